"""Decoder steps at the edge: codes that do not vary or are far from 0, extreme ridges, numbers that are not finite; and
the choice of alpha against the full path of PRESS, and against what a decoder is for: the error on fresh rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ridge_problems import (
    NOTHING,
    WEIGHTS,
    least_squares,
    press,
    problem,
    solved,
    system_of,
    terms_of,
)
from sklearn.datasets import load_digits

from saecli.base.errors import TrainingError
from saecli.train.ridge import (
    TOLERANCE,
    HeldRows,
    StreamedCodes,
    choose_alpha,
    iterative,
    optimal_decoder,
)
from saecli.train.ridge.decoder import LEAST, MOST, sample_rows
from saecli.train.ridge.sums import Direct
from saecli.train.ridge.system import PROBES, Ridge

both = pytest.mark.parametrize("kind", ["sums", "held rows"])


@both
def test_dead_and_duplicate_latents_solve_without_a_ridge(kind):
    z, y, _, W_t, b_t = problem(30 if kind == "sums" else 8, 12, 4)
    z[:, 3] = 0
    z[:, 4] = z[:, 5]
    decoder = solved(system_of(kind, z, y), terms_of(NOTHING, None, W_t, b_t))
    with_bias = np.hstack([z, np.ones((len(z), 1))])
    expected = with_bias @ np.linalg.lstsq(with_bias, y.numpy(), rcond=1e-10)[0]
    assert decoder.ridge > 0
    np.testing.assert_allclose(z @ decoder.W + decoder.b, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "flagged"),
    [*((kind, True) for kind in ("sums", "held rows", "streamed")), ("sums", False)],
)
@pytest.mark.parametrize("rows", [5, 30])
def test_codes_that_are_not_finite_are_refused(kind, flagged, rows, monkeypatch):
    z, y, _, W_t, b_t = problem(rows, 12, 4)
    z[2, 3] = torch.nan
    if not flagged:  # by the factorisation, as on CUDA
        monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda *_, out, **__: out[1].zero_())
    with pytest.raises(TrainingError, match="are not finite"):
        solved(system_of(kind, z, y), terms_of((1.0, 0.0, 0.0, 0.0), None, W_t, b_t))


def test_finite_sums_that_no_ridge_makes_solvable_are_not_called_infinite():
    z, y, _, W_t, b_t = problem(30, 12, 4)
    system = system_of("sums", z, y)
    system.gram.add_(1e4 * (1 - torch.eye(12)))  # what rounding may leave of codes far from 0
    with pytest.raises(TrainingError, match="normalize scale"):
        solved(system, terms_of(NOTHING, None, W_t, b_t))


@pytest.mark.parametrize("block", [7, 40])
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_offsets_of_codes_and_targets_do_not_cancel_in_float32(block, weights):
    z, y, direction, W_t, b_t = problem(40, 12, 4)
    z, y = (z + 1e4).float(), (y - 3e4).float()
    terms = terms_of(weights, direction, W_t, b_t)
    decoder = solved(system_of("sums", z, y, block=block), terms)
    z, y = z.double(), y.double()
    exact = solved(system_of("sums", z, y, block=block), terms)
    assert not decoder.raised
    np.testing.assert_allclose(exact.W, least_squares(z, y, terms).W, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(decoder.W, exact.W, rtol=1e-4, atol=1e-4)
    fitted, expected = z @ decoder.W + decoder.b, z @ exact.W + exact.b
    torch.testing.assert_close(fitted, expected, rtol=0, atol=1e-2)


@both
@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("alpha", [0.0, 1e-9, 3.0, 1e12, None], ids=str)
@pytest.mark.parametrize("size", [0.0, 1e4, 0.1])
def test_codes_that_do_not_vary_leave_the_direction_and_the_mean(kind, rows, alpha, size):
    z, y, direction, W_t, b_t = problem(rows, 12, 4)
    z = torch.full_like(z, size)
    system, terms = system_of(kind, z.float(), y.float()), terms_of(NOTHING, direction, W_t, b_t)
    if alpha is None:
        alpha = choose_alpha(system, terms, z, y, None).alpha
    assert system.scale(1.0) >= 0
    for T0, c in ((direction, 1.0), (None, 0.0)):
        decoder = solved(system, replace(terms, alpha=alpha, direction=T0))
        assert decoder.c == c and decoder.ridge > 0
        torch.testing.assert_close(decoder.W, c * direction, rtol=1e-6, atol=1e-6)
        fitted = z.mean(0) @ decoder.W + decoder.b
        torch.testing.assert_close(fitted, y.mean(0), rtol=1e-6, atol=1e-6)


def test_rounding_never_makes_the_scale_or_the_ridge_negative():
    z, y, direction, W_t, b_t = problem(40, 12, 4)
    system = system_of("sums", torch.zeros_like(z), y)
    system.gram.fill_diagonal_(-1e-12)
    decoder = solved(system, terms_of((1.0, 0.0, 0.0, 0.0), direction, W_t, b_t))
    assert system.scale(1.0) == 0 and decoder.ridge == 1
    assert solved(system, terms_of(NOTHING, None, W_t, b_t)).ridge > 0


@both
def test_alpha_is_not_lost_next_to_a_large_mu(kind):
    z, y, direction, W_t, b_t = problem(40, 60, 4)
    decoder = solved(system_of(kind, z, y), terms_of((0.7, 0.0, 1e30, 0.0), direction, W_t, b_t))
    assert decoder.alpha == 0.7
    best = (W_t * direction).sum() / direction.square().sum()
    assert decoder.c == pytest.approx(best.item(), rel=1e-9)
    torch.testing.assert_close(decoder.W, W_t, rtol=1e-9, atol=1e-9)


@both
@pytest.mark.parametrize("alpha", [1e8, 1e16, 1e25])
def test_a_large_alpha_leaves_the_best_multiple_of_the_direction(kind, alpha):
    z, y, direction, W_t, b_t = problem(40 if kind == "sums" else 8, 12, 4)
    decoder = solved(system_of(kind, z, y), terms_of((alpha, 0.0, 0.0, 0.0), direction, W_t, b_t))
    centred = (z - z.mean(0)) @ direction
    best = (centred * (y - y.mean(0))).sum() / centred.square().sum()
    assert decoder.c == pytest.approx(best.item(), rel=1e-5)
    torch.testing.assert_close(decoder.W, best * direction, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("power", [-7, -5, -3])
@pytest.mark.parametrize("rows", [30, 60, 85])
def test_press_of_held_rows_is_precise_for_tiny_ridges(power, rows):
    z, y, direction, W_t, b_t = problem(rows, 90, 4, spread=0.5)
    system = HeldRows(z, y)
    alpha = system.scale(1.0) * 10**power
    middle = np.eye(rows) - 1 / rows
    weights, vectors = np.linalg.eigh(middle @ z.numpy() @ z.numpy().T @ middle)
    kept = vectors[:, 1:]  # the first is the constant vector, which the bias fits
    inverse = kept / (weights[1:] + alpha) @ kept.T
    condition = rows * (weights[-1] + alpha) / (weights[1] + alpha)
    # c's M T0 is divided by the ridge.
    for target, lost in ((None, condition), (direction, condition + 10**-power)):
        terms = terms_of((alpha, 0.0, 0.0, 0.0), target, W_t, b_t)
        unexplained = y.numpy() - z.numpy() @ (solved(system, terms).c * direction.numpy())
        left_out = (inverse @ unexplained) / inverse.diagonal()[:, None]
        expected = np.square(left_out).sum(1).mean()
        rounding = 100 * np.finfo(float).eps * lost
        assert press(system, terms, z, y) == pytest.approx(expected, rel=rounding)


def positive(side: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(side)
    left = torch.randn(side, side + 5, generator=generator, dtype=torch.float64)
    return left @ left.T


@pytest.mark.parametrize("side", [1, 7, 50])
def test_the_condition_is_estimated_from_below(side):
    whole = positive(side) + 0.5 * torch.eye(side)
    factor = Direct(None, lambda ridge: whole.tril(), Ridge(0.5, 0.0))
    exactly = np.linalg.cond(whole.numpy())
    assert exactly / 4 <= factor.condition() <= exactly * (1 + 1e-9)


@pytest.mark.parametrize("place", [3, 30, 49])
def test_a_ridge_is_raised_until_the_matrix_is_positive_definite(place):
    matrix = positive(50)
    matrix[place, place] = -1.0
    factor = Direct(None, lambda ridge: matrix + ridge * torch.eye(50).double(), Ridge(0.01, 0.0))
    assert factor.raised and factor.ridge.total > 1
    assert factor.solve(torch.ones(50, 1).double()).isfinite().all()


def test_an_iteration_cut_short_reports_its_residual(monkeypatch):
    monkeypatch.setattr(iterative, "MOST_ITERATIONS", 3)
    z, y, direction, W_t, b_t = problem(2000, 40, 7, spread=0.3)
    terms = terms_of((1e-3, 0.0, 0.0, 0.0), direction, W_t, b_t)
    decoder = solved(system_of("streamed", z, y, block=64), terms)
    assert decoder.residual > 10 * TOLERANCE and decoder.W.isfinite().all()


def test_a_start_near_the_solution_saves_iterations(monkeypatch):
    z, y, _, W_t, b_t = problem(2000, 160, 7, spread=0.3)
    z = z * (torch.rand(z.shape, generator=torch.Generator().manual_seed(1)) < 0.1)
    terms = terms_of((1.0, 0.0, 0.0, 0.0), None, W_t, b_t)
    taken, times = [], StreamedCodes.times
    monkeypatch.setattr(StreamedCodes, "times", lambda *given: taken.append(1) or times(*given))
    far = solved(system_of("streamed", z, y, block=64), terms)
    cold = sum(taken)
    solved(system_of("streamed", z, y, block=64, start=far.W), replace(terms, alpha=1.1))
    assert sum(taken) < 1.5 * cold


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_conjugate_gradients_find_the_solution_and_its_residual(spread):
    generator = torch.Generator().manual_seed(0)
    size = 10 ** (spread * torch.rand(30, generator=generator, dtype=torch.float64))
    matrix = positive(30) * size * size[:, None]
    right = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    right[:, 1] = 0
    solution, residual = iterative.conjugate_gradient(
        lambda V: matrix @ V, right, torch.zeros_like(right), matrix.diagonal(), 1e-10
    )
    np.testing.assert_allclose(matrix @ solution, right, atol=1e-7 * right.abs().max())
    assert residual <= 1e-10


PATH = np.geomspace(LEAST, MOST, 101)  # over the mean diagonal


def encoded(x: torch.Tensor, d_sae: int, kept: int, seed: int) -> tuple:
    """Codes of a random topk encoder of unit columns, the inputs, and the encoder's transpose."""
    generator = torch.Generator().manual_seed(seed)
    W_enc = torch.randn(x.shape[1], d_sae, generator=generator)
    W_enc /= W_enc.norm(dim=0)
    before = x @ W_enc
    least = before.topk(kept, 1).values[:, -1:]
    return torch.where(before >= least, before, 0.0).relu(), x, W_enc.T.contiguous()


def inputs(rows: int, d_in: int, seed: int, spread: float = 0.0) -> torch.Tensor:
    """Rows near a subspace; `spread` makes their norms differ, in powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(rows, d_in // 2, generator=generator)
    x = factors @ torch.randn(d_in // 2, d_in, generator=generator) / 3
    x += 0.5 * torch.randn(rows, d_in, generator=generator)
    return x * 10 ** (spread * torch.randn(rows, 1, generator=generator))


def digits(rows: int) -> torch.Tensor:
    x = torch.tensor(load_digits().data[:rows], dtype=torch.float32)
    return (x - x.mean(0)) / x.std()


DATA = {
    "alike": lambda: encoded(inputs(600, 16, 0), 64, 16, 1),
    "norms a hundredfold": lambda: encoded(inputs(600, 16, 0, 0.6), 64, 16, 1),
    "many rows, norms a hundredfold": lambda: encoded(inputs(4000, 16, 3, 0.6), 64, 16, 1),
    "N < F": lambda: encoded(inputs(60, 16, 0), 160, 16, 1),
    "N = F": lambda: encoded(inputs(160, 16, 0), 160, 16, 1),
    "N >> F": lambda: encoded(inputs(8000, 16, 0), 48, 12, 1),
    "sparse": lambda: encoded(inputs(2000, 16, 0), 160, 3, 1),
    "many dimensions, mixed for c": lambda: encoded(inputs(500, 3 * PROBES, 0, 0.3), 250, 10, 0),
    "digits": lambda: encoded(digits(1500), 128, 12, 1),
}


def system_and_terms(z: torch.Tensor, x: torch.Tensor, direction: torch.Tensor | None) -> tuple:
    system = system_of("held rows" if len(z) < z.shape[1] else "sums", z, x, block=1000)
    shape = z.shape[1], x.shape[1]
    return system, terms_of(NOTHING, direction, torch.zeros(shape), torch.zeros(shape[1]))


@pytest.mark.slow
@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_chosen_alpha_is_within_a_hundredth_of_the_best(data, directed):
    z, x, direction = data()
    system, terms = system_and_terms(z, x, direction if directed else None)
    scale = system.scale(1.0)

    def score(alpha: float) -> float:
        return press(system, terms, z, x, alpha)

    path = [score(scale * alpha) for alpha in PATH]
    first = choose_alpha(system, terms, z, x, None).alpha
    starts = (first / 1.5, first, 1.5 * first)
    for chosen in (first, *(choose_alpha(system, terms, z, x, start).alpha for start in starts)):
        assert score(chosen) <= 1.01 * min(path)
        assert 1e-7 * scale < chosen < 1e3 * scale or np.argmin(path) in (0, len(path) - 1)


@pytest.mark.parametrize("last", [None, 1e-3, 1e-9, 1e9])
def test_a_search_finds_its_way_to_the_ends_of_the_range(last):
    z, _, _, W_t, b_t = problem(400, 10, 3)
    noise = torch.randn(400, 3, generator=torch.Generator().manual_seed(0)).double()
    # Noise leaves PRESS flat above 30.
    for x, least, most in ((z @ W_t[:, :3], 0.0, 2e-7), (noise, 30.0, 1e3)):
        system, terms = system_of("sums", z, x), terms_of(NOTHING, None, W_t[:, :3], b_t)
        scale = system.scale(1.0)
        chosen = choose_alpha(system, terms, z, x, last).alpha
        assert least <= chosen / scale <= most * 1.01
        if least:
            at_the_end = press(system, terms, z, x, most * scale)
            assert press(system, terms, z, x, chosen) <= 1.001 * at_the_end


@pytest.mark.slow
@pytest.mark.parametrize("directed", [False, True])
def test_an_iteration_chooses_alpha_as_sums_do(directed):
    z, x, direction = encoded(inputs(2000, 16, 0), 160, 16, 1)
    exact, terms = system_and_terms(z.double(), x.double(), direction if directed else None)
    best, chosen = (
        choose_alpha(system, terms, z, x, None).alpha
        for system in (exact, system_of("streamed", z, x, block=64))
    )
    assert press(exact, terms, z, x, chosen) <= 1.01 * press(exact, terms, z, x, best)


def test_a_good_start_takes_four_factorisations_for_the_decoder_too(monkeypatch):
    z, x, direction = DATA["norms a hundredfold"]()
    system, terms = system_and_terms(z, x, direction)
    chosen = choose_alpha(system, terms, z, x, None).alpha
    taken, original = [], system.factorise
    monkeypatch.setattr(system, "factorise", lambda terms: taken.append(1) or original(terms))
    optimal_decoder(system, terms, choose_alpha(system, terms, z, x, 1.1 * chosen))
    assert len(taken) == 4


def test_sampled_rows_stand_for_all_and_hold_the_largest():
    x = inputs(3000, 16, 0, 0.7).double()
    index, weight = sample_rows(x, x.mean(0), 300)
    norms = (x - x.mean(0)).square().sum(1)
    assert 150 < len(index) <= 301 and len(index.unique()) == len(index)
    assert (weight >= 1).all() and set(norms.topk(20).indices.tolist()) <= set(index.tolist())
    for share in (norms.sqrt(), norms, norms * x[:, 0].sigmoid()):
        assert (weight * share[index]).sum().item() == pytest.approx(share.sum().item(), rel=0.1)
    few, even = sample_rows(x[:50], x.mean(0), 300)
    assert few.tolist() == list(range(50)) and (even == 1).all()
