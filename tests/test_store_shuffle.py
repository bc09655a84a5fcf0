"""Streams of rows: a shuffled epoch is a permutation, decided by seed and epoch alone, in bounded memory."""

import threading
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storing import collect, make_store, memory_folder

from saecli.errors import ConfigError, StoreError
from saecli.store import DTYPES


def numbered(count: int, d_in: int = 3) -> np.ndarray:
    """Rows whose first entry is their number, exact in every stored type up to 256."""
    rows = np.zeros((count, d_in), np.float32)
    rows[:, 0] = np.arange(count)
    return rows


def reading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sae-read")]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_epoch_is_a_permutation_of_the_split_whatever_the_sizes(data):
    dtype, count = data.draw(st.sampled_from(list(DTYPES))), data.draw(st.integers(1, 256))
    with memory_folder() as folder:
        store = make_store(folder / "s", numbered(count), dtype, shard_rows=data.draw(st.integers(1, 150)),
                           chunk_rows=data.draw(st.integers(1, 40)))
        try:
            rows = store.split(data.draw(st.sampled_from(["all", "train", "test"])), seed=data.draw(st.integers(0, 9)))
        except StoreError:
            return  # an empty split, which has its own test
        size, window = data.draw(st.integers(1, 100)), data.draw(st.integers(1, 4000))
        batches = [b[:, 0].astype(int) for b in rows.batches(size, seed=1, epoch=0, window_bytes=window)]
        assert [len(b) for b in batches[:-1]] == [size] * (len(batches) - 1)
        expected = collect(rows.sequential(size))[:, 0].astype(int)
        assert len(expected) == rows.rows
        np.testing.assert_array_equal(np.sort(np.concatenate(batches)), expected)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("s") / "s", numbered(5000), shard_rows=700, chunk_rows=20).split("all")


def order(rows, **arguments) -> np.ndarray:
    arguments = {"seed": 0, "epoch": 0, "window_bytes": 12 * 1000, **arguments}
    return collect(rows.batches(64, **arguments))[:, 0].astype(int)


def test_order_is_a_function_of_seed_and_epoch(rows):
    first = order(rows)
    for _ in range(3):
        np.testing.assert_array_equal(order(rows), first)
    assert (order(rows, epoch=1) != first).mean() > 0.9
    assert (order(rows, seed=1) != first).mean() > 0.9


def test_window_mixes_rows_from_all_over_the_store(rows):
    within_window = order(rows)[:960]
    # A fifth of the store is in a window, as chunks of 20 drawn at random: every tenth of the store shows up.
    assert len(np.unique(within_window // 500)) == 10
    # Neighbours in a batch are strangers: with 50 chunks in a window, 1 pair in 50 shares a chunk.
    pairs = (within_window[1:] // 20) == (within_window[:-1] // 20)
    assert pairs.mean() < 0.06


def test_window_as_large_as_the_store_gives_a_uniform_shuffle(rows):
    shuffled = order(rows, window_bytes=1 << 20)
    displacement = np.abs(np.argsort(shuffled) - np.arange(5000)).mean()
    assert displacement == pytest.approx(5000 / 3, rel=0.05)  # the mean of |U - V| for independent uniforms


def test_batches_stay_valid_while_held_and_may_be_written_to(rows):
    seen = []
    for batch in rows.batches(64, seed=0, epoch=0, window_bytes=12 * 1000):
        before = batch.copy()
        time.sleep(0.001)  # the threads read on meanwhile
        np.testing.assert_array_equal(batch, before)
        seen.append(before)
        batch[:] = -1
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)[:, 0]), np.arange(5000))


@pytest.mark.parametrize("stream", [lambda rows: rows.sequential(64),
                                    lambda rows: rows.batches(64, seed=0, epoch=0, window_bytes=12 * 1000)])
def test_threads_end_when_the_consumer_stops_early(rows, stream):
    batches = stream(rows)
    next(batches)
    assert reading_threads()
    batches.close()
    assert not reading_threads()


@pytest.mark.parametrize("stream", [lambda rows: rows.sequential(64),
                                    lambda rows: rows.batches(64, seed=0, epoch=0, window_bytes=12 * 1000)])
def test_an_error_while_reading_ahead_reaches_the_consumer_and_ends_the_threads(tmp_path, stream):
    store = make_store(tmp_path / "s", numbered(2000), shard_rows=700, chunk_rows=20)
    (tmp_path / "s" / "shards" / "00001.h5").write_bytes(b"not HDF5")
    with pytest.raises(StoreError, match=r"00001\.h5"):
        collect(stream(store.split("all")))
    assert not reading_threads()


def test_memory_does_not_grow_with_the_store(tmp_path):
    window, peaks = 256 << 10, []
    for count in (70_000, 280_000):
        rows = np.ones((count, 16), np.float32)
        split = make_store(tmp_path / str(count), rows, block=1 << 16, shard_rows=1 << 16,
                           chunk_rows=512).split("train")
        tracemalloc.start()
        for _ in split.batches(32, seed=0, epoch=0, window_bytes=window):
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


def test_a_batch_size_below_one_is_refused_at_once(rows):
    for stream in (lambda: rows.sequential(0), lambda: rows.batches(0, seed=0, epoch=0)):
        with pytest.raises(ConfigError, match="batch-size must be at least 1, got 0"):
            stream()
