"""`sae eval` against numpy in float64 over the same rows."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from homes import CommandLine, D, F, make_run, make_store, random_sae, some_rows

from saecli.activations import JumpRelu, Relu, TopK
from saecli.formats import SavedSAE, save
from saecli.sae import SAE
from saecli.store import is_test

KEYS = ["run", "data", "split", "rows", "mse", "fvu", "explained_variance", "cosine", "l0", "l1", "dead_fraction"]


def relu_oracle(sae: SAE, rows: np.ndarray) -> dict[str, float]:
    W_enc, b_enc, W_dec, b_dec = (t.double().numpy() for t in (sae.W_enc, sae.b_enc, sae.W_dec, sae.b_dec))
    x = rows.astype(np.float64)
    z = np.maximum(x @ W_enc + b_enc, 0)
    x_hat = z @ W_dec + b_dec
    error = ((x_hat - x) ** 2).sum(1).mean()
    fvu = error / x.var(0).sum()
    cosine = ((x * x_hat).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(x_hat, axis=1)).mean()
    return {"rows": len(x), "mse": error / D, "fvu": fvu, "explained_variance": 1 - fvu, "cosine": cosine,
            "l0": (z > 0).sum(1).mean(), "l1": z.sum(1).mean(), "dead_fraction": (~(z > 0).any(0)).mean()}


@pytest.mark.parametrize("split", ["test", "train", "all"])
def test_measures_match_numpy_on_the_rows_of_the_runs_own_split(sae: CommandLine, split: str) -> None:
    rows = make_store(sae.home, "rows", some_rows())
    make_run(sae.home, "run", random_sae(), split_seed=3)
    held_out = is_test(np.arange(len(rows)), seed=3)
    chosen = {"test": rows[held_out], "train": rows[~held_out], "all": rows}[split]
    (found,) = sae("eval", "run", "--split", split, "--json").json["runs"]
    assert list(found) == KEYS
    assert (found["run"], found["data"], found["split"]) == ("run", "rows", split)
    oracle = relu_oracle(random_sae(), chosen)
    assert {key: found[key] for key in oracle} == pytest.approx(oracle, rel=1e-5)


def test_the_train_split_is_the_fraction_that_was_trained_on(sae: CommandLine) -> None:
    make_store(sae.home, "rows", some_rows())
    make_run(sae.home, "half", random_sae(), fraction=0.5)
    (train,) = sae("eval", "--split", "train", "--json").json["runs"]
    assert 1000 < train["rows"] < 1700


def test_without_arguments_the_newest_run_is_measured_on_its_own_store_and_both_are_named(sae: CommandLine) -> None:
    make_store(sae.home, "rows", some_rows())
    make_store(sae.home, "newer", some_rows(seed=1))
    make_run(sae.home, "old", random_sae(), created="2026-01-01")
    make_run(sae.home, "new", random_sae(), created="2026-01-02")
    done = sae("eval")
    assert done.status == 0
    assert "new" in done.out and "rows" in done.out and "newer" not in done.out
    assert "using the newest run, new" in done.err


def test_several_runs_make_one_table_the_best_first_and_marked(sae: CommandLine) -> None:
    make_store(sae.home, "rows", some_rows())
    make_run(sae.home, "random", random_sae())
    identity = SAE(torch.eye(D, F), torch.zeros(F), torch.eye(F, D), torch.zeros(D), TopK(k=D))
    make_run(sae.home, "exact", identity)
    lines = [line for line in sae("eval", "random", "exact").out.splitlines() if "rows" in line and "test" in line]
    assert "exact *" in lines[0] and "random " in lines[1] and "*" not in lines[1]
    assert [run["run"] for run in sae("eval", "random", "exact", "--json").json["runs"]] == ["random", "exact"]


def test_runs_on_different_rows_are_pointed_out(sae: CommandLine) -> None:
    make_store(sae.home, "rows", some_rows())
    make_run(sae.home, "a", random_sae(), split_seed=0)
    make_run(sae.home, "b", random_sae(), split_seed=1)
    assert "measured on different rows" in sae("eval", "a", "b").err
    assert "measured on different rows" not in sae("eval", "a", "a").err


@pytest.mark.parametrize(("name", "activation"), [("saelens", Relu()), ("sparsify", Relu()),
                                                  ("dictionary-learning", JumpRelu())])
def test_a_folder_of_another_library_is_measured_on_the_newest_store(
        sae: CommandLine, tmp_path: Path, name: str, activation: Relu | JumpRelu) -> None:
    make_store(sae.home, "rows", some_rows())
    make_run(sae.home, "native", random_sae(activation))
    save(SavedSAE(random_sae(activation)), name, tmp_path / "theirs")
    done = sae("eval", "native", tmp_path / "theirs", "--json")
    assert "using the newest store, rows" in done.err
    native, theirs = done.json["runs"]
    assert theirs["run"] == str(tmp_path / "theirs")
    for key in ("rows", "mse", "fvu", "cosine", "l0", "dead_fraction"):
        assert theirs[key] == pytest.approx(native[key], rel=1e-4)


def test_a_store_of_another_width_is_refused_with_both_widths(sae: CommandLine) -> None:
    make_store(sae.home, "rows", some_rows())
    make_store(sae.home, "wide", some_rows(d_in=9))
    make_run(sae.home, "run", random_sae())
    done = sae("eval", "run", "--data", "wide")
    assert done.status == 1
    assert done.err.endswith("expected rows of 8 dimensions, got 9; name another store with --data\n")
    assert done.out == ""


@pytest.mark.parametrize(("words", "told"), [
    (["nosuch"], "there are: run"), (["run", "--data", "nosuch"], "there are: rows"),
    (["run", "--device", "toaster"], "--device must be cpu, cuda, cuda:N or auto, got 'toaster'")])
def test_what_is_missing_is_one_sentence_and_status_1(sae: CommandLine, words: list[str], told: str) -> None:
    make_store(sae.home, "rows", some_rows())
    make_run(sae.home, "run", random_sae())
    done = sae("eval", *words)
    assert done.status == 1
    assert told in done.err
    assert len(done.err.splitlines()) == 1


def test_an_unknown_split_is_wrong_usage(sae: CommandLine) -> None:
    assert sae("eval", "--split", "half").status == 2


def test_a_run_named_twice_is_measured_once(sae: CommandLine) -> None:
    make_store(sae.home, "rows", some_rows())
    make_run(sae.home, "run", random_sae())
    make_run(sae.home, "other", random_sae(seed=1))
    assert [one["run"] for one in sae("eval", "run", "other", "run", "--json").json["runs"]] == ["run", "other"]


def test_an_unfinished_run_is_measured_at_its_last_checkpoint_and_said_to_be(sae: CommandLine) -> None:
    make_store(sae.home, "rows", some_rows())
    make_run(sae.home, "half", random_sae(), complete=False)
    assert "half is not finished" in sae("eval", "half").err


def test_figures_that_are_no_numbers_become_null(sae: CommandLine) -> None:
    make_store(sae.home, "rows", np.ones((3000, D), np.float32))
    make_run(sae.home, "run", random_sae())
    (found,) = sae("eval", "--json").json["runs"]
    assert found["fvu"] is None and found["explained_variance"] is None


def test_csv_holds_every_digit_of_the_json_the_best_run_first(sae: CommandLine, tmp_path: Path) -> None:
    make_store(sae.home, "rows", some_rows())
    make_run(sae.home, "random", random_sae())
    make_run(sae.home, "exact", SAE(torch.eye(D, F), torch.zeros(F), torch.eye(F, D), torch.zeros(D), TopK(k=D)))
    found = sae("eval", "random", "exact", "--csv", tmp_path / "new" / "x.csv", "--json").json["runs"]
    with (tmp_path / "new" / "x.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["run"] for line in lines] == ["exact", "random"]
    for line, run in zip(lines, reversed(found), strict=True):
        assert list(line) == KEYS
        assert {key: type(run[key])(value) for key, value in line.items()} == run


def test_a_csv_that_cannot_be_written_leaves_what_was_there(sae: CommandLine, tmp_path: Path) -> None:
    make_store(sae.home, "rows", np.ones((3000, D), np.float32))
    make_run(sae.home, "run", random_sae())
    assert sae("eval", "run", "--csv", tmp_path).status == 2  # a folder
    (tmp_path / "x.csv").write_text("old")
    (tmp_path / ".x.csv.partial").mkdir()
    done = sae("eval", "run", "--csv", tmp_path / "x.csv")
    assert (done.status, (tmp_path / "x.csv").read_text(), done.out) == (1, "old", "")
    (tmp_path / ".x.csv.partial").rmdir()
    assert sae("eval", "run", "--csv", tmp_path / "x.csv").status == 0
    with (tmp_path / "x.csv").open(newline="") as file:
        assert next(csv.DictReader(file))["fvu"] == ""  # rows that do not vary


def test_plot_draws_the_frontier_and_refuses_other_kinds_of_picture(sae: CommandLine, tmp_path: Path) -> None:
    make_store(sae.home, "rows", some_rows())
    make_run(sae.home, "run", random_sae())
    assert sae("eval", "run", "--plot", tmp_path / "frontier.png", "--json").json
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert "cannot draw" in sae("eval", "run", "--plot", tmp_path / "frontier.docx").err
    sae("eval", "run", "--plot", tmp_path / "new" / "folder" / "frontier.png")
    assert (tmp_path / "new" / "folder" / "frontier.png").exists()


@pytest.mark.parametrize("command", ["eval", "sparsity", "geometry"])
def test_a_picture_that_cannot_be_written_is_refused_before_the_work(sae: CommandLine, tmp_path: Path,
                                                                     command: str) -> None:
    (tmp_path / "file.png").touch()
    (tmp_path / "folder.png").mkdir()
    for picture, why in {"file.png/a.png": "Not a directory", "folder.png": "expected a file, got a folder"}.items():
        done = sae(command, "no-such-run", "--plot", tmp_path / picture)
        assert done.err == f"sae: cannot write {tmp_path / picture}: {why}; name another place\n"
    sae(command, "no-such-run", "--plot", tmp_path / "new" / "a.png")
    assert not (tmp_path / "new").exists()


def test_python_m_saecli_prints_one_json_document_and_nothing_else(tmp_path: Path) -> None:
    home = tmp_path / "home"
    make_store(home, "rows", some_rows())
    make_run(home, "run", random_sae())
    done = subprocess.run([sys.executable, "-W", "error", "-m", "saecli", "--home", home, "eval", "--json"],
                          capture_output=True, text=True, check=True)
    assert list(json.loads(done.stdout)) == ["runs"]
