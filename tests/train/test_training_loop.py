"""The training loop: a training cut at any checkpoint and resumed has, bit for bit, the weights of one never cut."""

import json
import shutil
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import assert_same_weights, make_run, make_store, random_sae, same, some_rows
from launching import signalled
from torch import Tensor

import saecli
from saecli.base.devices import multiplies_bf16
from saecli.base.errors import TrainingError
from saecli.base.processes import Communicator
from saecli.sae.activations import TopK
from saecli.sae.dictionary import SAE, Normalisation
from saecli.store.split import Stream
from saecli.train import SOLVERS
from saecli.train.fit import planned
from saecli.train.plan import Plan
from saecli.train.rows import ArrayRows, TrainingRows
from saecli.train.runs import load_checkpoint, read_metrics, save_checkpoint
from saecli.train.start import Start, fingerprint
from saecli.train.training import Progress, Record, start_training


class Ended(Record):
    """Counts how often training came to an end."""

    ended = 0

    def end(self) -> None:
        self.ended += 1


def test_a_failure_ends_the_record():
    options = {"d_sae": 24, "k": 3, "epochs": 2, "batch_size": 64, "lr": 1e30}
    diverging = start_training(planned(some_rows(500), "sgd", "topk", options), Ended())
    with pytest.raises(TrainingError, match="the loss became"):
        diverging.train()
    assert diverging.record.ended == 1


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
    ("pam", "topk", TOPK | {"alpha": 1.0}),
    ("pam", "relu", {"mu_enc": 1.0, "mu_dec": 1.0, "nu_dec": 2.0, "beta": 1.0}),
    ("pam-sgd", "relu", {"seed": 3}),
    ("pam-sgd", "topk", TOPK | {"target": True}),
    ("pam-sgd", "topk", TOPK | {"target": True, "skip": True}),
    ("sgd", "topk", TOPK | {"target": True, "skip": True}),
    ("pam-sgd", "topk", TOPK | {"init": True, "d_sae": 20}),
    ("sgd", "relu", {"init": True, "d_sae": 20}),
]
if multiplies_bf16(torch.device("cpu")):
    CASES += [(solver, "relu", {"precision": "bf16"}) for solver in SOLVERS]


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


class InterruptedAtItsEnd(ArrayRows):
    """Ctrl-C comes while a stream is closed, which waits for its threads."""

    def batches(self, *words: Any, **more: Any) -> Stream:
        try:
            yield from super().batches(*words, **more)
        finally:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "consume",
    [
        lambda rows: deque(rows.in_epoch(0)),
        lambda rows: deque(rows.some(100, 0)),
        lambda rows: rows.sample_of(rows.stored, 100),
    ],
    ids=["epoch", "some", "sample"],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_at_the_end_of_a_stream_is_not_lost(consume: Callable[..., Any], processes: int):
    stored, one = InterruptedAtItsEnd(some_rows(500)), torch.ones(1)
    normalisation = Normalisation(0 * one, one, one, stored.d_in)
    rows = TrainingRows(stored, normalisation, 64, 0, Communicator(0, processes))
    with pytest.raises(KeyboardInterrupt):
        consume(rows)


@pytest.mark.slow
@pytest.mark.parametrize(("solver", "act", "options"), CASES, ids=str)
def test_resumed_is_bit_for_bit_uninterrupted(solver, act, options, tmp_path):
    plan = plan_of(solver, act, options)
    record = Cut(tmp_path)
    first = start_training(plan, record)
    whole = first.train()
    kept = sorted(tmp_path.iterdir())
    assert len(kept) > plan.epochs
    if plan.start is not None:  # the checkpoint has all that it gives
        plan = replace(plan, start=replace(plan.start, sae=None))
    for after in kept[:-1]:
        cut = Cut(tmp_path, after)
        resumed = start_training(plan, cut)
        step = resumed.progress.step
        sae = resumed.train()
        assert cut.lines == [line for line in record.lines if line["step"] > step]
        if plan.start is not None:
            assert resumed.comparison.measures == first.comparison.measures
        assert same(sae, whole), after


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["sgd", "pam-sgd"])
def test_a_command_killed_within_its_only_epoch_goes_on_from_a_checkpoint_there(sae, solver):
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
def test_one_run_for_each_store_goes_on_after_a_kill_and_past_a_store_that_fails(sae):
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
def test_a_run_killed_before_its_first_checkpoint_starts_from_the_same_sae(sae, tmp_path):
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
