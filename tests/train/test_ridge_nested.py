"""The decoder step of nested dictionaries, against least squares on a copy of the rows for each prefix."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ridge_problems import codes_of, press, problem, solved, terms_of

from saecli.train.ridge import StreamedCodes, Sums, choose_alpha, plan, solve
from saecli.train.ridge.choice import Press

PREFIXES = (3, 7, 12)
WEIGHTS = {"all": (0.7, 2.0, 0.3, 5.0), "ridge only": (0.7, 0.0, 0.0, 0.0)}


def nested_sums(z: torch.Tensor, x: torch.Tensor, block: int = 16) -> Sums:
    sums = Sums(z.shape[1], x.shape[1], prefixes=PREFIXES)
    for codes, targets in zip(z.split(block), x.split(block), strict=True):
        sums.add(codes_of(codes), targets)
    return sums


def copies(z: torch.Tensor) -> np.ndarray:
    """The codes that each prefix has of each row, (n, L, F), each weighted so that squared errors are means."""
    masks = np.arange(z.shape[1]) < np.array(PREFIXES)[:, None]
    return z.numpy()[:, None] * masks / np.sqrt(len(PREFIXES))


def least_squares(z, x, terms, target) -> tuple[np.ndarray, np.ndarray]:
    """(W, b) by stacked least squares; the bias alone weighs each copy as the codes do."""
    d_sae, d_in = target.shape
    weight = 1 / np.sqrt(len(PREFIXES))
    rows = copies(z).reshape(-1, d_sae)
    left = np.hstack([rows, np.full((len(rows), 1), weight)])
    right = weight * np.repeat(x.numpy(), len(PREFIXES), 0)
    eye, corner = np.eye(d_sae + 1)[:-1], np.eye(d_sae + 1)[-1:]
    extra = [(np.sqrt(terms.alpha) * eye, np.sqrt(terms.alpha) * target.numpy()),
             (np.sqrt(terms.mu) * eye, np.sqrt(terms.mu) * terms.W_t.numpy()),
             (terms.decay.sqrt().numpy()[:, None] * eye, np.zeros((d_sae, d_in))),
             (np.sqrt(terms.beta) * corner, np.zeros((1, d_in))),
             (np.sqrt(terms.nu) * corner, np.sqrt(terms.nu) * terms.b_t.numpy()[None])]
    both = np.linalg.lstsq(np.vstack([left, *(one for one, _ in extra)]),
                           np.vstack([right, *(one for _, one in extra)]), rcond=None)[0]
    return both[:-1], both[-1]


@pytest.mark.parametrize("offset", [0.0, 50.0], ids=["", "codes far from 0"])
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("rows", [6, 40])
@pytest.mark.parametrize("directed", [False, True])
def test_the_decoder_is_that_of_a_copy_of_the_rows_for_each_prefix(weights, rows, directed, offset):
    z, x, direction, W_t, b_t = problem(rows, 12, 4)
    z = z + offset
    terms = terms_of(weights, direction if directed else None, W_t, b_t, decayed=True)
    decoder = solved(nested_sums(z, x), terms)
    W, b = least_squares(z, x, terms, decoder.c * direction)
    np.testing.assert_allclose(decoder.W, W, rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(decoder.b, b, rtol=1e-7, atol=1e-6)


def test_a_bias_fitted_after_is_the_mean_of_what_all_prefixes_leave():
    z, x, _, W_t, b_t = problem(40, 12, 4)
    terms = replace(terms_of((0.7, 2.0, 0.3, 5.0), None, W_t, b_t, decayed=True), joint=False)
    decoder = solved(nested_sums(z, x), terms)
    rows = copies(z).reshape(-1, 12)
    right = np.repeat(x.numpy(), 3, 0) / np.sqrt(3)
    gram = rows.T @ rows + np.eye(12) + np.diag(terms.decay)
    W = np.linalg.solve(gram, rows.T @ right + terms.mu * W_t.numpy())
    left = (np.sqrt(3) * (right - rows @ W)).mean(0)
    np.testing.assert_allclose(decoder.W, W, rtol=1e-9)
    np.testing.assert_allclose(decoder.b, (40 * left + 5 * b_t.numpy()) / 47, rtol=1e-9)


@pytest.mark.parametrize("weights", [(0.7, 0.0, 0.0, 0.0), (0.7, 2.0, 0.3, 5.0)])
@pytest.mark.parametrize("spread", [0.0, 0.7])
def test_a_row_is_left_out_of_every_prefix_at_once(weights, spread):
    z, x, direction, W_t, b_t = problem(15, 12, 4, spread=spread)
    z[3, 3:] = 0  # the same in every prefix
    terms = terms_of(weights, direction, W_t, b_t, decayed=True)
    system = nested_sums(z, x)
    c = solved(system, terms).c
    left_out = []
    for row in range(len(z)):
        others = torch.arange(len(z)) != row
        W, b = least_squares(z[others], x[others], terms, c * direction)
        errors = np.sqrt(3) * copies(z)[row] @ W + b - x[row].numpy()
        left_out.append(np.square(errors).sum())
    assert press(system, terms, z, x) == pytest.approx(np.mean(left_out), rel=1e-6)


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("rows", [20, 300])
def test_the_model_has_the_value_and_the_slope_of_press(rows, directed):
    z, x, direction, W_t, b_t = problem(rows, 12, 4, spread=0.3)
    terms = terms_of((20.0, 3.0, 0.0, 2.0), direction if directed else None, W_t, b_t, decayed=True)
    system = nested_sums(z, x)
    sampled = replace(Press.of(system, terms, z, x), z=z, y=x, weight=torch.ones(rows).double())
    near = torch.tensor([20.0, 19.998, 20.002]).double()
    value, below, above = sampled.model(system.factorise(terms), 0.0).press(near)
    assert value.item() / rows == pytest.approx(press(system, terms, z, x), rel=1e-9)
    slope = press(system, terms, z, x, 20.002) - press(system, terms, z, x, 19.998)
    assert (above - below).item() / rows == pytest.approx(slope, rel=1e-3)


def test_the_chosen_alpha_is_the_best_of_many():
    z, x, direction, W_t, b_t = problem(100, 12, 4)
    x = x + 3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    terms, system = terms_of((0.0, 0.0, 0.0, 0.0), direction, W_t, b_t), nested_sums(z, x)
    scores = [press(system, terms, z, x, system.scale(1.0) * 10**decades) for decades in np.arange(-7, 3, 0.1)]
    chosen = choose_alpha(system, terms, z, x, None).alpha
    assert 1e-6 * system.scale(1.0) < chosen < 1e2 * system.scale(1.0)
    assert press(system, terms, z, x, chosen) <= 1.002 * min(scores)


@pytest.mark.parametrize("rows", [8, 40])
def test_effective_dof_is_the_trace_of_the_hat_matrix_of_all_prefixes(rows):
    z, x, _, W_t, b_t = problem(rows, 12, 4)
    left = np.hstack([copies(z).reshape(-1, 12), np.full((3 * rows, 1), 1 / np.sqrt(3))])
    for alpha, joint in ((1e-4, True), (0.7, True), (0.7, False), (50.0, True)):
        terms = replace(terms_of((alpha, 0.0, 0.0, 0.0), None, W_t, b_t), joint=joint)
        if joint:
            hat = left @ np.linalg.solve(left.T @ left + alpha * np.diag([*[1.0] * 12, 0.0]), left.T)
        else:
            hat = left[:, :-1] @ np.linalg.solve(left[:, :-1].T @ left[:, :-1] + alpha * np.eye(12), left[:, :-1].T)
            hat = hat + np.full_like(hat, 1 / len(hat)) @ (np.eye(len(hat)) - hat)
        assert solve(nested_sums(z, x), terms, z=z).dof == pytest.approx(np.trace(hat), rel=1e-6)


@pytest.mark.parametrize("density", [0.1, 1.0])
@pytest.mark.parametrize("budget", [np.inf, 0], ids=["kept", "streamed"])
def test_an_iteration_finds_the_same_decoder_and_alpha(density, budget):
    z, x, direction, W_t, b_t = problem(600, 12, 5, spread=0.3)
    z = z * (torch.rand(z.shape, generator=torch.Generator().manual_seed(1)) < density)
    terms = terms_of((0.7, 2.0, 0.3, 5.0), direction, W_t, b_t, decayed=True)
    blocks = [codes_of(some.float()) for some in z.split(64)]
    system = StreamedCodes(torch.zeros(12, 5), lambda: iter(blocks), budget, PREFIXES)
    for codes, targets in zip(blocks, x.float().split(64), strict=True):
        system.add(codes, targets)
    found, exact = solved(system, terms), solved(nested_sums(z, x), terms)
    assert (found.W - exact.W).norm() <= 2e-3 * exact.W.norm()
    assert (found.b - exact.b).norm() <= 2e-3 * exact.b.norm()
    assert (choose_alpha(system, terms, z.float(), x.float(), None).alpha
            == pytest.approx(choose_alpha(nested_sums(z, x), terms, z, x, None).alpha, rel=0.2))


def test_one_prefix_of_all_latents_is_none_and_few_rows_are_solved_for_by_sums():
    z, x, direction, W_t, b_t = problem(40, 12, 4)
    terms = terms_of((0.7, 2.0, 0.3, 5.0), direction, W_t, b_t, decayed=True)
    one, none = Sums(12, 4, prefixes=(12,)), Sums(12, 4)
    for sums in (one, none):
        sums.add(codes_of(z), x)
    torch.testing.assert_close(solved(one, terms).W, solved(none, terms).W, rtol=1e-12, atol=1e-12)
    assert press(one, terms, z, x) == pytest.approx(press(none, terms, z, x), rel=1e-12)
    assert (plan(5, 12, 4).kind, plan(5, 12, 4, prefixes=PREFIXES).kind) == ("dual", "direct")
