"""Files that appear whole, and what is no file."""

import json
import os
from pathlib import Path

import pytest

from saecli.base.files import (
    NotAFile,
    appearing_whole,
    as_named,
    check_place,
    partial_path,
    regular,
    to_json,
)


def test_only_a_regular_file_or_a_link_to_one_is_one(tmp_path: Path):
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    file.write_text("x")
    link.symlink_to(file)
    os.mkfifo(pipe)
    assert regular(file) == file and regular(link) == link
    with pytest.raises(NotAFile, match="expected a file, got a pipe"):
        regular(pipe)
    with pytest.raises(NotAFile, match="got a folder"):
        regular(tmp_path)
    with pytest.raises(NotAFile, match="got a device"):
        regular(Path("/dev/zero"))
    with pytest.raises(FileNotFoundError):
        regular(tmp_path / "nothing")


def test_a_pipe_under_the_hidden_name_is_not_written_to(tmp_path: Path):
    os.mkfifo(tmp_path / ".file.partial")
    with appearing_whole(tmp_path / "file") as temporary:
        temporary.write_text("whole")
    assert (tmp_path / "file").read_text() == "whole"


def test_a_place_is_tried_before_the_work_and_left_as_it_was(tmp_path: Path):
    (tmp_path / "there").write_text("kept")
    for path in (tmp_path / "new.png", tmp_path / "there"):
        check_place(path)
    assert [path.name for path in tmp_path.iterdir()] == ["there"] and (
        tmp_path / "there"
    ).read_text() == "kept"
    for path, refused in {
        tmp_path / "there" / "x.png": "Not a directory",
        tmp_path: "expected a file, got a folder",
        tmp_path / "a" / "new.png": "there is no folder",
        tmp_path / ("x" * 300): "File name too long",
        Path("/proc/new/x.png"): "there is no folder",
        Path("/dev/null"): "got a device",
    }.items():
        with pytest.raises(OSError, match=refused):
            check_place(path)


@pytest.mark.parametrize("name", ["file.png", "a b.tar.gz", ".hidden", "x.partial"])
def test_a_message_names_files_as_they_were_to_be_called(name: str):
    path = Path("/some/.config.d/folder") / name
    inner = partial_path(partial_path(path) / "ae.pt")
    for message in (
        "cannot use {}: Is a directory",
        "[Errno 2] No such file: '{}'",
        "file path: {}",
    ):
        assert as_named(message.format(inner)) == message.format(path / "ae.pt")
    assert as_named("a.partial of 0.5 and b.partial") == "a.partial of 0.5 and b.partial"


def test_json_holds_a_files_name_that_is_no_utf8_as_other_programs_read_it():
    name = os.fsdecode(b"\xffa\xc3\xa4")
    assert json.loads(to_json({"file": name, "rows": float("nan")})) == {
        "file": "\\udcffaä",
        "rows": None,
    }
