"""The decoder step against float64 oracles that know nothing of moments: stacked least squares, and refits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saecli.errors import TrainingError
from saecli.ridge import HeldRows, Moments, Terms, choose_alpha, memory_needed, press, solve

WEIGHTS = {"all": (0.7, 2.0, 0.3, 5.0), "ridge only": (0.7, 0.0, 0.0, 0.0), "no ridge on W": (0.0, 2.0, 0.3, 5.0)}


def problem(rows: int, d_sae: int, d_in: int, seed: int = 0, spread: float = 0.0) -> tuple:
    """Codes, inputs, a direction and a previous decoder; `spread` makes row norms differ, in powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)
    z = draw(rows, d_sae).relu()
    x = z @ draw(d_sae, d_in) * 0.5 + draw(rows, d_in) + 3
    size = 10 ** (spread * draw(rows, 1))
    return z * size, x * size, draw(d_sae, d_in), draw(d_sae, d_in), draw(d_in)


def terms_of(weights: tuple, direction: torch.Tensor | None, W_t: torch.Tensor, b_t: torch.Tensor,
             decayed: bool = False) -> Terms:
    decay = torch.linspace(0, 3, len(W_t), dtype=torch.float64) * decayed
    return Terms(*weights, direction=direction, W_t=W_t, b_t=b_t, decay=decay)


def moments_of(z: torch.Tensor, x: torch.Tensor, block: int) -> Moments:
    moments = Moments(x.shape[1], z.shape[1])
    for start in range(0, len(z), block):
        moments.add(z[start : start + block], x[start : start + block])
    return moments


def systems_of(z: torch.Tensor, x: torch.Tensor) -> dict:
    return {"moments": moments_of(z, x, 7), "held rows": HeldRows(z, x)}


def stacked_least_squares(z, x, terms: Terms, target: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(W, b) by the pseudo-inverse of data, ridge and proximal rows stacked, as the paper's theorem has it."""
    d_sae, d_in = target.shape
    eye, ones, zero = np.eye(d_sae), np.ones((len(z), 1)), np.zeros((d_sae, 1))
    bias_row = np.eye(1, d_sae + 1, d_sae)
    left = [np.hstack([z, ones]), np.sqrt(terms.alpha) * np.hstack([eye, zero]), np.sqrt(terms.beta) * bias_row,
            np.sqrt(terms.mu) * np.hstack([eye, zero]), np.sqrt(terms.nu) * bias_row,
            np.hstack([np.diag(terms.decay.sqrt()), zero])]
    right = [x.numpy(), np.sqrt(terms.alpha) * target.numpy(), np.zeros((1, d_in)),
             np.sqrt(terms.mu) * terms.W_t.numpy(), np.sqrt(terms.nu) * terms.b_t.numpy()[None],
             np.zeros((d_sae, d_in))]
    both = np.linalg.pinv(np.vstack(left)) @ np.vstack(right)
    return both[:-1], both[-1]


def objective(z, x, terms: Terms, W, b, c: float) -> float:
    target = c * terms.direction if terms.direction is not None else torch.zeros_like(W)
    parts = [(z @ W + b - x, 1), (W - target, terms.alpha), (b, terms.beta), (W - terms.W_t, terms.mu),
             (b - terms.b_t, terms.nu), (terms.decay.sqrt()[:, None] * W, 1)]
    return sum(weight * part.square().sum().item() for part, weight in parts)


@pytest.mark.parametrize("held", ["moments", "held rows"])
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("rows", [5, 12, 40])
@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("decayed", [False, True])
def test_decoder_equals_the_stacked_pseudo_inverse(held, weights, rows, directed, decayed):
    z, x, direction, W_t, b_t = problem(rows, 12, 4)
    terms = terms_of(weights, direction if directed else None, W_t, b_t, decayed)
    decoder = solve(systems_of(z, x)[held], terms)
    W, b = stacked_least_squares(z, x, terms, decoder.c * direction)
    assert not decoder.raised
    np.testing.assert_allclose(decoder.W, W, rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(decoder.b, b, rtol=1e-7, atol=1e-7)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(3, 40), alpha=st.floats(0.01, 100), mu=st.floats(0, 3))
def test_c_and_the_decoder_are_a_joint_minimum(seed, rows, alpha, mu):
    z, x, direction, W_t, b_t = problem(rows, 9, 3, seed)
    terms = terms_of((alpha, 0.5, mu, 0.5), direction, W_t, b_t, decayed=True)
    decoder = solve(moments_of(z, x, 8), terms)
    best = objective(z, x, terms, decoder.W, decoder.b, decoder.c)
    generator = torch.Generator().manual_seed(seed)
    for size in (1e-3, 1e-1, 1.0):
        step = size * torch.randn(3, generator=generator, dtype=torch.float64)
        W = decoder.W + step[0] * direction / direction.norm()
        moved = objective(z, x, terms, W, decoder.b + step[1], decoder.c + step[2].item())
        assert moved >= best * (1 - 1e-12)


@pytest.mark.parametrize("block", [1, 3, 64])
def test_moments_do_not_depend_on_the_blocks_that_rows_come_in(block):
    z, x, *_ = problem(50, 8, 3)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    whole, parts = moments_of(z, x, 50), moments_of(z[order], x[order], block)
    for name in ("sum_z", "sum_x", "zz", "zx"):
        torch.testing.assert_close(getattr(whole, name), getattr(parts, name), rtol=1e-12, atol=1e-12)


def test_moments_of_sparse_codes_equal_those_of_dense_ones():
    z, x, *_ = problem(400, 64, 5)
    sparse = z * (torch.rand(z.shape, generator=torch.Generator().manual_seed(2)) < 0.02)
    moments = moments_of(sparse.float(), x.float(), 100)
    torch.testing.assert_close(moments.zz, sparse.float().double().T @ sparse.float().double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(moments.zx, sparse.T @ x, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("held", ["moments", "held rows"])
@pytest.mark.parametrize("spread", [0.0, 0.7])
@pytest.mark.parametrize("weights", [(0.7, 0.0, 0.0, 0.0), (0.7, 2.0, 0.3, 5.0)])
def test_press_equals_refitting_without_each_row(held, spread, weights):
    z, x, direction, W_t, b_t = problem(15, 6 if held == "moments" else 30, 4, spread=spread)
    terms = terms_of(weights, direction, W_t, b_t)
    terms = replace(terms, decay=torch.linspace(0, 1, z.shape[1], dtype=torch.float64))
    system = systems_of(z, x)[held]
    c = solve(system, terms).c
    left_out = []
    for row in range(len(z)):
        others = torch.arange(len(z)) != row
        W, b = stacked_least_squares(z[others], x[others], terms, c * direction)
        left_out.append(np.square(z[row].numpy() @ W + b - x[row].numpy()).sum())
    assert press(system, terms, z, x) == pytest.approx(np.mean(left_out), rel=1e-6)


@pytest.mark.parametrize("spread", [0.0, 0.7])
def test_chosen_alpha_is_near_the_best_of_a_full_path(spread):
    z, x, direction, W_t, b_t = problem(60, 40, 5, spread=spread)
    system = moments_of(z, x, 60)
    terms = terms_of((0.0, 0.0, 0.0, 0.0), direction, W_t, b_t)

    def score(alpha: float) -> float:
        return press(system, replace(terms, alpha=alpha), z, x)

    path = min(score(alpha) for alpha in system.scale(1.0) * np.logspace(-7, 3, 101))
    first = choose_alpha(system, terms, z, x, None)
    assert score(first) <= 1.01 * path
    assert score(choose_alpha(system, terms, z, x, 2 * first)) <= 1.01 * path


@pytest.mark.parametrize("held", ["moments", "held rows"])
def test_dead_and_duplicate_latents_solve_without_a_ridge(held):
    z, x, _, W_t, b_t = problem(30 if held == "moments" else 8, 12, 4)
    z[:, 3] = 0
    z[:, 4] = z[:, 5]
    decoder = solve(systems_of(z, x)[held], terms_of((0.0, 0.0, 0.0, 0.0), None, W_t, b_t))
    fitted = z @ decoder.W + decoder.b
    with_bias = np.hstack([z, np.ones((len(z), 1))])
    expected = with_bias @ np.linalg.lstsq(with_bias, x.numpy(), rcond=1e-10)[0]
    assert decoder.ridge > 0
    np.testing.assert_allclose(fitted, expected, atol=1e-4)


def test_codes_that_are_not_finite_are_refused_by_a_sentence():
    z, x, _, W_t, b_t = problem(30, 12, 4)
    z[2, 3] = torch.nan
    with pytest.raises(TrainingError, match="codes are not finite; lower --lr"):
        solve(moments_of(z, x, 30), terms_of((1.0, 0.0, 0.0, 0.0), None, W_t, b_t))


def test_memory_needed_grows_with_the_smaller_of_rows_and_latents():
    assert memory_needed(10**6, 256, 8192) >= 32 * 8192**2
    assert memory_needed(100, 256, 8192) < memory_needed(10**6, 256, 8192) / 10


@pytest.mark.parametrize("held", ["moments", "held rows"])
@pytest.mark.parametrize("alpha", [1e8, 1e16, 1e25])
def test_a_large_alpha_leaves_the_best_multiple_of_the_direction(held, alpha):
    z, x, direction, W_t, b_t = problem(40 if held == "moments" else 8, 12, 4)
    decoder = solve(systems_of(z, x)[held], terms_of((alpha, 0.0, 0.0, 0.0), direction, W_t, b_t))
    centred = (z - z.mean(0)) @ direction
    best = (centred * (x - x.mean(0))).sum() / centred.square().sum()
    assert decoder.c == pytest.approx(best.item(), rel=1e-5)
    torch.testing.assert_close(decoder.W, best * direction, rtol=1e-4, atol=1e-6)


def test_a_ridge_of_zero_that_holds_is_not_called_raised():
    z, x, _, W_t, b_t = problem(40, 6, 3)
    assert not solve(moments_of(z, x, 40), terms_of((0.0, 0.0, 0.0, 0.0), None, W_t, b_t)).raised
