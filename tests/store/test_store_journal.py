"""The journal of an unfinished store: one line per shard, whatever was written of the last."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from storing import make_meta, make_store, memory_folder, stored_contents

from saecli.base.errors import StoreError
from saecli.store.reader import ActivationStore
from saecli.store.writer import StoreWriter

ROWS = np.random.default_rng(0).standard_normal((250, 4)).astype(np.float32)
ROWS[[3, 120, 249]] = np.nan


def write(path, until: int = len(ROWS), shard_rows: int = 20) -> None:
    """Append the rows up to one, in blocks of 13, to a new or an unfinished store."""
    with StoreWriter.open(path, make_meta(4, shard_rows=shard_rows)) as writer:
        for start in range(writer.cursor["row"] if writer.cursor else 0, until, 13):
            writer.append(ROWS[start : start + 13], {}, {"row": start})
        if until == len(ROWS):
            writer.finish()


@pytest.fixture
def in_memory() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


def test_a_journal_cut_anywhere_gives_whole_shards_and_resumes_to_the_same_store(in_memory):
    write(in_memory / "whole")
    write(in_memory / "half", until=78)
    journal = (in_memory / "half" / "shards.jsonl").read_bytes()
    ends = [at for at, byte in enumerate(journal, 1) if byte == ord("\n")]
    assert len(ends) == 3
    kept = ROWS[np.isfinite(ROWS).all(axis=1)]
    for cut in (0, 1, ends[0] - 1, ends[0], ends[0] + 1, ends[1] + 200, ends[2] - 1, ends[2]):
        for tail in (b"", b"\0" * 30, b"\0" * 30 + b"}\n"):  # pages that never reached the disk
            path = in_memory / "cut"
            shutil.copytree(in_memory / "half", path)
            (path / "shards.jsonl").write_bytes(journal[:cut] + tail)
            contents = stored_contents(path)
            assert len(contents["meta"]["shards"]) == sum(cut >= end for end in ends)
            np.testing.assert_array_equal(contents["rows"], kept[: len(contents["rows"])])
            write(path)
            assert stored_contents(path)["meta"] == stored_contents(in_memory / "whole")["meta"]
            assert not (path / "shards.jsonl").exists()
            shutil.rmtree(path)


def test_what_a_shard_writes_does_not_grow_with_their_number(in_memory):
    write(in_memory / "s", until=234, shard_rows=2)
    lines = (in_memory / "s" / "shards.jsonl").read_text().splitlines()
    assert len(lines) == 116
    assert max(map(len, lines)) < 1.2 * min(map(len, lines))
    assert json.loads((in_memory / "s" / "store.json").read_text())["shards"] == []


def test_a_damaged_line_before_the_last_is_refused_by_name(tmp_path):
    write(tmp_path / "s", until=78)
    path = tmp_path / "s" / "shards.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for changed, said in (
        (lines[0].replace('"rows": 20', '"rows": 21'), "expected 20 rows in shard 00000.h5, got"),
        (lines[0].replace("00000.h5", "00001.h5"), "expected shard 0 to be named 00000.h5"),
        (lines[0][:50] + "\n", "line 1: "),
        ("{}\n", "line 1: expected a field shard"),
    ):
        path.write_text("".join([changed, *lines[1:]]))
        with pytest.raises(StoreError, match=f"cannot read {path}: {said}"):
            ActivationStore.open(tmp_path / "s")
        with pytest.raises(StoreError, match=f"cannot read {path}: {said}"):
            write(tmp_path / "s")


def test_a_journal_that_a_kill_left_beside_a_complete_store_is_ignored(tmp_path):
    write(tmp_path / "half", until=78)
    store = make_store(tmp_path / "s", ROWS)
    shutil.copy(tmp_path / "half" / "shards.jsonl", tmp_path / "s")
    assert ActivationStore.open(tmp_path / "s").meta == store.meta
