"""`sae eval` against numpy in float64 over the same rows."""

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from homes import CommandLine, D, F, make_run, make_store, random_sae, some_rows
from hypothesis import given
from hypothesis import strategies as st

from saecli.measure.evaluate import unbeaten
from saecli.sae.activations import JumpRelu, Relu, TopK
from saecli.sae.dictionary import SAE
from saecli.sae.formats import SavedSAE, save
from saecli.store.split import is_test

KEYS = ["run", "data", "split", "rows", "mse", "fvu", "explained_variance", "cosine", "l0", "l1", "silent_fraction",
        "dead_fraction", "unbeaten"]


def relu_oracle(sae: SAE, rows: np.ndarray) -> dict[str, float]:
    W_enc, b_enc, W_dec, b_dec = (t.double().numpy() for t in (sae.W_enc, sae.b_enc, sae.W_dec, sae.b_dec))
    x = rows.astype(np.float64)
    z = np.maximum(x @ W_enc + b_enc, 0)
    x_hat = z @ W_dec + b_dec
    error = ((x_hat - x) ** 2).sum(1).mean()
    fvu = error / x.var(0).sum()
    cosine = ((x * x_hat).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(x_hat, axis=1)).mean()
    return {"rows": len(x), "mse": error / D, "fvu": fvu, "explained_variance": 1 - fvu, "cosine": cosine,
            "l0": (z > 0).sum(1).mean(), "l1": z.sum(1).mean(), "silent_fraction": (~(z > 0).any(0)).mean()}


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


def test_dead_latents_are_those_of_the_record_whichever_rows_are_measured(sae: CommandLine, tmp_path: Path) -> None:
    make_store(sae.home, "rows", some_rows())
    run = sae("train", "--act", "topk", "--k", "1", "--d-sae", "64", "--epochs", "2", "--solver", "sgd", "--lr",
              "0.1", "--keep-every", "1", "--json").json
    dead = run["final"]["dead_fraction"]
    train, test = (sae("eval", run["run"], "--split", split, "--json").json["runs"][0] for split in ("train", "test"))
    assert 0 < train["dead_fraction"] == test["dead_fraction"] == dead == train["silent_fraction"]
    assert test["silent_fraction"] >= dead
    assert sae("sparsity", run["run"], "--json").json["runs"][0]["dead_fraction"] == dead
    save(SavedSAE(random_sae()), "sparsify", tmp_path / "theirs")
    for other in (tmp_path / "theirs", Path(run["path"]) / "kept" / "epoch-1"):
        assert sae("eval", other, "--json").json["runs"][0]["dead_fraction"] is None
    assert " - │" in sae("eval", tmp_path / "theirs", "--csv", tmp_path / "x.csv").out
    assert (tmp_path / "x.csv").read_text().endswith(",,\n")


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


def exact_sae(k: int = D) -> SAE:
    return SAE(torch.eye(D, F), torch.zeros(F), torch.eye(F, D), torch.zeros(D), TopK(k=k))


def test_several_runs_make_one_table_the_sparsest_first_and_unbeaten_ones_marked(sae: CommandLine) -> None:
    make_store(sae.home, "rows", some_rows())
    make_run(sae.home, "random", random_sae())  # some 11 latents fire
    make_run(sae.home, "sparse", exact_sae(4))
    make_run(sae.home, "exact", exact_sae())
    out = sae("eval", "random", "exact", "sparse").out
    assert [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")] == [
        "sparse *", "exact *", "random"]
    document = sae("eval", "random", "exact", "sparse", "--json").json
    assert [(run["run"], run["unbeaten"]) for run in document["runs"]] == [
        ("random", False), ("exact", True), ("sparse", True)]
    assert document["unbeaten_means"] == (
        "unbeaten (*): every other run on the same rows with at most 1.05 times its l0 is worse in fvu")
    assert document["unbeaten_means"] in " ".join(out.split())


def test_a_run_alone_on_its_rows_is_compared_with_none(sae: CommandLine) -> None:
    make_store(sae.home, "rows", some_rows())
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_run(sae.home, name, random_sae(seed=ord(name)), split_seed=seed)
    assert "*" not in sae("eval", "a").out + sae("eval", "a", "c").out
    assert [run["unbeaten"] for run in sae("eval", "a", "c", "--json").json["runs"]] == [None, None]
    one, other, alone = (run["unbeaten"] for run in sae("eval", "a", "b", "c", "--json").json["runs"])
    assert alone is None and {one, other} <= {True, False} and (one or other)


def of(l0: float, *errors: float) -> dict[str, float]:
    return {"l0": l0, **dict(zip(("fvu", "ce_recovered", "kl"), errors, strict=False))}


@pytest.mark.parametrize(("runs", "marks"), [
    ([of(16, 0.2), of(65, 0.1)], [True, True]),  # fewer latents, or less error
    ([of(16, 0.2), of(65, 0.3)], [True, False]),
    ([of(15.9, 0.2), of(16, 0.1)], [False, True]),  # of like L0
    ([of(15, 0.2), of(15.76, 0.1)], [True, True]),
    ([of(16, 0.2), of(16, 0.2)], [True, True]),
    ([of(16, 0.1, 0.8, 0.5), of(16, 0.2, 0.9, 0.4)], [True, True]),  # better in one and worse in another
    ([of(16, 0.1, 0.8, 0.5), of(16, 0.2, 0.8, 0.5)], [True, False]),
    ([of(16, 0.1, 0.9, 0.5), of(16, 0.1, 0.8, 0.5)], [True, False]),
    ([of(16, 0.1), of(16, math.nan), of(16, math.inf)], [True, False, False]),
    ([of(1, math.nan), of(16, 0.1)], [False, True]),
    ([of(0, 0.9), of(0, 0.8)], [False, True]),
    ([of(100, 0.1), of(104, 0.09), of(108, 0.08), of(112, 0.07)], [False, False, False, True]),
])
def test_a_run_is_beaten_by_one_of_no_larger_l0_that_is_no_worse_and_somewhere_better(
        runs: list[dict[str, float]], marks: list[bool]) -> None:
    assert unbeaten(runs) == marks
    assert unbeaten(runs[::-1]) == marks[::-1]


@given(st.lists(st.tuples(st.floats(0, 100), *[st.sampled_from([0.1, 0.2, 0.3])] * 3), min_size=1, max_size=12))
def test_of_runs_with_finite_errors_at_least_one_is_unbeaten(runs: list[tuple[float, ...]]) -> None:
    assert any(unbeaten([of(*run) for run in runs]))


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
    for key in ("rows", "mse", "fvu", "cosine", "l0", "silent_fraction"):
        assert theirs[key] == pytest.approx(native[key], rel=1e-4)


def test_a_store_of_another_width_is_refused_with_both_widths(sae: CommandLine) -> None:
    make_store(sae.home, "rows", some_rows())
    make_store(sae.home, "wide", some_rows(d_in=9))
    make_run(sae.home, "run", random_sae())
    done = sae("eval", "run", "--data", "wide")
    assert done.status == 2
    assert done.err.endswith("expected rows of 8 dimensions, got 9; name another store with --data\n")
    assert done.out == ""


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
    make_run(sae.home, "other", random_sae(seed=1))
    assert [run["unbeaten"] for run in sae("eval", "run", "other", "--json").json["runs"]] == [False, False]


def test_csv_holds_every_digit_of_the_json_the_sparsest_run_first(sae: CommandLine, tmp_path: Path) -> None:
    make_store(sae.home, "rows", some_rows())
    make_run(sae.home, "random", random_sae())
    make_run(sae.home, "exact", exact_sae())
    found = sae("eval", "random", "exact", "--csv", tmp_path / "x.csv", "--json").json["runs"]
    with (tmp_path / "x.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["run"] for line in lines] == ["exact", "random"]
    for line, run in zip(lines, reversed(found), strict=True):
        assert list(line) == KEYS
        assert line.pop("unbeaten") == str(run.pop("unbeaten"))
        assert {key: type(run[key])(value) if value else None for key, value in line.items()} == run


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
    assert "there is no folder" in sae("eval", "run", "--plot", tmp_path / "new" / "frontier.png").err


@pytest.mark.parametrize("command", ["eval", "sparsity", "geometry"])
def test_a_picture_that_cannot_be_written_is_refused_before_the_work(sae: CommandLine, tmp_path: Path,
                                                                     command: str) -> None:
    (tmp_path / "file.png").touch()
    (tmp_path / "folder.png").mkdir()
    for picture, why in {"file.png/a.png": "Not a directory", "folder.png": "expected a file, got a folder"}.items():
        done = sae(command, "no-such-run", "--plot", tmp_path / picture)
        assert done.err == f"sae: cannot write {tmp_path / picture}: {why}; name another path\n"
    sae(command, "no-such-run", "--plot", tmp_path / "new" / "a.png")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_python_m_saecli_prints_one_json_document_and_nothing_else(tmp_path: Path) -> None:
    home = tmp_path / "home"
    make_store(home, "rows", some_rows())
    make_run(home, "run", random_sae())
    done = subprocess.run([sys.executable, "-W", "error", "-m", "saecli", "--home", home, "eval", "--json"],
                          capture_output=True, text=True, check=True)
    assert list(json.loads(done.stdout)) == ["runs", "unbeaten_means"]
