"""Splits: by document, the test rows fixed, fractions nested; mean and scatter of the training rows."""

import h5py
import numpy as np
import pytest
from storing import collect, make_store

from saecli.base.errors import ConfigError, StoreError
from saecli.store.reader import ActivationStore, Rows
from saecli.store.split import is_test


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rows = np.zeros((20_000, 2), np.float32)
    rows[:, 0] = np.arange(20_000)
    sizes = {"block": 1000, "shard_rows": 3000, "chunk_rows": 70}
    documents = np.arange(20_000) // 10
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
    train = store.split("train", fraction=fraction)
    assert_spread(train.spread(), read_back(train))
    assert_spread(store.split("train", test_fraction=0).spread(), read_back(store.split("all")))
    assert_spread(store.split("test").spread(), read_back(store.split("test")))
    assert_spread(store.split("all").spread(), read_back(store.split("all")))


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
