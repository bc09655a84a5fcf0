"""Decoder steps from the codes of encoder steps: against sums made by hand, and against passes over all rows."""

from collections.abc import Iterator

import pytest
import torch
from test_solvers import F, RowsInMemory, sparse_mixture, started, trained

from saecli.activations import Activation, Relu, TopK
from saecli.batch import Batch
from saecli.codes import Codes
from saecli.dictionary import SAE
from saecli.distributed import ALONE
from saecli.ridge import Sums
from saecli.solvers import Task
from saecli.solvers.pam_sgd import PASS_ROWS, RUNNING_ROWS, PamSgd
from saecli.solvers.running import Running
from saecli.training.rows import initial_sae

WINDOW = 100


def batches(count: int, sae: SAE, seed: int = 0) -> list[tuple[Codes, torch.Tensor]]:
    x = torch.randn(count, 30, sae.d_in, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return [(sae.codes(some), some) for some in x]


def together(found: list[tuple[Codes, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([z.dense() for z, _ in found]), torch.cat([x for _, x in found])


def running_of(activation: Activation) -> tuple:
    data = sparse_mixture()
    sae = initial_sae(activation, F, data.x, 1)
    return Running(sae, "l1", WINDOW, ALONE), sae


@pytest.mark.parametrize("activation", [Relu(), TopK(k=3)], ids=lambda activation: activation.name)
def test_rows_before_a_decoder_step_count_for_as_much_less_as_there_are_rows_after_it(activation):
    running, sae = running_of(activation)
    first, second = batches(2, sae, 0), batches(3, sae, 1)
    for z, x in first:
        running.add(z, Batch.of(x))
    one = running.observed()
    assert one.system.rows == 60 and one.fired.equal(together(first)[0].any(0))
    running.rescale(2.0)  # as a balancing after the step
    for z, x in second:
        running.add(z, Batch.of(x))
    found, keep = running.observed(), 1 - 60 / WINDOW
    (z_before, x_before), (z_after, x_after) = together(first), together(second)
    gram = keep * (2 * z_before).T @ (2 * z_before) + z_after.T @ z_after
    cross = keep * (2 * z_before).T @ x_before + z_after.T @ x_after
    assert found.system.rows == pytest.approx(keep * 60 + 90)
    torch.testing.assert_close(found.system.gram.matrix.tril(), gram.tril(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.system.zy, cross, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.norm_weights, keep * 2 * z_before.sum(0) + z_after.sum(0), rtol=1e-5, atol=1e-5)
    assert found.z.equal(z_after) and found.y.equal(x_after)


def test_more_rows_than_the_window_leave_nothing_of_those_before():
    running, sae = running_of(TopK(k=3))
    for z, x in batches(4, sae, 0):
        running.add(z, Batch.of(x))
    running.observed()
    after = batches(2, sae, 1)
    fresh = Sums(F, sae.d_in)
    for z, x in after:
        running.add(z, Batch.of(x))
        fresh.add(z, x)
    torch.testing.assert_close(running.observed().system.zy, fresh.zy, rtol=1e-6, atol=1e-6)


class Counted(RowsInMemory):
    """Rows that count the passes over them."""

    passes = 0

    def some(self, count: int, epoch: int = 0) -> Iterator[Batch]:
        self.passes += count == self.rows
        return super().some(count, epoch)


@pytest.mark.parametrize("inner_steps", [1, 3])
def test_one_pass_over_many_rows_is_the_only_one_and_its_decoder_is_that_of_its_codes(inner_steps):
    data = Counted(sparse_mixture(3 * PASS_ROWS * F).x, 32)
    solver = started(PamSgd(decoder_every=5, inner_steps=inner_steps), data, TopK(k=3), epochs=1)
    sae = trained(solver, data, 1)
    batches_ = -(-data.rows // 32)
    assert data.passes == 0 and solver.outer == -(-batches_ // 5)
    every = started(PamSgd(inner_steps=inner_steps), data, TopK(k=3), epochs=1)
    by_pass = trained(every, data, 1)
    errors = [(one(data.x) - data.x).square().sum().item() for one in (sae, by_pass)]
    assert data.passes == 1 and errors[0] < 1.1 * errors[1]


@pytest.mark.parametrize(("rows", "epochs", "passes"), [(RUNNING_ROWS * F * 2, 2, 1), (RUNNING_ROWS * F // 2, 1, 2)])
def test_several_passes_end_with_one_more_and_few_rows_are_passed_over_each_time(rows, epochs, passes):
    data = Counted(sparse_mixture(rows).x, 32)
    solver = started(PamSgd(decoder_every=1, inner_steps=1), data, Relu(), epochs=epochs)
    trained(solver, data, epochs)
    assert data.passes == passes


class Repeated(RowsInMemory):
    """Rows whose every batch is the same."""

    def shuffled(self, epoch: int) -> Iterator[Batch]:
        return map(Batch.of, self.x.split(self.batch_size))


def test_fixed_weights_compete_with_the_sum_over_all_rows_whichever_rows_a_decoder_step_takes():
    window = RUNNING_ROWS * F
    data, found = Repeated(sparse_mixture(window).x.repeat(4, 1), window), []
    for every in ("epoch", 1):
        task = Task(data.rows, 10**6, 1e-12, "none", 0.0, batches=4)
        config = PamSgd(decoder="free", decoder_every=every, alpha=500.0, beta=300.0, inner_steps=1, revive=False)
        found.append(trained(config.build(initial_sae(TopK(k=3), F, data.x, seed=1), task), data, 1))
    torch.testing.assert_close(found[0].W_dec, found[1].W_dec, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[0].b_dec, found[1].b_dec, rtol=1e-6, atol=1e-6)
