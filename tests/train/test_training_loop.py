"""The loop over trainings: one reading of the rows for all, and failures and interrupts among several; and a training
cut at any checkpoint and resumed, which has, bit for bit, the weights of one never cut."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import (
    CommandLine,
    assert_same_weights,
    fvu,
    make_run,
    make_store,
    random_sae,
    same,
    some_rows,
)
from launching import signalled
from storing import collect
from torch import Tensor

import saecli
from saecli.base.devices import multiplies_bf16
from saecli.base.errors import TrainingError
from saecli.sae.activations import TopK
from saecli.sae.dictionary import SAE
from saecli.store.reader import Rows
from saecli.train import SOLVERS
from saecli.train.fit import planned
from saecli.train.loop import Loop
from saecli.train.plan import Plan
from saecli.train.rows import ArrayRows, TrainingRows
from saecli.train.runs import load_checkpoint, read_metrics, save_checkpoint
from saecli.train.start import Start, fingerprint
from saecli.train.training import Progress, Record, Training, start_training

QUICK = {"d_sae": 24, "epochs": 2, "batch_size": 64}
KINDS = [
    ("pam-sgd", "topk", {}),
    ("sgd", "jumprelu", {}),
    ("sgd", "topk", {"seed": 3}),
    ("pam", "batchtopk", {"k": 2}),
    ("pam-sgd", "relu", {"decoder_every": 4}),
]


class Lines(Record):
    """Keeps lines of measures, and whether training has come to an end."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.epochs = self.ended = 0

    def line(self, line: dict[str, Any]) -> None:
        self.lines.append(line)

    def save(self, *words: Any) -> None:
        self.epochs += 1

    def end(self) -> None:
        self.ended += 1


class Failing(Lines):
    """Fails, or is interrupted, as its first epoch is kept."""

    def __init__(self, failure: BaseException) -> None:
        super().__init__()
        self.failure = failure

    def save(self, *words: Any) -> None:
        super().save(*words)
        raise self.failure


def training(
    rows: Any,
    solver: str = "sgd",
    act: str = "topk",
    record: Record | None = None,
    test: Any = None,
    shared: TrainingRows | None = None,
    **options: Any,
) -> Training:
    settings = QUICK | ({"k": 3} if act == "topk" else {}) | options
    plan = replace(planned(rows, solver, act, settings), test_rows=test)
    return start_training(plan, record or Lines(), shared=shared)


def several(*each: Training) -> Loop:
    return Loop(each, alone=False)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How often each batch of rows in memory was read, by the way of reading it, epoch and number."""
    read = Counter()

    def counting(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def counted(self, *words, **named):
            for number, batch in enumerate(original(self, *words, **named)):
                read[name, named.get("epoch"), number] += 1
                yield batch

        monkeypatch.setattr(kind, name, counted)

    for kind in (ArrayRows, Rows):
        counting(kind, "batches")
        counting(kind, "sequential")
    return read


@pytest.mark.slow
def test_each_of_several_is_to_the_bit_what_it_is_alone():
    rows = some_rows(700)
    alone = [Loop([training(rows, solver, act, **options)]) for solver, act, options in KINDS]
    expected = [loop.train()[0] for loop in alone]
    together = several(*(training(rows, solver, act, **options) for solver, act, options in KINDS))
    assert all(map(same, together.train(), expected))
    for each, loop in zip(together.trainings, alone, strict=True):
        lines, lines_alone = each.record.lines, loop.trainings[0].record.lines
        for line in (*lines, *lines_alone):
            line.pop("seconds", None)
        assert lines == lines_alone
    assert together.errors == {}
    assert [each.record.epochs for each in together.trainings] == [2] * len(KINDS)


@pytest.mark.slow
def test_several_read_the_rows_as_often_as_one(batches: Counter):
    rows = some_rows(700)
    counts = []
    for seeds in ((), (1, 2)):
        first = training(rows, "pam-sgd")
        others = [training(rows, "pam-sgd", seed=seed, shared=first.rows) for seed in seeds]
        batches.clear()
        Loop([first, *others]).train()
        # The first batches are each training's sample too.
        counts.append({key: count for key, count in batches.items() if key[2]})
    assert counts[0] == counts[1]
    assert batches["batches", 1, 0] == 1


@pytest.mark.slow
def test_one_that_wants_passes_of_its_own_shares_the_others(batches: Counter):
    rows = some_rows(900)
    # Too few rows for running sums: it passes over all.
    often = ({"d_sae": 200}, {"d_sae": 200, "decoder_every": 3})
    expected, read = [], []
    for options in often:
        batches.clear()
        expected += Loop([training(rows, "pam-sgd", **options)]).train()
        read.append(batches["sequential", None, 0])
    batches.clear()
    saes = Loop([training(rows, "pam-sgd", **options) for options in often]).train()
    assert all(map(same, saes, expected))
    # The other's rows are checked and measured too.
    assert batches["sequential", None, 0] == read[1] + 2
    # Within an epoch of 15 batches; both make the pass at its end.
    assert read[1] - read[0] == 2 * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "failing", [{"lr": 1e30}, {"record": Failing(OSError("full"))}], ids=["diverges", "full"]
)
def test_a_failure_leaves_the_others_to_go_on(failing: dict):
    rows = some_rows(500)
    (expected,) = Loop([training(rows)]).train()
    loop = several(training(rows), training(rows, **failing), training(rows))
    saes = loop.train()
    assert len(saes) == 2 and all(same(sae, expected) for sae in saes)
    assert list(loop.errors) == [loop.trainings[1]]
    assert isinstance(loop.errors[loop.trainings[1]], TrainingError if "lr" in failing else OSError)
    assert [each.record.ended for each in loop.trainings] == [1, 1, 1]


def test_the_only_one_raises_what_ends_it():
    alone = training(some_rows(500), lr=1e30)
    with pytest.raises(TrainingError, match="the loss became"):
        Loop([alone]).train()
    assert alone.record.ended == 1


def test_all_that_fail_leave_no_sae():
    loop = several(training(some_rows(500), lr=1e30), training(some_rows(500), lr=1e29))
    assert loop.train() == [] and len(loop.errors) == 2


def test_rows_that_cannot_be_read_end_all(monkeypatch: pytest.MonkeyPatch):
    original, reads = ArrayRows.batches, []

    def damaged(self, *words, **named):
        for number, batch in enumerate(original(self, *words, **named)):
            if reads and number == 3:
                raise OSError("damaged")
            yield batch
        reads.append(named)

    loop = several(training(some_rows(500), epochs=9), training(some_rows(500), epochs=9))
    monkeypatch.setattr(ArrayRows, "batches", damaged)
    with pytest.raises(OSError, match="damaged"):
        loop.train()
    assert [each.record.ended for each in loop.trainings] == [1, 1]


def test_an_interrupt_reaches_all():
    loop = several(
        training(some_rows(500), epochs=9, record=Failing(KeyboardInterrupt())),
        training(some_rows(500), epochs=9),
    )
    with pytest.raises(KeyboardInterrupt):
        loop.train()
    assert loop.errors == {}
    assert [each.record.ended for each in loop.trainings] == [1, 1]
    assert max(each.epochs for each in loop.trainings) == 1


def test_results_are_measured_on_all_rows_for_those_that_came_through(tmp_path):
    make_store(tmp_path, "rows", some_rows(500))
    store = saecli.open_store("rows", tmp_path)
    test = store.split("test")
    options = ({}, {"lr": 1e30}, {"seed": 2})
    loop = several(*(training(store, test=test, **each) for each in options))
    saes = loop.train()
    results = loop.results(saes)
    assert len(results) == 2
    x = torch.from_numpy(collect(test.sequential(64)))
    for sae, result in zip(saes, results, strict=True):
        assert result["final"]["test_fvu"] == pytest.approx(fvu(sae(x), x), rel=1e-4)
        assert result["rows_test"] == len(x)


ROWS = some_rows(300)
TARGETS = np.abs(some_rows(300, 5, seed=1)).cumsum(1)
SHORT = {"d_sae": 24, "epochs": 3, "batch_size": 64}
TOPK = {"k": 3}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("sgd", "relu", {}),
    ("sgd", "relu", {"sparsity": "l1-codes"}),
    ("sgd", "jumprelu", {}),
    ("sgd", "batchtopk", TOPK),
    ("sgd", "topk", TOPK | {"tied": True, "clip_norm": 1.0}),
    ("sgd", "relu", {"weight_decay": 0.1}),
    ("sgd", "topk", TOPK | {"mu_enc": 5.0, "nu_enc": 1.0}),
    ("sgd", "abs-topk", TOPK | {"epochs": None, "steps": 23}),
    ("sgd", "relu-topk", TOPK | {"dtype": "float64"}),
    ("sgd", "topk", TOPK | {"prefixes": "auto"}),
    ("sgd", "topk", TOPK | {"smoothing": 0.0, "normalize": "none"}),
    ("pam-sgd", "relu", {}),
    ("pam-sgd", "jumprelu", {"target_l0": 4.0}),
    ("pam-sgd", "batchtopk", TOPK),
    ("pam-sgd", "topk", TOPK | {"release": 0.0}),
    ("pam-sgd", "topk", TOPK | {"release": 1.0, "prefixes": "6,12"}),
    ("pam-sgd", "topk", TOPK | {"decoder_every": 2}),
    ("pam-sgd", "topk", TOPK | {"solve": "iterative"}),
    ("pam", "topk", TOPK | {"alpha": 1.0, "bias": "after", "decoder_first": True}),
    ("pam", "relu", {"mu_enc": 1.0, "mu_dec": 1.0, "nu_dec": 2.0, "beta": 1.0}),
    ("pam-sgd", "relu", {"seed": 3}),
    ("pam-sgd", "topk", TOPK | {"target": True}),
    ("pam-sgd", "topk", TOPK | {"target": True, "skip": True}),
    ("sgd", "topk", TOPK | {"target": True, "skip": True}),
    ("pam-sgd", "topk", TOPK | {"init": True, "d_sae": 20}),
    ("sgd", "relu", {"init": True, "d_sae": 20}),
    *[
        (solver, "relu", {"precision": "bf16"})
        for solver in SOLVERS
        if multiplies_bf16(torch.device("cpu"))
    ],
]


class Cut(Record):
    """Keeps each checkpoint in a file, and resumes from one of them; keeps the lines of measures."""

    def __init__(self, folder: Path, after: Path | None = None) -> None:
        self.folder, self.after = folder, after
        self.lines: list[dict[str, Any]] = []

    def checkpoint(self) -> tuple[dict[str, Tensor], Progress] | None:
        return None if self.after is None else load_checkpoint(self.after)

    def line(self, line: dict[str, Any]) -> None:
        self.lines.append(line)

    def save(self, sae: SAE, state: dict[str, Tensor], progress: Progress) -> None:
        folder = self.folder / f"{progress.step:04}"
        folder.mkdir(exist_ok=True)
        save_checkpoint(folder, state, progress)


def plan_of(solver: str, act: str, options: dict[str, Any]) -> Plan:
    given = SHORT | options
    target = TARGETS if given.pop("target", False) else None
    old = random_sae(TopK(k=4))
    start = Start("old", fingerprint(old), old) if given.pop("init", False) else None
    plan = planned(ROWS, solver, act, given, target=target, start=start)
    return replace(plan, training=replace(plan.training, checkpoint_every=2))


@pytest.mark.slow
@pytest.mark.parametrize(("solver", "act", "options"), CASES, ids=str)
def test_resumed_is_bit_for_bit_uninterrupted(
    solver: str, act: str, options: dict[str, Any], tmp_path: Path
):
    plan = plan_of(solver, act, options)
    record = Cut(tmp_path)
    first = start_training(plan, record)
    (whole,) = Loop([first]).train()
    kept = sorted(tmp_path.iterdir())
    assert len(kept) > plan.epochs
    if plan.start is not None:  # the checkpoint has all that it gives
        plan = replace(plan, start=replace(plan.start, sae=None))
    for after in kept[:-1]:
        cut = Cut(tmp_path, after)
        resumed = start_training(plan, cut)
        step = resumed.progress.step
        (sae,) = Loop([resumed]).train()
        assert cut.lines == [line for line in record.lines if line["step"] > step]
        if plan.start is not None:
            assert resumed.comparison.measures == first.comparison.measures
        assert same(sae, whole), after


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["sgd", "pam-sgd"])
def test_a_command_killed_within_its_only_epoch_goes_on_from_a_checkpoint_there(
    sae: CommandLine, solver: str
):
    make_store(sae.home, "rows", some_rows(4000))
    words = f"train --solver {solver} --act topk --k 2 --epochs 1".split()
    words += "--batch-size 32 --checkpoint-every 25".split()
    assert sae(*words, "--name", "whole").status == 0
    signalled(sae.home, [*words, "--name", "killed"], "checkpoint.safetensors", 4)
    folder = sae.home / "runs" / "killed"
    assert load_checkpoint(folder)[1].step == 75
    done = sae("train", "--resume", "--json").json
    assert (done["run"], done["epochs"], done["steps"]) == ("killed", 1, 113)
    assert_same_weights(sae.home, "whole", "killed")
    assert read_metrics(folder) == read_metrics(folder.with_name("whole"))


@pytest.mark.slow
def test_one_run_for_each_store_goes_on_after_a_kill_and_past_a_store_that_fails(sae: CommandLine):
    for index, name in enumerate(["x-10", "x-2", "y"]):
        make_store(sae.home, name, some_rows(1000, seed=index))
    make_store(sae.home, "x-1", some_rows(1000) * np.float32(1e30))  # whose squares overflow
    common = "train --solver sgd --normalize none --epochs 3 --batch-size 64 --seed 1"
    words = [*common.split(), "--seed", "0", "--data", "x-*", "--each", "--name", "a"]
    signalled(sae.home, words, "checkpoint.safetensors", 8)
    ended = (sae.home / "runs" / "a-x-2-seed0" / "sae.safetensors").stat()
    done = sae(*words, "--json")
    names = [f"a-x-{store}-seed{seed}" for store in (2, 10) for seed in (1, 0)]
    runs = json.loads(done.out)["runs"]
    assert [run["run"] for run in runs] == names and done.status == 1
    assert [run["varied"] for run in runs] == [{"seed": 1}, {"seed": 0}] * 2
    assert "a-x-2-seed0: finished already" in done.err
    assert "a-x-1-seed1: the loss became" in done.err
    assert (sae.home / "runs" / "a-x-2-seed0" / "sae.safetensors").stat() == ended
    for name, store in zip(names[::2], ("x-2", "x-10"), strict=True):
        sae(f"{common} --data {store} --name alone-{store}")
        assert_same_weights(sae.home, name, f"alone-{store}")
    sae(*words, "--lr", "0.1").fails(1, "a run named 'a-x-2-seed1' already, with other options")
    alike = sae("eval", "a-*seed1", "--json").json["runs"]
    assert {run["run"] for run in alike} == set(names[::2])


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_from_the_same_sae(
    sae: CommandLine, tmp_path: Path
):
    make_store(sae.home, "rows", some_rows(600))
    make_run(sae.home, "old", random_sae(TopK(k=3)))
    words = "train --init old --solver sgd --epochs 1 --batch-size 64".split()
    assert sae(*words, "--name", "whole").status == 0
    signalled(sae.home, [*words, "--name", "killed"], "checkpoint.safetensors")
    folder = sae.home / "runs" / "killed"
    shutil.copytree(folder, tmp_path / "kept")
    assert sae("train", "--resume").status == 0
    assert_same_weights(sae.home, "whole", "killed")
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "kept", folder)
    saecli.save_sae(random_sae(seed=1), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "sae.safetensors", sae.home / "runs" / "old")
    assert "old is not the SAE that this run was begun from" in sae("train", "--resume").err
