"""`sae train --log-to`: what a tracker has is what metrics.jsonl says, resumed runs included."""

import importlib.util
import json
import math
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from environments import python_with
from homes import CommandLine, make_store, some_rows

import saecli
from saecli.train.files import read_metrics
from saecli.train.runs import RunRecord

QUICK = ("--d-sae", "24", "--epochs", "4", "--batch-size", "64", "--inner-steps", "2", "--name", "run")
installed = pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None,
                               reason="tensorboard, of the extra saecli[tensorboard], is not installed")


def curves_read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every curve of a folder of event files, as TensorBoard reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def curves_written(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every curve of `metrics.jsonl`."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in read_metrics(folder):
        for name, value in line.items():
            if name != "step" and value is not None:
                found.setdefault(name, []).append((line["step"], value))
    return found


def assert_the_same(folder: Path) -> None:
    read, written = curves_read(folder / "tensorboard"), curves_written(folder)
    assert read.keys() == written.keys() >= {"loss", "batch_fvu", "batch_l0", "test_fvu", "test_l0", "alpha", "epoch"}
    for name in written:
        assert [step for step, _ in read[name]] == [step for step, _ in written[name]], name
        assert all(math.isclose(one, other, rel_tol=1e-6)  # TensorBoard keeps float32
                   for (_, one), (_, other) in zip(read[name], written[name], strict=True)), name


@pytest.mark.slow
@installed
def test_tensorboard_reads_the_curves_of_metrics(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(1000))
    assert sae("train", "--log-to", "tensorboard", *QUICK).status == 0
    assert_the_same(sae.home / "runs" / "run")
    assert sae("train", *QUICK[:-1], "plain").status == 0
    assert not (sae.home / "runs" / "plain" / "tensorboard").exists()


@installed
@pytest.mark.parametrize("cut", [pytest.param(0, marks=pytest.mark.slow), 5])
def test_a_resumed_run_goes_on_with_its_curves_and_has_no_step_twice(sae: CommandLine, monkeypatch, cut: int):
    make_store(sae.home, "rows", some_rows(1000))
    folder = sae.home / "runs" / "run"
    write = RunRecord.line

    def stop_in_the_third_epoch(record: RunRecord, line: dict) -> None:
        write(record, line)
        if "epoch" not in line and (folder / "checkpoint.safetensors").exists() and line["step"] > 60:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunRecord, "line", stop_in_the_third_epoch)
        assert sae("train", "--log-to", "tensorboard", *QUICK).status == 130
    late = curves_written(folder)["loss"][-1][0]
    if cut:  # as of a process that was killed while it wrote
        (events,) = (folder / "tensorboard").iterdir()
        events.write_bytes(events.read_bytes()[:-cut])
    assert sae("train", "--resume").status == 0
    assert curves_written(folder)["loss"][-1][0] > late
    assert_the_same(folder)


def test_without_the_package_a_sentence_says_what_to_install(sae: CommandLine, monkeypatch):
    make_store(sae.home, "rows", some_rows(300))
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec",
                        lambda name, *more: None if name == "tensorboard" else find(name, *more))
    done = sae("train", "--log-to", "tensorboard", *QUICK)
    assert done.status == 2
    assert "install it with `pip install 'saecli[tensorboard]'`" in done.err
    assert not list((sae.home / "runs").iterdir())


@pytest.mark.slow
def test_nothing_imports_tensorboard_unasked(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(300))
    script = (f"import sys\nfrom saecli.cli.main import main\nsys.argv = ['sae', '--home', {str(sae.home)!r}, 'train', "
              "'--steps', '2']\ntry: main()\nexcept SystemExit: assert 'tensorboard' not in sys.modules")
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)


def run_with(library: str, home: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`sae train` in an environment that has a tracker."""
    python = python_with(library)
    return subprocess.run([python, "-m", "saecli", "--home", home, "train", "--log-to", library, *QUICK, *words],
                          env={**os.environ, "PYTHONPATH": str(Path(saecli.__file__).parents[1]), **environment},
                          capture_output=True, text=True, stdin=subprocess.DEVNULL)


@pytest.mark.slow
def test_trackio_has_the_curves_and_settings_of_each_of_several_runs_on_this_machine(sae: CommandLine, tmp_path: Path):
    make_store(sae.home, "rows", some_rows(1000))
    done = run_with("trackio", sae.home, "--seed", "0", "--seed", "1", "--json", TRACKIO_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)["runs"]  # what trackio prints is on stderr
    with closing(sqlite3.connect(tmp_path / "saecli.db")) as database:
        for run in runs:
            lines = [(step, json.loads(figures)) for step, figures in database.execute(
                "select step, metrics from metrics where run_name like ? order by id", (f"{run['run']}-%",))]
            assert lines == [(line["step"], {name: value for name, value in line.items()
                                             if name != "step" and value is not None})
                             for line in read_metrics(Path(run["path"]))]
        settings = [json.loads(text) for (text,) in database.execute("select config from configs order by id")]
    assert [(one["seed"], one["d_sae"], one["solver"], one["data"]) for one in settings] == \
        [(0, 24, "pam-sgd", "rows"), (1, 24, "pam-sgd", "rows")]


@pytest.mark.slow
def test_wandb_has_the_curves_without_a_network_and_says_how_to_log_in(sae: CommandLine, tmp_path: Path):
    make_store(sae.home, "rows", some_rows(1000))
    own = {"HOME": str(tmp_path), "WANDB_API_KEY": ""}
    done = run_with("wandb", sae.home, **own)
    assert done.returncode == 2 and "log in by `wandb login`, or set WANDB_MODE=offline" in done.stderr
    assert not list((sae.home / "runs").iterdir())
    done = run_with("wandb", sae.home, **own, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    folder = sae.home / "runs" / "run"
    (kept,) = folder.glob("wandb/offline-run-*/*.wandb")
    for line in read_metrics(folder):
        assert all(repr(value).encode() in kept.read_bytes() for value in line.values() if value is not None)


def test_words_that_name_no_tracker_are_refused(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(300))
    for words in "comet", "wandb,comet", "wandb,wandb", "":
        done = sae("train", "--log-to", words, *QUICK)
        assert done.status == 2 and "--log-to must be one of trackio, wandb, tensorboard, or several" in done.err
