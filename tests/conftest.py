"""Fixtures that many tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Tests run side by side: threads of each that wait for cores would take longer than one. Before torch is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

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
