"""Nothing is lost: killed, interrupted, out of disk, or two at once, a store ends as if nothing had happened."""

import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import store_producer
from power_cut import restore
from storing import collect, make_meta, make_store, memory_folder, stored_contents

from saecli.base.errors import StoreError
from saecli.store.blocks import RowBlock
from saecli.store.opening import finished_store
from saecli.store.reader import ActivationStore
from saecli.store.schema import write_meta
from saecli.store.writer import StoreWriter


@pytest.fixture(scope="module")
def uninterrupted():
    with memory_folder() as folder:
        store_producer.write(folder / "s")
        yield stored_contents(folder / "s")


def assert_prefix(path: Path, whole: dict) -> bool:
    """Whatever has happened, the store opens, and its rows are the first of the whole one's; is it complete?"""
    try:
        contents = stored_contents(path)
    except StoreError as error:
        assert "it has no store.json" in str(error)  # killed before there was anything
        return False
    np.testing.assert_array_equal(contents["rows"], whole["rows"][: len(contents["rows"])])
    return contents["meta"]["complete"]


def assert_same(path: Path, whole: dict) -> None:
    contents = stored_contents(path)
    assert contents["meta"] == whole["meta"]
    np.testing.assert_array_equal(contents["rows"], whole["rows"])


DIGITS = "import digits --shard-rows 300 --name s"
WORLD = "import synthetic --features 60 --d-in 8 --rows 3000 --shard-rows 500 --name s"
TEXT = "extract --model tiny-gemma2 --rows 2000 --shard-rows 150 --batch-size 4 --name s"
IMPORTS = [
    "transformers.models.gemma2.modeling_gemma2",
    "transformers.models.gemma.tokenization_gemma",
    "transformers.models.auto.modeling_auto",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "most", "step"),
    [
        ({}, 150, 8),
        ({"ranks": True}, 340, 12),
        ({"words": DIGITS.split(), "imports": ["sklearn.datasets"]}, 90, 18),
        ({"words": WORLD.split(), "imports": []}, 90, 18),
        pytest.param({"words": TEXT.split(), "imports": IMPORTS}, 300, 12, marks=pytest.mark.long),
        pytest.param({}, 200, 1, marks=pytest.mark.long),
    ],
    ids=["rows", "ranks", "import", "world", "extract", "every"],
)
def test_killed_anywhere_and_run_again_equals_never_killed(produce, tmp_path, command, most, step):
    """Killed before its n-th file operation, again before its n/2-th, then run to the end."""
    whole = tmp_path / "whole" / "activations" / "s"
    assert produce(whole, **command) == (0, "")
    expected, kills = stored_contents(whole), 0
    for kill_at in range(1, most, step):
        with memory_folder() as folder:
            path = folder / "activations" / "s"
            for at in (kill_at, max(1, kill_at // 2)):
                status, error = produce(path, kill_at=at, **command)
                assert not error
                kills += status < 0
                assert_prefix(path, expected)
            assert produce(path, **command) == (0, "")
            assert_same(path, expected)
    assert kills > most / step / 2


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, pytest.param(1, marks=pytest.mark.long)])
def test_a_power_cut_leaves_a_prefix_that_is_completed(produce, uninterrupted, share):
    rng = random.Random(1)
    with memory_folder() as folder:
        cuts, path = folder / "cuts", folder / "disk" / "activations" / "s"
        cuts.mkdir()
        (folder / "disk").mkdir()
        assert produce(path, cuts=str(cuts)) == (0, "")
        states = [pickle.loads(state.read_bytes()) for state in sorted(cuts.iterdir())]
        assert len(states) > 60
        for number, state in enumerate(states, 1 - len(states)):
            if number < -1 and rng.random() > share:
                continue
            with memory_folder() as cut:
                restore(state, cut)
                where = cut / "activations" / "s"
                complete = assert_prefix(where, uninterrupted)
                # The last two: what was said to be finished outlasts anything.
                if number < -1 and not complete:
                    assert produce(where)[0] == 0
                assert_same(where, uninterrupted)


@pytest.mark.slow
def test_a_file_size_limit_leaves_a_store_that_resumes(produce, uninterrupted):
    with memory_folder() as folder:
        path = folder / "s"
        # A full shard takes 6952 bytes: too little for store.json, for a few chunks, for the columns at the end.
        for limit in (300, 2000, 6900):
            status, error = produce(path, file_bytes=limit)
            assert status == 0
            assert "File too large; free some space and run the same command again" in error
            assert_prefix(path, uninterrupted)
            assert not list(path.rglob("*.partial"))
        assert produce(path) == (0, "")
        assert_same(path, uninterrupted)


def test_a_shard_that_ends_early_leaves_rows_and_batches_as_they_are(tmp_path, monkeypatch):
    rows = np.random.default_rng(0).standard_normal((1000, 4), np.float32)
    sizes = {"shard_rows": 320, "chunk_rows": 16}
    batches = []
    for name, seconds, shards in (("late", 60, 4), ("early", -1, 63)):
        monkeypatch.setattr("saecli.store.writer.SHARD_SECONDS", seconds)
        store = make_store(tmp_path / name, rows, **sizes)
        assert len(store.meta.shards) == shards and store.verify() == []
        batches.append(np.concatenate([*store.split("train").batches(50, seed=3, epoch=0)]))
        np.testing.assert_array_equal(collect(store.split("all").sequential(64)), rows)
    np.testing.assert_array_equal(*batches)


def test_a_block_that_failed_part_way_is_not_kept(tmp_path, monkeypatch):
    meta = make_meta(4, columns=("document",))
    with pytest.raises(KeyError), StoreWriter.open(tmp_path / "s", meta) as writer:
        rows = np.ones((3, 4), np.float32)
        writer.append(RowBlock(rows, {"document": np.arange(3)}), {"row": 0})
        writer.append(RowBlock(rows), {"row": 3})
    assert ActivationStore.open(tmp_path / "s").rows == 0
    assert not list(tmp_path.rglob("*.partial"))


def test_a_second_writer_is_refused(tmp_path, produce):
    with StoreWriter.open(tmp_path / "s", make_meta(store_producer.D_IN)) as writer:
        writer.append(RowBlock(np.ones((3, store_producer.D_IN), np.float32)), {})
        assert "another process is writing it" in produce(tmp_path / "s")[1]
        with pytest.raises(StoreError, match="another process is writing it; wait for that one"):
            StoreWriter.open(tmp_path / "s", make_meta(store_producer.D_IN))


def test_another_request_and_another_folder_are_refused(tmp_path):
    make_store(tmp_path / "s", np.ones((5, 4), np.float32), source={"layer": 6})
    with pytest.raises(StoreError, match="holds something else: expected layer 12, got 6"):
        StoreWriter.open(tmp_path / "s", make_meta(4, source={"layer": 12}))
    with StoreWriter.open(tmp_path / "s", make_meta(4, source={"layer": 6})) as writer:
        assert writer.meta.complete
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match="other is no store, and not empty"):
        StoreWriter.open(tmp_path / "other", make_meta(4))
    assert [path.name for path in (tmp_path / "other").glob("[!.]*")] == ["thesis.tex"]


@pytest.mark.parametrize("left", ["nothing", "half a shard"])
def test_a_store_that_was_stopped_without_a_row_gives_its_name_to_another(tmp_path, left):
    rows = np.ones((5, 4), np.float32)
    wanted = make_meta(4, source={"layer": 12})
    for path, source in ((tmp_path / "s", {"layer": 6}), (tmp_path / "t", {"layer": 12})):
        path.mkdir()
        write_meta(path, make_meta(4, source=source))  # as far as a killed process came
    if left == "half a shard":
        (tmp_path / "s" / "shards").mkdir()
        (tmp_path / "s" / "shards" / ".00000.h5.partial").write_bytes(b"x" * 100)
    for path in (tmp_path / "s", tmp_path / "t"):
        assert finished_store(path, "another") is None
        with StoreWriter.open(path, wanted) as writer:
            writer.append(RowBlock(rows), {"row": 0})
            writer.finish()
        names = {".lock", "shards", "shards.jsonl", "store.json"}
        assert {file.name for file in path.iterdir()} == names
    assert stored_contents(tmp_path / "s")["meta"] == stored_contents(tmp_path / "t")["meta"]
    with pytest.raises(StoreError, match="a store named 's' already, made from something else"):
        finished_store(tmp_path / "s", "another")


def test_a_source_that_changed_is_refused(tmp_path):
    rows = np.ones((120, 4), np.float32)
    for block, cursor, said in (
        (rows[:50], {"row": 0}, "expected 120 rows or more at {'row': 0}, got 50 rows"),
        (rows, {"row": 7}, "got 120 rows at {'row': 7}"),
    ):
        with StoreWriter.open(tmp_path / "s", make_meta(4)) as writer:
            if writer.cursor is None:
                writer.append(RowBlock(rows), {"row": 0})
        with (
            StoreWriter.open(tmp_path / "s", make_meta(4)) as writer,
            pytest.raises(StoreError, match=said),
        ):
            writer.append(RowBlock(block), cursor)
    with (
        StoreWriter.open(tmp_path / "s", make_meta(4)) as writer,
        pytest.raises(StoreError, match="got nothing; the source has changed"),
    ):
        writer.finish()


def test_a_store_with_a_damaged_shard_is_not_resumed(tmp_path):
    with StoreWriter.open(tmp_path / "s", make_meta(4)) as writer:
        writer.append(RowBlock(np.ones((250, 4), np.float32)), {"row": 0})
    (tmp_path / "s" / "shards" / "00000.h5").write_bytes(b"x" * 10_000)
    with pytest.raises(StoreError, match=r"00000\.h5 is damaged"):
        StoreWriter.open(tmp_path / "s", make_meta(4))
