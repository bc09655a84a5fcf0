"""Processes at once: one writer of a store, any number of readers."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from homes import CommandLine
from storing import collect

from saecli.store.reader import ActivationStore


def started(sae: CommandLine, *words: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "saecli", "--home", sae.home, *words], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.long
def test_trainers_that_begin_at_once_get_a_run_each_and_end_alike(sae: CommandLine):
    assert sae("import", "digits").status == 0
    words = ["train", "--epochs", "3", "--d-sae", "16", "--json"]
    alone = sae(*words, "--name", "alone").json
    processes = [started(sae, *words) for _ in range(3)]
    found = []
    for process in processes:
        out, err = process.communicate()
        assert process.returncode == 0, err
        found.append(json.loads(out))
    assert {run["run"] for run in found} == {f"pam-sgd-relu-{number}" for number in (1, 2, 3)}
    assert all(run["final"] == alone["final"] for run in found)


@pytest.mark.long
def test_a_second_extraction_is_refused_and_readers_see_whole_shards_that_stay(sae: CommandLine, tmp_path: Path):
    words = ["extract", "--model", "tiny-gemma2", "--rows", "40000", "--shard-rows", "500", "--name", "x"]
    path = sae.home / "activations" / "x"
    processes, seen = [started(sae, *words) for _ in range(2)], []
    while any(process.poll() is None for process in processes):
        if (path / "store.json").exists() and (store := ActivationStore.open(path)).rows:
            seen.append(collect(store.split("all").sequential(256)))
        time.sleep(0.01)
    refused = [process for process in processes if process.returncode]
    assert [process.returncode for process in refused] == [1]
    assert "another process is writing it; wait for that one, or choose another --name" in refused[0].communicate()[1]
    next(process for process in processes if not process.returncode).communicate()
    whole = collect(ActivationStore.open(path).split("all").sequential(256))
    assert len(whole) == 40000
    assert len({len(rows) for rows in seen}) > 3
    for rows in seen:
        assert len(rows) % 500 == 0
        np.testing.assert_array_equal(rows, whole[: len(rows)])
