"""Ctrl-C ends a command with status 130 and one true sentence on what was kept; real processes, real signals."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from homes import CommandLine, make_store, some_rows

from saecli.store.schema import read_meta

EXTRACT = ["extract", "--model", "tiny-gemma2", "--rows", "30000", "--name", "s", "--shard-rows"]
ANEW = "stopped before anything was saved; the same command begins again"


def stopped(home: Path, words: list, reached: Callable[[int], bool]) -> str:
    """Run a command, send it Ctrl-C once that is true of its process id, and return what it said."""
    process = subprocess.Popen(
        [sys.executable, "-m", "saecli", "--home", str(home), *map(str, words)], stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # a background job ignores it
    while not reached(process.pid):
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in said
    return said


def grown(path: Path, size: int) -> Callable[[int], bool]:
    """Whether a file is there, and of so many bytes."""
    return lambda process: path.exists() and path.stat().st_size >= size


def assert_told(said: str, folder: Path) -> int:
    """What was said of a store that was stopped is so; returns how many rows are saved."""
    if said.splitlines()[-1] == ANEW:
        assert not folder.exists()
        return 0
    rows = read_meta(folder).rows
    assert said.splitlines()[-1] == f"stopped; {rows:,} rows are saved, and the same command goes on from there"
    assert rows > 0
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(("shard_rows", "file", "size"), [
    (2_000_000, "shards/.00000.h5.partial", 0), (2_000_000, "shards/.00000.h5.partial", 30_000_000),
    (100_000, "shards/00001.h5", 1)])
def test_an_import_that_was_stopped_says_what_is_saved_and_goes_on_from_there(sae: CommandLine, tmp_path: Path,
                                                                            shard_rows: int, file: str, size: int):
    rows = np.tile(np.arange(16, dtype=np.float32), (2_000_000, 1))
    np.save(tmp_path / "s.npy", rows)
    words = ["import", tmp_path / "s.npy", "--shard-rows", shard_rows]
    folder = sae.home / "activations" / "s"
    saved = assert_told(stopped(sae.home, words, grown(folder / file, size)), folder)  # none, if in the midst of rows
    again = sae(*words, "--json")
    assert again.json["rows"] == len(rows)
    assert f"going on after {saved:,} rows" in again.err if saved else "going on" not in again.err


@pytest.mark.long
@pytest.mark.parametrize(("shard_rows", "file", "size"), [
    pytest.param(30_000, "store.json", 1, marks=pytest.mark.long), (30_000, "shards/.00000.h5.partial", 1_000_000),
    pytest.param(500, "shards/00001.h5", 1, marks=pytest.mark.long)])
def test_an_extraction_that_was_stopped_says_what_is_saved_and_goes_on_from_there(sae: CommandLine, shard_rows: int,
                                                                                file: str, size: int):
    folder, words = sae.home / "activations" / "s", [*EXTRACT, str(shard_rows)]
    saved = assert_told(stopped(sae.home, words, grown(folder / file, size)), folder)
    assert saved or shard_rows > 500
    again = sae(*words, "--json")
    assert again.json["rows"] == 30_000
    assert f"going on after {saved:,} rows" in again.err if saved else "going on" not in again.err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not tell what a process has mapped")
@pytest.mark.parametrize("words", [["train", "--epochs", "100"], EXTRACT[:-1]], ids=["train", "extract"])
def test_a_command_stopped_while_it_imports_torch_says_that_nothing_was_changed(sae: CommandLine, words: list):
    make_store(sae.home, "rows", some_rows(1000))
    said = stopped(sae.home, words, lambda process: "libtorch" in Path(f"/proc/{process}/maps").read_text())
    assert said == "stopped before it began; nothing was changed\n"
    assert [path.name for path in sae.home.iterdir()] == ["activations"]
