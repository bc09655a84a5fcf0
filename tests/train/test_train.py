"""`sae train`: what it writes and prints, that it repeats and resumes bit for bit, and what bad input gets; `--log-to`:
what a tracker has is what metrics.jsonl says."""

import importlib.util
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from homes import CommandLine, assert_same_weights, make_store, some_rows, weights
from launching import captured, python_with, signalled
from safetensors.torch import load_file

import saecli
from saecli.sae.formats import load
from saecli.store.split import is_test
from saecli.store.values import Spread
from saecli.train.rows import fit_normalisation
from saecli.train.runs import read_metrics

QUICK = ("--d-sae", "24", "--epochs", "3", "--batch-size", "64", "--json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--act topk --k 24", "--k 24 is all of d_sae, 24, so codes are not sparse; lower --k"),
        ("--act batchtopk --k 8", "--k 8 is not below d_in, 8, so codes are not sparse; lower --k"),
        ("--act relu --sparsity-weight 0.01", "held-out L0 .* above d_in, 8, .*; raise --spars"),
        ("--act relu --sparsity none", "held-out L0 .* above d_in, 8, so .*; use --sparsity l1"),
        ("--sparsity l1", "--act batchtopk keeps 3 latents per row whatever --sparsity l1 weighs"),
        ("--act topk --k 3", None),
        (
            "--solver sgd --act topk --k 2 --lr 1 --smoothing 0 --no-revive",
            "held-out FVU .* is above 1, so the mean of the rows would reconstruct them better; lower --lr",
        ),
    ],
)
def test_what_hardly_comes_to_what_was_wanted_is_warned_of_once(sae, words, said):
    make_store(sae.home, "rows", some_rows(1000))
    done = sae(f"train {words}", *QUICK)
    if said is None:
        assert done.json["warnings"] == []
        assert "warning" not in done.err + sae("eval").err
        return
    (warning,) = done.json["warnings"]
    assert re.match(said, warning)
    assert done.err.count("warning: ") == 1 and f"warning: {warning}\n" in done.err
    kept = json.loads((Path(done.json["path"]) / "run.json").read_text())["result"]
    assert kept["warnings"] == [warning]


@pytest.mark.slow
def test_rows_fitted_by_heart_and_rows_of_massive_norm_are_warned_of(sae: CommandLine):
    rows = some_rows(300)
    rows[7] *= 1000
    make_store(sae.home, "rows", rows)
    words = "train --solver sgd --act topk --k 2 --d-sae 200 --steps 250 --batch-size 150"
    done = sae(words, "--smoothing", "0", "--normalize", "standardize", "--json")
    assert "rows: 1 of 300 rows have over 10 times the median norm" in done.err
    (warning,) = done.json["warnings"]
    said = "held-out FVU .* is far above .*, after 125 epochs; .* use fewer --epochs or"
    assert re.match(said, warning)
    once = sae(words.replace("250", "2"), "--lr", "0.1", "--normalize", "standardize", "--json")
    assert not re.search("by heart|--epochs", once.err)


@pytest.mark.parametrize(
    "words, moves",
    [
        ("--lr 1.5e-3 --lr-decay 0 --sparsity-weight 10", True),
        pytest.param("--lr 1e-2 --sparsity-weight 1", False, marks=pytest.mark.slow),
    ],
)
def test_an_l0_that_still_moves_is_warned_of(sae: CommandLine, words: str, moves: bool):
    make_store(sae.home, "rows", some_rows(300))
    options = "--solver sgd --act relu --d-sae 12 --steps 200 --batch-size 40 --json"
    done = sae(f"train {options} {words}")
    said = "L0 was still moving at the end, from .* to .*; train for more --steps"
    assert any(re.match(said, warning) for warning in done.json["warnings"]) == moves


@pytest.mark.slow
def test_an_interrupt_saves_and_says_how_to_go_on(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(20_000))
    words = "train --d-sae 64 --epochs 100 --batch-size 64 --name stopped".split()
    process = signalled(sae.home, words, "checkpoint.safetensors", 2, signal.SIGINT)
    assert process.returncode == 130
    assert "sae train --resume --name stopped" in process.said
    assert "Traceback" not in process.said
    assert sae("eval", "stopped", "--json").status == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "scale", "standardize", "none"])
@pytest.mark.parametrize("act", ["topk", "matching-pursuit"])
def test_normalisation_is_folded_so_that_the_saved_sae_acts_on_raw_rows(sae, act, kind):
    rows = some_rows(2000) * np.float32(37) + np.arange(8, dtype=np.float32)
    reads = np.linspace(0.5, 4, 8)
    make_store(sae.home, "rows", rows, reads=tuple(reads.tolist()))
    document = sae("train", "--normalize", kind, "--act", act, "--k", "6", *QUICK).json
    saved = load(Path(document["path"])).sae
    x = torch.from_numpy(rows)
    unexplained = (saved(x) - x).square().sum() / (x - x.mean(0)).square().sum()
    assert unexplained.item() == pytest.approx(document["final"]["train_fvu"], abs=0.02)
    assert unexplained < 0.5
    # Mean and scale are those of the training rows alone, though the store's statistics are of all rows.
    train = ~is_test(np.arange(2000))
    kept = load_file(Path(document["path"]) / "checkpoint.safetensors")
    x = rows[train].astype(np.float64)
    variance = x.var(axis=0)
    deviation = {
        "auto": np.sqrt((variance * reads).mean() / reads),
        "scale": np.sqrt(variance.mean()),
        "standardize": np.sqrt(variance),
        "none": 1,
    }[kind]
    mean, scale = x.mean(axis=0) * (kind != "none"), np.broadcast_to(deviation, 8)
    np.testing.assert_allclose(kept["normalisation.mean"], mean, rtol=1e-6)
    np.testing.assert_allclose(kept["normalisation.scale"], scale, rtol=1e-6)
    settings = json.loads((Path(document["path"]) / "run.json").read_text())["training"]
    assert settings["normalize"] == ("model" if kind == "auto" else kind)


@pytest.mark.parametrize("kind", ["model", "scale", "standardize", "none"])
def test_normalisations_match_numpy(kind: str):
    x = (some_rows(500) * np.linspace(1, 9, 8, dtype=np.float32)).astype(np.float64)
    x[:, 3] = 5
    reads = np.linspace(0.5, 4, 8)
    fitted = fit_normalisation(kind, Spread.of(x.copy()), torch.float64, reads=reads)
    rows = fitted(torch.from_numpy(x)).numpy()
    assert fitted.variance.item() == pytest.approx(rows.var(0).sum())
    if kind in ("model", "scale"):
        assert fitted.variance.item() == pytest.approx(8)
        weighed = fitted.scale.numpy() * np.sqrt(reads if kind == "model" else 1)
        np.testing.assert_allclose(weighed, weighed[0])
    elif kind == "standardize":
        np.testing.assert_allclose(rows.std(0), np.arange(8) != 3, atol=1e-9)
    np.testing.assert_allclose(rows.mean(0), x.mean(0) * (kind == "none"), atol=1e-9)


def test_the_order_of_the_rows_has_a_seed_of_its_own(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(300))
    words = "train --solver sgd --act topk --k 3 --d-sae 24 --batch-size 64 --steps 1 --lr 1e-9"
    losses = []
    for name in ("0", "1"):
        sae(words, "--shuffle-seed", name, "--name", name).succeeds()
        lines = read_metrics(sae.home / "runs" / name)
        losses += [line["loss"] for line in lines if "loss" in line]
    assert_same_weights(sae.home, "0", "1", atol=1e-6)
    assert len(losses) == len({*losses}) == 2


@pytest.mark.parametrize("act", ["topk", "batchtopk", "matching-pursuit"])
def test_k_falls_over_the_first_half_of_the_steps(sae: CommandLine, act: str):
    make_store(sae.home, "rows", some_rows(640))
    line = f"train --act {act} --k 2 --k-start 6 --d-sae 24 --batch-size 64 --steps 20"
    sae(line, "--name", "falls").succeeds()
    lines = read_metrics(sae.home / "runs" / "falls")
    l0s = [line["batch_l0"] for line in lines if "batch_l0" in line]
    assert 2 < l0s[0] <= 6 and l0s[-1] <= 2
    assert load(sae.home / "runs" / "falls").sae.k == 2


def test_a_name_that_is_taken_is_refused_and_a_default_name_counts_on(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(300))
    first, second = (sae("train", *QUICK).json["run"] for _ in range(2))
    assert (first, second) == ("pam-sgd-batchtopk-1", "pam-sgd-batchtopk-2")
    assert f"a run named '{first}' already" in sae("train", "--name", first, *QUICK).err
    assert "is finished" in sae("train", "--resume", "--name", first).err


def test_steps_take_the_place_of_epochs_and_the_rows_that_of_a_larger_batch(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(300))
    document = sae("train --steps 11 --batch-size 64 --d-sae 24 --json").json
    assert (document["steps"], document["epochs"]) == (11, 3)
    sae("train --d-sae 24 --epochs 2 --batch-size 100000000 --name run --json").succeeds()
    settled = json.loads((sae.home / "runs" / "run" / "run.json").read_text())["training"]
    assert 200 < settled["batch_size"] < 300


def test_a_store_is_read_while_hdf5_locks_its_shards(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(300))
    (shard,) = (sae.home / "activations" / "rows" / "shards").glob("*.h5")
    with h5py.File(shard, "r"):
        assert sae("train", *QUICK).status == 0
        assert sae("eval", "--json").status == 0


def cells(text: str) -> list[list[str]]:
    """The cells of a table, line by line."""
    return [
        [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]
        for line in text.splitlines()
        if line[:1] in "│┃"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["sgd", "pam-sgd"])
def test_a_run_prints_its_results_and_its_solvers_figures(sae: CommandLine, solver: str):
    make_store(sae.home, "rows", some_rows(1000))
    done = sae("train", "--solver", solver, *QUICK[:-1], "--name", "run")
    result = json.loads((sae.home / "runs" / "run" / "run.json").read_text())["result"]
    final = result["final"]
    head, line, names, figures = cells(done.out)
    assert head == ["run", "data", "d_sae", "FVU", "L0", "dead latents"]
    assert line[:5] == ["run", "rows", "24", f"{final['test_fvu']:.4g}", f"{final['test_l0']:.4g}"]
    shown = dict(zip(names, figures, strict=True))
    assert shown["learning rate"] == f"{final['lr']:.4g}"
    assert shown["FVU on training rows"] == f"{final['train_fvu']:.4g}"
    assert names == ["run", "epochs", "steps", "seconds", "FVU on training rows", "learning rate"]
    solves = solver == "pam-sgd"
    assert ("relative_alpha" in final) == solves
    folder = sae.home / "runs" / "run"
    assert done.out.endswith(f"saved in {folder}; loss.png there has its curves\n")


@pytest.mark.slow
def test_several_runs_stand_in_one_table_and_are_each_as_alone(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(1000))
    words = ("train", *QUICK[2:-1], "--solver", "sgd", "--name")
    done = sae(*words, "x", "--d-sae", "24", "--d-sae", "16", "--seed", "0", "--seed", "1")
    head, *lines = cells(done.out)
    assert head == ["run", "seed", "data", "d_sae", "FVU", "L0", "dead latents"]
    assert [f"{line[3]} {line[1]}" for line in lines[:4]] == ["24 0", "24 1", "16 0", "16 1"]
    figures = [line for line in lines[4:] if line[0].startswith("x-")]
    assert lines[4][:4] == ["run", "epochs", "steps", "seconds"]
    assert [line[0] for line in figures[:4]] == [line[0] for line in lines[:4]]
    assert sae(*words, "alone", "--d-sae", "16", "--seed", "1").status == 0
    assert_same_weights(sae.home, lines[3][0], "alone")
    first, second = (weights(sae.home, line[0]) for line in lines[:2])
    assert not torch.equal(first["W_enc"], second["W_enc"])


@pytest.mark.slow
def test_one_that_diverges_leaves_the_others_to_their_ends(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(1000))
    words = ["train --solver sgd --lr 1e30 --lr 0.01 --name run", *QUICK[:-1]]
    assert "run-lr0.01" in sae(*words).fails(1, "run-lr1e+30: the loss became").out
    assert "run-lr0.01: finished already" in sae(*words).err
    assert [path.name for path in (sae.home / "runs").iterdir()] == ["run-lr0.01"]
    sae("train --name run --lr 0.01 --lr 0.02", *QUICK).fails(1, "a run named 'run-lr0.01' already")
    assert [path.name for path in (sae.home / "runs").iterdir()] == ["run-lr0.01"]


TRACKED = "--d-sae 24 --epochs 4 --batch-size 64 --name run".split()


def test_without_the_package_a_sentence_says_what_to_install(sae: CommandLine, monkeypatch):
    make_store(sae.home, "rows", some_rows(300))
    find = importlib.util.find_spec

    def find_others(name: str, *more: Any) -> Any:
        return None if name == "wandb" else find(name, *more)

    monkeypatch.setattr("importlib.util.find_spec", find_others)
    done = sae("train", "--log-to", "wandb", *TRACKED)
    done.fails(2, "install it with `pip install 'saecli[wandb]'`")
    assert not list((sae.home / "runs").iterdir())


@pytest.mark.long
def test_wandb_has_the_curves_without_a_network_and_says_how_to_log_in(sae, tmp_path):
    make_store(sae.home, "rows", some_rows(1000))
    own = {"HOME": str(tmp_path), "WANDB_API_KEY": ""}
    own["PYTHONPATH"] = str(Path(saecli.__file__).parents[1])
    command = [python_with("wandb"), "-m", "saecli", "--home", sae.home, "train"]
    command += ["--log-to", "wandb", *TRACKED]
    done = captured(command, env=os.environ | own, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert "run `wandb login`, or set WANDB_MODE=offline" in done.stderr
    assert not list((sae.home / "runs").iterdir())
    own["WANDB_MODE"] = "offline"
    captured(command, env=os.environ | own, stdin=subprocess.DEVNULL, check=True)
    folder = sae.home / "runs" / "run"
    (kept,) = folder.glob("wandb/offline-run-*/*.wandb")
    values = {value for line in read_metrics(folder) for value in line.values()} - {None}
    assert all(repr(value).encode() in kept.read_bytes() for value in values)
