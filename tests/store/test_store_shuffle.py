"""Streams of rows: a shuffled epoch is a permutation, decided by seed and epoch alone, in bounded memory."""

import math
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from storing import collect, make_store, memory_folder

import saecli
from saecli.base.errors import StoreError
from saecli.store.split import Part, Permutation


def numbered(count: int, d_in: int = 3) -> np.ndarray:
    """Rows whose first entry is their number, exact in every stored type up to 256."""
    rows = np.zeros((count, d_in), np.float32)
    rows[:, 0] = np.arange(count)
    return rows


def reading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sae-read")]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("s") / "s"
    return make_store(path, numbered(5000), shard_rows=700, chunk_rows=20).split("all")


def order(rows, **arguments) -> np.ndarray:
    arguments = {"seed": 0, "epoch": 0, "window_bytes": 12 * 1000, **arguments}
    return collect(rows.batches(64, **arguments))[:, 0].astype(int)


def test_order_is_a_function_of_seed_and_epoch(rows):
    first = order(rows)
    for _ in range(3):
        np.testing.assert_array_equal(order(rows), first)
    assert (order(rows, epoch=1) != first).mean() > 0.9
    assert (order(rows, seed=1) != first).mean() > 0.9


@pytest.mark.parametrize("part", [Part(), Part(1, 3)], ids=["whole", "a third"])
def test_the_first_batches_can_be_left_out(rows, part):
    """Some within a window, a whole window of 1,000 rows, two and a half, all but the last, and all."""
    options = {"seed": 1, "epoch": 2, "window_bytes": 12 * 1000, "part": part}
    batches = [*rows.batches(64, **options)]
    for first in (3, 15, 16, 40, 78, 79, 80):
        rest = [*rows.batches(64, first=first, **options)]
        assert len(rest) == max(0, 79 - first)
        for batch, expected in zip(rest, batches[first:], strict=True):
            np.testing.assert_array_equal(batch, expected)


def pairs_of_one_document(documents: np.ndarray, batch_size: int) -> float:
    """Pairs of rows of one document that share a batch, over what a uniform shuffle is expected to have."""

    def pairs(values: np.ndarray) -> int:
        counts = np.unique(values, return_counts=True)[1]
        return int((counts * (counts - 1) // 2).sum())

    rows = len(documents)
    batches = np.split(documents, range(batch_size, rows, batch_size))
    within = sum(len(batch) * (len(batch) - 1) // 2 for batch in batches)
    return sum(map(pairs, batches)) / (pairs(documents) * within / (rows * (rows - 1) // 2))


@pytest.fixture(scope="module", params=[96, 700])
def documents(tmp_path_factory, request):
    """A store in document order, whose rows hold the number of their document; and that store's documents."""
    of_rows = np.arange(80_000) // request.param
    # Rows of 512 bytes, so that a unit has up to 128 of them.
    rows = np.zeros((len(of_rows), 128), np.float32)
    rows[:, 0] = of_rows
    folder = tmp_path_factory.mktemp("documents") / "s"
    sizes = {"block": 8000, "shard_rows": 25_000, "chunk_rows": 256}
    return make_store(folder, rows, documents=of_rows, **sizes), of_rows


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 4, 30, 200])
def test_a_batch_holds_few_pairs_of_one_document(documents, parts):
    store, of_rows = documents
    window = store.rows // parts * 512
    assert pairs_of_one_document(of_rows, 64) > 100  # as stored
    assert pairs_of_one_document(order(store.split("all"), window_bytes=window), 64) < 1.2


def test_batches_larger_than_a_block_hold_every_row_once(tmp_path):
    rows = np.random.default_rng(0).standard_normal((7000, 512)).astype(np.float16)
    rows = rows.astype(np.float32)
    rows[:, 0], rows[:, 1] = np.divmod(np.arange(7000), 100)
    sizes = {"block": 1000, "shard_rows": 2500, "chunk_rows": 100}
    split = make_store(tmp_path / "s", rows, "float16", **sizes).split("all")
    np.testing.assert_array_equal(collect(split.sequential(3000)), rows)
    shuffled = collect(split.batches(3000, seed=0, epoch=0, window_bytes=1024 * 4000))
    np.testing.assert_array_equal(shuffled[np.lexsort((shuffled[:, 1], shuffled[:, 0]))], rows)


def test_a_change_to_a_batch_leaves_the_store_and_other_batches_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("saecli.store.split.BLOCK_BYTES", 1 << 10)  # a few batches a block
    rows = numbered(2000, d_in=8)
    for name in ("a", "b"):
        make_store(tmp_path / name, rows, shard_rows=700, chunk_rows=20)
    joined = saecli.join(tmp_path / "a", tmp_path / "b").split("all")
    for split, expected in (
        (saecli.open_store(tmp_path / "a").split("all"), rows),
        (joined, np.concatenate([rows, rows], axis=1)),
    ):
        np.testing.assert_array_equal(collect(split.sequential(8)), expected)
        shuffled = collect(split.batches(8, seed=0, epoch=0))
        np.testing.assert_array_equal(shuffled[shuffled[:, 0].argsort()], expected)
        copies = []
        for batch in split.batches(8, seed=0, epoch=0):
            copies.append(batch.copy())
            batch[:] = -1
        np.testing.assert_array_equal(np.concatenate(copies), shuffled)


@pytest.mark.parametrize(
    ("batch_size", "largest", "unit", "windows"),
    [(60, 10**9, 8, 5), (250, 10**9, 8, 2), (250, 24_000, 4, 3)],
)
def test_windows_grow_with_the_batch_so_that_rows_are_read_in_runs(
    rows, monkeypatch, batch_size, largest, unit, windows
):
    """Rows of 12 bytes, units of at most 8; a window of 12,000 bytes has room for units of 2 at a batch of 250."""
    monkeypatch.setattr("saecli.store.split.UNIT_BYTES", 96)
    monkeypatch.setattr("saecli.store.split.WINDOW_BYTES", 12_000)
    monkeypatch.setattr("saecli.store.split.LARGEST_WINDOW_BYTES", largest)
    numbers = collect(rows.batches(batch_size, seed=0, epoch=0))[:, 0].astype(int)
    np.testing.assert_array_equal(np.sort(numbers), np.arange(5000))
    units = math.ceil(5000 / unit / windows)  # of the first window
    assert len(np.unique(numbers[: (units - 1) * unit // batch_size * batch_size] // unit)) == units


def permuted_without_a_table(count: int, seed: int) -> np.ndarray:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("saecli.store.split.LARGEST_TABLE", 0)
        return Permutation(count, np.random.default_rng(seed))(np.arange(count))


@given(st.integers(1, 3000), st.integers(0, 2**32))
def test_permutation_beyond_a_table_is_one(count, seed):
    images = permuted_without_a_table(count, seed)
    np.testing.assert_array_equal(np.sort(images), np.arange(count))


def test_permutation_beyond_a_table_scatters_neighbours():
    count = 40_000
    images = permuted_without_a_table(count, 0)
    # Each eighth is spread evenly over the whole: chi-squared, 49 degrees of freedom.
    for part in np.split(images, 8):
        counts = np.bincount(part * 50 // count, minlength=50)
        assert ((counts - 100) ** 2 / 100).sum() < 95
    assert (np.abs(np.diff(images)) <= 10).mean() == pytest.approx(20 / count, abs=5e-4)


STREAMS = [
    lambda rows: rows.sequential(64),
    lambda rows: rows.batches(64, seed=0, epoch=0, window_bytes=12 * 1000),
]


@pytest.mark.parametrize("stream", STREAMS)
def test_threads_end_when_the_consumer_stops_early(rows, stream):
    batches = stream(rows)
    next(batches)
    assert reading_threads()
    batches.close()
    assert not reading_threads()


@pytest.mark.parametrize("stream", STREAMS)
def test_an_error_while_reading_ahead_reaches_the_consumer(tmp_path, stream):
    store = make_store(tmp_path / "s", numbered(2000), shard_rows=700, chunk_rows=20)
    (tmp_path / "s" / "shards" / "00001.h5").write_bytes(b"not HDF5")
    with pytest.raises(StoreError, match=r"00001\.h5"):
        collect(stream(store.split("all")))
    assert not reading_threads()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_does_not_grow_with_the_store(dtype):
    window, peaks = 256 << 10, []
    for count in (70_000, 280_000):
        rows = np.ones((count, 16), np.float32)
        with memory_folder() as folder:
            sizes = {"block": 1 << 16, "shard_rows": 1 << 16, "chunk_rows": 512}
            split = make_store(folder / "s", rows, dtype, **sizes).split("train")
            tracemalloc.start()
            for _ in split.batches(32, seed=0, epoch=0, window_bytes=window):
                pass
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]
