"""Stores read side by side: row for row the same, in the order of the first alone; a store that several ranks write
holds what each of them stored, and its shards of uneven sizes are read as others are."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_producer import RANK_META as META
from store_producer import RANK_ROWS as ROWS
from store_producer import write_ranks as write
from storing import collect, make_meta, make_store, memory_folder, stored_contents

from saecli.base.errors import ConfigError, StoreError
from saecli.base.home import Home
from saecli.store.blocks import RowBlock
from saecli.store.opening import Joined
from saecli.store.reader import ActivationStore, JoinedRows
from saecli.store.schema import StoreMeta, rank_folder, read_meta, write_meta
from saecli.store.split import Part
from saecli.store.writer import StoreWriter, ranked_store

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
            request_hash=f"s{width}",
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
    assert len(hashes) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "dtype", "documents", "words"),
    [
        (COUNT - 6, "float32", DOCUMENTS[:-6], "rows, 3000 and 2994"),
        (COUNT, "float16", DOCUMENTS, "dtype, "),
        (COUNT, "float32", None, "columns, "),
        (COUNT, "float32", np.where(DOCUMENTS == 200, 9999, DOCUMENTS), "the column document"),
    ],
)
def test_stores_of_other_tokens_are_refused(stores, tmp_path, count, dtype, documents, words):
    other = make_store(tmp_path / "other", rows_of(3, 0)[:count], dtype, documents=documents)
    with pytest.raises(ConfigError, match=f"s5 and other are not .*: they differ in {words}"):
        Joined((stores[0],), other).demand_alike()
    Joined((stores[0], stores[1]), stores[2]).demand_alike()


def of_ranks(count: int) -> StoreMeta:
    return replace(META, ranks=count)


def test_a_store_of_several_ranks_says_and_holds_what_they_stored(tmp_path: Path):
    write(tmp_path / "s")
    contents = stored_contents(tmp_path / "s")
    whole = contents["meta"]
    expected = [float(rank + len(ROWS) * n) for rank, rows in enumerate(ROWS) for n in range(rows)]
    assert contents["rows"][:, 0].tolist() == expected
    assert whole["complete"] and whole["ranks"] == 4
    shards = [*[7] * 6, 3, *[7] * 3, 2, *[7] * 4, 3]
    assert [shard["rows"] for shard in whole["shards"]] == shards
    assert whole["dropped"] == {"special": 2 * (9 + 5 + 7)}
    assert whole["norms"]["rows"] == sum(ROWS)
    assert whole["norms"]["max"] == max(expected)


def test_control_tokens_of_several_ranks_are_those_with_rows():
    whole = replace(of_ranks(2), control_tokens={"1": 0, "2": 0})
    parts = {"00000": replace(META, control_tokens={"2": 5}), "00001": META}
    assert whole.joined(parts).control_tokens == {"2": 5}


def test_a_finished_store_of_several_ranks_is_the_newest(tmp_path: Path):
    stores = Home(tmp_path).stores
    write(stores.path / "first")
    write(stores.path / "second", stop=3)
    assert stores.unfinished() == ["second"] and stores.find(None).name == "first"
    write(stores.path / "second")
    assert stores.unfinished() == [] and stores.find(None).name == "second"
    own = StoreMeta.from_json((stores.path / "second" / "store.json").read_bytes())
    assert own.complete and own.shards == () and own.dropped == {}


def test_another_number_of_processes_is_refused(tmp_path: Path):
    several, alone = tmp_path / "several", tmp_path / "alone"
    write(several, stop=3)
    refused = "the number of processes that began it, {}, got {}"
    with pytest.raises(StoreError, match=refused.format(4, 2)), ranked_store(several, of_ranks(2)):
        pass
    with pytest.raises(StoreError, match=refused.format(4, 1)):
        StoreWriter.open(several, META)
    with suppress(KeyboardInterrupt), StoreWriter.open(alone, META) as writer:
        block = RowBlock(np.ones((8, 3), np.float32), {"document": np.arange(8)})
        writer.append(block, {"block": 0})
        raise KeyboardInterrupt
    with pytest.raises(StoreError, match=refused.format(1, 4)), ranked_store(alone, of_ranks(4)):
        pass
    write(several)  # as it was, each of them lets go of the lock


def test_a_second_command_is_refused_and_a_store_without_rows_unfinished(tmp_path: Path):
    with ranked_store(tmp_path / "s", of_ranks(4)):
        with (
            pytest.raises(StoreError, match="another process is writing it"),
            ranked_store(tmp_path / "s", of_ranks(4)),
        ):
            pass
        with pytest.raises(StoreError, match="another process is writing it"):
            StoreWriter.open(tmp_path / "s", META)
        for rank in range(4):
            with StoreWriter.open(tmp_path / "s", META, rank=rank) as writer:
                writer.finish()
    assert not read_meta(tmp_path / "s").complete


def test_a_rank_that_stores_something_else_is_refused(tmp_path: Path):
    write(tmp_path / "s")
    folder = rank_folder(tmp_path / "s", 1)
    write_meta(folder, replace(read_meta(folder), request_hash="other"))
    with pytest.raises(StoreError, match="cannot read"):
        ActivationStore.open(tmp_path / "s")


@pytest.mark.slow
@given(st.data())
def test_shards_of_uneven_sizes_are_read_as_the_rows_that_they_hold(data):
    counts = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any))
    columns = data.draw(st.sampled_from([(), ("document",)]))
    shard_rows, chunk_rows = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 25))
    meta = make_meta(2, shard_rows=shard_rows, chunk_rows=chunk_rows, columns=columns)
    with memory_folder() as folder, pytest.MonkeyPatch.context() as patch:
        with ranked_store(folder / "s", replace(meta, ranks=len(counts))):
            for rank, count in enumerate(counts):
                numbers = sum(counts[:rank]) + np.arange(count)
                with StoreWriter.open(folder / "s", meta, rank=rank) as writer:
                    rows = numbers[:, None] * np.ones(2, np.float32)
                    block = RowBlock(rows, dict.fromkeys(columns, numbers))
                    writer.append(block, {"row": 0})
                    writer.finish()
        store = ActivationStore.open(folder / "s")
        patch.setattr("saecli.store.split.RUN_BYTES", data.draw(st.sampled_from([8, 64, 1 << 20])))
        rows, size = store.split("all"), data.draw(st.integers(1, 60))
        total = sum(counts)
        assert store.rows == total
        assert collect(rows.sequential(size))[:, 0].tolist() == list(range(total))
        assert np.concatenate(list(rows.numbers(size))).tolist() == list(range(total))
        asked = {"seed": 1, "epoch": 0, "window_bytes": data.draw(st.integers(1, 2000))}
        assert sorted(collect(rows.batches(size, **asked))[:, 0].tolist()) == list(range(total))
        if total > 1:
            train, test = store.split("train"), store.split("test")
            read = [*train.batches(size, **asked), *test.sequential(size)]
            assert sorted(np.concatenate(read)[:, 0].tolist()) == list(range(total))
            expected = collect(train.sequential(64)).astype(np.float64).mean(0)
            np.testing.assert_allclose(train.spread().mean, expected)
