"""A store that several ranks write holds what each of them stored; shards of uneven sizes are read as others are."""

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
from storing import collect, make_meta, memory_folder, stored_contents

from saecli.base.errors import StoreError
from saecli.store.reader import ActivationStore
from saecli.store.schema import StoreMeta, rank_folder, read_meta, write_meta
from saecli.store.writer import StoreWriter, ranked_store


def of_ranks(count: int) -> StoreMeta:
    return replace(META, ranks=count)


def test_a_store_of_several_ranks_says_and_holds_what_they_stored(tmp_path: Path):
    write(tmp_path / "s")
    contents = stored_contents(tmp_path / "s")
    whole = contents["meta"]
    expected = [
        float(rank + len(ROWS) * number) for rank, rows in enumerate(ROWS) for number in range(rows)
    ]
    assert contents["rows"][:, 0].tolist() == expected
    assert whole["complete"] and whole["ranks"] == 4
    shards = [*[7] * 6, 3, *[7] * 3, 2, *[7] * 4, 3]
    assert [shard["rows"] for shard in whole["shards"]] == shards
    assert whole["dropped"] == {"special": 2 * (9 + 5 + 7)}
    assert whole["norms"]["rows"] == sum(ROWS)
    assert whole["norms"]["max"] == max(expected)


def test_another_number_of_processes_is_refused(tmp_path: Path):
    several, alone = tmp_path / "several", tmp_path / "alone"
    write(several, stop=3)
    refused = "the number of processes that began it, {}, got {}"
    with pytest.raises(StoreError, match=refused.format(4, 2)), ranked_store(several, of_ranks(2)):
        pass
    with pytest.raises(StoreError, match=refused.format(4, 1)):
        StoreWriter.open(several, META)
    with suppress(KeyboardInterrupt), StoreWriter.open(alone, META) as writer:
        writer.append(np.ones((8, 3), np.float32), {"document": np.arange(8)}, {"block": 0})
        raise KeyboardInterrupt
    with pytest.raises(StoreError, match=refused.format(1, 4)), ranked_store(alone, of_ranks(4)):
        pass
    write(several)  # as it was, each of them lets go of the lock


def test_a_second_command_is_refused_and_an_empty_store_removed(tmp_path: Path):
    with ranked_store(tmp_path / "s", of_ranks(4)):
        with (
            pytest.raises(StoreError, match="another process is writing it"),
            ranked_store(tmp_path / "s", of_ranks(4)),
        ):
            pass
        with pytest.raises(StoreError, match="another process is writing it"):
            StoreWriter.open(tmp_path / "s", META)
    assert not (tmp_path / "s").exists()


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
                part = rank_folder(folder / "s", rank)
                with StoreWriter.open(part, meta, is_part=True) as writer:
                    rows = numbers[:, None] * np.ones(2, np.float32)
                    writer.append(rows, dict.fromkeys(columns, numbers), {"row": 0})
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
