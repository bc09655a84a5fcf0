"""The solvers on small problems in memory: optimality, descent, equivalences, and resuming."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from grids import grid
from tasks import task_of
from torch import Tensor

from saecli.sae.activations import ACTIVATIONS, Activation, BatchTopK, JumpRelu, Relu, Swish, TopK
from saecli.sae.batch import Batch
from saecli.sae.dictionary import SAE
from saecli.sae.metrics import reconstruction
from saecli.train.pam_sgd import PamSgd, PamSgdSolver
from saecli.train.sgd import Sgd
from saecli.train.solver import Solver, SolverConfig
from saecli.train.solvers import SOLVERS
from saecli.train.start import initial_sae
from saecli.train.task import StepReport

D, F = 6, 16
EVERY_ACTIVATION = [kind(k=3) if hasattr(kind, "k") else kind() for kind in ACTIVATIONS.values()]


@dataclass(frozen=True)
class RowsInMemory:
    x: Tensor
    batch_size: int = 32

    @property
    def rows(self) -> int:
        return len(self.x)

    @property
    def d_in(self) -> int:
        return self.x.shape[1]

    def shuffled(self, epoch: int) -> Iterator[Batch]:
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(epoch))
        return map(Batch.of, self.x[order].split(self.batch_size))

    def some(self, count: int, epoch: int = 0) -> Iterator[Batch]:
        return map(Batch.of, self.x[:count].split(40) if count else ())


def sparse_mixture(rows: int = 300, seed: int = 0) -> RowsInMemory:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.rand(rows, F, generator=generator, dtype=torch.float64)
    codes *= torch.rand(rows, F, generator=generator) < 0.15
    dictionary = torch.randn(F, D, generator=generator, dtype=torch.float64)
    x = codes @ dictionary + 0.02 * torch.randn(rows, D, generator=generator, dtype=torch.float64)
    return RowsInMemory((x - x.mean(0)) / x.std())


def started(config: SolverConfig, rows: RowsInMemory, activation: Activation, epochs: int = 4, sparsity: str = "none",
            weight: float = 0.0, lr: float = 1e-2, smoothing: float = 0.0, seed: int = 0) -> Solver:
    config = config.resolved(None)
    batches = -(-rows.rows // rows.batch_size)
    task = task_of(rows.rows, epochs * batches * config.inner_steps, lr, sparsity, weight, sample=rows.x,
                   smoothing=smoothing, seed=seed, batches=batches)
    return config.build(initial_sae(activation, F, Batch.of(rows.x[:64]), seed=1), task)


def decoder_steps(solver: Solver, rows: RowsInMemory) -> None:
    """The decoder steps that are due."""
    while (due := solver.due) is not None:
        solver.begin_pass(lambda due=due: rows.some(due))
        for batch in rows.some(due):
            solver.observe(batch)
        solver.end_pass()


def solve_decoder(solver: PamSgdSolver, rows: RowsInMemory, last: bool) -> None:
    """A decoder step over all rows."""
    solver._last, solver._silenced, solver._due = last, False, rows.rows
    decoder_steps(solver, rows)


def one_epoch(solver: Solver, rows: RowsInMemory, epoch: int = 0) -> list[StepReport]:
    """A pass over the rows, as the training loop makes it."""
    reports = []
    solver.begin_epoch()
    decoder_steps(solver, rows)
    for batch in rows.shuffled(epoch):
        reports += solver.step(batch)
        decoder_steps(solver, rows)
        if solver.finished:
            break
    reports += solver.end_epoch()
    decoder_steps(solver, rows)
    return reports


def trained(solver: Solver, rows: RowsInMemory, epochs: int) -> SAE:
    for epoch in range(epochs):
        one_epoch(solver, rows, epoch)
    return solver.sae()


def loss_of(solver: Solver, data: RowsInMemory) -> Tensor:
    """What descent lowers, on all rows."""
    weight = solver.task.penalty_weight(solver.steps)
    return solver.dictionary.loss(Batch.of(data.x), solver.task.training.sparsity, weight).value + solver.extra_loss()


def decoder_of(solver: Solver) -> tuple[Tensor, Tensor]:
    """The decoder's weights and bias as they stand."""
    return solver.dictionary.decoder().detach().clone(), solver.dictionary.b_dec.detach().clone()


def full_objective(solver: PamSgdSolver, rows: RowsInMemory, W: Tensor, b: Tensor, c: float) -> Tensor:
    """The sum that PAM-SGD minimises, from its definition: errors, penalty, ridge, and the proximal terms."""
    z = solver.dictionary.encode(rows.x)
    target = c * solver.dictionary.W_enc.T if solver.config.decoder == "residual" else 0.0
    total = ((z @ W + b - rows.x) ** 2).sum() + solver.decoder.alpha * ((W - target) ** 2).sum()
    total = total + solver.config.beta * (b**2).sum()
    if solver.task.training.sparsity == "l1":
        total = total + solver.task.penalty_weight(solver.steps - 1) * (z.abs() * W.norm(dim=1)).sum()
    return total


@pytest.mark.parametrize("activation", EVERY_ACTIVATION, ids=lambda activation: activation.name)
@pytest.mark.parametrize("decoder", ["residual", "free"])
@pytest.mark.parametrize("alpha", ["auto", 0.5])
@pytest.mark.parametrize("rows", [300, 12])
def test_gradient_of_the_objective_vanishes_after_a_decoder_step(activation, decoder, alpha, rows):
    data = sparse_mixture(rows)
    solver = started(PamSgd(decoder=decoder, alpha=alpha, beta=0.3), data, activation)
    solver.descend(next(data.shuffled(0)))
    solve_decoder(solver, data, last=True)
    W, b = (tensor.requires_grad_() for tensor in decoder_of(solver))
    with torch.enable_grad():
        objective = full_objective(solver, data, W, b, solver.decoder.c)
        gradients = torch.autograd.grad(objective, [W, b])
    scale = data.x.square().sum()
    assert max(gradient.abs().max() for gradient in gradients) < 1e-6 * scale


@pytest.mark.parametrize("decoder", ["residual", "free"])
@pytest.mark.parametrize("release", [1, 0])
@pytest.mark.parametrize("sparsity", ["none", "l1"])
def test_objective_never_rises_in_a_decoder_step(decoder, release, sparsity):
    data = sparse_mixture()
    config = PamSgd(decoder=decoder, release=release, alpha=0.7, beta=0.2, revive=False)
    solver = started(config, data, Relu(), 6, sparsity, 0.5)
    for epoch in range(6):
        for batch in data.shuffled(epoch):
            solver.descend(batch)
        with torch.no_grad():
            before = full_objective(solver, data, *decoder_of(solver), solver.decoder.c)
            held = {name: tensor.clone() for name, tensor in solver.optimizer.tensors.items()}
            solve_decoder(solver, data, last=False)
            after = full_objective(solver, data, *decoder_of(solver), solver.decoder.c)
        assert after <= before * (1 + 1e-12)
        assert all(torch.equal(held[name], solver.optimizer.tensors[name]) for name in ("W_enc", "b_enc"))
    assert solver.released == (release == 0)


@pytest.mark.parametrize("activation", EVERY_ACTIVATION, ids=lambda activation: activation.name)
@pytest.mark.parametrize("decoder", ["residual", "free"])
def test_balancing_leaves_the_sae_as_it_was(activation, decoder):
    data = sparse_mixture()
    solver = started(PamSgd(decoder=decoder), data, activation)
    for batch in data.shuffled(0):
        solver.descend(batch)
    with torch.no_grad():
        solver._apply(replace(solver.decoder, c=7.0 * solver.decoder.c, Delta=0.3 * solver.decoder.Delta))
        before = solver.sae()
        solver._balance()
        after = solver.sae()
        torch.testing.assert_close(after(data.x), before(data.x), rtol=1e-10, atol=1e-10)
    movable = activation.name not in ("swish", "soft-topk")  # the others compute something else at another size
    assert torch.allclose(before.W_enc, after.W_enc) != movable


@pytest.mark.slow
def test_a_penalty_does_not_drive_codes_to_nothing_over_many_outer_iterations():
    data = sparse_mixture()
    solver = started(PamSgd(), data, Relu(), epochs=150, sparsity="l1", weight=0.3)
    found = reconstruction(trained(solver, data, 150), [data.x])
    assert found["l0"] > 0.5
    assert found["fvu"] < 0.5


def test_a_large_alpha_makes_the_residual_decoder_a_multiple_of_the_encoder():
    data = sparse_mixture()
    solver = started(PamSgd(alpha=1e12), data, TopK(k=3))
    sae = trained(solver, data, 4)
    torch.testing.assert_close(sae.W_dec, solver.decoder.c * sae.W_enc.T, rtol=1e-6, atol=1e-6)


def test_tied_weights_stay_tied():
    data = sparse_mixture()
    sae = trained(started(Sgd(tied=True), data, TopK(k=3)), data, 4)
    assert torch.equal(sae.W_dec, sae.W_enc.T)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "activation"), grid(
    [Sgd(), Sgd(tied=True), PamSgd(decoder="free"), PamSgd()], EVERY_ACTIVATION), ids=lambda value: value.name)
def test_training_lowers_the_unexplained_variance(config, activation):
    data = sparse_mixture()
    solver = started(config, data, activation, epochs=20)
    before = reconstruction(solver.sae(), [data.x])["fvu"]
    after = reconstruction(trained(solver, data, 20), [data.x])["fvu"]
    assert after < 0.8 * before


@pytest.mark.parametrize("config", [Sgd(), PamSgd(inner_steps=2, decoder_every=3, mu_enc=0.1, nu_enc=0.2, mu_dec=0.3,
                                                  nu_dec=0.4), PamSgd(release=0.3)],
                         ids=["sgd", "pam-sgd", "released"])
@pytest.mark.parametrize("activation", [Relu(), JumpRelu(), JumpRelu(fixed_threshold=True), BatchTopK(k=3)], ids=str)
def test_a_restored_solver_goes_on_bit_for_bit(config, activation):
    data = sparse_mixture()
    whole, first, second = (started(config, data, activation, 4, "l1", 0.1) for _ in range(3))
    expected = trained(whole, data, 4)
    trained(first, data, 2)
    second.restore({name: tensor.clone() for name, tensor in first.state().items()})
    for epoch in (2, 3):
        one_epoch(second, data, epoch)
    for name, tensor in second.sae().tensors().items():
        assert torch.equal(tensor, expected.tensors()[name]), name


@pytest.mark.parametrize("config", [Sgd(), PamSgd(), PamSgd(decoder="free")], ids=str)
def test_batchtopk_keeps_about_k_latents_of_rows_that_it_was_not_trained_on(config):
    whole = sparse_mixture(1500).x
    data, fresh = RowsInMemory(whole[:1000], batch_size=100), whole[1000:]
    sae = trained(started(config, data, BatchTopK(k=3), epochs=15), data, 15)
    assert (sae.encode(data.x) != 0).sum(1).double().mean().item() == pytest.approx(3, rel=1e-3)
    kept = (sae.encode(fresh) != 0).sum(1).double()
    assert kept.mean().item() == pytest.approx(3, rel=0.1)
    assert kept.std() > 0.5


@pytest.mark.parametrize("config", [Sgd(), PamSgd(), PamSgd(decoder="free")], ids=str)
@pytest.mark.parametrize("fixed", [False, True])
def test_a_fixed_threshold_stays_where_it_starts(config, fixed):
    data = sparse_mixture()
    sae = trained(started(config, data, JumpRelu(threshold=0.2, fixed_threshold=fixed), 4, "l1", 0.1), data, 4)
    assert torch.equal(sae.activation_parameters["threshold"], torch.full((F,), 0.2).double()) == fixed


def test_proximal_weights_hold_encoder_and_decoder_back():
    data = sparse_mixture()

    def moved(**weights: float) -> tuple[float, float]:
        solver = started(PamSgd(decoder="free", alpha=1.0, **weights), data, Relu())
        start = solver.sae()
        one_epoch(solver, data)
        end = solver.sae()
        return (end.W_enc - start.W_enc).norm().item(), (end.W_dec - start.W_dec).norm().item()

    free, held_enc, held_dec = moved(), moved(mu_enc=1e5, nu_enc=1e5), moved(mu_dec=1e7, nu_dec=1e7)
    assert held_enc[0] < 0.5 * free[0]
    assert held_dec[1] < 0.01 * free[1]


def test_inner_steps_and_the_step_limit_count_optimiser_steps():
    data = sparse_mixture()
    solver = PamSgd(inner_steps=3).build(initial_sae(Relu(), F, Batch.of(data.x[:64]), 1),
                                                    task_of(data.rows, 10))
    reports = one_epoch(solver, data)
    assert solver.steps == 10
    assert [report.step for report in reports] == list(range(1, 11))


def test_learning_rate_rises_holds_and_falls_to_nearly_zero():
    task = task_of(1, 100, 2.0)
    rates = [task.learning_rate(step) for step in range(100)]
    peak = rates.index(max(rates))
    assert max(rates) == 2.0
    assert all(later >= earlier for earlier, later in pairwise(rates[: peak + 1]))
    assert all(later <= earlier for earlier, later in pairwise(rates[peak:]))
    assert rates[-1] == pytest.approx(0.04)


def test_every_solver_starts_from_an_aligned_decoder_of_the_datas_scale():
    data = sparse_mixture()
    for activation in EVERY_ACTIVATION:
        sae = initial_sae(activation, F, Batch.of(data.x), seed=3)
        z = activation.training_codes(sae.pre_activations(data.x), sae.activation_parameters)
        x_hat = sae.predicted(data.x, z)[:, -1]
        torch.testing.assert_close(sae.W_dec, sae.W_enc.T)
        if activation.name not in ("jumprelu", "swish", "soft-topk"):  # their codes do not scale with the weights
            assert ((data.x * x_hat).sum() / x_hat.square().sum()).item() == pytest.approx(1, rel=1e-6)
    assert set(SOLVERS) == {"sgd", "pam-sgd"}


@pytest.mark.parametrize("activation", [Relu(), Swish()], ids=lambda activation: activation.name)
@pytest.mark.parametrize("d_sae", [2 * D, 2 * D + 3])
def test_where_opposites_are_linear_the_first_decoder_step_reconstructs_all_rows(activation, d_sae):
    x = sparse_mixture().x
    z = initial_sae(activation, d_sae, Batch.of(x), seed=1).encode(x)
    ones = torch.ones(len(x), 1).double()
    # What combinations of the codes reach, by a decomposition that stands dependent columns: lstsq may answer anything.
    u, singular, _ = torch.linalg.svd(torch.cat([z, ones], 1), full_matrices=False)
    reached = u[:, singular > 1e-10 * singular[0]]
    torch.testing.assert_close(reached @ (reached.T @ x), x, rtol=0, atol=1e-9)
