"""Streams of rows: a shuffled epoch is a permutation, decided by seed and epoch alone, in bounded memory. Splits: by
document, the test rows fixed, fractions nested; mean and scatter of the training rows."""

import math
import os
import resource
import threading
import tracemalloc

import h5py
import numpy as np
import pytest
from storing import collect, make_store, memory_folder

import saecli
from saecli.base.errors import ConfigError, StoreError
from saecli.store.reader import ActivationStore, Rows
from saecli.store.split import Part, is_test


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
    rows = numbered(len(of_rows), 128)
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
    monkeypatch.setattr("saecli.store.shard.MOST_OPEN", 1)
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
def test_windows_grow_with_the_batch(rows, monkeypatch, batch_size, largest, unit, windows):
    """Rows of 12 bytes, units of at most 8; a window of 12,000 bytes has room for units of 2 at a batch of 250."""
    monkeypatch.setattr("saecli.store.split.UNIT_BYTES", 96)
    monkeypatch.setattr("saecli.store.split.WINDOW_BYTES", 12_000)
    monkeypatch.setattr("saecli.store.split.LARGEST_WINDOW_BYTES", largest)
    numbers = collect(rows.batches(batch_size, seed=0, epoch=0))[:, 0].astype(int)
    np.testing.assert_array_equal(np.sort(numbers), np.arange(5000))
    units = math.ceil(5000 / unit / windows)  # of the first window
    assert len(np.unique(numbers[: (units - 1) * unit // batch_size * batch_size] // unit)) == units


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
@pytest.mark.parametrize("cut", [0, 5000, None], ids=["all", "some", "foreign"])
def test_an_error_while_reading_ahead_reaches_the_consumer(tmp_path, stream, cut):
    """Of a foreign shard, or one cut off under a reader, which would kill a process that maps it."""
    split = make_store(tmp_path / "s", numbered(2000), shard_rows=700, chunk_rows=20).split("all")
    path, said = tmp_path / "s" / "shards" / "00001.h5", r"00001\.h5"
    if cut is None:
        path.write_bytes(b"not HDF5")
    else:
        collect(stream(split))
        os.truncate(path, cut)
        said += r" is truncated: expected \d+ bytes or more, got \d+; remove it with `sae rm s`"
    with pytest.raises(StoreError, match=said):
        collect(stream(split))
    assert not reading_threads()


def test_many_shards_of_many_stores_are_read_with_few_files_open(tmp_path):
    rows, documents = numbered(100), np.arange(100) // 9
    stores = [tmp_path / name for name in "abc"]
    for path in stores:
        make_store(path, rows, documents=documents, shard_rows=5, chunk_rows=5)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = 2 * len(os.listdir("/dev/fd")) + 12  # shards take half of it
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    try:
        split = saecli.join(*stores).split("all")
        expected = np.concatenate([rows] * 3, axis=1)
        np.testing.assert_array_equal(collect(split.sequential(16)), expected)
        shuffled = collect(split.batches(16, seed=0, epoch=0, window_bytes=1 << 9))
        np.testing.assert_array_equal(shuffled[shuffled[:, 0].argsort()], expected)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_memory_of_a_commit_does_not_grow_with_the_shard(tmp_path):
    peaks = []
    for count in (2000, 64_000):
        make_store(tmp_path / str(count), np.ones((10, 64), np.float32))  # loads what is needed
        rows = np.ones((count, 64), np.float32)
        tracemalloc.start()
        make_store(tmp_path / f"{count}-rows", rows, shard_rows=count, chunk_rows=500, block=500)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < rows.nbytes / 8


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


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rows, documents = numbered(20_000, 2), np.arange(20_000) // 10
    sizes = {"block": 1000, "shard_rows": 3000, "chunk_rows": 70}
    return make_store(tmp_path_factory.mktemp("s") / "s", rows, documents=documents, **sizes)


def numbers(rows) -> set[int]:
    return set(collect(rows.sequential(512))[:, 0].astype(int).tolist())


def test_fractions_nest_and_leave_the_test_rows_alone(store):
    test = numbers(store.split("test"))
    larger = training = numbers(store.split("train"))
    for fraction in (0.5, 0.1, 0.01):
        assert numbers(store.split("test", fraction=fraction)) == test
        smaller = numbers(store.split("train", fraction=fraction))
        assert len(smaller) == pytest.approx(fraction * 18_000, rel=0.5)
        assert smaller < larger
        assert numbers(store.split("train", fraction=fraction, rest=True)) == training - smaller
        larger = smaller


def splitmix64(value: int) -> int:
    """The generator's finaliser in Python's own integers."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def hash_of(document: int, seed: int) -> int:
    return splitmix64(splitmix64(document) ^ splitmix64(splitmix64(seed) ^ 1))


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5])
def test_the_rows_held_out_are_for_ever_those_of_splitmix64(seed):
    expected = [hash_of(document, seed) / 2**64 < 0.1 for document in range(3000)]
    np.testing.assert_array_equal(is_test(np.arange(3000), seed=seed), expected)


@pytest.mark.parametrize(
    ("rows", "unit", "advice"),
    [(50, "documents", "a store of more documents"), (1, "rows", "import more rows")],
)
def test_an_empty_split_is_refused_with_advice(tmp_path, rows, unit, advice):
    one_document = np.zeros(rows, int) if unit == "documents" else None
    store = make_store(tmp_path / "s", np.zeros((rows, 2), np.float32), documents=one_document)
    with pytest.raises(StoreError, match=rf"test split .* is empty.*{advice}"):
        store.split("test")


def counted_store(path, units, by_document):
    rows = np.repeat(np.arange(units, dtype=np.float32), 3 if by_document else 1)[:, None]
    documents = rows[:, 0].astype(int) if by_document else None
    return make_store(path, rows, documents=documents, chunk_rows=4, shard_rows=20)


@pytest.mark.slow
@pytest.mark.parametrize("by_document", [True, False])
@pytest.mark.parametrize("units", [2, 5, 20, 23])
def test_a_small_store_holds_out_its_lowest_hash(tmp_path, units, by_document):
    store = counted_store(tmp_path / "s", units, by_document)
    for seed in range(40):
        hashes = np.array([(hash_of(unit, seed) >> 11) / 2**53 for unit in range(units)])
        expected = set(np.flatnonzero(hashes <= max(np.nextafter(0.1, 0), hashes.min())).tolist())
        assert numbers(store.split("test", seed=seed)) == expected
        if len(expected) < units:
            assert numbers(store.split("train", seed=seed)) == set(range(units)) - expected
    assert len(numbers(store.split("test"))) == 1  # seed 0 has no hash below 0.1 before the 24th


@pytest.mark.parametrize("by_document", [True, False])
@pytest.mark.parametrize("units", [2, 5, 23])
def test_fractions_of_a_small_store_keep_a_document_and_nest(tmp_path, units, by_document):
    store = counted_store(tmp_path / "s", units, by_document)
    larger = numbers(store.split("train"))
    for fraction in (0.5, 0.1, 0.01, 1e-9):
        smaller = numbers(store.split("train", fraction=fraction))
        assert smaller
        assert smaller <= larger
        larger = smaller
    assert len(larger) == 1


def lowest_hash(documents: list[int], seed: int) -> int:
    return min(documents, key=lambda document: hash_of(document, seed))


@pytest.mark.parametrize("seed", range(6))
def test_each_source_of_a_mixture_with_two_documents_holds_one_out(tmp_path, seed):
    # 40 documents of three rows: source 1 has three, source 2 a single one, source 0 the others
    sources_of = {3: 1, 17: 1, 30: 1, 25: 2}
    documents = np.arange(40).repeat(3)
    source = np.array([sources_of.get(document, 0) for document in documents.tolist()], np.int16)
    rows = documents[:, None].astype(np.float32)
    columns = {"document": documents, "source": source}
    mixed = make_store(tmp_path / "m", rows, columns=columns, sources=("a", "b", "c"), chunk_rows=7)
    expected = {document for document in range(40) if hash_of(document, seed) / 2**64 < 0.1}
    for own in ([document for document in range(40) if document not in sources_of], [3, 17, 30]):
        if expected.isdisjoint(own):
            expected.add(lowest_hash(own, seed))
    test = numbers(mixed.split("test", seed=seed))
    assert test == expected
    assert numbers(mixed.split("train", seed=seed)) == set(range(40)) - test
    assert numbers(mixed.split("test", seed=seed, test_fraction=0.5)) > test
    larger = set(range(40)) - test
    for fraction in (0.5, 0.1, 1e-9):
        assert numbers(mixed.split("test", seed=seed, fraction=fraction)) == test
        smaller = numbers(mixed.split("train", seed=seed, fraction=fraction))
        assert smaller <= larger
        larger = smaller
    assert len(larger) == 1


def test_a_mixture_of_single_documents_holds_out_the_lowest_hash(tmp_path):
    columns = {"document": np.array([0, 0, 1]), "source": np.array([0, 0, 1], np.int16)}
    rows = np.array([[0.0], [0.0], [1.0]], np.float32)
    mixed = make_store(tmp_path / "m", rows, columns=columns, sources=("a", "b"))
    assert numbers(mixed.split("test")) == {lowest_hash([0, 1], 0)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"which": "dev"}, "split must be one of train, test, all, got 'dev'"),
        ({"which": "train", "fraction": 0}, "fraction must be above 0 and at most 1, got 0"),
        ({"which": "train", "test_fraction": 1}, "at least 0 and below 1, got 1"),
    ],
)
def test_arguments_out_of_range_are_refused(store, arguments, said):
    with pytest.raises(ConfigError, match=said):
        store.split(**arguments)


def offset_rows(rng: np.random.Generator, rows: int, d_in: int) -> np.ndarray:
    """Rows far from 0, of sizes that differ a thousandfold, with a dimension that does not vary."""
    centre, sizes = 1e4 * rng.standard_normal(d_in), rng.lognormal(0, 2, (rows, 1))
    values = centre + sizes * rng.standard_normal((rows, d_in))
    values[:, -1] = 1 / 3
    return values.astype(np.float32)


def read_back(rows: Rows) -> np.ndarray:
    return collect(rows.sequential(64)).astype(np.float64)


def assert_spread(spread, rows: np.ndarray) -> None:
    assert spread.rows == len(rows)
    # A sum of float64 is good to 1e-16 of its largest term: a mean to that of the mean, a scatter to that of itself.
    np.testing.assert_allclose(spread.mean, rows.mean(axis=0), rtol=1e-13)
    scatter = ((rows - rows.mean(axis=0)) ** 2).sum(axis=0)
    np.testing.assert_allclose(spread.scatter, scatter, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_spread_of_training_rows_excludes_held_out_rows(tmp_path, documents, fraction):
    rows = offset_rows(np.random.default_rng(0), 1000, 5)
    numbers = np.arange(1000) // 7 if documents else None
    store = make_store(tmp_path / "s", rows, documents=numbers, shard_rows=300)
    for which in ("train", "test", "all"):
        split = store.split(which, fraction=fraction)
        assert_spread(split.spread(), read_back(split))
    assert_spread(store.split("train", test_fraction=0).spread(), read_back(store.split("all")))


@pytest.mark.parametrize(("inside", "outside"), [(0.0, 1.0), (1e-6, 1e6)])
def test_spread_is_exact_where_only_held_out_rows_vary(tmp_path, inside, outside):
    rows = np.random.default_rng(0).standard_normal((1000, 3)).astype(np.float32)
    held_out = is_test(np.arange(1000))
    rows[:, 1] *= inside
    rows[held_out, 1] = outside * np.arange(held_out.sum())
    train = make_store(tmp_path / "s", rows, shard_rows=300).split("train")
    assert_spread(train.spread(), read_back(train))
    assert (train.spread().scatter[1] == 0) == (inside == 0)


def test_spread_of_training_rows_reads_only_held_out_rows(tmp_path):
    rows = offset_rows(np.random.default_rng(0), 1000, 5)
    store = make_store(tmp_path / "s", rows, shard_rows=300, chunk_rows=1)
    expected = read_back(store.split("train"))
    for number in np.flatnonzero(~is_test(np.arange(1000))):
        path = store.path / "shards" / store.meta.shards[number // 300].file
        with h5py.File(path) as file:
            at = file["activations"].id.get_chunk_info_by_coord((number % 300, 0)).byte_offset
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"\xff" * 20)
    assert_spread(ActivationStore.open(store.path).split("train").spread(), expected)
