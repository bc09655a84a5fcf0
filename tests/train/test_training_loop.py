"""The loop over trainings: one reading of the rows for all, and failures and interrupts among several."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from homes import make_store, same, some_rows
from storing import collect

import saecli
from saecli.base.errors import TrainingError
from saecli.store.reader import Rows
from saecli.train.fit import planned
from saecli.train.loop import Loop
from saecli.train.rows import ArrayRows, TrainingRows
from saecli.train.training import Record, Training, start_training

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
        fvu = (sae(x) - x).square().sum() / (x - x.mean(0)).square().sum()
        assert result["final"]["test_fvu"] == pytest.approx(fvu.item(), rel=1e-4)
        assert result["rows_test"] == len(x)
