"""Files that appear whole, and what is no file."""

import os
from pathlib import Path

import pytest

from saecli.files import NotAFile, appearing_whole, regular


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
