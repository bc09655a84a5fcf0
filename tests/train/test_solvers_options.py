"""Schedules, optimisers, and the words on the decoder step."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from grids import grid
from homes import CommandLine, make_store, some_rows
from safetensors.torch import load_file
from tasks import task_of
from test_solvers import (
    F,
    RowsInMemory,
    decoder_steps,
    loss_of,
    one_epoch,
    solve_decoder,
    sparse_mixture,
    started,
    trained,
)

from saecli.base.errors import ConfigError
from saecli.sae.activations import JumpRelu, Relu, SoftTopK, TopK
from saecli.sae.batch import Batch
from saecli.sae.dictionary import SAE
from saecli.train.checkpoints import Progress
from saecli.train.optimizers import OPTIMIZERS, outer_iterations
from saecli.train.options import weight_at
from saecli.train.pam_sgd import PamSgd, PamSgdSolver, batches_between_decoder_steps
from saecli.train.rows import initial_sae
from saecli.train.run import RunRecord
from saecli.train.sgd import Sgd
from saecli.train.solver import SolverConfig

WHOLE = ("--optimizer", "lbfgs", "--batch-size", "1000")
PAPER = ("--decoder", "free", "--alpha", "1e-3", "--bias", "after", "--decoder-first", "--clip-norm", "1", "--mu-enc",
         "9", "--lr-decay", "0", "--weight-decay", "0.1", "--sparsity", "l1-codes", "--sparsity-warm-up", "0")
QUICK = ("--d-sae", "24", "--epochs", "4", "--json")
EACH = [Sgd(optimizer="sgd"), Sgd(optimizer="lbfgs"), PamSgd(optimizer="sgd", inner_steps=2, mu_enc="4:1"),
        PamSgd(optimizer="lbfgs", mu_dec="3,1,0"), PamSgd(optimizer="lbfgs", alpha=0.5, decoder="free")]


def batched_for(config: SolverConfig) -> RowsInMemory:
    x = sparse_mixture().x
    return RowsInMemory(x, len(x) if config.optimizer == "lbfgs" else 32)


@pytest.mark.parametrize(("schedule", "expected"), [
    (0.5, [0.5] * 5), ("16:1", [16, 8, 4, 2, 1]), ("1e-2:1e2", [0.01, 0.1, 1, 10, 100]), ("3,2", [3, 2, 2, 2, 2]),
    ("1,0,5,0,7,9", [1, 0, 5, 0, 7]),
])
def test_weights_of_a_schedule(schedule, expected):
    assert [weight_at(schedule, outer, 5) for outer in range(5)] == pytest.approx(expected)


def test_a_schedule_of_one_outer_iteration_is_its_first_value():
    assert weight_at("4:1", 0, 1) == pytest.approx(4)
    assert weight_at("4:1", 9, 5) == pytest.approx(1)


@pytest.mark.parametrize("spelling", ["", "x", "1:", ":1", "0:1", "1:0", "1:2:3", "1:2,3", "1,", "1,x", "1,-1", "1,nan",
                                      "inf:1", "-1:-2", "auto"])
def test_other_spellings_are_refused(spelling):
    with pytest.raises(ConfigError, match=r"mu_enc must be a number, FIRST:LAST .*, got"):
        PamSgd(mu_enc=spelling)


def test_schedules_go_to_json_as_they_were_written():
    config = PamSgd(mu_enc="5:0.1", nu_dec="1,2")
    assert (config.to_json()["mu_enc"], config.to_json()["nu_dec"]) == ("5:0.1", "1,2")
    assert PamSgd.from_json(config.to_json()) == config


@pytest.mark.parametrize("options", [{}, {"decoder_every": 3}, {"decoder_every": 2, "inner_steps": 4},
                                     {"decoder_every": 100}], ids=str)
@pytest.mark.parametrize("steps", [1, 10, 23, 40, 41])
def test_outer_iterations_are_as_many_as_foretold(options, steps):
    data = sparse_mixture(150)
    config = PamSgd(alpha=1.0, **options).resolved(None)
    task = task_of(data.rows, steps, batches=5)
    solver = config.build(initial_sae(Relu(), F, Batch.of(data.x), seed=1), task)
    trained(solver, data, math.ceil(steps / (5 * config.inner_steps)))
    assert solver.steps == steps
    every = math.inf if isinstance(config.decoder_every, str) else config.decoder_every
    assert solver.outer == outer_iterations(math.ceil(steps / config.inner_steps), 5, every) == solver._outers


@pytest.mark.parametrize(("options", "rows", "epochs", "d_sae", "expected"), [
    ({}, 60_000, 17, 512, math.inf),  # often enough after epochs
    ({}, 1_000_000, 2, 512, 489),  # 8 times in each of two epochs
    ({}, 1_000_000, 1, 512, 245),
    ({}, 1_000_000, 1, 4096, 1954),  # twice, since a pass takes an eighth of the rows
    ({}, 1_000_000, 1, 16_384, math.inf),
    ({"decoder_every": "epoch"}, 1_000_000, 2, 512, math.inf), ({"decoder_every": 7}, 1_000_000, 2, 512, 7),
    ({"decoder": "free"}, 1_000_000, 2, 512, math.inf), ({"decoder_first": True}, 1_000_000, 2, 512, math.inf),
    ({"optimizer": "lbfgs"}, 1_000_000, 2, 512, math.inf)])
def test_where_epochs_are_few_decoder_steps_come_within_them(options, rows, epochs, d_sae, expected):
    config, batches = PamSgd(**options).resolved(None), -(-rows // 256)
    task = task_of(rows, epochs * batches * config.inner_steps, batches=batches)
    assert batches_between_decoder_steps(task, config, d_sae) == expected


def test_each_outer_iteration_has_the_weights_of_its_schedule():
    data = sparse_mixture()
    solver = started(PamSgd(alpha=1.0, mu_enc="8:2", mu_dec="5,0"), data, Relu(), 3)
    seen = []
    for epoch in range(3):
        seen.append((solver.weight("mu_enc"), solver.weight("mu_dec"), solver.weight("nu_enc")))
        held = solver.dictionary.W_enc.detach().clone()
        solver.begin_epoch()
        for batch in data.shuffled(epoch):
            solver.step(batch)
            moved = (solver.dictionary.W_enc.detach() - held).square().sum()
            assert solver.extra_loss().item() == pytest.approx(seen[-1][0] * moved.item() / data.rows)
        solver.end_epoch()
        decoder_steps(solver, data)
    assert seen == [pytest.approx(one) for one in ((8, 5, 0), (4, 0, 0), (2, 0, 0))]


def test_proximal_weights_by_a_schedule_hold_back_while_they_are_large():
    config = PamSgd(optimizer="lbfgs", decoder="free", alpha=1.0, mu_enc="1e6,1e6,0", revive=False)
    data = batched_for(config)
    solver = started(config, data, Relu(), 6)
    places = [solver.sae().W_enc]
    for epoch in range(4):
        one_epoch(solver, data, epoch)
        places.append(solver.sae().W_enc)
    moved = [(after - before).norm() for before, after in pairwise(places)]
    assert max(moved[:2]) < 0.01 * min(moved[2:])


def test_a_step_of_sgd_is_the_learning_rate_times_the_gradient():
    data = sparse_mixture()
    solver = started(PamSgd(optimizer="sgd"), data, Relu(), 4)
    trained_by_descent = solver.optimizer.tensors
    start = {name: tensor.detach().clone() for name, tensor in trained_by_descent.items()}
    gradients = dict(zip(start, torch.autograd.grad(loss_of(solver, data), list(trained_by_descent.values())),
                         strict=True))
    solver.descend(Batch.of(data.x))
    for name, tensor in trained_by_descent.items():
        torch.testing.assert_close(tensor.detach(), start[name] - solver.task.learning_rate(0) * gradients[name])


@pytest.mark.slow
@pytest.mark.parametrize("activation", [Relu(), SoftTopK(k=3), TopK(k=3), JumpRelu()], ids=lambda one: one.name)
def test_lbfgs_never_ends_above_where_it_began_and_where_the_loss_is_smooth_at_a_point_without_slope(activation):
    data = sparse_mixture()
    solver = started(PamSgd(optimizer="lbfgs", mu_enc=30.0, nu_enc=30.0), data, activation, 3, "l1", 0.05)
    assert solver.task.penalty_weight(0) == 0.05
    for _ in range(3):
        before = solver.descend(Batch.of(data.x))[0].loss
        loss = loss_of(solver, data)
        slopes = torch.autograd.grad(loss, [solver.dictionary.W_enc, solver.dictionary.b_enc])
        assert loss <= before
        if activation.name == "soft-topk":
            assert max(slope.abs().max() for slope in slopes) < 1e-3
        solve_decoder(solver, data, last=False)


@pytest.mark.slow
@pytest.mark.parametrize("config", EACH, ids=str)
def test_every_optimiser_trains_and_a_restored_solver_goes_on_bit_for_bit(config):
    data = batched_for(config)
    whole, first, second = (started(config, data, Relu(), 8, sparsity="l1", weight=0.05) for _ in range(3))
    start = ((whole.sae()(data.x) - data.x) ** 2).sum()
    expected = trained(whole, data, 8)
    assert ((expected(data.x) - data.x) ** 2).sum() < 0.8 * start
    trained(first, data, 3)
    second.restore({name: tensor.clone() for name, tensor in first.state().items()})
    for epoch in range(3, 8):
        one_epoch(second, data, epoch)
    assert all(torch.equal(tensor, expected.tensors()[name]) for name, tensor in second.sae().tensors().items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_balancing_and_revival_leave_every_optimiser_with_state_that_fits(optimizer):
    data = batched_for(PamSgd(optimizer=optimizer))
    solver = started(PamSgd(optimizer=optimizer), data, Relu(), 4)
    solver.descend(Batch.of(data.x))
    before = {name: value.clone() for name, value in solver.optimizer.state().items()}
    with torch.no_grad():
        solver._apply(replace(solver.decoder, c=4.0 * solver.decoder.c, Delta=0.5 * solver.decoder.Delta))
        held = solver.dictionary.W_enc.clone()
        solver._balance()
        factor = (solver.dictionary.W_enc.norm() / held.norm()).item()
    assert factor > 1
    solver.optimizer.forget(torch.arange(F) < 2, solver.dictionary.latent_dimension)
    after = solver.optimizer.state()
    assert after.keys() == before.keys()
    if optimizer == "sgd":
        assert after["sgd.scale.W_enc"].item() == pytest.approx(factor)
        assert after["sgd.scale.b_dec"].item() == 1
    if optimizer == "adam":
        expected = before["adam.exp_avg.W_enc"] / factor
        expected[:, :2] = 0
        torch.testing.assert_close(after["adam.exp_avg.W_enc"], expected)
        expected = before["adam.exp_avg_sq.b_enc"] / factor**2
        expected[:2] = expected[2:].mean()
        torch.testing.assert_close(after["adam.exp_avg_sq.b_enc"], expected)
        assert after["adam.step.W_enc"] == 1
    solver.descend(Batch.of(data.x))
    assert all(tensor.isfinite().all() for tensor in solver.optimizer.tensors.values())


def ended(solver: PamSgdSolver, data: RowsInMemory, epochs: int) -> list[str]:
    trained(solver, data, epochs)
    return solver.notes()


def test_the_record_ends_with_the_decoders_degrees_of_freedom_and_outlasts_a_checkpoint():
    data = sparse_mixture()
    solver = started(PamSgd(), data, Relu(), 4)
    assert "dof" not in solver.record()
    assert ended(solver, data, 4) == []
    assert 1 <= solver.record()["dof"] <= F + 1
    again = started(PamSgd(), data, Relu(), 4)
    again.restore(solver.state())
    assert again.record() == solver.record()


@pytest.mark.parametrize(("rows", "alpha", "warned"), [(17, 1e-9, True), (17, "auto", False), (17, 1e3, False),
                                                       (300, 1e-9, False), (6, 1e-9, False)])
def test_a_fixed_alpha_at_the_interpolation_threshold_is_warned_of(rows, alpha, warned):
    data = sparse_mixture(rows)
    notes = ended(started(PamSgd(alpha=alpha), data, SoftTopK(k=8), 4), data, 4)
    assert any("where the error on other rows peaks; use --alpha auto" in note for note in notes) == warned


@pytest.mark.parametrize(("words", "sentence"), [
    (("--mu-enc", "1:x"), "--mu-enc must be a number, FIRST:LAST with both above 0"),
    (("--mu-enc", "-1"), "--mu-enc must be at least 0, got -1"),
    (("--solver", "sgd", "--mu-dec", "1:2"), "--mu-dec does nothing with --solver sgd"),
    (("--optimizer", "sgd"), "--lr auto is fitted to Adam"),
    (("--optimizer", "lbfgs", "--batch-size", "999"), "more than --batch-size 999; give --batch-size 1"),
    (("--optimizer", "lbfgs", "--batch-size", "5000", "--lr", "1"), "--lr does nothing with --optimizer lbfgs"),
    (("--optimizer", "lbfgs", "--batch-size", "5000", "--smoothing", "0.1"), "--smoothing cannot be used with"),
    (("--optimizer", "lbfgs", "--batch-size", "5000", "--inner-steps", "2"), "--inner-steps 2 does nothing with"),
    (("--optimizer", "lbfgs", "--batch-size", "5000", "--clip-norm", "1"), "--clip-norm does nothing with"),
    (("--optimizer", "lbfgs", "--batch-size", "5000", "--lr-decay", "0"), "--lr-decay does nothing with"),
    (("--sparsity", "none", "--sparsity-warm-up", "0"), "--sparsity-warm-up does nothing with --sparsity none"),
    (("--lr-decay", "1.5"), "--lr-decay must be at most 1, got 1.5"),
    (("--bias", "after"), "--bias after cannot be used with --alpha auto"),
    (("--decoder-first", "--decoder-every", "5"), "--decoder-first cannot be used with --decoder-every"),
    (("--solver", "sgd", "--decoder-first"), "--decoder-first does nothing with --solver sgd"),
    (("--act", "topk", "--sparsity", "l0"), "use one of none, l1, l1-codes"),
])
def test_what_cannot_work_gets_one_sentence_and_leaves_nothing(sae: CommandLine, words: tuple, sentence: str):
    make_store(sae.home, "rows", some_rows(1500))
    done = sae("train", *words)
    assert done.status == 2
    assert sentence in done.err
    assert "Traceback" not in done.err
    assert not (sae.home / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("words", [WHOLE, ("--optimizer", "sgd", "--lr", "0.05"), ("--solver", "sgd", *WHOLE),
                                   ("--mu-enc", "5:1", "--nu-dec", "2,1"), PAPER,
                                   ("--solver", "sgd", "--tied", "--mu-enc", "9:1", "--nu-enc", "4"),
                                   ], ids=" ".join)
def test_a_stopped_run_resumed_equals_one_never_stopped(sae: CommandLine, words: tuple, monkeypatch):
    make_store(sae.home, "rows", some_rows(1000))
    whole = sae("train", "--name", "whole", *words, *QUICK).json
    keep = RunRecord.epoch

    def keep_two(record: RunRecord, sae: SAE, state: dict, progress: Progress, test: dict) -> None:
        keep(record, sae, state, progress, test)
        if progress.epoch == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunRecord, "epoch", keep_two)
        assert sae("train", "--name", "cut", *words, *QUICK).status == 130
    done = sae("train", "--resume", "--json").json
    assert done["final"] == whole["final"]
    assert done["notes"] == whole["notes"]
    one, other = (load_file(sae.home / "runs" / name / "sae.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [30.0, 300.0, 3000.0, 1e6])
def test_a_penalty_too_strong_for_any_code_ends_them_all(weight):
    data = sparse_mixture()
    solver = started(PamSgd(), data, Relu(), epochs=30, sparsity="l1", weight=weight)
    sae = trained(solver, data, 30)
    assert not sae.encode(data.x).any()
    assert all(tensor.isfinite().all() for tensor in sae.tensors().values())


@pytest.mark.long
@pytest.mark.parametrize(("decoder", "activation", "rows"),
                         grid(["free", "residual"], [Relu(), TopK(k=3)], [300, 20]), ids=str)
def test_without_room_for_the_gram_matrix_an_iteration_trains_to_the_same_error(decoder, activation, rows):
    data, errors, d_sae = sparse_mixture(rows), [], 40  # with fewer the Gram matrix takes less than an iteration
    for memory, solve in ((math.inf, "auto"), (math.inf, "iterative"), (0.0, "auto"), (0.0, "direct")):
        task = task_of(rows, 30, batches=math.ceil(rows / 32), memory=memory)
        initial = initial_sae(activation, d_sae, Batch.of(data.x), 1)
        solver = PamSgd(decoder=decoder, solve=solve).resolved(None).build(initial, task)
        sae = trained(solver, data, math.ceil(30 / task.batches))
        errors.append((sae(data.x) - data.x).square().mean().item())
        assert ("residual" in solver.record()) == ((memory, solve) not in ((math.inf, "auto"), (0.0, "direct")))
    assert errors == pytest.approx([errors[0]] * 4, rel=0.02, abs=1e-4 * data.x.var().item())
