"""Fixtures that many tests share."""

from pathlib import Path

import pytest
from homes import CommandLine


@pytest.fixture
def sae(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """The command line, run in this process, with a home of the test's own."""
    return CommandLine(tmp_path / "home", monkeypatch, capsys)
