"""Stores named by their folder, in the home and outside it."""

import json
from pathlib import Path

import pytest
from homes import CommandLine, make_store, some_rows

import saecli

QUICK = ("--d-sae", "24", "--epochs", "1", "--solver", "sgd")


def test_a_store_outside_the_home_is_trained_on_measured_on_and_found_again(sae: CommandLine, tmp_path: Path):
    make_store(tmp_path / "other", "rows", some_rows(300))
    folder = tmp_path / "other" / "activations" / "rows"
    assert sae("train", "--data", folder, *QUICK, "--name", "run").status == 0
    run = sae.home / "runs" / "run"
    assert json.loads((run / "run.json").read_text())["data"] == str(folder)
    assert sae("eval", "run", "--json").json["runs"][0]["rows"] > 0
    assert sae("train", "--config", run / "config.toml", "--name", "again").status == 0
    assert (run / "sae.safetensors").read_bytes() == (sae.home / "runs" / "again" / "sae.safetensors").read_bytes()
    assert saecli.evaluate("run", data=str(folder), home=sae.home)["rows"] > 0
    document = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(document | {"complete": False, "result": None}))
    assert sae("train", "--resume", "--name", "run").status == 0


def test_the_folder_of_a_store_in_the_home_is_its_name(sae: CommandLine, monkeypatch: pytest.MonkeyPatch):
    make_store(sae.home, "rows", some_rows(300))
    monkeypatch.chdir(sae.home)
    assert sae("train", "--data", "activations/rows", *QUICK, "--name", "run").status == 0
    assert json.loads((sae.home / "runs" / "run" / "run.json").read_text())["data"] == "rows"
    done = sae("train", "--data", "rows", "--data", "activations/rows", *QUICK)
    assert done.status == 2 and "--data names rows twice" in done.err


def test_a_name_in_the_home_comes_before_a_folder_here_and_a_folder_without_a_store_is_none(
        sae: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_store(sae.home, "rows", some_rows(300))
    make_store(tmp_path, "rows", some_rows(200))
    monkeypatch.chdir(tmp_path / "activations")
    assert sae("train", *QUICK, "--name", "run", "--data", "rows", "--json").json["rows_train"] > 200
    monkeypatch.chdir(tmp_path / "activations" / "rows")  # has a store.json, which a store's name must not find
    assert sae("train", *QUICK, "--name", "newest", "--json").json["rows_train"] > 200
    done = sae("train", "--data", tmp_path)
    assert done.status == 1 and f"there is no activation store named '{tmp_path}'" in done.err
