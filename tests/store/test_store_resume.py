"""Nothing is lost: killed, interrupted, out of disk, or two at once, a store ends as if nothing had happened."""

import pickle
import random
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import store_producer
import torch
from hypothesis import given
from hypothesis import strategies as st
from power_cut import restore
from storing import collect, make_meta, make_store, memory_folder

from saecli.base.errors import StoreError
from saecli.store.reader import ActivationStore
from saecli.store.writer import StoreWriter


@pytest.fixture(scope="module")
def uninterrupted():
    with memory_folder() as folder:
        store_producer.write(folder / "s")
        yield contents(folder / "s")


def contents(path: Path) -> dict:
    """All that a store says and holds, but for when it was begun."""
    store = ActivationStore.open(path)
    assert not list(store.verify())
    rows = collect(store.split("all").sequential(64)) if store.rows else np.empty((0, store.d_in))
    return {"meta": store.meta.to_json() | {"created": ""}, "rows": rows}


def assert_prefix(path: Path, whole: dict) -> bool:
    """Whatever has happened, the store opens, and its rows are the first of the whole one's; is it complete?"""
    try:
        there = contents(path)
    except StoreError as error:
        assert "expected store.json in it" in str(error)  # killed before there was anything
        return False
    np.testing.assert_array_equal(there["rows"], whole["rows"][: len(there["rows"])])
    return there["meta"]["complete"]


def assert_same(path: Path, whole: dict) -> None:
    there = contents(path)
    assert there["meta"] == whole["meta"]
    np.testing.assert_array_equal(there["rows"], whole["rows"])


def test_uninterrupted_store_holds_the_blocks(uninterrupted):
    blocks = list(store_producer.blocks(None))
    finite = [rows[np.isfinite(rows).all(axis=1)] for _, rows, _, _ in blocks]
    # The limit is a multiple of the median norm in the first block that has a finite row.
    median = np.median(np.linalg.norm(next(rows for rows in finite if len(rows)).astype(float), axis=1))
    finite = np.concatenate(finite)
    kept = finite[np.linalg.norm(finite.astype(float), axis=1) <= store_producer.MULTIPLE * median]
    rows = torch.from_numpy(kept).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(uninterrupted["rows"], rows)
    assert 900 < len(kept) < 0.99 * len(finite)
    assert uninterrupted["meta"]["median_norm"] == pytest.approx(median)
    assert uninterrupted["meta"]["dropped"] == {
        "special": sum(len(dropped["special"]) for *_, dropped in blocks),
        "nonfinite": sum(len(rows) for _, rows, _, _ in blocks) - len(finite), "high_norm": len(finite) - len(kept)}
    for reason, norms in (("special", np.concatenate([dropped["special"] for *_, dropped in blocks])),
                          ("high_norm", np.setdiff1d(*(np.linalg.norm(part.astype(float), axis=1)
                                                       for part in (finite, kept))))):
        assert uninterrupted["meta"]["dropped_norms"][reason] == pytest.approx(
            {"rows": len(norms), "mean": norms.mean(), "max": norms.max()})


@pytest.mark.slow
@pytest.mark.parametrize("least", [20, pytest.param(220, marks=pytest.mark.long)])
def test_killed_at_random_points_and_run_again_equals_never_interrupted(produce, uninterrupted, least):
    rng = random.Random(least)
    kills = 0
    while kills < least:
        with memory_folder() as folder:
            for _ in range(1000):
                how = {"kill_at": rng.randint(1, 150)} if rng.random() < 0.6 else {"kill_after": rng.uniform(0, 0.05)}
                status, error = produce(folder / "s", save_seconds=rng.choice([0.0, 60.0]), **how)
                assert not error
                kills += status < 0
                if assert_prefix(folder / "s", uninterrupted):
                    break
            assert_same(folder / "s", uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(("damaged", "share", "save_seconds"), [
    (False, 0.1, 60.0), (True, 1, 60.0), pytest.param(False, 1, 60.0, marks=pytest.mark.long),
    pytest.param(False, 0.2, 0.0, marks=pytest.mark.long)])
def test_a_power_cut_leaves_a_prefix_that_ends_up_as_if_there_had_been_none(produce, uninterrupted, damaged, share,
                                                                            save_seconds):
    rng = random.Random(1)
    with memory_folder() as folder:
        cuts, path = folder / "cuts", folder / "disk" / "activations" / "s"
        cuts.mkdir()
        (folder / "disk").mkdir()
        if damaged:
            store_producer.write(path)
            (path / "shards" / "00002.h5").unlink()
            (path / "shards" / "00004.h5").write_bytes(b"")
        assert produce(path, cuts=str(cuts), save_seconds=save_seconds) == (0, "")
        states = [pickle.loads(state.read_bytes()) for state in sorted(cuts.iterdir())]
        assert len(states) > (8 if damaged else 60)
        for number, state in enumerate(states, 1 - len(states)):
            if number < -1 and rng.random() > share:
                continue
            with memory_folder() as cut:
                restore(state, cut)
                where = cut / "activations" / "s"
                complete = not damaged and assert_prefix(where, uninterrupted)
                if number < -1 and not complete:  # the last two: what was said to be finished outlasts anything
                    assert produce(where)[0] == 0
                assert_same(where, uninterrupted)


@pytest.mark.long
def test_extract_killed_at_random_points_equals_one_never_stopped(produce, tmp_path):
    """The command itself, wherever a kill comes."""
    rng = random.Random(2)
    text = tmp_path / "text.txt"
    text.write_text((Path(__file__).parents[2] / "README.md").read_text())
    words = ["extract", "--model", "tiny-gemma2", "--dataset", str(text), "--rows", "2000", "--shard-rows", "150",
             "--name"]
    imports = ["transformers.models.gemma2.modeling_gemma2", "transformers.models.gemma.tokenization_gemma",
               "transformers.models.auto.modeling_auto"]

    def extract(name: str, **order) -> int:
        path = tmp_path / "home" / "activations" / name
        status, error = produce(path, words=[*words, name], imports=imports, **order)
        assert not error
        return status

    assert extract("warm") == 0
    began = time.monotonic()
    assert extract("whole") == 0
    seconds = time.monotonic() - began
    whole = contents(tmp_path / "home" / "activations" / "whole")
    kills, number = 0, 0
    while kills < 25:
        number += 1
        path = tmp_path / "home" / "activations" / f"killed{number}"
        for _ in range(10):
            kills += extract(path.name, kill_after=rng.uniform(0, seconds)) < 0
            if assert_prefix(path, whole):
                break
        else:  # where other programs slow it, every kill may come before the end
            assert extract(path.name) == 0
        assert_same(path, whole)


@pytest.mark.slow
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.one_of(st.none(), st.integers(1, 1200)),
       st.sampled_from([None, 1.1]), st.sampled_from([KeyboardInterrupt, None]), st.sampled_from([0.0, 60.0]),
       st.booleans())
def test_interrupted_after_any_blocks_and_run_again_equals_never_interrupted(pauses, limit, multiple, by, save_seconds,
                                                                            foresees):
    meta = make_meta(store_producer.D_IN, shard_rows=70, chunk_rows=16, columns=("document", "position"),
                     max_norm_multiple=multiple)
    with memory_folder() as folder:
        for name, stops in (("whole", [10**6]), ("parts", [*pauses, 10**6])):
            for stop in stops:
                rows_then = 0
                with (suppress(KeyboardInterrupt),
                      StoreWriter.open(folder / name, meta, limit=limit, save_seconds=save_seconds) as writer):
                    for cursor, rows, columns, dropped in store_producer.blocks(writer.cursor):
                        if writer.full or stop == 0:
                            break
                        writer.append(rows, columns, cursor, dropped,
                                      {"block": cursor["block"] + 1} if foresees else None)
                        stop -= 1
                    if stop:
                        writer.finish()
                        break
                    rows_then = writer.rows
                    if by:
                        raise by
                if rows_then and (by or not save_seconds):  # no row is lost
                    assert ActivationStore.open(folder / name).meta.saved_rows == rows_then
        whole, parts = contents(folder / "whole"), contents(folder / "parts")
        assert whole["meta"] == parts["meta"]
        np.testing.assert_array_equal(whole["rows"], parts["rows"])
        assert [sorted(path.name for path in (folder / name / "shards").iterdir()) for name in ("whole", "parts")] == [
            [shard["file"] for shard in whole["meta"]["shards"]]] * 2


def test_a_full_store_that_was_stopped_counts_nothing_of_the_block_after(tmp_path):
    rows, special = np.ones((20, 4), np.float32), {"special": np.ones(3)}
    with suppress(KeyboardInterrupt), StoreWriter.open(tmp_path / "s", make_meta(4), limit=40) as writer:
        for block in range(2):
            writer.append(rows, {}, {"block": block}, special, {"block": block + 1})
        raise KeyboardInterrupt
    with StoreWriter.open(tmp_path / "s", make_meta(4), limit=40) as writer:
        assert writer.full
        writer.finish()
    meta = ActivationStore.open(tmp_path / "s").meta
    assert (meta.rows, meta.dropped) == (40, {"special": 6})


def test_a_damaged_partial_shard_is_not_taken_up_and_its_rows_come_again(tmp_path):
    rows = np.random.default_rng(0).standard_normal((250, 4), np.float32)
    make_store(tmp_path / "whole", rows)
    with suppress(KeyboardInterrupt), StoreWriter.open(tmp_path / "s", make_meta(4)) as writer:
        writer.append(rows[:37], {}, {"row": 0})
        raise KeyboardInterrupt
    store = ActivationStore.open(tmp_path / "s")
    assert (store.rows, store.meta.saved_rows) == (0, 37)
    path = tmp_path / "s" / "shards" / "00000-37.h5"
    content = bytearray(path.read_bytes())
    content[store.meta.partial.shard.frame.start + 5] ^= 1
    path.write_bytes(content)
    with StoreWriter.open(tmp_path / "s", make_meta(4)) as writer:
        assert (writer.rows, writer.cursor) == (0, None)
        for begin in range(0, 250, 37):
            writer.append(rows[begin : begin + 37], {}, {"row": begin})
        writer.finish()
    assert_same(tmp_path / "s", contents(tmp_path / "whole"))
    assert not path.exists()


def test_a_file_size_limit_leaves_a_store_that_can_be_gone_on_with(produce, uninterrupted):
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
        assert contents(path)["meta"] == uninterrupted["meta"]


def test_a_full_disk_leaves_a_store_that_can_be_gone_on_with(tmp_path, produce, uninterrupted):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system of its own needs the right to mount one")
    try:
        status, error = produce(disk / "s")
        assert status == 0
        assert "No space left on device; free some space and run the same command again" in error
        store = ActivationStore.open(disk / "s")
        assert 0 < store.rows < len(uninterrupted["rows"])
        assert not list(disk.rglob("*.partial"))
        assert_prefix(disk / "s", uninterrupted)
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        assert produce(disk / "s") == (0, "")
        assert contents(disk / "s")["meta"] == uninterrupted["meta"]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_second_writer_is_refused_until_the_first_lets_go(tmp_path, produce):
    with StoreWriter.open(tmp_path / "s", make_meta(store_producer.D_IN)):
        assert "another process is writing it" in produce(tmp_path / "s")[1]
        with pytest.raises(StoreError, match="another process is writing it; wait for that one"):
            StoreWriter.open(tmp_path / "s", make_meta(store_producer.D_IN))
    with StoreWriter.open(tmp_path / "s", make_meta(store_producer.D_IN)) as writer:
        assert writer.cursor is None


def test_a_store_without_a_shard_is_removed_but_never_another_writers(tmp_path, produce):
    with StoreWriter.open(tmp_path / "s", make_meta(store_producer.D_IN)) as writer:
        writer.append(np.ones((3, store_producer.D_IN), np.float32), {}, {})
        assert produce(tmp_path / "s")[1]
        assert (tmp_path / "s" / "store.json").exists()
    assert not (tmp_path / "s").exists()


def test_whole_shards_can_be_read_while_another_shard_is_written(tmp_path):
    rows = np.random.default_rng(0).standard_normal((250, 4), np.float32)
    with StoreWriter.open(tmp_path / "s", make_meta(4)) as writer:
        writer.append(rows, {}, {"row": 0})
        assert writer.rows == 250
        store = ActivationStore.open(tmp_path / "s")
        assert not store.complete
        np.testing.assert_array_equal(collect(store.split("all").sequential(64)), rows[:200])
    assert not list((tmp_path / "s").rglob("*.partial"))


def test_another_request_under_the_same_name_is_refused_with_the_difference(tmp_path):
    make_store(tmp_path / "s", np.ones((5, 4), np.float32), source={"layer": 6})
    with pytest.raises(StoreError, match="holds something else: expected layer 12, got 6; choose another name"):
        StoreWriter.open(tmp_path / "s", make_meta(4, source={"layer": 12}))
    with StoreWriter.open(tmp_path / "s", make_meta(4, source={"layer": 6})) as writer:
        assert writer.complete
        with pytest.raises(StoreError, match="is complete, with 5 rows"):
            writer.append(np.ones((5, 4), np.float32), {}, {})


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match=r"expected an empty folder, got one that holds thesis\.tex"):
        StoreWriter.open(tmp_path, make_meta(4))
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "00000.h5").touch()
    with pytest.raises(StoreError, match="expected an empty folder"):
        StoreWriter.open(tmp_path, make_meta(4))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["00000.h5", "shards", "thesis.tex"]


def test_a_source_that_changed_is_refused(tmp_path):
    rows = np.ones((120, 4), np.float32)
    for block, cursor, said in ((rows[:50], {"row": 0}, "expected 100 rows or more at {'row': 0}, got 50 rows"),
                                (rows, {"row": 7}, "got 120 rows at {'row': 7}")):
        with StoreWriter.open(tmp_path / "s", make_meta(4)) as writer:
            if writer.cursor is None:
                writer.append(rows, {}, {"row": 0})
        with StoreWriter.open(tmp_path / "s", make_meta(4)) as writer, pytest.raises(StoreError, match=said):
            writer.append(block, {}, cursor)
    with (StoreWriter.open(tmp_path / "s", make_meta(4)) as writer,
          pytest.raises(StoreError, match="got nothing; the source has changed")):
        writer.finish()
