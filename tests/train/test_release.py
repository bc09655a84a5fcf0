"""The release: when the decoder of PAM-SGD begins to descend, and what it does then."""

from dataclasses import replace

import pytest
import torch
from test_solvers import F, RowsInMemory, decoder_steps, one_epoch, solve_decoder, sparse_mixture, started

from saecli.sae.activations import Relu, TopK
from saecli.sae.batch import Batch
from saecli.train.pam_sgd import PASS_ROWS, RELEASED_BELOW, PamSgd
from saecli.train.solver import Solver


@pytest.fixture
def data() -> RowsInMemory:
    return sparse_mixture()


def epochs_held(data: RowsInMemory, epochs: int = 6, **options: object) -> int:
    """How many epochs end before the decoder is released; all, if it never is."""
    solver = started(PamSgd(**options), data, TopK(k=3), epochs)
    for epoch in range(epochs):
        one_epoch(solver, data, epoch)
        if solver.released:
            return epoch
    return epochs


@pytest.mark.parametrize(("release", "held"), [(0.0, 0), (0.3, 1), (0.5, 2), (0.9, 6), (1.0, 6)])
def test_the_decoder_is_released_at_the_first_solve_after_the_fraction_of_steps(data, release, held):
    assert epochs_held(data, release=release) == held


@pytest.mark.parametrize("decoder", ["residual", "free"])
@pytest.mark.parametrize("relative", [0.5, 2.0])
def test_auto_releases_half_way_where_alpha_is_small_and_the_decoder_residual(data, decoder, relative):
    first = started(PamSgd(), data, TopK(k=3), 6)
    one_epoch(first, data)
    diagonal = first.decoder.alpha / first.decoder.relative_alpha
    held = epochs_held(data, decoder=decoder, alpha=relative * RELEASED_BELOW * diagonal)
    assert held == (2 if relative < 1 and decoder == "residual" else 6)


def test_a_release_changes_nothing_of_what_the_dictionary_computes(data):
    first, second = (started(PamSgd(release=release), data, Relu(), 6) for release in (0.0, 1.0))
    for solver in (first, second):
        one_epoch(solver, data)
    assert first.released and not second.released
    torch.testing.assert_close(first.sae()(data.x), second.sae()(data.x), rtol=1e-12, atol=1e-12)


def test_a_released_decoder_takes_the_gradient_step_of_its_own_and_is_then_solved_for_anew(data):
    solver = started(PamSgd(release=0.0, optimizer="sgd", revive=False), data, Relu(), 6)
    one_epoch(solver, data)
    dictionary, batch = solver.dictionary, Batch.of(data.x)
    W, W_enc = (tensor.detach().clone().requires_grad_() for tensor in (dictionary.decoder(), dictionary.W_enc))
    z = torch.relu(batch.x @ W_enc + dictionary.b_enc.detach())
    loss = (z @ W + dictionary.b_dec.detach() - batch.x).square().sum() / len(batch.x)
    expected = W - solver.task.learning_rate(solver.steps) * torch.autograd.grad(loss, [W])[0] \
        * solver.optimizer.state()["sgd.scale.Delta"] ** 2
    solver.descend(batch)
    torch.testing.assert_close(dictionary.decoder().detach(), expected.detach())
    solve_decoder(solver, data, last=False)
    state, W_enc = solver.decoder, dictionary.W_enc.detach()
    scale = state.c * W_enc.T  # after balancing, c is that of the balanced encoder
    assert (dictionary.decoder() - scale).norm() < (dictionary.decoder() + scale).norm()
    assert state.c > 0 and dictionary.c == 0


def many_rows() -> RowsInMemory:
    return replace(sparse_mixture(2 * PASS_ROWS * F), batch_size=256)


def rows_observed(solver: Solver, data: RowsInMemory, epochs: range) -> list[int]:
    """The rows that the decoder step after each epoch observes."""
    found = []
    for epoch in epochs:
        solver.begin_epoch()
        for batch in data.shuffled(epoch):
            solver.step(batch)
        solver.end_epoch()
        found.append(solver.due)
        decoder_steps(solver, data)
    return found


@pytest.mark.parametrize(("options", "whole"), [
    ({}, {2, 5}), ({"release": 1.0}, {5}), ({"release": 0.3}, {5}), ({"decoder": "free"}, set(range(6)))])
def test_decoder_steps_take_some_rows_but_for_the_one_that_decides_and_the_last(options, whole):
    data = many_rows()
    found = rows_observed(started(PamSgd(**options), data, TopK(k=3), 6), data, range(6))
    assert found == [data.rows if epoch in whole else PASS_ROWS * F for epoch in range(6)]


def test_a_release_that_was_decided_against_is_not_decided_again_after_a_checkpoint():
    data = many_rows()
    first, second = (started(PamSgd(alpha=1e9), data, TopK(k=3), 6) for _ in range(2))
    rows_observed(first, data, range(3))
    second.restore(first.state())
    assert rows_observed(first, data, range(3, 6)) == rows_observed(second, data, range(3, 6))
    assert not first.released and not second.released
    torch.testing.assert_close(first.sae().W_dec, second.sae().W_dec, rtol=0, atol=0)
