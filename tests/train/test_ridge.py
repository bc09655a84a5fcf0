"""The decoder step against float64 oracles that know nothing of sums: stacked least squares, and refits."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ridge_problems import (
    codes_of,
    objective,
    press,
    problem,
    solved,
    stacked_least_squares,
    sums_of,
    systems_of,
    terms_of,
)

from saecli.base.errors import TrainingError
from saecli.train.ridge import HeldRows, Place, Sums, Terms, choose_alpha, solve
from saecli.train.ridge.cholesky import Cholesky
from saecli.train.ridge.skip import SkipSums

WEIGHTS = {"all": (0.7, 2.0, 0.3, 5.0), "ridge only": (0.7, 0.0, 0.0, 0.0), "no ridge on W": (0.0, 2.0, 0.3, 5.0)}


@pytest.mark.parametrize("held", ["sums", "held rows"])
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("rows", [5, 12, 40])
@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("decayed", [False, True])
def test_decoder_equals_the_stacked_pseudo_inverse(held, weights, rows, directed, decayed):
    z, x, direction, W_t, b_t = problem(rows, 12, 4)
    terms = terms_of(weights, direction if directed else None, W_t, b_t, decayed)
    decoder = solved(systems_of(z, x)[held], terms)
    W, b = stacked_least_squares(z, x, terms, decoder.c * direction)
    assert not decoder.raised
    np.testing.assert_allclose(decoder.W, W, rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(decoder.b, b, rtol=1e-7, atol=1e-7)


@given(seed=st.integers(0, 10**6), rows=st.integers(3, 40), alpha=st.floats(0.01, 100), mu=st.floats(0, 3))
def test_c_and_the_decoder_are_a_joint_minimum(seed, rows, alpha, mu):
    z, x, direction, W_t, b_t = problem(rows, 9, 3, seed)
    terms = terms_of((alpha, 0.5, mu, 0.5), direction, W_t, b_t, decayed=True)
    decoder = solved(sums_of(z, x, 8), terms)
    best = objective(z, x, terms, decoder.W, decoder.b, decoder.c)
    generator = torch.Generator().manual_seed(seed)
    for size in (1e-3, 1e-1, 1.0):
        step = size * torch.randn(3, generator=generator, dtype=torch.float64)
        W = decoder.W + step[0] * direction / direction.norm()
        moved = objective(z, x, terms, W, decoder.b + step[1], decoder.c + step[2].item())
        assert moved >= best * (1 - 1e-12)


@pytest.mark.parametrize("block", [1, 3, 64])
def test_sums_do_not_depend_on_the_blocks_that_rows_come_in(block):
    z, x, direction, W_t, b_t = problem(50, 8, 3)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    whole, parts = sums_of(z, x, 50), sums_of(z[order], x[order], block)
    torch.testing.assert_close(whole.z_bar, parts.z_bar, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole.y_bar, parts.y_bar, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole.cross(b_t), parts.cross(b_t), rtol=1e-12, atol=1e-10)
    terms = terms_of(WEIGHTS["all"], direction, W_t, b_t)
    for one in (terms, replace(terms, beta=0.0, nu=0.0)):
        torch.testing.assert_close(solved(whole, one).W, solved(parts, one).W, rtol=1e-10, atol=1e-10)


def test_sums_of_sparse_codes_equal_those_of_dense_ones():
    z, x, direction, W_t, b_t = problem(400, 300, 5)
    for density in (0.003, 0.06, 0.5):
        sparse = (z * (torch.rand(z.shape, generator=torch.Generator().manual_seed(2)) < density)).float()
        sums, exact = sums_of(sparse, x.float(), 100), sparse.double().T @ sparse.double()
        torch.testing.assert_close(sums.gram.matrix.tril(), exact.tril(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sums.zy, sparse.double().T @ x, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(sums.z_bar, sparse.double().mean(0), rtol=1e-6, atol=1e-7)
        solved(sums, terms_of((1.0, 0.0, 0.0, 0.0), direction, W_t, b_t))
        torch.testing.assert_close(sums.gram.matrix.tril(), exact.tril(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("held", ["sums", "held rows"])
@pytest.mark.parametrize("spread", [0.0, 0.7])
@pytest.mark.parametrize("weights", [(0.7, 0.0, 0.0, 0.0), (0.7, 2.0, 0.3, 5.0)])
def test_press_equals_refitting_without_each_row(held, spread, weights):
    z, x, direction, W_t, b_t = problem(15, 6 if held == "sums" else 30, 4, spread=spread)
    terms = terms_of(weights, direction, W_t, b_t)
    terms = replace(terms, decay=torch.linspace(0, 1, z.shape[1], dtype=torch.float64))
    system = systems_of(z, x)[held]
    c = solved(system, terms).c
    left_out = []
    for row in range(len(z)):
        others = torch.arange(len(z)) != row
        W, b = stacked_least_squares(z[others], x[others], terms, c * direction)
        left_out.append(np.square(z[row].numpy() @ W + b - x[row].numpy()).sum())
    assert press(system, terms, z, x) == pytest.approx(np.mean(left_out), rel=1e-6)
    assert press(system, terms, z[4:9], x[4:9]) == pytest.approx(np.mean(left_out[4:9]), rel=1e-6)


@pytest.mark.parametrize("power", [-7, -5, -3])
@pytest.mark.parametrize("rows", [30, 60, 85])
def test_press_of_held_rows_stands_a_ridge_far_below_their_size(power, rows):
    z, x, direction, W_t, b_t = problem(rows, 90, 4, spread=0.5)
    system = HeldRows(z, x)
    alpha = system.scale(1.0) * 10**power
    middle = np.eye(rows) - 1 / rows
    weights, vectors = np.linalg.eigh(middle @ z.numpy() @ z.numpy().T @ middle)
    kept = vectors[:, 1:]  # the first is the constant vector, which the bias fits
    inverse = kept / (weights[1:] + alpha) @ kept.T
    condition = rows * (weights[-1] + alpha) / (weights[1] + alpha)
    for target, lost in ((None, condition), (direction, condition + 10**-power)):  # c's M T0 is divided by the ridge
        terms = terms_of((alpha, 0.0, 0.0, 0.0), target, W_t, b_t)
        unexplained = x.numpy() - z.numpy() @ (solved(system, terms).c * direction.numpy())
        left_out = (inverse @ unexplained) / inverse.diagonal()[:, None]
        assert press(system, terms, z, x) == pytest.approx(np.square(left_out).sum(1).mean(),
                                                           rel=100 * np.finfo(float).eps * lost)


@pytest.mark.parametrize("held", ["sums", "held rows"])
@pytest.mark.parametrize("rows", [5, 12, 40])
@pytest.mark.parametrize("decayed", [False, True])
def test_effective_dof_is_the_trace_of_the_hat_matrix(held, rows, decayed):
    z, x, _, W_t, b_t = problem(rows, 12, 4)
    system, previous = systems_of(z, x)[held], (torch.zeros(12, rows).double(), torch.zeros(rows).double())
    found = []
    for alpha in (1e-6, 0.7, 50.0, 1e9):
        terms = terms_of((alpha, 0.0, 0.0, 0.0), None, W_t, b_t, decayed)
        W, b = stacked_least_squares(z, torch.eye(rows).double(), replace(terms, W_t=previous[0], b_t=previous[1]),
                                     previous[0])
        found.append(solve(system, terms, z=z).dof)
        assert found[-1] == pytest.approx(np.trace(z.numpy() @ W + b), rel=1e-5)
    assert found == sorted(found, reverse=True)
    assert found[-1] >= 1 and found[0] <= min(rows, 13)


@pytest.mark.parametrize("held", ["sums", "held rows"])
@pytest.mark.parametrize("rows", [5, 12, 40])
@pytest.mark.parametrize(("beta", "nu"), [(0.0, 0.0), (2.0, 5.0)])
def test_a_bias_fitted_after_is_the_best_for_a_decoder_solved_without_one(held, rows, beta, nu):
    z, x, direction, W_t, b_t = problem(rows, 12, 4)
    for target in (None, direction):
        terms = replace(terms_of((0.7, beta, 0.3, nu), target, W_t, b_t, decayed=True), joint=False)
        decoder = solved(systems_of(z, x)[held], terms)
        ridges = [np.sqrt(terms.alpha) * np.eye(12), np.sqrt(terms.mu) * np.eye(12), np.diag(terms.decay.sqrt())]
        pulls = [ridges[0] @ (decoder.c * direction.numpy()), ridges[1] @ W_t.numpy(), np.zeros((12, 4))]
        W = np.linalg.lstsq(np.vstack([z, *ridges]), np.vstack([x, *pulls]), rcond=None)[0]
        b = ((x.numpy() - z.numpy() @ W).sum(0) + nu * b_t.numpy()) / (rows + beta + nu)
        np.testing.assert_allclose(decoder.W, W, rtol=1e-7, atol=1e-7)
        np.testing.assert_allclose(decoder.b, b, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("held", ["sums", "held rows"])
@pytest.mark.parametrize("rows", [5, 12, 40])
def test_effective_dof_where_the_bias_is_fitted_after(held, rows):
    z, x, _, W_t, b_t = problem(rows, 12, 4)
    for alpha in (1e-4, 0.7, 50.0):
        terms = replace(terms_of((alpha, 3.0, 0.0, 0.0), None, W_t, b_t), joint=False)
        gram = z.numpy().T @ z.numpy() + alpha * np.eye(12)
        hat = z.numpy() @ np.linalg.solve(gram, z.numpy().T)
        hat = hat + np.ones((rows, rows)) @ (np.eye(rows) - hat) / (rows + 3.0)
        assert solve(systems_of(z, x)[held], terms, z=z).dof == pytest.approx(np.trace(hat), rel=1e-5)


def test_effective_dof_of_a_sample_is_near_that_of_all_rows():
    z, x, _, W_t, b_t = problem(2000, 40, 3)
    system, terms = sums_of(z, x, 500), terms_of((300.0, 0.0, 0.0, 0.0), None, W_t, b_t)
    assert solve(system, terms, z=z[::10]).dof == pytest.approx(solve(system, terms, z=z).dof, rel=0.05)


@pytest.mark.parametrize("held", ["sums", "held rows"])
def test_dead_and_duplicate_latents_solve_without_a_ridge(held):
    z, x, _, W_t, b_t = problem(30 if held == "sums" else 8, 12, 4)
    z[:, 3] = 0
    z[:, 4] = z[:, 5]
    decoder = solved(systems_of(z, x)[held], terms_of((0.0, 0.0, 0.0, 0.0), None, W_t, b_t))
    fitted = z @ decoder.W + decoder.b
    with_bias = np.hstack([z, np.ones((len(z), 1))])
    expected = with_bias @ np.linalg.lstsq(with_bias, x.numpy(), rcond=1e-10)[0]
    assert decoder.ridge > 0
    np.testing.assert_allclose(fitted, expected, atol=1e-4)


def test_codes_that_are_not_finite_are_refused_by_a_sentence():
    z, x, _, W_t, b_t = problem(30, 12, 4)
    z[2, 3] = torch.nan
    for system in (sums_of(z, x, 30), HeldRows(z, x), HeldRows(z[:5], x[:5])):
        with pytest.raises(TrainingError, match="are not finite; lower lr"):
            solved(system, terms_of((1.0, 0.0, 0.0, 0.0), None, W_t, b_t))


def test_a_nan_that_the_factorisation_does_not_flag_is_refused_too(monkeypatch):
    z, x, _, W_t, b_t = problem(30, 12, 4)
    z[2, 3] = torch.nan
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda matrix: (matrix.tril(), torch.tensor(0)))  # as on CUDA
    with pytest.raises(TrainingError, match="are not finite; lower lr"):
        solved(sums_of(z, x, 30), terms_of((1.0, 0.0, 0.0, 0.0), None, W_t, b_t))


def test_finite_sums_that_no_ridge_makes_solvable_are_not_called_infinite():
    z, x, _, W_t, b_t = problem(30, 12, 4)
    system = sums_of(z, x, 30)
    system.gram.matrix.add_(1e4 * (1 - torch.eye(12)))  # what rounding may leave of codes far from 0
    with pytest.raises(TrainingError, match=r"offset is so large .* normalize scale") as refused:
        solved(system, terms_of((0.0, 0.0, 0.0, 0.0), None, W_t, b_t))
    assert "not finite" not in str(refused.value)


@pytest.mark.parametrize("block", [7, 40])
@pytest.mark.parametrize("weights", [(0.7, 0.0, 0.0, 0.0), (0.7, 2.0, 0.3, 5.0)])
def test_offsets_of_codes_and_inputs_do_not_cancel_in_float32(block, weights):
    z, x, direction, W_t, b_t = problem(40, 12, 4)
    z, x = (z + 1e4).float(), (x - 3e4).float()
    terms = terms_of(weights, direction, W_t, b_t)
    decoder, exact = solved(sums_of(z, x, block), terms), solved(sums_of(z.double(), x.double(), 40), terms)
    W, _ = stacked_least_squares(z.double(), x.double(), terms, exact.c * direction)
    assert not decoder.raised
    np.testing.assert_allclose(exact.W, W, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(decoder.W, exact.W, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(z.double() @ decoder.W + decoder.b, z.double() @ exact.W + exact.b, rtol=0, atol=1e-2)


@pytest.mark.parametrize("held", ["sums", "held rows"])
@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("alpha", [0.0, 1e-9, 3.0, 1e12, None], ids=str)
@pytest.mark.parametrize("size", [0.0, 1e4, 0.1])
def test_codes_that_do_not_vary_leave_the_direction_and_the_mean(held, rows, alpha, size):
    z, x, direction, W_t, b_t = problem(rows, 12, 4)
    z = torch.full_like(z, size)
    system = systems_of(z.float(), x.float())[held]
    terms = terms_of((0.0, 0.0, 0.0, 0.0), direction, W_t, b_t)
    terms = replace(terms, alpha=choose_alpha(system, terms, z, x, None).alpha if alpha is None else alpha)
    assert system.scale(1.0) >= 0
    for T0, c in ((direction, 1.0), (None, 0.0)):
        decoder = solved(system, replace(terms, direction=T0))
        assert decoder.c == c and decoder.ridge > 0
        torch.testing.assert_close(decoder.W, c * direction, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(z.mean(0) @ decoder.W + decoder.b, x.mean(0), rtol=1e-6, atol=1e-6)


def test_rounding_never_makes_the_scale_or_the_ridge_negative():
    z, x, direction, W_t, b_t = problem(40, 12, 4)
    system = sums_of(torch.zeros_like(z), x, 40)
    system.gram.matrix.fill_diagonal_(-1e-12)
    decoder = solved(system, terms_of((1.0, 0.0, 0.0, 0.0), direction, W_t, b_t))
    assert system.scale(1.0) == 0 and decoder.ridge == 1
    assert solved(system, terms_of((0.0, 0.0, 0.0, 0.0), None, W_t, b_t)).ridge > 0


@pytest.mark.parametrize("held", ["sums", "held rows"])
def test_alpha_is_not_lost_beside_a_large_mu(held):
    z, x, direction, W_t, b_t = problem(40, 60, 4)
    system, terms = systems_of(z, x)[held], terms_of((0.7, 0.0, 1e30, 0.0), direction, W_t, b_t)
    decoder = solved(system, terms)
    assert decoder.alpha == 0.7
    assert decoder.c == pytest.approx(((W_t * direction).sum() / direction.square().sum()).item(), rel=1e-9)
    torch.testing.assert_close(decoder.W, W_t, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("held", ["sums", "held rows"])
def test_the_condition_is_estimated_only_for_a_decoder(held, monkeypatch):
    z, x, direction, W_t, b_t = problem(40, 60, 4)
    system, terms = systems_of(z, x)[held], terms_of(WEIGHTS["all"], direction, W_t, b_t)
    taken, original = [], Cholesky.condition
    monkeypatch.setattr(Cholesky, "condition", lambda self: taken.append(1) or original(self))
    press(system, terms, z, x)
    assert not taken
    choose_alpha(system, terms, z, x, None)
    assert len(taken) <= 1
    taken.clear()
    assert solved(system, terms).condition >= 1 and len(taken) == 1


@pytest.mark.parametrize("held", ["sums", "held rows"])
@pytest.mark.parametrize("alpha", [1e8, 1e16, 1e25])
def test_a_large_alpha_leaves_the_best_multiple_of_the_direction(held, alpha):
    z, x, direction, W_t, b_t = problem(40 if held == "sums" else 8, 12, 4)
    decoder = solved(systems_of(z, x)[held], terms_of((alpha, 0.0, 0.0, 0.0), direction, W_t, b_t))
    centred = (z - z.mean(0)) @ direction
    best = (centred * (x - x.mean(0))).sum() / centred.square().sum()
    assert decoder.c == pytest.approx(best.item(), rel=1e-5)
    torch.testing.assert_close(decoder.W, best * direction, rtol=1e-4, atol=1e-6)


def test_a_ridge_of_zero_that_holds_is_not_called_raised():
    z, x, _, W_t, b_t = problem(40, 6, 3)
    assert not solved(sums_of(z, x, 40), terms_of((0.0, 0.0, 0.0, 0.0), None, W_t, b_t)).raised


@pytest.mark.parametrize("held", ["sums", "held rows"])
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("rows", [5, 12, 40])
@pytest.mark.parametrize("decayed", [False, True])
def test_no_direction_leads_downhill_from_the_decoder(held, weights, rows, decayed):
    z, x, direction, W_t, b_t = problem(rows, 12, 4)
    terms = terms_of(weights, direction, W_t, b_t, decayed)
    decoder = solved(systems_of(z, x)[held], terms)
    W, b = decoder.W, decoder.b
    misfit = z @ W + b - x
    of_W = [z.T @ misfit, terms.alpha * (W - decoder.c * direction), terms.mu * (W - W_t), terms.decay[:, None] * W]
    of_b = [misfit.sum(0), terms.beta * b, terms.nu * (b - b_t)]
    assert sum(of_W).norm() <= 1e-6 * max((z.T @ x).norm(), *(part.norm() for part in of_W))
    assert sum(of_b).norm() <= 1e-6 * max(x.sum(0).norm(), *(part.norm() for part in of_b))


@given(seed=st.integers(0, 10**6), rows=st.integers(3, 30), weights=st.tuples(*[st.floats(0.01, 50)] * 4),
       c=st.floats(-2, 2), held=st.sampled_from(["sums", "held rows"]))
def test_the_objective_does_not_rise(seed, rows, weights, c, held):
    z, x, direction, W_t, b_t = problem(rows, 9, 3, seed)
    terms = terms_of(weights, direction, W_t, b_t, decayed=True)
    decoder = solved(systems_of(z, x)[held], terms)
    before = objective(z, x, terms, W_t, b_t, c)
    assert objective(z, x, terms, decoder.W, decoder.b, decoder.c) <= before * (1 + 1e-12)


@pytest.mark.parametrize("held", ["sums", "held rows"])
@pytest.mark.parametrize("rows", [5, 40])
def test_latents_in_another_order_give_the_decoder_in_that_order(held, rows):
    z, x, direction, W_t, b_t = problem(rows, 12, 4)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    terms = terms_of(WEIGHTS["all"], direction, W_t, b_t, decayed=True)
    moved = replace(terms, direction=direction[order], W_t=W_t[order], decay=terms.decay[order])
    decoder, other = solved(systems_of(z, x)[held], terms), solved(systems_of(z[:, order], x)[held], moved)
    assert other.c == pytest.approx(decoder.c, rel=1e-9)
    torch.testing.assert_close(other.W, decoder.W[order], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(other.b, decoder.b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("held", ["sums", "held rows"])
def test_as_alpha_falls_the_decoder_tends_to_least_squares(held):
    z, x, direction, W_t, b_t = problem(60, 12, 4)
    expected = np.linalg.lstsq(np.hstack([z, np.ones((60, 1))]), x.numpy(), rcond=None)[0]
    away = []
    for alpha in (1.0, 1e-2, 1e-4, 1e-6):
        decoder = solved(systems_of(z, x)[held], terms_of((alpha, 0.0, 0.0, 0.0), direction, W_t, b_t))
        away.append(np.linalg.norm(np.vstack([decoder.W, decoder.b]) - expected))
    assert all(after < 0.02 * before for before, after in pairwise(away))
    assert away[-1] < 1e-6 * np.linalg.norm(expected)


def effects_of(z, x, y, alpha, prefixes, case) -> torch.Tensor:
    zeros, skip, targets = torch.zeros(6, 4).double(), None, y
    if case == "skip":
        skip, targets = SkipSums(4, 4, x.device), torch.cat([y, x], 1)
        skip.add(x, y)
    places = [Place(slice(2), zeros[:, 0], 1.0), Place(slice(2, 4), zeros[:, 0], 3.0)] if case == "places" else []
    terms = Terms(alpha, 0.0, 0.0, 0.0, None, zeros, torch.zeros(targets.shape[1]).double(), zeros[:, 0], True, skip,
                  places)
    system = Sums(6, targets.shape[1], prefixes=prefixes)
    system.add(codes_of(z), targets)
    return solve(system, terms, effects=True).effect


@pytest.mark.parametrize("case", ["plain", "places", "skip", "nested"])
def test_the_effect_of_a_latent_is_how_much_the_objective_rises_without_it(case):
    generator = torch.Generator().manual_seed(3)
    z = torch.rand(60, 6, generator=generator, dtype=torch.float64)
    x = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    prefixes = (3, 6) if case == "nested" else ()
    alpha = 0.7

    def best(z, prefixes) -> float:
        """The least objective, by least squares on all unknowns at once: weights, bias, skip, ridge."""
        held = [slice(0, m) for m in prefixes] or [slice(0, z.shape[1])]
        skip = x if case == "skip" else x[:, :0]
        y = (x @ torch.arange(16.0).double().view(4, 4)).sin() if case == "skip" else x
        total = 0.0
        for column in range(4):
            own = alpha * (3.0 if case == "places" and column > 1 else 1.0)
            blocks = []
            for part in held:
                used = torch.zeros_like(z)
                used[:, part] = z[:, part]
                blocks.append(torch.cat([used, torch.ones(60, 1), skip], 1) / len(held) ** 0.5)
            ridge = torch.cat([own**0.5 * torch.eye(z.shape[1]), torch.zeros(z.shape[1], 1 + skip.shape[1])], 1)
            left = torch.cat([*blocks, ridge.double()])
            right = torch.cat([y[:, column].repeat(len(held)) / len(held) ** 0.5, torch.zeros(z.shape[1]).double()])
            solution = torch.linalg.lstsq(left, right[:, None]).solution[:, 0]
            total += (left @ solution - right).square().sum().item()
        return total

    targets = (x @ torch.arange(16.0).double().view(4, 4)).sin() if case == "skip" else x
    found = effects_of(z, x, targets, alpha, prefixes, case)
    for latent in range(6):
        without = z.clone()
        without[:, latent] = 0
        assert found[latent].item() == pytest.approx(best(without, prefixes) - best(z, prefixes), rel=1e-5)
