"""Files and folders that appear whole, and where they can; shelves: what is newest, what is found."""

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from saecli.base.errors import ConfigError, RunError
from saecli.base.files import (
    appearing_whole,
    demand_place,
    folder_appearing_whole,
    lock_folder,
    make_folder,
)
from saecli.base.home import Home, checked_name


def test_two_writers_of_a_file_leave_each_other_alone(tmp_path: Path):
    path = tmp_path / "file"
    with appearing_whole(path) as first:
        first.write_text("first")
        with appearing_whole(path) as second:
            second.write_text("se")
            with pytest.raises(OSError, match="no room"), appearing_whole(path) as third:
                third.write_text("half")
                raise OSError("no room")
            assert first.read_text() == "first"
            assert not path.exists()
            second.write_text("second, longer")
        assert path.read_text() == "second, longer"
    assert path.read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_of_two_writers_of_a_folder_the_first_is_kept_whole(tmp_path: Path):
    folder = tmp_path / "pages"
    with pytest.raises(OSError, match="not empty"), folder_appearing_whole(folder) as second:
        (second / "index.html").write_text("second")
        with folder_appearing_whole(folder) as first:
            (first / "index.html").write_text("first")
    assert (folder / "index.html").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["pages"]


def test_a_folder_whose_replacement_fails_stays(tmp_path: Path, monkeypatch):
    folder, replace = tmp_path / "pages", Path.replace
    folder.mkdir()
    (folder / "index.html").write_text("old")

    def refused(path: Path, target: Path) -> Path:
        if target == folder and (path / "new.html").exists():
            raise OSError("refused")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refused)
    with pytest.raises(OSError, match="refused"), folder_appearing_whole(folder, True) as made:
        (made / "new.html").write_text("new")
    assert (folder / "index.html").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["pages"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_a_file_has_the_mode_that_the_umask_leaves_and_the_umask_stays(tmp_path: Path, mask: int):
    before = os.umask(mask)
    try:
        with appearing_whole(tmp_path / "file") as temporary:
            temporary.unlink()  # as some writers do
            os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o600))
    finally:
        assert os.umask(before) == mask
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~mask


def test_locking_a_folder_removes_what_a_killed_owner_left_and_nothing_of_others(tmp_path: Path):
    (tmp_path / ".state.safetensors.0123abcd.partial").write_text("half")
    (tmp_path / "kept.partial").touch()
    (tmp_path / ".pages.0123abcd.partial").mkdir()  # a report that may be under way
    with appearing_whole(tmp_path / "labels.json") as labels:  # of a writer without the lock
        labels.write_text("[]")
        os.close(lock_folder(tmp_path, ["state.safetensors", "run.json"]))
        os.close(lock_folder(tmp_path))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {".lock", "kept.partial", ".pages.0123abcd.partial", "labels.json"}


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.EACCES, errno.ENOTSUP])
def test_no_folder_needs_to_be_flushed_for_files_and_folders(tmp_path, monkeypatch, number):
    fsync = os.fsync

    def of_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    make_folder(tmp_path / "a" / "b")
    with appearing_whole(tmp_path / "a" / "file") as temporary:
        temporary.write_text("x")
    with folder_appearing_whole(tmp_path / "pages") as made:
        (made / "index.html").touch()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "pages"}
    monkeypatch.setattr(os, "fsync", lambda _: os.read(-1, 1))  # files must be flushed
    with pytest.raises(OSError, match="Bad file"), appearing_whole(tmp_path / "file"):
        pass


def test_a_folder_stands_though_what_it_replaced_cannot_be_removed(tmp_path: Path, monkeypatch):
    folder, unlink = tmp_path / "pages", os.unlink
    folder.mkdir()
    (folder / ".nfs0001").touch()

    def busy(path, *arguments, **more) -> None:
        if ".nfs" in str(path):
            raise OSError(errno.EBUSY, "in use")
        unlink(path, *arguments, **more)

    monkeypatch.setattr(os, "unlink", busy)
    with folder_appearing_whole(folder, True) as made:
        (made / "new.html").write_text("new")
    assert [path.name for path in folder.iterdir()] == ["new.html"]


def test_a_place_is_tried_before_the_work_and_left_as_it_was(tmp_path: Path):
    (tmp_path / "there").write_text("kept")
    for path in (tmp_path / "new.png", tmp_path / "there"):
        demand_place(path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["kept"]
    for path, refused in {
        tmp_path / "there" / "x.png": "there is no folder",
        tmp_path: "expected a file",
        tmp_path / "a" / "new.png": "there is no folder",
        tmp_path / ("x" * 300): "File name too long",
        Path("/proc/new/x.png"): "there is no folder",
        Path("/dev/null"): "expected a file",
    }.items():
        with pytest.raises(ConfigError, match=refused):
            demand_place(path)


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
    with pytest.raises(RunError, match=r"cannot read .*worn.run\.json: .*; restore it, or rem"):
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
