"""The paper's descent theorem, where its assumptions hold: each half step lowers the objective by its proximal term,
and the steps go to zero.

The objective is that of Algorithm 3.1 over all N rows, with E the encoder's weights and W = c E' + Delta for the
residual decoder, whose unknowns are then c and Delta:

    F = sum ||z W + b - x||^2 + alpha ||W - c E'||^2 + beta ||b||^2

A step of either half, minimised with mu ||. - .^t||^2 added, leaves F at least mu ||. - .^t||^2 below where it was, and
summing over t, the squared steps have a finite sum: all of them together at most what F fell by, over mu.
"""

from itertools import pairwise

import pytest
from tasks import task_of
from test_solvers import F, RowsInMemory, decoder_of, solve_decoder, sparse_mixture
from torch import Tensor

from saecli.sae.activations import Activation, SoftTopK, Swish
from saecli.sae.batch import Batch
from saecli.train.pam_sgd import PamSgd, PamSgdSolver
from saecli.train.start import initial_sae

ALPHA, BETA, MU, NU = 2.0, 1.0, 10.0, 10.0
OUTER = 60
SMOOTH = [Swish(), SoftTopK(k=3, temperature=0.5)]
Point = dict[str, Tensor]


def solver_of(rows: RowsInMemory, activation: Activation, lr: float = 1e-2, **options: object) -> PamSgdSolver:
    settings = {"optimizer": "lbfgs", "alpha": ALPHA, "beta": BETA, "mu_enc": MU, "nu_enc": NU, "mu_dec": MU,
                "nu_dec": NU, "revive": False} | options
    config = PamSgd(**settings).resolved(OUTER)
    return config.build(initial_sae(activation, F, Batch.of(rows.x), seed=1), task_of(rows.rows, OUTER, lr))


def point(solver: PamSgdSolver) -> Point:
    W, b = decoder_of(solver)
    encoder = {name: getattr(solver.dictionary, name).detach().clone() for name in ("W_enc", "b_enc")}
    return encoder | {"W_dec": W, "b_dec": b, "Delta": solver.decoder.Delta.clone()}


def objective(solver: PamSgdSolver, rows: RowsInMemory, at: Point) -> float:
    z = solver.dictionary.activation(rows.x @ at["W_enc"] + at["b_enc"], {}).dense()
    error = ((z @ at["W_dec"] + at["b_dec"] - rows.x) ** 2).sum()
    return (error + ALPHA * (at["Delta"] ** 2).sum() + BETA * (at["b_dec"] ** 2).sum()).item()


def squared_step(before: Point, after: Point, names: tuple[str, ...]) -> float:
    return sum(((after[name] - before[name]) ** 2).sum().item() for name in names)


def alternated(solver: PamSgdSolver, rows: RowsInMemory) -> list[Point]:
    """The points before the first half step and after each one."""
    points = [point(solver)]
    for _ in range(OUTER):
        solver.descend(Batch.of(rows.x))
        points.append(point(solver))
        solve_decoder(solver, rows, last=False)
        points.append(point(solver))
    return points


def rises(solver: PamSgdSolver, rows: RowsInMemory) -> list[float]:
    values = [objective(solver, rows, at) for at in alternated(solver, rows)]
    return [after - before for before, after in pairwise(values)]


@pytest.mark.parametrize("decoder", ["residual", pytest.param("free", marks=pytest.mark.slow)])
@pytest.mark.parametrize("activation", [SMOOTH[0], pytest.param(SMOOTH[1], marks=pytest.mark.slow)],
                         ids=lambda activation: activation.name)
def test_each_half_step_lowers_the_objective_by_its_proximal_term_and_steps_go_to_zero(activation, decoder):
    rows = sparse_mixture(150)
    solver = solver_of(rows, activation, decoder=decoder)
    points = alternated(solver, rows)
    values = [objective(solver, rows, at) for at in points]
    rounding = 1e-12 * values[0]
    for half, (before, after) in enumerate(pairwise(points)):
        moved = ("W_enc", "b_enc") if half % 2 == 0 else ("W_dec", "b_dec")
        gained = values[half] - values[half + 1]
        assert gained >= MU * squared_step(before, after, moved) - rounding, half
    steps = [squared_step(before, after, ("W_enc", "b_enc", "W_dec", "b_dec"))
             for before, after in pairwise(points[::2])]
    assert MU * sum(steps) <= values[0] - values[-1] + len(steps) * rounding
    assert sum(steps[OUTER // 2 :]) < 0.03 * sum(steps)
    assert steps[-1] < 1e-3 * steps[0]
    assert all(later < earlier for earlier, later in pairwise(sum(steps[i : i + 10]) for i in range(0, OUTER, 10)))


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["residual", "free"])
def test_the_objective_rises_where_the_decoder_step_ignores_the_penalty(decoder):
    rows = sparse_mixture(150)
    assert max(rises(solver_of(rows, Swish(), decoder=decoder), rows)) <= 0
    blind = solver_of(rows, Swish(), decoder=decoder, alpha=0.0, mu_dec=0.0)
    assert max(rises(blind, rows)[1::2]) > 1e-3


@pytest.mark.parametrize("decoder", ["residual", "free"])
def test_a_gradient_step_lowers_the_objective_where_it_is_small_and_not_where_it_is_large(decoder):
    rows = sparse_mixture(150)
    small, large = (rises(solver_of(rows, Swish(), lr, optimizer="sgd", decoder=decoder), rows) for lr in (0.01, 2.0))
    assert max(small) <= 0
    assert max(large[::2]) > 1e-3
