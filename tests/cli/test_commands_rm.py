"""`sae rm`: what it shows, asks, removes and leaves alone."""

import io
from pathlib import Path

import pytest
from homes import CommandLine, make_run, make_store, random_sae, some_rows

from saecli.base.files import lock_folder


@pytest.fixture
def filled(sae: CommandLine) -> CommandLine:
    for name in ("rows", "both"):
        make_store(sae.home, name, some_rows(300))
    for name in ("first", "both"):
        make_run(sae.home, name, random_sae(), data="rows")
    return sae


def left(home: Path) -> set[str]:
    return {str(path.relative_to(home)) for path in home.glob("*/*")}


ALL = {"activations/rows", "activations/both", "runs/first", "runs/both"}


def test_what_is_removed_is_shown_and_asked_for_first(filled: CommandLine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    done = filled("rm", "rows")
    assert "store rows: " in done.err and "trained on it: first, both" in done.err and "remove 1 folder?" in done.err
    assert (done.status, done.out, "nothing was removed" in done.err, left(filled.home)) == (0, "", True, ALL)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    done = filled("rm", "rows", "first")
    assert (done.status, left(filled.home)) == (0, {"activations/both", "runs/both"})
    assert "remove 2 folders?" in done.err and done.out.startswith("removed 2 folders, ")


def test_nobody_is_asked_with_yes_and_the_kind_tells_two_of_a_name_apart(filled: CommandLine):
    done = filled("rm", "both", "--kind", "run", "--yes", "--json")
    assert [(one["kind"], one["name"]) for one in done.json["removed"]] == [("run", "both")]
    assert done.json["bytes"] == done.json["removed"][0]["bytes"] > 1000
    assert left(filled.home) == ALL - {"runs/both"}
    assert filled("rm", "both", "-y").status == 0 and left(filled.home) == {"activations/rows", "runs/first"}


def test_what_is_being_written_stays(filled: CommandLine):
    lock_folder(filled.home / "runs" / "first")  # held until the process ends
    done = filled("rm", "first", "--yes")
    assert done.status == 1 and "another process is writing it" in done.err and left(filled.home) == ALL
    done = filled("rm", "rows", "--yes")
    assert done.status == 1 and "or training on it" in done.err and left(filled.home) == ALL


def test_an_unreadable_folder_and_a_link_are_removed_by_name(filled: CommandLine, tmp_path: Path):
    (filled.home / "runs" / "first" / "run.json").unlink()
    (filled.home / "activations" / "linked").symlink_to(filled.home / "activations" / "rows")
    assert filled("rm", "first", "linked", "--yes").status == 0
    assert left(filled.home) == ALL - {"runs/first"}
