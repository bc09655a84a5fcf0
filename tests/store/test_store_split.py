"""Splits: by document, the test rows fixed, fractions nested."""

import numpy as np
import pytest
from storing import collect, make_store

from saecli.base.errors import ConfigError, StoreError
from saecli.store.split import is_test


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rows = np.zeros((20_000, 2), np.float32)
    rows[:, 0] = np.arange(20_000)
    return make_store(tmp_path_factory.mktemp("s") / "s", rows, documents=np.arange(20_000) // 10, block=1000,
                      shard_rows=3000, chunk_rows=70)


def numbers(rows) -> set[int]:
    return set(collect(rows.sequential(512))[:, 0].astype(int).tolist())


def test_smaller_fractions_nest_in_larger_ones_and_never_touch_the_test_rows(store):
    test = numbers(store.split("test"))
    larger = numbers(store.split("train"))
    for fraction in (0.5, 0.1, 0.01):
        assert numbers(store.split("test", fraction=fraction)) == test
        smaller = numbers(store.split("train", fraction=fraction))
        assert len(smaller) == pytest.approx(fraction * 18_000, rel=0.5)
        assert smaller < larger
        larger = smaller


def test_seed_decides_which_rows_are_held_out(store):
    first, second = (numbers(store.split("test", seed=seed)) for seed in (0, 1))
    assert len(first & second) / len(first) == pytest.approx(0.1, abs=0.06)


def splitmix64(value: int) -> int:
    """The generator's finaliser in Python's own integers."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5])
def test_the_rows_held_out_are_for_ever_those_of_splitmix64(seed):
    key = splitmix64(splitmix64(seed) ^ 1)
    expected = [splitmix64(splitmix64(document) ^ key) / 2**64 < 0.1 for document in range(3000)]
    np.testing.assert_array_equal(is_test(np.arange(3000), seed=seed), expected)


def test_a_store_without_documents_is_split_by_row(tmp_path):
    rows = np.arange(3000, dtype=np.float32)[:, None]
    test = numbers(make_store(tmp_path / "s", rows).split("test"))
    assert test == set(np.flatnonzero(is_test(np.arange(3000))).tolist())


@pytest.mark.parametrize(("rows", "unit", "advice"), [
    (50, "documents", "a store of more documents"), (1, "rows", "import more rows")])
def test_an_empty_split_is_refused_with_advice(tmp_path, rows, unit, advice):
    one_document = np.zeros(rows, int) if unit == "documents" else None
    store = make_store(tmp_path / "s", np.zeros((rows, 2), np.float32), documents=one_document)
    with pytest.raises(StoreError, match=rf"test split .* is empty.*{advice}"):
        store.split("test")


def counted_store(path, units, by_document):
    rows = np.repeat(np.arange(units, dtype=np.float32), 3 if by_document else 1)[:, None]
    documents = rows[:, 0].astype(int) if by_document else None
    return make_store(path, rows, documents=documents, chunk_rows=4, shard_rows=20)


@pytest.mark.parametrize("by_document", [True, False])
@pytest.mark.parametrize("units", [2, 5, 20, 23])
def test_a_small_store_holds_out_its_lowest_hash_where_none_is_below_the_threshold(tmp_path, units, by_document):
    store = counted_store(tmp_path / "s", units, by_document)
    for seed in range(40):
        key = splitmix64(splitmix64(seed) ^ 1)
        hashes = np.array([(splitmix64(splitmix64(unit) ^ key) >> 11) / 2**53 for unit in range(units)])
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


@pytest.mark.parametrize(("arguments", "said"), [
    ({"which": "dev"}, "split must be one of train, test, all, got 'dev'"),
    ({"which": "train", "fraction": 0}, "fraction must be above 0 and at most 1, got 0"),
    ({"which": "train", "test_fraction": 1}, "at least 0 and below 1, got 1"),
])
def test_arguments_out_of_range_are_refused(store, arguments, said):
    with pytest.raises(ConfigError, match=said):
        store.split(**arguments)
