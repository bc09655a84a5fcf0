"""Commands on stores: rows of high norm, stores named by their folder, processes at once."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from homes import CommandLine, change_json, make_store, some_rows
from storing import collect

import saecli
from saecli.store.reader import ActivationStore

QUICK = ("--d-sae", "24", "--epochs", "1", "--solver", "sgd")


def test_import_drops_outliers_and_says_so_everywhere(sae: CommandLine, tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3000, 16)).astype(np.float32)
    rows[rng.choice(3000, 40, replace=False)] *= 50
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    high = norms > 10 * np.median(norms)
    np.save(tmp_path / "a.npy", rows)
    words = ("import", tmp_path / "a.npy", "--max-norm-multiple", "10")
    document = sae(*words, "--json").json
    assert (document["rows"], document["dropped"]) == (2960, {"high_norm": 40})
    assert document["norms"]["max"] == pytest.approx(norms[~high].max())
    (listed,) = sae("list", "--json").json["stores"]
    assert (listed["norms"], listed["dropped"]) == (document["norms"], document["dropped"])
    median = f"{document['norms']['median']:.4g}"
    shown = sae("list").out
    assert "1.3%" in shown and median in shown
    done = sae(*words)
    mean, most = document["norms"]["mean"], document["norms"]["max"]
    assert f"median {median}, mean {mean:.4g}, max {most:.4g}" in done.out
    assert "stored already" in done.out
    assert "dropped: high_norm" in done.out and "40 (1.3%)" in done.out
    store = ActivationStore.open(sae.home / "activations" / "a")
    np.testing.assert_array_equal(collect(store.split("all").sequential(64)), rows[~high])
    for other in ((), ("--max-norm-multiple", "11")):
        assert "made from something else" in sae(*words[:2], *other).err


def test_a_store_outside_the_home_is_trained_on_and_found_again(sae: CommandLine, tmp_path: Path):
    make_store(tmp_path / "other", "rows", some_rows(300))
    folder = tmp_path / "other" / "activations" / "rows"
    assert sae("train", "--data", folder, *QUICK, "--name", "run").status == 0
    run = sae.home / "runs" / "run"
    assert json.loads((run / "run.json").read_text())["data"] == str(folder)
    assert sae("eval", "run", "--json").json["runs"][0]["rows"] > 0
    assert sae("train", "--config", run / "config.toml", "--name", "again").status == 0
    weights = (sae.home / "runs" / name / "sae.safetensors" for name in ("run", "again"))
    assert len({path.read_bytes() for path in weights}) == 1
    assert saecli.evaluate("run", data=str(folder), home=sae.home)["rows"] > 0
    change_json(run / "run.json", complete=False, result=None)
    assert sae("train", "--resume", "--name", "run").status == 0


def test_the_folder_of_a_store_in_the_home_is_its_name(
    sae: CommandLine, monkeypatch: pytest.MonkeyPatch
):
    make_store(sae.home, "rows", some_rows(300))
    monkeypatch.chdir(sae.home)
    assert sae("train", "--data", "activations/rows", *QUICK, "--name", "run").status == 0
    assert json.loads((sae.home / "runs" / "run" / "run.json").read_text())["data"] == "rows"
    assert sae("train", "--data", "rows", "--data", "activations/rows", *QUICK).status == 2


def test_a_name_in_the_home_comes_before_a_folder_here(
    sae: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_store(sae.home, "rows", some_rows(300))
    make_store(tmp_path, "rows", some_rows(200))
    monkeypatch.chdir(tmp_path / "activations")
    named = sae("train", *QUICK, "--name", "run", "--data", "rows", "--json")
    assert named.json["rows_train"] > 200
    monkeypatch.chdir("rows")  # has a store.json, which a store's name must not find
    newest = sae("train", *QUICK, "--name", "newest", "--json")
    assert newest.json["rows_train"] > 200
    assert sae("train", "--data", tmp_path).status == 1


def started(sae: CommandLine, *words: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "saecli", "--home", sae.home, *words],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.long
def test_trainers_at_once_get_a_run_each_and_end_alike(sae: CommandLine):
    assert sae("import", "digits").status == 0
    words = ["train", "--epochs", "3", "--d-sae", "16", "--json"]
    alone = sae(*words, "--name", "alone").json
    processes = [started(sae, *words) for _ in range(3)]
    documents = []
    for process in processes:
        out, err = process.communicate()
        assert process.returncode == 0, err
        documents.append(json.loads(out))
    assert {run["run"] for run in documents} == {f"pam-sgd-relu-{number}" for number in (1, 2, 3)}
    assert all(run["final"] == alone["final"] for run in documents)
