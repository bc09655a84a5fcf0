"""Stores read side by side: row for row the same, in the order of the first alone."""

from pathlib import Path

import numpy as np
import pytest
from storing import collect, make_store

from saecli.base.errors import ConfigError
from saecli.store.opening import Joined
from saecli.store.reader import ActivationStore, JoinedRows
from saecli.store.split import Part

COUNT = 3000
DOCUMENTS = np.repeat(np.arange(COUNT // 6), 6)


def rows_of(width: int, seed: int) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(COUNT, width)).astype(np.float32)
    rows[:, 0] = np.arange(COUNT)
    return rows


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[ActivationStore]:
    """Three places of the same tokens, of unlike widths, shards and chunks."""
    folder = tmp_path_factory.mktemp("stores")
    return [
        make_store(
            folder / f"s{width}",
            rows_of(width, width),
            documents=DOCUMENTS,
            shard_rows=shard,
            chunk_rows=chunk,
            reads=(1.0, 2.0, 3.0, 4.0, 5.0) if width == 5 else (),
        )
        for width, shard, chunk in ((5, 700, 20), (2, 900, 64), (40, 3000, 7))
    ]


def joined_rows(stores: list[ActivationStore], which: str = "train", **choice) -> JoinedRows:
    return Joined((stores[0], stores[1]), stores[2]).split(which, **choice)


@pytest.mark.parametrize("which", ["train", "test", "all"])
@pytest.mark.parametrize("window_bytes", [1 << 30, 6000])
def test_every_batch_has_the_rows_of_all_places_in_the_firsts_order(stores, which, window_bytes):
    both = joined_rows(stores, which, seed=1)
    assert (both.widths, both.d_in, both.d_target) == ((5, 2), 7, 40)
    assert both.reads.tolist() == [1, 2, 3, 4, 5, *[1] * 42]
    assert stores[1].split(which).reads is None
    arguments = {"seed": 3, "epoch": 1, "window_bytes": window_bytes}
    batches = collect(both.batches(64, **arguments))
    alone = collect(stores[0].split(which, seed=1).batches(64, **arguments))
    np.testing.assert_array_equal(batches[:, :5], alone)
    numbers = alone[:, 0].astype(int)
    for begin, width in ((0, 5), (5, 2), (7, 40)):
        own = batches[:, begin : begin + width]
        np.testing.assert_array_equal(own, rows_of(width, width)[numbers])


def test_parts_of_batches_are_those_of_the_rows_side_by_side(stores):
    both = joined_rows(stores)
    whole = [*both.batches(50, seed=0, epoch=0)]
    parts = [[*both.batches(50, seed=0, epoch=0, part=Part(number, 3))] for number in range(3)]
    for batch, *some in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(np.concatenate(some), batch)
    halves = [collect(both.sequential(32, Part(number, 2))) for number in range(2)]
    np.testing.assert_array_equal(np.concatenate(halves), collect(both.sequential(32)))


def test_the_spread_is_that_of_all_dimensions(stores):
    both = joined_rows(stores)
    every, spread = collect(both.sequential(100)).astype(np.float64), both.spread()
    np.testing.assert_allclose(spread.mean, every.mean(0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(spread.variance, every.var(0), rtol=1e-9)


def test_names_and_hash_say_what_is_read_and_in_which_order(stores):
    a, b, c = stores
    both = Joined((a, b), c)
    assert both.name == "s5 + s2 -> s40"
    assert both.names() == {"data": "s5", "data_hash": both.hash, "beside": ["s2"], "target": "s40"}
    orders = [((b, a), c), ((a, c), b), ((a, b, c), None), ((a,), c), ((a,), None)]
    hashes = {both.hash, *(Joined(inputs, target).hash for inputs, target in orders)}
    assert len(hashes) >= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": COUNT - 6}, "the same rows"),
        ({"dtype": "float16"}, "the same dtype"),
        ({"documents": None}, "the same columns"),
        ({"moved": True}, "the same document in row 1,200"),
    ],
)
def test_stores_of_other_tokens_are_refused_in_a_sentence(
    stores, tmp_path: Path, change: dict, words: str
):
    count = change.get("rows", COUNT)
    documents = DOCUMENTS[:count].copy() if change.get("documents", DOCUMENTS) is not None else None
    if change.get("moved"):
        documents[1200:1206] = 9999
    dtype = change.get("dtype", "float32")
    other = make_store(tmp_path / "other", rows_of(3, 0)[:count], dtype, documents=documents)
    with pytest.raises(ConfigError, match=f"s5 and other are not .*: expected {words}"):
        Joined((stores[0],), other).demand_alike()
    Joined((stores[0], stores[1]), stores[2]).demand_alike()
