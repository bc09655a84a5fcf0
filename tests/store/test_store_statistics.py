"""What a store knows of its rows: exactly what NumPy finds in float64 in the rows read back, whatever the shards."""


import h5py
import numpy as np
import pytest
from storing import collect, make_store

from saecli.store.reader import ActivationStore, Rows
from saecli.store.split import is_test


def offset_rows(rng: np.random.Generator, rows: int, d_in: int) -> np.ndarray:
    """Rows far from 0, of sizes that differ a thousandfold, with a dimension that does not vary."""
    values = 1e4 * rng.standard_normal(d_in) + rng.lognormal(0, 2, (rows, 1)) * rng.standard_normal((rows, d_in))
    values[:, -1] = 1 / 3
    return values.astype(np.float32)


def read_back(rows: Rows) -> np.ndarray:
    return collect(rows.sequential(64)).astype(np.float64)


def assert_spread(found, rows: np.ndarray) -> None:
    assert found.rows == len(rows)
    # A sum of float64 is good to 1e-16 of its largest term: a mean to that of the mean, a scatter to that of itself.
    np.testing.assert_allclose(found.mean, rows.mean(axis=0), rtol=1e-13)
    np.testing.assert_allclose(found.scatter, ((rows - rows.mean(axis=0)) ** 2).sum(axis=0), rtol=1e-9, atol=1e-13)


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
    plain = make_store(tmp_path / "plain", rows)
    held_out = np.concatenate(list(make_store(tmp_path / "n", np.arange(1000, dtype=np.float32)[:, None])
                                   .split("test").sequential(64))).ravel().astype(int)
    rows[:, 1] *= inside
    rows[held_out, 1] = outside * np.arange(len(held_out))
    store = make_store(tmp_path / "s", rows)
    assert plain.split("test").rows == len(held_out) > 50
    train = store.split("train")
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
