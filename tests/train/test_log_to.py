"""`sae train --log-to`: what a tracker has is what metrics.jsonl says, resumed runs included."""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
from homes import CommandLine, make_store, some_rows
from launching import captured, python_with

import saecli
from saecli.train.runs import read_metrics

QUICK = "--d-sae 24 --epochs 4 --batch-size 64 --name run".split()


def test_without_the_package_a_sentence_says_what_to_install(sae: CommandLine, monkeypatch):
    make_store(sae.home, "rows", some_rows(300))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *more: None if name == "wandb" else find(name, *more),
    )
    done = sae("train", "--log-to", "wandb", *QUICK)
    assert done.status == 2
    assert "install it with `pip install 'saecli[wandb]'`" in done.err
    assert not list((sae.home / "runs").iterdir())


def run_with(
    library: str, home: Path, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`sae train` in an environment that has a tracker."""
    python = python_with(library)
    return captured(
        [python, "-m", "saecli", "--home", home, "train", "--log-to", library, *QUICK, *words],
        env={**os.environ, "PYTHONPATH": str(Path(saecli.__file__).parents[1]), **environment},
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.long
def test_wandb_has_the_curves_without_a_network_and_says_how_to_log_in(
    sae: CommandLine, tmp_path: Path
):
    make_store(sae.home, "rows", some_rows(1000))
    own = {"HOME": str(tmp_path), "WANDB_API_KEY": ""}
    done = run_with("wandb", sae.home, **own)
    assert (
        done.returncode == 2 and "log in by `wandb login`, or set WANDB_MODE=offline" in done.stderr
    )
    assert not list((sae.home / "runs").iterdir())
    done = run_with("wandb", sae.home, **own, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    folder = sae.home / "runs" / "run"
    (kept,) = folder.glob("wandb/offline-run-*/*.wandb")
    for line in read_metrics(folder):
        assert all(
            repr(value).encode() in kept.read_bytes()
            for value in line.values()
            if value is not None
        )
