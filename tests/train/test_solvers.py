"""The solvers on small problems in memory: optimality, descent, equivalences, and the terms left out by default."""

import math
from dataclasses import replace

import pytest
import torch
from homes import grid
from solver_problems import (
    EVERY_ACTIVATION,
    F,
    RowsInMemory,
    decoder_of,
    decoder_step,
    loss_of,
    one_epoch,
    solve_decoder,
    sparse_mixture,
    started,
    task_of,
    trained,
)
from torch import Tensor

from saecli.sae.activations import BatchTopK, Relu, TopK
from saecli.sae.dictionary import Batch
from saecli.sae.metrics import reconstruction
from saecli.train.options import Pam, PamSgd, Sgd, SolverConfig
from saecli.train.pam_sgd import PamSolver
from saecli.train.solver import Solver
from saecli.train.upkeep import balance_norms

FREE = Pam(alpha=0.5)
KINDS = [Sgd(), PamSgd(), Pam()]


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


@pytest.mark.parametrize("activation", EVERY_ACTIVATION, ids=lambda activation: activation.name)
def test_balancing_leaves_the_sae_as_it_was(data, activation):
    solver = started(PamSgd(), data, activation)
    for batch in data.shuffled(0):
        solver.descend(batch)
    with torch.no_grad():
        solver.dictionary.c *= 7.0
        solver.dictionary.Delta *= 0.3
        before = solver.sae()
        balance_norms(solver.dictionary, 1.0)
        after = solver.sae()
        torch.testing.assert_close(after(data.x), before(data.x), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(before.W_enc, after.W_enc)


@pytest.mark.slow
def test_a_penalty_does_not_drive_codes_to_nothing_in_150_iterations(data):
    solver = started(PamSgd(), data, Relu(), 150, "l1", 0.3)
    measures = reconstruction(trained(solver, data, 150), [data.x])
    assert measures["l0"] > 0.5
    assert measures["fvu"] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("weight", [30.0, 3000.0, 1e6])
def test_a_penalty_too_strong_for_any_code_ends_them_all(data, weight, monkeypatch):
    monkeypatch.setattr("saecli.train.upkeep.RELEASE_STEPS", 1)
    sae = trained(started(PamSgd(), data, Relu(), 30, "l1", weight), data, 30)
    assert not sae.encode(data.x).any()
    assert all(tensor.isfinite().all() for tensor in sae.tensors().values())


def test_tied_weights_stay_tied(data):
    sae = trained(started(Sgd(tied=True), data, TopK(k=3)), data, 4)
    assert torch.equal(sae.W_dec, sae.W_enc.T)


@pytest.mark.slow
@pytest.mark.parametrize("config", KINDS, ids=str)
def test_batchtopk_keeps_about_k_latents_of_rows_not_trained_on(config):
    whole = sparse_mixture(1500).x
    data, fresh = RowsInMemory(whole[:1000], batch_size=100), whole[1000:]
    sae = trained(started(config, data, BatchTopK(k=3), epochs=15), data, 15)
    assert (sae.encode(data.x) != 0).sum(1).double().mean().item() == pytest.approx(3, rel=1e-3)
    kept = (sae.encode(fresh) != 0).sum(1).double()
    assert kept.mean().item() == pytest.approx(3, rel=0.1)
    assert kept.std() > 0.5


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
            moved = {
                name: (tensor.detach() - held[name]).square().sum().item()
                for name, tensor in encoder.items()
            }
            assert solver.extra_loss().item() == pytest.approx(
                (8 * moved["W_enc"] + 3 * moved["b_enc"]) / data.rows
            )
            solver.step(batch)


@pytest.mark.parametrize(
    ("rise", "fall", "expected"),
    [
        (0.0, 0.0, [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        (0.4, 0.2, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 0.5]),
        (0.0, 1.0, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
    ],
)
def test_learning_rate_rises_and_falls_over_fractions_of_all_steps(
    rise: float, fall: float, expected: list
):
    task = task_of(100, 10, 0.02, lr_warm_up=rise, lr_decay=fall)
    shares = [task.learning_rate(step) / 0.02 for step in range(10)]
    assert shares == pytest.approx(expected)


def gradients(solver: Solver, data: RowsInMemory) -> dict[str, Tensor]:
    """Of the loss on all rows, as autograd has them."""
    tensors = solver.optimizer.tensors
    values = torch.autograd.grad(loss_of(solver, data), list(tensors.values()))
    return dict(zip(tensors, values, strict=True))


@pytest.mark.parametrize("config", [Sgd(), Pam()], ids=["sgd", "pam"])
@pytest.mark.parametrize("share", [0.3, 3.0])
def test_adam_steps_by_the_gradient_clipped_to_its_norm(data, config: SolverConfig, share: float):
    expected = gradients(started(config, data, Relu()), data)
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in expected.values()))
    solver = started(replace(config, clip_norm=share * norm), data, Relu())
    solver.descend(Batch.of(data.x))
    for name, gradient in expected.items():
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


@pytest.mark.parametrize("bias", ["joint", "after"])
def test_decoder_first_solves_for_the_encoder_before_the_epoch(data, bias: str):
    solver = started(replace(FREE, decoder_first=True, bias=bias), data, TopK(k=3), 3)
    for epoch, due in enumerate(solver.schedule.values()):
        z = solver.sae().encode(data.x)
        decoder_step(solver, data, due)
        middle = z.mean(0) * (bias == "joint")
        gram = (z - middle).T @ (z - middle) + 0.5 * torch.eye(F).double()
        W = torch.linalg.solve(gram, (z - middle).T @ (data.x - data.x.mean(0) * (bias == "joint")))
        W_dec, b_dec = decoder_of(solver)
        torch.testing.assert_close(W_dec, W, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(b_dec, (data.x - z @ W).mean(0), rtol=1e-6, atol=1e-8)
        for batch in data.shuffled(epoch):
            solver.step(batch)
    assert solver.finished and solver.notes() == []
    assert 1 <= solver.record()["dof"] <= F + 1


def test_decoder_first_sets_an_activations_estimates_at_the_end(data):
    sae = trained(started(replace(FREE, decoder_first=True), data, BatchTopK(k=3), 3), data, 3)
    assert sae.encode(data.x).count_nonzero().item() == pytest.approx(3 * 300, rel=0.02)


def test_adams_moments_follow_rescaled_and_revived_tensors(data):
    solver = started(PamSgd(), data, Relu(), 4)
    solver.descend(Batch.of(data.x))
    adam = solver.optimizer
    before = {name: value.clone() for name, value in adam.state().items()}
    adam.rescale(dict.fromkeys(adam.tensors, 3.0))
    latents = torch.arange(F) < 2
    adam.forget(latents, ~latents, solver.dictionary.latent_dimension)
    average = before["adam.exp_avg.W_enc"] / 3
    average[:, :2] = 0
    torch.testing.assert_close(adam.state()["adam.exp_avg.W_enc"], average)
    square = before["adam.exp_avg_sq.b_enc"] / 9
    square[:2] = square[2:].mean()
    torch.testing.assert_close(adam.state()["adam.exp_avg_sq.b_enc"], square)
    assert adam.state()["adam.step.W_enc"] == 1
