"""When decoder steps are due, what each takes, the release, and the words on the last one."""

import math
from dataclasses import replace

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
from saecli.train.decoder_step import silence
from saecli.train.options import RELEASED_BELOW, PamSgd
from saecli.train.pam_sgd import MOST_ROWS, PASS_ROWS, batches_between, decoder_steps
from saecli.train.start import initial_sae

ROWS = RowsInMemory(torch.zeros(40 * F, 2), batch_size=64)  # ten batches


@pytest.fixture
def data() -> RowsInMemory:
    return sparse_mixture()


@pytest.mark.parametrize(
    ("options", "more", "expected"),
    [
        # Each line: epoch.batch, rows per latent, and c(hooses), d(ecides), r(eleases), l(ast).
        ({}, {}, "0.10:32c 1.10:32c 2.10:32cd 3.10:32c 4.10:40cl"),
        ({}, {"smoothing": 0.3}, "0.10:32c 1.10:32c 2.10:32cd 3.10:32c 4.10:40l"),
        ({}, {"B": torch.eye(2)}, "0.10:32cr 1.10:32c 2.10:32c 3.10:32 4.10:40cl"),
        ({"alpha": 1.0}, {}, "0.10:32 1.10:32 2.10:32d 3.10:32 4.10:40l"),
        ({"release": 0.4}, {}, "0.10:32c 1.10:32cr 2.10:32c 3.10:32c 4.10:40cl"),
        ({"release": 1.0}, {}, "0.10:32c 1.10:32c 2.10:32c 3.10:32 4.10:40cl"),
        ({"decoder": "free"}, {}, "0.10:40c 1.10:40c 2.10:40c 3.10:40 4.10:40cl"),
        ({"decoder_first": True}, {}, "0.0:40c 1.0:40c 2.0:40c 3.0:40 4.0:40c"),
        (
            {"decoder_every": 4},
            {"steps": 20},
            "0.4:32c 0.8:32c 0.10:32cd 1.4:32c 1.8:32c 1.10:40cl",
        ),
        ({"decoder_every": 4}, {"steps": 16}, "0.4:32c 0.8:32cd 0.10:32c 1.4:32c 1.10:40cl"),
        ({"decoder_every": 4, "inner_steps": 2}, {"steps": 15}, "0.4:32cd 0.10:40cl"),
        ({}, {"steps": 1}, "0.10:40cl"),
        (
            {},
            {"few": 100},
            "0.10:32c 1.10:32cd 2.10:32c 3.10:32c 4.10:40cl",
        ),  # half of the steps of a release half way
    ],
)
def test_the_schedule_of_decoder_steps(options, more, expected, monkeypatch):
    monkeypatch.setattr("saecli.train.pam_sgd.RELEASE_STEPS", more.get("few", 1))
    config = PamSgd(**options).resolved(None)
    task = task_of(
        ROWS.rows,
        more.get("steps", 50),
        batches=10,
        sample=ROWS.x,
        smoothing=more.get("smoothing", 0.0),
    )
    passes = decoder_steps(replace(task, B=more.get("B")), config, F)
    assert [one.number for one in passes] == list(range(len(passes)))
    found = " ".join(
        f"{one.epoch}.{one.after_batch}:{one.rows / F:g}"
        + "c" * one.chooses
        + "d" * one.decides
        + "r" * one.releases
        + "l" * one.last
        for one in passes
    )
    assert found == expected


def test_alpha_is_chosen_less_and_less_often():
    config = PamSgd(decoder_every=1, release=1.0).resolved(None)
    passes = decoder_steps(task_of(ROWS.rows, 40, batches=10), config, F)
    assert [one.number for one in passes if one.chooses] == [0, 1, 2, 4, 8, 16, 32, 39]
    assert (passes[0].rows, passes[-1].rows) == (PASS_ROWS * F, min(ROWS.rows, MOST_ROWS * F))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, range(1, 70, 2)),
        ({"decoder_every": "epoch"}, range(70)),
        ({"decoder": "free"}, range(70)),
    ],
)
def test_of_many_epochs_some_end_with_a_decoder_step_and_the_last_always(options, expected):
    config = PamSgd(**options).resolved(None)
    assert [one.epoch for one in decoder_steps(task_of(ROWS.rows, 700, batches=10), config, F)] == [
        *expected
    ]


@pytest.mark.parametrize(
    ("options", "rows", "epochs", "d_sae", "expected"),
    [
        ({}, 60_000, 17, 512, None),  # often enough after epochs
        ({}, 100_000, 11, 1024, 196),  # twice in each of 11
        ({}, 1_000_000, 2, 512, 391),
        ({}, 1_000_000, 1, 512, 196),
        ({}, 1_000_000, 1, 4096, 977),  # four times, since a pass takes an eighth of the rows
        ({}, 1_000_000, 1, 16_384, None),
        ({"decoder_every": "epoch"}, 1_000_000, 2, 512, None),
        ({"decoder_every": 7}, 1_000_000, 2, 512, 7),
        ({"decoder": "free"}, 1_000_000, 2, 512, None),
        ({"decoder_first": True}, 1_000_000, 2, 512, None),
    ],
)
def test_decoder_steps_come_within_epochs_where_those_are_few(
    options, rows, epochs, d_sae, expected
):
    config, batches = PamSgd(**options).resolved(None), -(-rows // 256)
    task = task_of(rows, epochs * batches * config.inner_steps, batches=batches)
    assert batches_between(task, config, d_sae) == (expected or batches)


@pytest.mark.parametrize(
    ("sparsity", "expected"), [("none", 196), ("target-l0", 196), ("l1", 391), ("lp", 391)]
)
def test_under_a_penalty_decoder_steps_are_fewer(sparsity, expected):
    task = task_of(100_000, 11 * 391, batches=391, sparsity=sparsity)
    assert batches_between(task, PamSgd(inner_steps=1).resolved(None), 1024) == expected


@pytest.mark.parametrize(
    "options", [{}, {"decoder_every": 3}, {"decoder_every": 2, "inner_steps": 4}], ids=str
)
@pytest.mark.parametrize("steps", [1, 23, 41])
def test_training_makes_every_scheduled_step_and_ends_on_the_last(options, steps, monkeypatch):
    data = sparse_mixture(150)
    solver = started(PamSgd(alpha=1.0, **options), data, Relu(), steps=steps)
    made, begin = [], solver.begin_pass
    monkeypatch.setattr(
        solver,
        "begin_pass",
        lambda now, again: (made.append((now, solver.steps)), begin(now, again)),
    )
    trained(solver, data, math.ceil(steps / (5 * solver.config.inner_steps)))
    assert solver.steps == steps
    assert [now for now, _ in made] == [*solver.passes.values()]
    assert all(
        at == min(steps, (now.epoch * 5 + now.after_batch) * solver.config.inner_steps)
        for now, at in made
    )


@pytest.mark.parametrize("decoder", ["residual", "free"])
@pytest.mark.parametrize("relative", [0.5, 2.0])
def test_auto_releases_half_way_if_alpha_is_small(data, decoder, relative, monkeypatch):
    monkeypatch.setattr("saecli.train.pam_sgd.RELEASE_STEPS", 1)
    first = started(PamSgd(), data, TopK(k=3), 6)
    one_epoch(first, data)
    diagonal = first.decoder.alpha / first.decoder.relative_alpha
    solver = started(
        PamSgd(decoder=decoder, alpha=relative * RELEASED_BELOW * diagonal), data, TopK(k=3), 6
    )
    released = []
    for epoch in range(6):
        one_epoch(solver, data, epoch)
        released.append(solver.released)
    assert released == [relative < 1 and decoder == "residual" and epoch >= 2 for epoch in range(6)]


def test_auto_holds_the_decoder_of_matching_pursuit(data):
    solver = started(PamSgd(), data, MatchingPursuit(k=3), 6)
    assert not any(one.decides or (one.releases and not one.last) for one in solver.passes.values())


def test_a_release_changes_nothing_of_what_the_dictionary_computes(data):
    first, second = (started(PamSgd(release=release), data, Relu(), 6) for release in (0.0, 1.0))
    for solver in (first, second):
        one_epoch(solver, data)
    assert first.released and not second.released
    torch.testing.assert_close(first.sae()(data.x), second.sae()(data.x), rtol=1e-12, atol=1e-12)


def test_a_released_decoder_descends_by_its_own_gradient(data):
    solver = started(PamSgd(release=0.0, revive=False), data, Relu(), 6)
    solve_decoder(solver, data)
    dictionary, batch = solver.dictionary, Batch.of(data.x)
    W, W_enc = (
        tensor.detach().clone().requires_grad_()
        for tensor in (dictionary.decoder(), dictionary.W_enc)
    )
    z = torch.relu(batch.x @ W_enc + dictionary.b_enc.detach())
    loss = (z @ W + dictionary.b_dec.detach() - batch.x).square().sum() / len(batch.x)
    (gradient,) = torch.autograd.grad(loss, [W])
    solver.descend(batch)  # Adam's first step is lr times the gradient's sign
    sizeable = gradient.abs() > 1e-4
    torch.testing.assert_close(
        (dictionary.decoder().detach() - W.detach())[sizeable],
        -solver.task.learning_rate(0) * gradient.sign()[sizeable],
        rtol=1e-3,
        atol=0,
    )
    solve_decoder(solver, data)
    assert solver.decoder.c > 0 and dictionary.c == 0


def test_the_record_ends_with_degrees_of_freedom_and_outlasts_a_checkpoint(data):
    solver, again = (started(PamSgd(), data, Relu(), 4) for _ in range(2))
    assert "dof" not in solver.record()
    trained(solver, data, 4)
    assert solver.notes() == []
    assert 1 <= solver.record()["dof"] <= F + 1
    again.restore(solver.state())
    assert again.record() == solver.record()


@pytest.mark.parametrize(
    ("rows", "alpha", "warned"),
    [(17, 1e-9, True), (17, "auto", False), (17, 1e3, False), (300, 1e-9, False), (6, 1e-9, False)],
)
def test_a_fixed_alpha_at_the_interpolation_threshold_is_warned_of(rows, alpha, warned):
    data = sparse_mixture(rows)
    solver = started(PamSgd(alpha=alpha), data, TopK(k=8), 4)
    trained(solver, data, 4)
    assert any("use --alpha auto" in note for note in solver.notes()) == warned


@pytest.mark.long
@pytest.mark.parametrize(
    ("decoder", "activation", "rows"),
    grid(["free", "residual"], [Relu(), TopK(k=3)], [300, 20]),
    ids=str,
)
def test_an_iteration_without_the_gram_matrix_trains_to_the_same_error(decoder, activation, rows):
    data, errors, d_sae = (
        sparse_mixture(rows),
        [],
        40,
    )  # with fewer the Gram matrix takes less than an iteration
    for memory, solve in (
        (math.inf, "auto"),
        (math.inf, "iterative"),
        (0.0, "auto"),
        (0.0, "direct"),
    ):
        task = task_of(rows, 30, batches=data.batches, memory=memory)
        initial = initial_sae(activation, d_sae, Batch.of(data.x), 1)
        solver = PamSgd(decoder=decoder, solve=solve).resolved(None).build(initial, task)
        sae = trained(solver, data, math.ceil(30 / task.batches))
        errors.append((sae(data.x) - data.x).square().mean().item())
        assert ("residual" in solver.record()) == (
            (memory, solve) not in ((math.inf, "auto"), (0.0, "direct"))
        )
    assert errors == pytest.approx([errors[0]] * 4, rel=0.02, abs=1e-4 * data.x.var().item())


def test_a_penalty_has_silenced_what_is_small_where_it_fires_not_what_is_rare():
    sae = initial_sae(Relu(), F, Batch.of(normal(64, 6)), seed=1)
    size, norms = math.sqrt(6), sae.W_dec.norm(dim=1).double()
    firings, parts = torch.full((F,), 2_000_000), torch.full((F,), 0.05)
    firings[2], parts[2] = 1, 0.2  # once in a pass over the rows for 65,536 latents
    parts[5] = 1e-8
    firings[7], parts[7] = 2, 1e-3  # rare, and small where it fires too
    sums = firings * parts * size / norms
    assert silence(sae, sums, firings, rows=4_000_000)
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
