"""`sae train --tensorboard`: what TensorBoard's own reader finds is what metrics.jsonl says, resumed runs included."""

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest
from homes import CommandLine, make_store, some_rows

from saecli.training import RunRecord, read_metrics

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
    assert sae("train", "--tensorboard", *QUICK).status == 0
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
        assert sae("train", "--tensorboard", *QUICK).status == 130
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
    done = sae("train", "--tensorboard", *QUICK)
    assert done.status == 2
    assert "install it with `pip install 'saecli[tensorboard]'`" in done.err
    assert not list((sae.home / "runs").iterdir())


@pytest.mark.slow
def test_nothing_imports_tensorboard_unasked(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(300))
    script = (f"import sys\nfrom saecli.cli import main\nsys.argv = ['sae', '--home', {str(sae.home)!r}, 'train', "
              "'--steps', '2']\ntry: main()\nexcept SystemExit: assert 'tensorboard' not in sys.modules")
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
