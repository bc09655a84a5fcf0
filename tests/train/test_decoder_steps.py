"""When decoder steps are due, what each takes, the release, and the words on the last one."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from homes import grid, normal
from solver_problems import (
    F,
    RowsInMemory,
    one_epoch,
    solve_decoder,
    sparse_mixture,
    started,
    task_of,
    trained,
)

from saecli.sae.activations import MatchingPursuit, Relu, TopK
from saecli.sae.dictionary import Batch
from saecli.train import moments, ridge
from saecli.train.moments import Moments
from saecli.train.options import RELEASED_BELOW, Pam, PamSgd
from saecli.train.pam_sgd import LAST_ROWS, passes_after, steps_between
from saecli.train.ridge import DecoderState, Sums, System, Terms
from saecli.train.rows import PASS_ROWS
from saecli.train.start import initial_sae
from saecli.train.upkeep import silence

ROWS = RowsInMemory(torch.zeros(40 * F, 2), batch_size=64)  # ten batches
EYE = torch.eye(2, dtype=torch.float64)
EPOCHS, PENALTY = PamSgd(decoder_every=10), {"sparsity": "l1", "weight": 0.1}


@pytest.fixture
def data() -> RowsInMemory:
    return sparse_mixture()


@pytest.mark.parametrize(
    ("config", "more", "expected"),
    [
        # After which step: rows per latent; alpha kept, in a w(alk), or a(new); r(elease); l(ast).
        (EPOCHS, {}, "10:32a 20:32w 30:32wr 40:32 50:40wl"),
        (EPOCHS, {"smoothing": 0.3}, "10:32a 20:32w 30:32wr 40:32 50:40l"),
        (EPOCHS, {"smoothing": 0.3, **PENALTY}, "10:32a 20:32w 30:32wr 40:32 50:40al"),
        (EPOCHS, {"B": EYE}, "10:32ar 20:32w 30:32w 40:32 50:40wl"),
        (EPOCHS, {"act": MatchingPursuit(k=1)}, "10:32a 20:32w 30:32w 40:32 50:40wl"),
        (PamSgd(decoder_every=10, alpha=1.0), {}, "10:32 20:32 30:32r 40:32 50:40l"),
        (PamSgd(decoder_every=10, release=0.4), {}, "10:32a 20:32wr 30:32w 40:32 50:40wl"),
        (PamSgd(decoder_every=10, release=1.0), {}, "10:32a 20:32w 30:32w 40:32 50:40wl"),
        (PamSgd(decoder_every=4), {"steps": 15}, "4:32a 8:32wr 12:32w 15:40wl"),
        (PamSgd(), {"steps": 1}, "1:40al"),
        (Pam(), {}, "10:40a 20:40w 30:40w 40:40 50:40wl"),
        (Pam(alpha=1.0), {"steps": 15}, "10:40 15:40l"),
    ],
)
def test_the_schedule_of_decoder_steps(config, more, expected):
    options = {"act": Relu(), "B": None, "steps": 50} | more
    act, B, steps = (options.pop(name) for name in ("act", "B", "steps"))
    task = task_of(ROWS.rows, steps, batches=10, sample=ROWS.x, **options)
    initial = initial_sae(act, F, Batch.of(normal(64, 2)), seed=1)
    schedule = config.build(initial, replace(task, B=B)).schedule
    assert [due.number for due in schedule.values()] == list(range(len(schedule)))
    rules = {"keep": "", "walk": "w", "anew": "a"}
    words = [
        f"{step}:{due.rows / F:g}{rules[due.alpha]}{'r' * due.release}{'l' * due.last}"
        for step, due in schedule.items()
    ]
    assert " ".join(words) == expected


def test_alpha_is_chosen_less_and_less_often():
    passes = passes_after(range(1, 41), ROWS.rows, F, release_from=1.0)
    chosen = [due.number for due in passes if due.alpha != "keep"]
    assert chosen == [0, 1, 2, 4, 8, 16, 32, 39]
    assert (passes[0].rows, passes[-1].rows) == (PASS_ROWS * F, min(ROWS.rows, LAST_ROWS * F))


@pytest.mark.parametrize(
    ("rows", "epochs", "d_sae", "steps"),
    [
        (60_000, 17, 512, 20),
        (1_000_000, 1, 512, 20),
        (1_000_000, 1, 4096, 4),  # since a pass takes an eighth of the rows
        (1_000_000, 1, 16_384, 1),
        (1_000_000, 3, 16_384, 3),
        (500, 100, 512, 20),  # each over all rows
    ],
)
def test_decoder_steps_are_twenty_unless_their_passes_cost_too_much(rows, epochs, d_sae, steps):
    batches = -(-rows // 256)
    task = task_of(rows, epochs * batches, batches=batches, batch_size=256)
    between = steps_between(task, d_sae)
    assert -(-task.steps // between) == steps


@pytest.mark.parametrize("config", [PamSgd(alpha=1.0), PamSgd(alpha=1.0, decoder_every=3), Pam()])
@pytest.mark.parametrize("steps", [1, 23, 41])
def test_training_makes_every_scheduled_step_and_ends_on_the_last(config, steps, monkeypatch):
    data = sparse_mixture(150)
    solver = started(config, data, Relu(), steps=steps)
    made, begin = [], solver.decoder_step

    def noted(due, rows):
        made.append((solver.steps, due))
        begin(due, rows)

    monkeypatch.setattr(solver, "decoder_step", noted)
    trained(solver, data, math.ceil(steps / 5))
    assert solver.steps == steps
    assert made == [*solver.schedule.items()] and made[-1][0] == steps


@pytest.mark.parametrize("relative", [0.5, 2.0])
def test_auto_releases_half_way_if_alpha_is_small(data, relative):
    first = started(PamSgd(decoder_every=10), data, TopK(k=3), 6)
    one_epoch(first, data)
    diagonal = first.alpha / first.solution.relative_alpha
    alpha = relative * RELEASED_BELOW * diagonal
    solver = started(PamSgd(decoder_every=10, alpha=alpha), data, TopK(k=3), 6)
    released = []
    for epoch in range(6):
        one_epoch(solver, data, epoch)
        released.append(solver.dictionary.untied)
    assert released == [relative < 1 and epoch >= 2 for epoch in range(6)]


def test_a_release_changes_nothing_of_what_the_dictionary_computes(data):
    reconstructed = []
    for release in (0.0, 1.0):
        solver = started(PamSgd(release=release, decoder_every=10), data, Relu(), 6)
        one_epoch(solver, data)
        assert solver.dictionary.untied == (release == 0)
        reconstructed.append(solver.sae()(data.x))
    torch.testing.assert_close(*reconstructed, rtol=1e-12, atol=1e-12)


def test_a_released_decoder_descends_by_its_own_gradient(data):
    solver = started(PamSgd(release=0.0, revive=False), data, Relu(), 6)
    solve_decoder(solver, data)
    dictionary, batch = solver.dictionary, Batch.of(data.x)
    W = dictionary.decoder().detach().clone()
    z = torch.relu(batch.x @ dictionary.W_enc + dictionary.b_enc).detach()
    gradient = z.T @ (z @ W + dictionary.b_dec.detach() - batch.x)
    solver.descend(batch)  # Adam's first step is lr times the gradient's sign
    sizeable = gradient.abs() > 1e-2
    moves = (dictionary.decoder().detach() - W)[sizeable]
    expected = -solver.task.learning_rate(0) * gradient.sign()[sizeable]
    torch.testing.assert_close(moves, expected, rtol=1e-3, atol=0)
    solve_decoder(solver, data)
    assert dictionary.untied and dictionary.c == 0


def test_a_fixed_alpha_that_was_raised_once_is_asked_for_again(data, monkeypatch):
    asked: list[float] = []

    def raising(system: System, terms: Terms, *more: Any) -> DecoderState:
        asked.append(terms.alpha)
        return replace(ridge.optimal_decoder(system, terms, *more), alpha=15.0)

    monkeypatch.setattr(moments, "optimal_decoder", raising)
    solver = started(Pam(alpha=0.5), data, Relu(), 3)
    solve_decoder(solver, data)
    assert solver.solution.alpha == 15
    solve_decoder(solver, data)
    assert asked == [0.5, 0.5]


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "activation", "rows"),
    grid([Pam(), PamSgd()], [Relu(), TopK(k=3)], [300, 20]),
    ids=str,
)
def test_an_iteration_without_the_gram_matrix_trains_to_the_same_error(config, activation, rows):
    data, errors = sparse_mixture(rows), []
    # With fewer than 40 latents the Gram matrix takes less than an iteration.
    initial = initial_sae(activation, 40, Batch.of(data.x), 1)
    for memory, solve, iterates in (
        (math.inf, "auto", False),
        (math.inf, "iterative", True),
        (0.0, "auto", True),
        (0.0, "direct", False),
    ):
        task = task_of(rows, 30, sample=data.x, batches=data.batches, memory=memory)
        solver = replace(config, solve=solve).build(initial, task)
        sae = trained(solver, data, math.ceil(30 / task.batches))
        errors.append((sae(data.x) - data.x).square().mean().item())
        assert ("residual" in solver.record()) == iterates
    assert errors == pytest.approx([errors[0]] * 4, rel=0.02, abs=1e-4 * data.x.var().item())


def test_a_penalty_has_silenced_what_is_small_where_it_fires_not_what_is_rare():
    sae = initial_sae(Relu(), F, Batch.of(normal(64, 6)), seed=1)
    size, norms = math.sqrt(6), sae.W_dec.norm(dim=1).double()
    firings, parts = torch.full((F,), 2_000_000), torch.full((F,), 0.05)
    firings[2], parts[2] = 1, 0.2  # once in a pass over the rows for 65,536 latents
    parts[5] = 1e-8
    firings[7], parts[7] = 2, 1e-4  # rare, and small where it fires too
    moments = Moments(Sums(F, 6, torch.device("cpu")), sae, "l1", rows=4_000_000)
    moments.norm_weights, moments.firings = firings * parts * size / norms, firings
    assert silence(sae, moments).nonzero()[:, 0].tolist() == [5, 7]
    assert (sae.W_enc == 0).all(0).nonzero()[:, 0].tolist() == [5, 7]


def test_a_latent_silenced_by_the_penalty_does_not_come_back_in_the_last_step(data):
    solver = started(PamSgd(revive=False), data, Relu(), 2, "l1", 0.1)
    one_epoch(solver, data)
    with torch.no_grad():
        solver.dictionary.W_enc[:, 3] *= 1e-12
        solver.dictionary.b_enc[3] = 1e-12
    assert solver.sae().encode(data.x)[:, 3].any()
    solve_decoder(solver, data, last=True)
    assert not solver.sae().encode(data.x)[:, 3].any()
