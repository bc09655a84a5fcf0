"""Finding the SAE that a user means."""

from pathlib import Path

import pytest
from homes import make_run, random_sae

from saecli.base.errors import FormatError, RunError
from saecli.base.home import Home
from saecli.sae.formats import SavedSAE, save
from saecli.sae.library import Subject, find_subject


def run_in(home: Home, name: str, created: str = "2026-01-01", complete: bool = True) -> Path:
    return make_run(home.path, name, random_sae(), "patches", 7, 0.5, created, complete)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def test_a_run_is_found_by_its_name_or_folder_with_its_split(home: Home, tmp_path: Path) -> None:
    for where, name in ((home, "first"), (home, "second"), (Home(tmp_path / "other"), "away")):
        folder = run_in(where, name)
        text = name if where is home else str(folder)
        assert find_subject(home, text) == Subject(text, folder, "patches", 7, 0.5, True)


def test_a_folder_in_another_librarys_format_knows_no_store_and_a_run_goes_first(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(SavedSAE(random_sae()), "saelens", tmp_path / "both")
    path = tmp_path / "both"
    assert find_subject(home, str(path)) == Subject(str(path), path)
    run_in(home, "both")
    monkeypatch.chdir(tmp_path)
    assert find_subject(home, "both").folder == home.runs.path / "both"


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("nosuch", RunError, "there are: only"),
        ("begun", RunError, r"holds no SAE yet.*sae train --resume --name begun"),
        (".", FormatError, "no SAE found in"),
        ("runs/first/sae.safetensors", RunError, "is a file: .* the file's folder, runs/first"),
    ],
)
def test_what_names_no_sae_is_refused(
    home: Home,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    error: type[Exception],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for missing in (None, "nosuch"):
        with pytest.raises(RunError, match="make one with `sae train`"):
            find_subject(home, missing)
    run_in(home, "only")
    (run_in(home, "begun", complete=False) / "sae.safetensors").unlink()
    Path("runs/first").mkdir(parents=True)
    Path("runs/first/sae.safetensors").touch()
    with pytest.raises(error, match=said):
        find_subject(home, name)
