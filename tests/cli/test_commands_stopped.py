"""Ctrl-C ends a command with status 130 and one true sentence on what was kept; real processes, real signals."""

import signal
from pathlib import Path

import numpy as np
import pytest
from homes import CommandLine
from launching import signalled

from saecli.store.schema import read_meta


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shard_rows", "name", "nth", "saved"), [
    ("import", 1000, "00000.h5", 1, False), ("import", 1000, "00002.h5", 1, True),
    ("import", 1000, "store.json", 1, False),
    pytest.param("extract", 30_000, "00000.h5", 1, False, marks=pytest.mark.long),
    pytest.param("extract", 500, "00002.h5", 1, True, marks=pytest.mark.long)])
def test_a_stopped_command_says_what_is_saved_and_goes_on_from_there(
        sae: CommandLine, tmp_path: Path, command: str, shard_rows: int, name: str, nth: int, saved: bool):
    if command == "import":
        np.save(tmp_path / "s.npy", np.tile(np.arange(16, dtype=np.float32), (5000, 1)))
    words = {"import": [tmp_path / "s.npy"],
             "extract": ["--model", "tiny-gemma2", "--rows", "5000", "--name", "s"]}[command]
    words = [command, *words, "--shard-rows", shard_rows]
    process = signalled(sae.home, words, name, nth, signal.SIGINT)
    folder, (*_, last) = sae.home / "activations" / "s", process.said.splitlines()
    assert process.returncode == 130 and "Traceback" not in process.said
    rows = read_meta(folder).rows if folder.exists() else 0
    assert (rows > 0) == saved
    assert last == (f"stopped; {rows:,} rows are saved, and the same command goes on from there" if rows else
                    "stopped before anything was saved; the same command begins again")
    assert not rows or [(one["state"], one["rows"]) for one in sae("list", "--json").json["stores"]] == [
        ("unfinished", rows)]
    again = sae(*words, "--json")
    assert again.json["rows"] == 5000
    assert f"going on after {rows:,} rows" in again.err if rows else "going on" not in again.err
