"""Finding the SAE that a user means."""

import json
from pathlib import Path

import pytest
import torch

from saecli.base.errors import FormatError, RunError
from saecli.base.home import Home
from saecli.sae.activations import Relu, activation_to_json
from saecli.sae.dictionary import SAE
from saecli.sae.formats import SavedSAE, save, save_native
from saecli.sae.library import Subject, find_subject


def small_sae() -> SAE:
    return SAE(torch.ones(3, 5), torch.zeros(5), torch.ones(5, 3), torch.zeros(3), Relu())


def make_run(home: Home, name: str, created: str, with_sae: bool = True, **further: object) -> Path:
    folder = home.runs.path / name
    folder.mkdir(parents=True)
    document = {"format_version": 1, "created": created, "complete": True, "data": "patches",
                "training": {"split_seed": 7, "fraction": 0.5}, "solver": {"name": "sgd"},
                "activation": activation_to_json(Relu()), "result": {}} | further
    (folder / "run.json").write_text(json.dumps(document))
    if with_sae:
        save_native(SavedSAE(small_sae()), folder)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def test_a_run_is_found_by_its_name_with_the_split_it_was_trained_on(home: Home) -> None:
    make_run(home, "first", "2026-01-01")
    make_run(home, "second", "2026-01-02")
    folder = home.runs.path / "first"
    assert find_subject(home, "first") == Subject("first", folder, "patches", 7, 0.5, True)


def test_without_a_name_the_newest_complete_run_is_meant(home: Home) -> None:
    make_run(home, "older", "2026-01-01")
    make_run(home, "newer", "2026-01-02")
    make_run(home, "unfinished", "2026-01-03", complete=False)
    assert find_subject(home, None).name == "newer"


def test_an_unfinished_run_with_a_checkpoint_is_found_and_known_as_unfinished(home: Home) -> None:
    make_run(home, "half", "2026-01-01", complete=False)
    assert not find_subject(home, "half").complete


def test_a_run_folder_elsewhere_keeps_its_split(home: Home, tmp_path: Path) -> None:
    folder = make_run(Home(tmp_path / "other"), "away", "2026-01-01")
    assert find_subject(home, str(folder)) == Subject(str(folder), folder, "patches", 7, 0.5, True)


def test_a_folder_in_another_librarys_format_knows_no_store(home: Home, tmp_path: Path) -> None:
    save(SavedSAE(small_sae()), "saelens", tmp_path / "theirs")
    assert find_subject(home, str(tmp_path / "theirs")) == Subject(str(tmp_path / "theirs"), tmp_path / "theirs")


def test_a_run_of_the_home_goes_before_a_folder_of_that_name(
        home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(home, "both", "2026-01-01")
    save(SavedSAE(small_sae()), "saelens", tmp_path / "both")
    monkeypatch.chdir(tmp_path)
    assert find_subject(home, "both").folder == home.runs.path / "both"


def test_an_unknown_name_is_answered_with_the_runs_there_are(home: Home) -> None:
    with pytest.raises(RunError, match="holds none, make one with `sae train`"):
        find_subject(home, "nosuch")
    make_run(home, "only", "2026-01-01")
    with pytest.raises(RunError, match="there are: only"):
        find_subject(home, "nosuch")


def test_a_home_without_runs_says_how_to_make_one(home: Home) -> None:
    with pytest.raises(RunError, match="make one with `sae train`"):
        find_subject(home, None)


def test_a_run_before_its_first_checkpoint_says_how_to_go_on(home: Home) -> None:
    make_run(home, "begun", "2026-01-01", with_sae=False, complete=False)
    with pytest.raises(RunError, match=r"holds no SAE yet.*sae train --resume --name begun"):
        find_subject(home, "begun")


def test_a_folder_without_an_sae_is_told_what_would_be_one(home: Home, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no SAE found in"):
        find_subject(home, str(tmp_path))


def test_a_file_is_told_from_its_folder_before_the_hub_is_asked_for_it(home: Home, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/first").mkdir(parents=True)
    Path("runs/first/sae.safetensors").touch()
    with pytest.raises(RunError, match=r"is a file: expected .* name the file's folder, runs/first"):
        find_subject(home, "runs/first/sae.safetensors")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"format_version": 99, "complete": true, "data": null, '
                                                      '"training": {"split_seed": 0, "fraction": 1.0}}'])
def test_a_run_json_of_another_kind_is_named(home: Home, tmp_path: Path, content: str) -> None:
    folder = make_run(Home(tmp_path / "other"), "odd", "2026-01-01")
    (folder / "run.json").write_text(content)
    with pytest.raises(RunError, match=r"run\.json"):
        find_subject(home, str(folder))
