"""The solvers on small problems in memory: optimality, descent, equivalences, the terms left out by default; smoothing,
the learning rate fitted to rows, and the revival of dead latents."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from homes import grid, normal
from solver_problems import (
    EVERY_ACTIVATION,
    F,
    RowsInMemory,
    decoder_of,
    loss_of,
    one_epoch,
    solve_decoder,
    sparse_mixture,
    started,
    task_of,
    trained,
)
from torch import Tensor

from saecli.sae.activations import Activation, BatchTopK, JumpRelu, Relu, TopK
from saecli.sae.dictionary import Batch
from saecli.sae.metrics import reconstruction
from saecli.train import upkeep
from saecli.train.options import WIDEST, Pam, PamSgd, Sgd, SolverConfig
from saecli.train.pam import PamSolver
from saecli.train.plan import default_width
from saecli.train.rows import Smoothing
from saecli.train.solver import Solver
from saecli.train.start import default_learning_rate
from saecli.train.upkeep import directions_of_worst, revive

FREE = Pam(alpha=0.5)


@pytest.fixture
def data() -> RowsInMemory:
    return sparse_mixture()


def full_objective(solver: PamSolver, rows: RowsInMemory, W: Tensor, b: Tensor, c: float) -> Tensor:
    """The sum that PAM-SGD minimises, from its definition: errors, penalty, ridge, and the proximal terms."""
    z = solver.dictionary.encode(rows.x)
    target = c * solver.dictionary.W_enc.T
    total = ((z @ W + b - rows.x) ** 2).sum() + solver.alpha * ((W - target) ** 2).sum()
    if isinstance(solver.config, Pam):
        total = total + solver.config.beta * (b**2).sum()
    if solver.task.training.sparsity == "l1":
        weight = solver.task.penalty_weight(solver.steps - 1)
        total = total + weight * (z.abs() * W.norm(dim=1)).sum()
    return total


@pytest.mark.parametrize("activation", EVERY_ACTIVATION, ids=lambda activation: activation.name)
@pytest.mark.parametrize(
    ("config", "alpha", "rows"), grid([PamSgd(), Pam(beta=0.3)], ["auto", 0.5], [300, 12])
)
def test_objective_has_no_gradient_after_a_decoder_step(activation, config, alpha, rows):
    data = sparse_mixture(rows)
    solver = started(replace(config, alpha=alpha), data, activation)
    solver.descend(next(data.shuffled(0)))
    solve_decoder(solver, data, last=True)
    W, b = (tensor.requires_grad_() for tensor in decoder_of(solver))
    with torch.enable_grad():
        objective = full_objective(solver, data, W, b, solver.dictionary.c)
        gradients = torch.autograd.grad(objective, [W, b])
    scale = data.x.square().sum()
    assert max(gradient.abs().max() for gradient in gradients) < 1e-6 * scale


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        Pam(alpha=0.7, beta=0.2),
        *(PamSgd(alpha=0.7, release=release, revive=False) for release in (0, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("sparsity", ["none", "l1"])
def test_objective_never_rises_in_a_decoder_step(data, config, sparsity):
    solver = started(config, data, Relu(), 6, sparsity, 0.5)
    for epoch in range(6):
        for batch in data.shuffled(epoch):
            solver.descend(batch)
        with torch.no_grad():
            before = full_objective(solver, data, *decoder_of(solver), solver.dictionary.c)
            held = {name: tensor.clone() for name, tensor in solver.optimizer.tensors.items()}
            solve_decoder(solver, data)
            after = full_objective(solver, data, *decoder_of(solver), solver.dictionary.c)
        assert after <= before * (1 + 1e-12)
        for name in ("W_enc", "b_enc"):
            assert torch.equal(held[name], solver.optimizer.tensors[name])
    if isinstance(config, PamSgd):
        assert solver.dictionary.untied == (config.release == 0)


@pytest.mark.slow
def test_a_penalty_does_not_drive_codes_to_nothing_in_150_iterations(data):
    solver = started(PamSgd(), data, Relu(), 150, "l1", 0.3)
    measures = reconstruction(trained(solver, data, 150), [data.x])
    assert measures["l0"] > 0.5
    assert measures["fvu"] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("weight", [30.0, 3000.0, 1e6])
def test_a_penalty_too_strong_for_any_code_ends_them_all(data, weight):
    sae = trained(started(PamSgd(), data, Relu(), 30, "l1", weight), data, 30)
    assert not sae.encode(data.x).any()
    assert all(tensor.isfinite().all() for tensor in sae.tensors().values())


def test_tied_weights_stay_tied(data):
    sae = trained(started(Sgd(tied=True), data, TopK(k=3)), data, 4)
    assert torch.equal(sae.W_dec, sae.W_enc.T)


def test_proximal_weights_hold_encoder_and_decoder_back(data):
    def moved(**weights: float) -> tuple[float, float]:
        solver = started(Pam(alpha=1.0, **weights), data, Relu())
        start = solver.sae()
        one_epoch(solver, data)
        end = solver.sae()
        return (end.W_enc - start.W_enc).norm().item(), (end.W_dec - start.W_dec).norm().item()

    free, held_enc, held_dec = moved(), moved(mu_enc=1e5, nu_enc=1e5), moved(mu_dec=1e7, nu_dec=1e7)
    assert held_enc[0] < 0.5 * free[0]
    assert held_dec[1] < 0.01 * free[1]


def test_proximal_terms_of_sgd_refer_to_the_start_of_the_epoch(data):
    solver = started(Sgd(tied=True, mu_enc=8.0, nu_enc=3.0), data, Relu(), 3)
    encoder = {name: getattr(solver.dictionary, name) for name in ("W_enc", "b_enc")}
    for epoch in range(3):
        held = {name: tensor.detach().clone() for name, tensor in encoder.items()}
        for batch in data.shuffled(epoch):
            of_W, of_b = ((encoder[name] - held[name]).square().sum() for name in held)
            expected = (8 * of_W + 3 * of_b).item() / data.rows
            assert solver.extra_loss().item() == pytest.approx(expected)
            solver.step(batch)


@pytest.mark.parametrize(
    ("rise", "fall", "expected"),
    [
        (0.0, 0.0, [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        (0.4, 0.2, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 0.5]),
        (0.0, 1.0, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
    ],
)
def test_learning_rate_rises_and_falls_over_fractions_of_all_steps(rise, fall, expected):
    task = task_of(100, 10, 0.02, lr_warm_up=rise, lr_decay=fall)
    shares = [task.learning_rate(step) / 0.02 for step in range(10)]
    assert shares == pytest.approx(expected)


@pytest.mark.parametrize("config", [Sgd(), Pam()], ids=["sgd", "pam"])
@pytest.mark.parametrize("share", [0.3, 3.0])
def test_adam_steps_by_the_gradient_clipped_to_its_norm(data, config: SolverConfig, share: float):
    plain = started(config, data, Relu())
    tensors = plain.optimizer.tensors
    gradients = torch.autograd.grad(loss_of(plain, data), [*tensors.values()])
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))
    solver = started(replace(config, clip_norm=share * norm), data, Relu())
    solver.descend(Batch.of(data.x))
    for name, gradient in zip(tensors, gradients, strict=True):
        # Adam's first moment after one step is a tenth of the gradient.
        moment = solver.optimizer.state()[f"adam.exp_avg.{name}"]
        torch.testing.assert_close(moment, 0.1 * min(1.0, share) * gradient)


@pytest.mark.parametrize("config", [Sgd(tied=True), Sgd(), FREE], ids=["tied", "untied", "pam"])
def test_weight_decay_adds_the_squares_of_trained_weights(data, config: SolverConfig):
    plain = started(config, data, Relu())
    decayed = started(replace(config, weight_decay=6.0), data, Relu())
    names = ("W_enc", "W_dec") if config == Sgd() else ("W_enc",)
    squares = sum((getattr(decayed.dictionary, name) ** 2).sum() for name in names)
    difference = (loss_of(decayed, data) - loss_of(plain, data)).item()
    assert difference == pytest.approx(6 * squares.item() / 300)


def test_l1_of_the_codes_is_blind_to_the_decoder(data):
    solver = started(Pam(alpha=1e-3), data, Relu(), 4, "l1-codes", 0.7)
    z = (data.x @ solver.dictionary.W_enc + solver.dictionary.b_enc).relu()
    solve_decoder(solver, data)
    with_one = torch.cat([z.detach(), torch.ones(300, 1).double()], 1)
    ridge = 1e-3 * torch.eye(F + 1).double()
    ridge[-1, -1] = 0
    expected = torch.linalg.solve(with_one.T @ with_one + ridge, with_one.T @ data.x)
    W_dec, b_dec = decoder_of(solver)
    torch.testing.assert_close(torch.cat([W_dec, b_dec[None]]), expected, rtol=1e-5, atol=1e-6)


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
    assert default_learning_rate(128, 4) == default_learning_rate(128, 100) == pytest.approx(5e-3)
    assert default_learning_rate(512, 4) == pytest.approx(2.5e-3)
    for descending, noise, most in ((1, 0.5 ** (1 / 2), 2), (2, 0.25, 2**0.5)):
        rare = default_learning_rate(128, 0.5, descending=descending)
        assert rare == pytest.approx(5e-3 * noise)
        few = [default_learning_rate(128, 4, n, descending) for n in (16_000, 4000, 3000, 100)]
        assert few == pytest.approx([5e-3, 5e-3, 5e-3 * (4 / 3) ** (1 / 3), 5e-3 * most])


def killed(config: SolverConfig, data: RowsInMemory, activation: Activation, **of: Any) -> Solver:
    """A solver some of whose latents never fire."""
    solver = started(config, data, activation, **of or {"epochs": 6, "smoothing": 0.3})
    with torch.no_grad():
        solver.dictionary.W_enc[:, DEAD] = 0
        solver.dictionary.b_enc[DEAD] = -100
    return solver


def firing(solver: Solver, data: RowsInMemory) -> Tensor:
    return (solver.sae().encode(data.x) != 0).any(0)[DEAD]


@pytest.mark.slow
@pytest.mark.parametrize("activation", [Relu(), TopK(k=3), JumpRelu(), BatchTopK(k=3)], ids=str)
@pytest.mark.parametrize("config", [PamSgd(), PamSgd(release=0.0), Sgd(), Sgd(tied=True)], ids=str)
def test_dead_latents_fire_again_and_stay_so(activation, config):
    data = sparse_mixture()
    solver = killed(config, data, activation)
    one_epoch(solver, data)
    assert firing(solver, data).any()
    sae = trained(solver, data, 6)
    assert solver.revived == len(DEAD)
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
    solver = killed(kind(**options), data, Relu())
    solver.steps = math.ceil(steps * solver.task.steps)
    one_epoch(solver, data)
    assert not firing(solver, data).any()
    assert solver.revived == 0


def test_sgd_waits_for_two_rows_per_latent_whatever_the_batch():
    data = replace(sparse_mixture(), batch_size=8)
    solver = killed(Sgd(), data, Relu(), steps=40)  # 16 rows come between two looks
    one_epoch(solver, data)
    assert firing(solver, data).all() and solver.revived == len(DEAD)


def test_a_step_follows_each_revival_of_sgd():
    data = sparse_mixture()
    solver = killed(Sgd(), data, Relu(), steps=40)
    revived = [solver.revived for _ in range(8) if solver.step(Batch.of(data.x))]
    assert revived == [0, 0, *[len(DEAD)] * 6]  # looked for after 2 steps: a text may end there


def test_revival_leaves_latents_that_fire_as_they_are():
    data = sparse_mixture()
    alive = [latent for latent in range(F) if latent not in DEAD]
    tensors = []
    for asked in (True, False):
        solver = killed(PamSgd(alpha=0.5, revive=asked), data, Relu())
        solver.descend(Batch.of(data.x))
        solve_decoder(solver, data)
        assert solver.revived == len(DEAD) * asked
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


@pytest.mark.parametrize("kind", [Sgd, PamSgd])
def test_no_two_latents_are_re_aimed_at_one_row(kind):
    data = sparse_mixture()
    solver, encoder = started(kind(), data, TopK(k=3)), lambda: solver.dictionary.W_enc.detach()
    rows = torch.cat([data.x[:4], data.x[2:7]])  # 7 different ones
    solver.task = replace(solver.task, sample=Batch.of(rows))
    alive = torch.arange(F) < 3
    encoder()[:, ~alive] = 0
    revive(solver, alive, rows=1000)
    aimed = encoder()[:, 3:].T
    assert solver.revived == len(torch.unique(aimed[:7], dim=0)) == 7
    assert not aimed[7:].any()


@pytest.mark.parametrize("config", [Sgd(tied=True), PamSgd()], ids=str)
def test_no_more_latents_are_re_aimed_at_once_than_the_error_bears(config):
    rows = sparse_mixture()
    d_in = rows.x.shape[1]
    rows.x[:3] = 40  # reconstructed by latent 0; what is aimed near it fires there too
    solver = started(config, rows, BatchTopK(k=3))
    solver.task = replace(solver.task, sample=Batch.of(rows.x))
    encoder = solver.dictionary.W_enc.detach()
    encoder[:, 0] = d_in**-0.5
    alive = torch.arange(F) < 3
    encoder[:, ~alive] = 0

    def error() -> float:
        return (rows.x - solver.dictionary(rows.x)).square().sum().item()

    before = error()
    revive(solver, alive, rows=1000)
    assert 1 < solver.revived < F - 3
    assert encoder[:, ~alive].any(0).sum() == solver.revived
    assert error() <= 1.1 * before


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e25])
def test_directions_of_the_worst_rows_are_unit_whatever_their_size(size):
    residuals = normal(20, 4).float() * size
    directions = directions_of_worst(residuals, residuals, 20, torch.Generator().manual_seed(0))
    torch.testing.assert_close(directions.norm(dim=1), torch.ones(20))


@pytest.mark.parametrize("solve", ["direct", "iterative"])
def test_a_latent_that_doubles_another_is_re_aimed_after_the_decoder_step(monkeypatch, solve):
    monkeypatch.setattr(upkeep, "REAIMED", 1.5 / F)
    rows = sparse_mixture()
    solver = started(PamSgd(alpha=0.01, solve=solve), rows, Relu())
    with torch.no_grad():
        solver.dictionary.W_enc[:, 1] = solver.dictionary.W_enc[:, 0]
    before = solver.dictionary.W_enc.detach().clone()
    solve_decoder(solver, rows)
    cosines = torch.cosine_similarity(before, solver.dictionary.W_enc.detach(), dim=0)
    assert solver.revived == 1
    assert cosines.argmin().item() in (0, 1)
