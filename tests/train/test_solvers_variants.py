"""Terms and orders that solvers leave out by default: clipped gradients, decay, proximal SGD, the decoder first."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from tasks import task_of
from test_solvers import F, RowsInMemory, loss_of, one_epoch, solve_decoder, sparse_mixture, started, trained
from torch import Tensor

from saecli.sae.activations import BatchTopK, Relu, TopK
from saecli.sae.batch import Batch
from saecli.train.optimizers import OPTIMIZERS
from saecli.train.pam_sgd import PamSgd
from saecli.train.sgd import Sgd
from saecli.train.solver import Solver, SolverConfig
from saecli.train.start import initial_sae

FREE = PamSgd(decoder="free", alpha=0.5, revive=False)


def gradients(solver: Solver, data: RowsInMemory) -> dict[str, Tensor]:
    """Of the loss on all rows, as autograd has them."""
    tensors = solver.optimizer.tensors
    found = torch.autograd.grad(loss_of(solver, data), list(tensors.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(tensors, found, strict=True) if gradient is not None}


@pytest.mark.parametrize("config", [Sgd(), PamSgd()], ids=["sgd", "pam-sgd"])
@pytest.mark.parametrize("share", [0.3, 3.0])
def test_a_clipped_step_is_the_gradient_of_at_most_that_norm(config: SolverConfig, share: float):
    data = sparse_mixture()
    found = gradients(started(config, data, Relu()), data)
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in found.values()))
    solver = started(replace(config, optimizer="sgd", clip_norm=share * norm), data, Relu())
    before = {name: tensor.detach().clone() for name, tensor in solver.optimizer.tensors.items()}
    solver.descend(Batch.of(data.x))
    for name, gradient in found.items():
        step = solver.task.learning_rate(0) * min(1.0, share) * gradient
        torch.testing.assert_close(solver.optimizer.tensors[name].detach(), before[name] - step)


def test_adam_steps_by_clipped_gradients():
    data = sparse_mixture()
    solver = started(Sgd(clip_norm=1e-3), data, Relu())
    solver.descend(Batch.of(data.x))
    moments = [value for name, value in solver.optimizer.state().items() if ".exp_avg." in name]
    norm = torch.cat([moment.flatten() for moment in moments]).norm().item()
    assert norm == pytest.approx(0.1 * 1e-3)  # Adam's first moment after one step is a tenth of the gradient


@pytest.mark.parametrize("config", [Sgd(tied=True), Sgd(), FREE], ids=["tied", "untied", "pam-sgd"])
def test_decay_adds_the_squared_weights_that_descent_trains_over_the_rows(config: SolverConfig):
    data = sparse_mixture()
    plain, decayed = started(config, data, Relu()), started(replace(config, weight_decay=6.0), data, Relu())
    names = ("W_enc", "W_dec") if config == Sgd() else ("W_enc",)
    squares = sum((getattr(decayed.dictionary, name) ** 2).sum() for name in names)
    assert (loss_of(decayed, data) - loss_of(plain, data)).item() == pytest.approx(6 * squares.item() / 300)


def test_proximal_weights_of_sgd_refer_to_the_encoder_at_the_start_of_the_epoch():
    data = sparse_mixture()
    solver = started(Sgd(tied=True, mu_enc="8:2", nu_enc=3.0), data, Relu(), 3)
    for epoch, weight in enumerate((8, 4, 2)):
        encoder = {name: getattr(solver.dictionary, name) for name in ("W_enc", "b_enc")}
        held = {name: tensor.detach().clone() for name, tensor in encoder.items()}
        solver.begin_epoch()
        for batch in data.shuffled(epoch):
            solver.step(batch)
            moved = {name: (tensor.detach() - held[name]).square().sum().item() for name, tensor in encoder.items()}
            expected = (weight * moved["W_enc"] + 3 * moved["b_enc"]) / data.rows
            assert solver.extra_loss().item() == pytest.approx(expected)
        solver.end_epoch()
    still, free = (trained(started(Sgd(mu_enc=mu), data, Relu()), data, 4).W_enc for mu in (1e7, 0.0))
    start = initial_sae(Relu(), F, Batch.of(data.x[:64]), seed=1).W_enc
    assert (still - start).norm() < 0.05 * (free - start).norm()


def test_l1_of_the_codes_is_blind_to_the_decoder():
    data = sparse_mixture()
    solver = started(PamSgd(decoder="free", alpha=1e-3), data, Relu(), 4, "l1-codes", 0.7)
    solver.steps = 40
    z = (data.x @ solver.dictionary.W_enc + solver.dictionary.b_enc).relu()
    loss = solver.dictionary.loss(Batch.of(data.x), "l1-codes", solver.task.penalty_weight(40))
    assert (loss.value - loss.squared_error).item() == pytest.approx(0.7 * z.sum(1).mean().item())
    solve_decoder(solver, data, last=False)
    with_one = torch.cat([z.detach(), torch.ones(300, 1).double()], 1)
    ridge = 1e-3 * torch.eye(F + 1).double()
    ridge[-1, -1] = 0
    expected = torch.linalg.solve(with_one.T @ with_one + ridge, with_one.T @ data.x)
    found = torch.cat([solver.decoder.Delta, solver.decoder.b[None]])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", ["joint", "after"])
def test_with_the_decoder_first_each_epoch_begins_with_the_decoder_of_the_encoder_before_it(bias: str):
    data = sparse_mixture()
    solver = started(replace(FREE, decoder_first=True, bias=bias), data, TopK(k=3), 3)
    for epoch in range(3):
        z = solver.sae().encode(data.x)
        steps = one_epoch(solver, data, epoch)
        middle = z.mean(0) * (bias == "joint")
        gram = (z - middle).T @ (z - middle) + 0.5 * torch.eye(F).double()
        W = torch.linalg.solve(gram, (z - middle).T @ (data.x - data.x.mean(0) * (bias == "joint")))
        torch.testing.assert_close(solver.decoder.Delta, W, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(solver.decoder.b, (data.x - z @ W).mean(0), rtol=1e-6, atol=1e-8)
        assert len(steps) == 10
    assert solver.outer == 3
    assert solver.notes() == []
    assert 1 <= solver.record()["dof"] <= F + 1


def test_with_the_decoder_first_what_an_activation_estimates_is_set_at_the_end():
    data = sparse_mixture()
    sae = trained(started(replace(FREE, decoder_first=True), data, BatchTopK(k=3), 3), data, 3)
    assert sae.encode(data.x).count_nonzero().item() == pytest.approx(3 * 300, rel=0.02)


@pytest.mark.parametrize(("rise", "fall", "expected"), [
    (0.0, 0.0, [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]), (0.4, 0.2, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 0.5]),
    (0.0, 1.0, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
])
def test_the_learning_rate_rises_and_falls_over_its_shares_of_all_steps(rise: float, fall: float, expected: list):
    task = task_of(100, 10, 0.02, lr_warm_up=rise, lr_decay=fall)
    assert [task.learning_rate(step) for step in range(10)] == pytest.approx([0.02 * share for share in expected])


def test_adam_is_torchs_to_the_bit_also_where_a_tensor_has_no_gradient():
    generator = torch.Generator().manual_seed(0)
    start = {"W_enc": torch.randn(5, 7, generator=generator).T, "b_enc": torch.randn(7, generator=generator)}
    ours, theirs = ({name: tensor.clone().requires_grad_() for name, tensor in start.items()} for _ in range(2))
    adam, oracle = OPTIMIZERS["adam"](ours), torch.optim.Adam(theirs.values(), fused=True)
    for step in range(6):
        def loss(tensors: dict, step: int = step) -> torch.Tensor:
            found = (tensors["W_enc"] ** 2).sin().sum()
            return found if step == 2 else found + (tensors["b_enc"] ** 3).sum()

        adam.descend(lambda: loss(ours), 0.1 / (step + 1))
        oracle.param_groups[0]["lr"] = 0.1 / (step + 1)
        oracle.zero_grad()
        loss(theirs).backward()
        oracle.step()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for name in ours:
        for key, value in oracle.state[theirs[name]].items():
            assert torch.equal(adam.state()[f"adam.{key}.{name}"], value)


@pytest.mark.slow
def test_a_training_does_not_load_torchs_compiler():
    script = ("import sys, numpy, saecli\n"
              "saecli.fit(numpy.random.default_rng(0).normal(size=(60, 8)), d_sae=12, epochs=1)\n"
              "sys.exit('torch._dynamo' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
