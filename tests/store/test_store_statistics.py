"""What a store knows of its rows: exactly what NumPy finds in float64 in the rows read back, whatever the shards."""

import hashlib
import json

import h5py
import numpy as np
import pytest
from storing import collect, make_store

from saecli.base.errors import StoreError
from saecli.store.reader import ActivationStore
from saecli.store.rows import Rows
from saecli.store.shard import stored_statistics
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
def test_spread_of_training_rows_is_exact_and_untouched_by_held_out_rows(tmp_path, documents, fraction):
    rows = offset_rows(np.random.default_rng(0), 1000, 5)
    numbers = np.arange(1000) // 7 if documents else None
    store = make_store(tmp_path / "s", rows, documents=numbers, shard_rows=300)
    train = store.split("train", fraction=fraction)
    assert_spread(train.spread(), read_back(train))
    assert_spread(store.split("train", test_fraction=0).spread(), read_back(store.split("all")))
    assert_spread(store.split("test").spread(), read_back(store.split("test")))
    assert_spread(store.split("all").spread(), read_back(store.split("all")))


@pytest.mark.parametrize(("inside", "outside"), [(0.0, 1.0), (1e-6, 1e6)])
def test_spread_stays_exact_where_a_dimension_varies_among_held_out_rows_alone(tmp_path, inside, outside):
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


def test_spread_of_training_rows_reads_the_held_out_rows_and_no_others(tmp_path):
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


def test_statistics_read_in_plain_h5py(tmp_path):
    store = make_store(tmp_path / "s", offset_rows(np.random.default_rng(0), 230, 5), "bfloat16")
    for path in sorted((store.path / "shards").iterdir()):
        with h5py.File(path) as file:
            x = file["activations"].astype("float32")[:].astype(np.float64)
            group = file["statistics"]
            np.testing.assert_allclose(group["mean"][:], x.mean(axis=0), rtol=1e-13)
            np.testing.assert_allclose(group["scatter"][:], x.var(axis=0) * len(x), rtol=1e-9, atol=1e-13)
            norms = np.linalg.norm(x, axis=1)
            assert group.attrs["norm_mean"] == pytest.approx(norms.mean())
            assert group.attrs["norm_max"] == pytest.approx(norms.max())
            edges = 2.0 ** (np.arange(12_000) / 40 - 149)
            bins, counts = np.unique(np.searchsorted(edges, norms, side="right"), return_counts=True)
            np.testing.assert_array_equal(group["norm_bin"][:], bins)
            np.testing.assert_array_equal(group["norm_count"][:], counts)


def rewritten(store: ActivationStore, name: str, values: np.ndarray | None) -> ActivationStore:
    """The store with one of its second shard's statistics replaced or removed, as another program may write it."""
    path = store.path / "shards" / "00001.h5"
    with h5py.File(path, "r+") as file:
        del file[name]
        if values is not None:
            file[name] = values
    document = json.loads((store.path / "store.json").read_text())
    document["shards"][1] |= {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "frame": None}
    (store.path / "store.json").write_text(json.dumps(document))
    return ActivationStore.open(store.path)


@pytest.mark.parametrize(("name", "values", "said"), [
    ("statistics/mean", np.zeros(4), "expected those of 100 rows of 5 dimensions, got others"),
    ("statistics/mean", np.full(5, np.nan), "expected those of 100 rows of 5 dimensions, got others"),
    ("statistics/scatter", np.array([1.0, 1, -1, 1, 1]), "expected those of 100 rows of 5 dimensions, got others"),
    ("statistics/norm_count", np.zeros(1, int), "expected those of 100 rows of 5 dimensions, got others"),
    ("statistics/norm_bin", np.full(1, 10**6), "out of bounds"),
    ("statistics/scatter", None, "scatter"),
])
def test_statistics_that_cannot_be_those_of_the_rows_are_refused_by_name(tmp_path, name, values, said):
    store = rewritten(make_store(tmp_path / "s", np.ones((200, 5), np.float32)), name, values)
    with pytest.raises(StoreError, match=rf"statistics of shard .*00001.h5: .*{said}.*run the command"):
        stored_statistics(store.path, store.meta)
