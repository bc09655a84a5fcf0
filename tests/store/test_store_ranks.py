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
from saecli.store.writer import RankedStore, StoreWriter, rank_folder, saved_rows


def test_a_joined_store_says_and_holds_what_the_ranks_stored(tmp_path: Path):
    write(tmp_path / "s")
    found = stored_contents(tmp_path / "s")
    whole = found["meta"]
    assert sorted(file.name for file in (tmp_path / "s").iterdir()) == [
        ".lock",
        "shards",
        "store.json",
    ]
    expected = [
        float(rank + len(ROWS) * number) for rank, rows in enumerate(ROWS) for number in range(rows)
    ]
    assert found["rows"][:, 0].tolist() == expected
    assert whole["complete"]
    assert [(rank["rows"], rank["shards"]) for rank in whole["ranks"]] == [
        (45, 7),
        (23, 4),
        (0, 0),
        (31, 5),
    ]
    assert [shard["rows"] for shard in whole["shards"]] == [7] * 6 + [3] + [7] * 3 + [2] + [
        7
    ] * 4 + [3]
    assert whole["dropped"] == {"special": 2 * (9 + 5 + 7)}
    assert whole["norms"]["rows"] == sum(ROWS)
    assert whole["norms"]["max"] == max(expected)


def test_another_number_of_processes_is_refused_in_one_sentence(tmp_path: Path):
    write(tmp_path / "several", stop=3)
    with pytest.raises(
        StoreError,
        match="expected the number of processes that began it, 4, got 2; run the command "
        "with `torchrun --nproc-per-node 4`, or remove that store",
    ):
        RankedStore.open(tmp_path / "several", META, world_size=2)
    with pytest.raises(StoreError, match="that began it, 4, got 1; run the command with `torchrun"):
        StoreWriter.open(tmp_path / "several", META)
    with suppress(KeyboardInterrupt), StoreWriter.open(tmp_path / "one", META) as writer:
        writer.append(np.ones((8, 3), np.float32), {"document": np.arange(8)}, {"block": 0})
        raise KeyboardInterrupt
    with pytest.raises(
        StoreError,
        match="that began it, 1, got 4; run the command with one process, without torchrun",
    ):
        RankedStore.open(tmp_path / "one", META, world_size=4)
    write(tmp_path / "several")  # as it was, each of them lets go of the lock


def test_a_second_command_is_refused_and_an_empty_store_removed(tmp_path: Path):
    with RankedStore.open(tmp_path / "s", META, world_size=4) as store:
        for again in (
            lambda: RankedStore.open(tmp_path / "s", META, world_size=4),
            lambda: StoreWriter.open(tmp_path / "s", META),
        ):
            with pytest.raises(StoreError, match="another process is writing it"):
                again()
        store.begin(ROWS)
        assert saved_rows(tmp_path / "s") == 0
    assert not (tmp_path / "s").exists()
    with (
        RankedStore.open(tmp_path / "s", META, world_size=4) as store,
        pytest.raises(StoreError, match="there are no rows to store"),
    ):
        store.begin([0, 0, 0, 0])
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
@given(st.data())
def test_shards_of_uneven_sizes_are_read_as_the_rows_that_they_hold(data):
    counts = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any))
    columns = data.draw(st.sampled_from([(), ("document",)]))
    meta = make_meta(
        2,
        shard_rows=data.draw(st.integers(1, 20)),
        chunk_rows=data.draw(st.integers(1, 25)),
        columns=columns,
    )
    with memory_folder() as folder, pytest.MonkeyPatch.context() as patch:
        with RankedStore.open(folder / "s", meta, world_size=len(counts)) as joined:
            joined.begin(counts)
            for rank, count in enumerate(counts):
                begin = sum(counts[:rank])
                if count:
                    with StoreWriter.open(
                        rank_folder(folder / "s", rank), replace(joined.meta, ranks=())
                    ) as writer:
                        numbers = np.arange(begin, begin + count)
                        writer.append(
                            numbers[:, None] * np.ones(2, np.float32),
                            dict.fromkeys(columns, numbers),
                            {"row": 0},
                        )
                        writer.finish()
            joined.join()
        store = ActivationStore.open(folder / "s")
        patch.setattr("saecli.store.stream.RUN_BYTES", data.draw(st.sampled_from([8, 64, 1 << 20])))
        rows, size = store.split("all"), data.draw(st.integers(1, 60))
        total = sum(counts)
        assert store.rows == total
        assert collect(rows.sequential(size))[:, 0].tolist() == list(range(total))
        assert np.concatenate(list(rows.numbers(size))).tolist() == list(range(total))
        asked = {"seed": 1, "epoch": 0, "window_bytes": data.draw(st.integers(1, 2000))}
        assert sorted(collect(rows.batches(size, **asked))[:, 0].tolist()) == list(range(total))
        if total > 1:
            train, test = store.split("train"), store.split("test")
            assert sorted(
                [
                    *collect(train.batches(size, **asked))[:, 0],
                    *collect(test.sequential(size))[:, 0],
                ]
            ) == list(range(total))
            np.testing.assert_allclose(
                train.spread().mean, collect(train.sequential(64)).astype(np.float64).mean(0)
            )
