"""Fixtures that many tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from homes import CommandLine
from store_producer import Producer


@pytest.fixture
def sae(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """The command line, run in this process, with a home of the test's own."""
    return CommandLine(tmp_path / "home", monkeypatch, capsys)


@pytest.fixture(scope="module")
def produce() -> Iterator[Producer]:
    """Writes the store of `store_producer` in processes of their own."""
    producer = Producer()
    yield producer
    producer.close()
