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

EXTRACT = ["extract", "--model", "tiny-gemma2", "--rows", "30000", "--name", "s", "--shard-rows"]
ANEW = "stopped before the first shard was whole; nothing was saved, and the same command begins again"
ONWARD = "stopped; the same command goes on after the last whole shard"


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
    # Python itself ends by the signal, which a shell calls 130, where Ctrl-C came while a string was executed.
    assert process.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in said
    return said


def in_folder(folder: Path, pattern: str) -> Callable[[int], bool]:
    return lambda process: any(folder.glob(pattern))


@pytest.mark.slow
@pytest.mark.parametrize(("shard_rows", "pattern", "said"), [
    (2_000_000, "shards/.00000.h5.partial", ANEW), (100_000, "shards/00001.h5", ONWARD)])
def test_an_import_stopped_before_and_after_its_first_shard_says_so_and_ends_when_run_again(
        sae: CommandLine, tmp_path: Path, shard_rows: int, pattern: str, said: str):
    rows = np.tile(np.arange(16, dtype=np.float32), (2_000_000, 1))
    np.save(tmp_path / "s.npy", rows)
    words = ["import", tmp_path / "s.npy", "--shard-rows", shard_rows]
    folder = sae.home / "activations" / "s"
    assert stopped(sae.home, words, in_folder(folder, pattern)).splitlines()[-1] == said
    assert folder.exists() == (said == ONWARD)
    again = sae(*words, "--json")
    assert again.json["rows"] == len(rows)
    assert ("going on after" in again.err) == (said == ONWARD)


@pytest.mark.slow
@pytest.mark.parametrize(("shard_rows", "pattern", "said"), [
    (30_000, "store.json", ANEW), (30_000, "shards/.00000.h5.partial", ANEW), (500, "shards/00001.h5", ONWARD)])
def test_an_extraction_stopped_before_and_after_its_first_shard_says_so(
        sae: CommandLine, shard_rows: int, pattern: str, said: str):
    folder = sae.home / "activations" / "s"
    assert stopped(sae.home, [*EXTRACT, shard_rows], in_folder(folder, pattern)).splitlines()[-1] == said
    assert folder.exists() == (said == ONWARD)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not tell what a process has mapped")
@pytest.mark.parametrize("words", [["train", "--epochs", "100"], EXTRACT[:-1]], ids=["train", "extract"])
def test_a_command_stopped_while_it_imports_torch_says_that_nothing_was_changed(sae: CommandLine, words: list):
    make_store(sae.home, "rows", some_rows(1000))
    said = stopped(sae.home, words, lambda process: "libtorch" in Path(f"/proc/{process}/maps").read_text())
    assert said == "stopped before it began; nothing was changed\n"
    assert [path.name for path in sae.home.iterdir()] == ["activations"]
