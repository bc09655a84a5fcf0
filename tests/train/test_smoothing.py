"""Smoothing, the learning rate fitted to rows, and the revival of dead latents."""

import math

import pytest
import torch
from homes import normal
from solver_problems import (
    F,
    RowsInMemory,
    one_epoch,
    solve_decoder,
    sparse_mixture,
    started,
    trained,
)
from torch import Tensor

from saecli.sae.activations import Activation, BatchTopK, JumpRelu, Relu, TopK
from saecli.sae.dictionary import Batch
from saecli.train import upkeep
from saecli.train.options import WIDEST, PamSgd, Sgd, SolverConfig
from saecli.train.plan import default_width
from saecli.train.rows import Smoothing
from saecli.train.solver import Solver, directions_of_worst
from saecli.train.start import default_learning_rate

DEAD = [2, 5]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def smoothed(x: Tensor, width: float, draws: torch.Generator) -> Tensor:
    return Smoothing(width, x)(Batch.of(x), draws).x


@pytest.mark.parametrize("width", [0.05, 0.5])
def test_rows_of_any_norm_move_by_the_width_times_their_distance(width):
    order = torch.randperm(2000, generator=generator())
    size = torch.logspace(-2, 2, 2000, dtype=torch.float64)[order]
    x = normal(2000, 12) * size[:, None]
    relative = (smoothed(x, width, generator(1)) - x).norm(dim=1) / (x - x.mean(0)).norm(dim=1)
    for part in (size < 0.1, (size > 0.1) & (size < 10), size > 10):
        assert relative[part].square().mean().sqrt().item() == pytest.approx(width, rel=0.15)


def test_a_row_moves_by_the_width_whatever_else_is_in_its_block():
    sample = normal(500, 12)
    smoothing, row, draws = Smoothing(0.4, sample), normal(1, 12, seed=2), generator(1)
    moves = torch.cat([smoothing(Batch.of(row), draws).x - row for _ in range(800)])
    of_its_norm = moves.norm(dim=1) / (row - sample.mean(0)).norm()
    assert of_its_norm.min() > 0
    assert of_its_norm.square().mean().sqrt().item() == pytest.approx(0.4, rel=0.1)
    together = smoothing(Batch.of(row.expand(800, 12)), generator(3)).x - row
    covariance = moves.T.cov()
    atol = 0.15 * covariance.diagonal().mean()
    torch.testing.assert_close(together.T.cov(), covariance, atol=atol, rtol=0)


def test_smoothed_rows_vary_more_by_the_inflation():
    x = normal(4000, 12) * torch.linspace(0.2, 2, 12) + 5.0
    smoothing = Smoothing(0.55, x)
    before, after = x - x.mean(0), smoothing(Batch.of(x), generator()).x - x.mean(0)
    inflation = after.square().sum() / before.square().sum()
    assert inflation.item() == pytest.approx(smoothing.inflation, rel=0.02)
    assert Smoothing(0.0, x).inflation == Smoothing(0.5, x[:1]).inflation == 1


@pytest.mark.parametrize(
    "x",
    [normal(50, 4), normal(1, 4), torch.zeros(6, 4), torch.ones(6, 4)],
    ids=["width 0", "one row", "zeros", "alike"],
)
def test_where_there_is_nothing_to_move_along_rows_stay(x):
    assert torch.equal(smoothed(x, 0.0 if len(x) == 50 else 0.5, generator()), x)


def test_the_default_width_falls_with_rows_beyond_latents():
    assert [default_width(rows, 8, 100) for rows in (1, 100)] == [WIDEST, WIDEST]
    assert default_width(400, 8, 100) == default_width(400, 25, 10) == pytest.approx(WIDEST / 2)


def test_the_default_learning_rate_is_that_of_its_formula():
    assert default_learning_rate(128, 8) == default_learning_rate(128, 100) == pytest.approx(8e-3)
    assert default_learning_rate(512, 8) == pytest.approx(4e-3)
    assert default_learning_rate(128, 1) == pytest.approx(2e-3)


def smoothing_solver(data: RowsInMemory, activation: Activation, config: SolverConfig) -> Solver:
    return started(config, data, activation, epochs=6, smoothing=0.3)


def kill(solver: Solver) -> None:
    with torch.no_grad():
        solver.dictionary.W_enc[:, DEAD] = 0
        solver.dictionary.b_enc[DEAD] = -100


def firing(solver: Solver, data: RowsInMemory) -> Tensor:
    return (solver.sae().encode(data.x) != 0).any(0)[DEAD]


@pytest.mark.slow
@pytest.mark.parametrize("activation", [Relu(), TopK(k=3), JumpRelu(), BatchTopK(k=3)], ids=str)
@pytest.mark.parametrize("config", [PamSgd(), PamSgd(release=0.0), Sgd(), Sgd(tied=True)], ids=str)
def test_dead_latents_fire_again_after_an_epoch_and_stay_so(activation, config):
    data = sparse_mixture()
    solver = smoothing_solver(data, activation, config)
    kill(solver)
    one_epoch(solver, data)
    assert firing(solver, data).all()
    assert solver.revived == len(DEAD)
    sae = trained(solver, data, 6)
    assert all(tensor.isfinite().all() for tensor in sae.tensors().values())
    assert firing(solver, data).all()


@pytest.mark.parametrize("kind", [PamSgd, Sgd])
@pytest.mark.parametrize(
    ("rows", "options", "steps"),
    [(300, {"revive": False}, 0.0), (31, {}, 0.0), (300, {}, 0.9)],
    ids=["--no-revive", "fewer than two rows per latent", "the last tenth of steps"],
)
def test_where_latents_are_not_revived(kind, rows, options, steps):
    data = sparse_mixture(rows)
    solver = smoothing_solver(data, Relu(), kind(**options))
    kill(solver)
    solver.steps = math.ceil(steps * solver.task.steps)
    one_epoch(solver, data)
    assert not firing(solver, data).any()
    assert solver.revived == 0


def test_revival_leaves_latents_that_fire_as_they_are():
    data = sparse_mixture()
    alive = [latent for latent in range(F) if latent not in DEAD]
    tensors = []
    for revive in (True, False):
        solver = smoothing_solver(data, Relu(), PamSgd(alpha=0.5, revive=revive))
        kill(solver)
        solver.descend(Batch.of(data.x))
        solve_decoder(solver, data)
        assert solver.revived == len(DEAD) * revive
        sae = solver.sae()
        tensors.append((sae.W_enc[:, alive], sae.b_enc[alive], sae.W_dec[alive], sae.b_dec))
    assert all(map(torch.equal, *tensors))


def test_directions_of_revival_are_of_rows_with_an_error():
    x, residuals = normal(20, 6), torch.zeros(20, 4)
    residuals[7], residuals[11] = torch.tensor([3.0, 0, 0, 0]), torch.tensor([0, 0, -2.0, 0])
    for count in (2, 5):
        directions = directions_of_worst(x, residuals, count, generator())
        assert sorted(map(tuple, directions.tolist())) == [(0, 0, -1, 0), (1, 0, 0, 0)]
    assert not len(directions_of_worst(x, torch.zeros(20, 4), 3, generator()))


def test_no_two_directions_are_of_equal_rows():
    x, residuals = normal(20, 6), normal(20, 4, seed=1).float()
    x[10:], residuals[10:] = x[:10], residuals[:10]
    directions = directions_of_worst(x, residuals, 18, generator())
    assert len(directions) == len(torch.unique(directions, dim=0)) == 10


@pytest.mark.parametrize("kind", [Sgd, PamSgd])
def test_no_two_latents_are_re_aimed_at_one_row(kind):
    data = sparse_mixture()
    solver, encoder = started(kind(), data, TopK(k=3)), lambda: solver.dictionary.W_enc.detach()
    for rows in (data.x[:4], data.x[2:7]):  # 7 different ones
        solver.step(Batch.of(rows))
    alive = torch.arange(F) < 3
    encoder()[:, ~alive] = 0
    solver.revive(alive, rows=1000)
    aimed = encoder()[:, 3:].T
    assert solver.revived == len(torch.unique(aimed[:7], dim=0)) == 7
    assert not aimed[7:].any()


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e25])
def test_directions_of_the_worst_rows_are_unit_whatever_their_size(size):
    residuals = normal(20, 4).float() * size
    directions = directions_of_worst(residuals, residuals, 20, torch.Generator().manual_seed(0))
    torch.testing.assert_close(directions.norm(dim=1), torch.ones(20))


@pytest.mark.parametrize("solve", ["direct", "iterative"])
def test_a_latent_that_doubles_another_is_re_aimed_after_the_decoder_step(monkeypatch, solve):
    monkeypatch.setattr(upkeep, "MOST_REAIMED", 1.5 / F)
    rows = sparse_mixture()
    solver = started(PamSgd(alpha=0.01, solve=solve), rows, Relu())
    with torch.no_grad():
        solver.dictionary.W_enc[:, 1] = solver.dictionary.W_enc[:, 0]
    before = solver.dictionary.W_enc.detach().clone()
    solve_decoder(solver, rows)
    cosines = torch.cosine_similarity(before, solver.dictionary.W_enc.detach(), dim=0)
    assert solver.revived == 1
    assert cosines.argmin().item() in (0, 1)
