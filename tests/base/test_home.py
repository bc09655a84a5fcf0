"""Shelves: what is newest, what is found, and how damaged markers are passed over."""

import json
from pathlib import Path

import pytest

from saecli.base.errors import ConfigError, RunError
from saecli.base.home import Home, checked_name

DAMAGED = ["", "[]", "\x00"]


def shelf_of(tmp_path, **markers):
    for name, marker in markers.items():
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(marker if isinstance(marker, str) else json.dumps(marker))
    return Home(tmp_path).runs


def test_the_newest_complete_entry_is_found_first_and_then_the_newest(tmp_path):
    old = {"created": "2026-01-01", "complete": True}
    shelf = shelf_of(tmp_path, old=old, new={"created": "2026-01-02", "complete": False})
    assert [*shelf.markers()] == ["new", "old"]
    assert shelf.find(None).name == "old"
    (tmp_path / "runs" / "old" / "run.json").write_text(json.dumps(old | {"complete": False}))
    assert shelf.find(None).name == "new"
    with pytest.raises(RunError, match=r"no run named 'x'; `sae list` shows every run"):
        shelf.find("x")


def test_a_misspelt_name_is_answered_with_the_nearest(tmp_path):
    shelf = shelf_of(tmp_path, topk={"created": "2026", "complete": True})
    with pytest.raises(RunError, match=r"no run named 'tokp'; did you mean topk\?$"):
        shelf.find("tokp")


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_marker_is_passed_over_unless_it_is_asked_for(tmp_path, damaged):
    shelf = shelf_of(tmp_path, worn=damaged, good={"created": "2026-01-01", "complete": False})
    assert [*shelf.markers()] == ["good", "worn"]
    assert shelf.find(None).name == shelf.find("good").name == "good"
    with pytest.raises(
        RunError, match=r"cannot read .*worn.run\.json: .*; restore it, or remove the folder"
    ):
        shelf.find("worn")
    (tmp_path / "runs" / "good" / "run.json").unlink()
    with pytest.raises(RunError, match="remove the folder to go on without it"):
        shelf.find(None)


def test_a_name_is_looked_up_without_reading_the_others(tmp_path, monkeypatch):
    whole = {"created": "2026", "complete": True}
    shelf = shelf_of(tmp_path, a=whole, b=whole)
    monkeypatch.setattr(Path, "glob", None)
    assert "a" in shelf and shelf.find("b").name == "b"
    absent = [None, "", "c", ".a", "a/../a", "../runs/a", str(tmp_path / "runs" / "a"), "x" * 999]
    assert not any(name in shelf for name in [*absent, "a\0"])


def test_a_folder_that_a_killed_writer_left_is_no_entry(tmp_path):
    whole = {"created": "2026", "complete": True}
    shelf = shelf_of(tmp_path, **{"good": whole, ".new.a1b2.partial": whole})
    assert [*shelf.markers()] == ["good"]


@pytest.mark.parametrize("created", [5, None, [], {}])
def test_a_date_that_is_no_text_is_the_oldest(tmp_path, created):
    odd, good = ({"complete": True, "created": each} for each in (created, "2026"))
    assert [*shelf_of(tmp_path, odd=odd, good=good).markers()] == ["good", "odd"]


@pytest.mark.parametrize("name", ["a", "-", "ä日😀", "a b", "a$b_", "x" * 200, "日" * 66])
def test_a_printable_name_is_taken(name):
    assert checked_name(name) == name


REFUSED = ["", ".", "..", ".a", "a/b", "a\nb", "a\x1b[1m", "a\u202eb", "a\udcff", "a\0", "x" * 201]


@pytest.mark.parametrize("name", [*REFUSED, "\u65e5" * 67])
def test_any_other_name_is_refused_and_shown_escaped(name):
    with pytest.raises(ConfigError, match=r"^--name must be a plain folder name, .*, got ") as told:
        checked_name(name)
    assert str(told.value).isprintable()
