"""A store that several writers fill in turns has the rows and counts of one writer, however often all are stopped and
however many go on. Writers are threads here, which tell each other what processes would."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from storing import memory_folder

from saecli.errors import StoreError
from saecli.store import ActivationStore, SharedWriter, StoreMeta, StoreWriter, made_by_several

D, LIMIT = 3, 60
Block = tuple[int, dict, np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]


class StoppedError(Exception):
    """What stands for a kill."""


class Talk:
    """What one of several threads says to all: gives each what every one of them said, in their order."""

    def __init__(self, threads: int, stop_after: int | None) -> None:
        self.barrier = threading.Barrier(threads, timeout=20)
        self._said: list[Any] = [None] * threads
        self._left = stop_after

    def by(self, rank: int):
        def exchange(value: Any) -> list[Any]:
            if rank == 0 and self._left is not None:
                self._left -= 1
                if self._left < 0:
                    self.barrier.abort()
                    raise StoppedError
            self._said[rank] = value
            self.barrier.wait()
            found = list(self._said)
            self.barrier.wait()
            return found

        return exchange


def blocks(seed: int) -> list[Block]:
    """Blocks of 0 to 9 rows, of which some are not finite and some very large; a row holds its own number."""
    rng = np.random.default_rng(seed)
    found, row = [], 0
    for number in range(16):
        count = int(rng.integers(10))
        rows = np.arange(row, row + count, dtype=np.float32)[:, None] + np.array([1, 0, 0], np.float32)
        rows[rng.random(count) < 0.1] = np.nan
        rows[rng.random(count) < 0.05] = 1e6
        special = {"special": np.full(int(rng.integers(2)), 2.0)}
        documents = {"document": np.arange(row, row + count)}
        found.append((number, {"place": row, "number": number}, rows, documents, special))
        row += count
    return found


def meta(multiple: float | None) -> StoreMeta:
    return StoreMeta(source={}, request_hash="h", dtype="float32", d_in=D, shard_rows=7, chunk_rows=4,
                     columns=("document",), max_norm_multiple=multiple)


def by_one(path: Path, seed: int, multiple: float | None) -> None:
    with StoreWriter.open(path, meta(multiple), limit=LIMIT) as writer:
        for _, cursor, rows, columns, dropped in blocks(seed):
            if not writer.full:
                writer.append(rows, columns, cursor, dropped)
        writer.finish()


def by_several(path: Path, seed: int, multiple: float | None, threads: int, stop_after: int | None = None) -> bool:
    """Whether they came to the end."""
    talk, ended, failed = Talk(threads, stop_after), [], []

    def turns(writer: SharedWriter) -> Iterator[list[Block]]:
        first, cursor = writer.start
        turn: list[Block] = []
        for block in blocks(seed)[cursor["number"] if cursor else 0:]:
            if turn and (len(turn) == threads or writer.waits):
                yield turn
                turn = []
            if writer.missing(first):
                turn.append((first, *block[1:]))
            first += 1
        if turn:
            yield turn

    def work(rank: int) -> None:
        try:
            with SharedWriter.open(path, meta(multiple), limit=LIMIT, rank=rank, exchange=talk.by(rank)) as writer:
                if not writer.complete:
                    for turn in turns(writer):
                        if rank < len(turn):
                            number, cursor, rows, columns, dropped = turn[rank]
                            writer.hold(number, cursor, rows, columns, dropped)
                        writer.store()
                    writer.finish()
                ended.append(rank)
        except (StoppedError, threading.BrokenBarrierError):
            return
        except Exception as error:
            failed.append(error)
            talk.barrier.abort()

    workers = [threading.Thread(target=work, args=(rank,)) for rank in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failed:
        raise failed[0]
    return len(ended) == threads


def contents(path: Path) -> tuple[list, list, StoreMeta]:
    store = ActivationStore.open(path)
    rows = store.split("all")
    documents = [int(one) for part in rows.column("document", 50) for one in part]
    values = np.concatenate([batch.copy() for batch in rows.sequential(50)])[:, 0].tolist()
    order = np.argsort(documents)
    return [documents[i] for i in order], [values[i] for i in order], store.meta


@given(seed=st.integers(0, 10_000), multiple=st.sampled_from([None, 50.0]),
       stops=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 30)), max_size=3), last=st.integers(1, 4),
       begun=st.integers(0, 12))
def test_rows_and_counts_are_those_of_one_writer_however_often_stopped(seed, multiple, stops, last, begun):
    with memory_folder() as folder:
        assert_as_by_one(folder, seed, multiple, stops, last, begun)


def assert_as_by_one(folder: Path, seed: int, multiple: float | None, stops: list, last: int, begun: int) -> None:
    by_one(folder / "one", seed, multiple)
    with StoreWriter.open(folder / "several", meta(multiple), limit=LIMIT) as writer:  # one begins
        for _, cursor, rows, columns, dropped in blocks(seed)[:begun]:
            if not writer.full:
                writer.append(rows, columns, cursor, dropped)
    for threads, after in stops:
        by_several(folder / "several", seed, multiple, threads, after)
    assert by_several(folder / "several", seed, multiple, last)
    (documents, values, one), (found, found_values, several) = contents(folder / "one"), contents(folder / "several")
    assert found == documents
    assert found_values == values
    assert several.complete
    assert several.dropped == one.dropped
    assert several.median_norm == one.median_norm
    assert several.norms.mean == pytest.approx(one.norms.mean, rel=1e-12)
    assert several.norm_quantiles == one.norm_quantiles
    assert {name: norms.rows for name, norms in several.dropped_norms.items()} == {
        name: norms.rows for name, norms in one.dropped_norms.items()}
    assert [shard.rows for shard in several.shards] == [shard.rows for shard in one.shards]
    assert ActivationStore.open(folder / "several").verify() == []


def test_a_damaged_shard_is_written_anew_from_its_own_blocks_alone(tmp_path: Path):
    assert by_several(tmp_path / "s", 3, None, 3)
    assert made_by_several(tmp_path / "s")
    shards = sorted((tmp_path / "s" / "shards").glob("*.h5"))
    before = [shard.read_bytes() for shard in shards]
    shards[1].write_bytes(before[1][:-9] + b"damaged!!")
    shards[4].unlink()
    asked: list[int] = []

    def produce(cursor: dict) -> tuple:
        asked.append(cursor["number"])
        return blocks(3)[cursor["number"]][2:]

    with SharedWriter.open(tmp_path / "s", meta(None), limit=LIMIT, rank=0, exchange=lambda value: [value]) as writer:
        assert writer.damaged == ["00001.h5", "00004.h5"]
        writer.mend(produce)
        assert writer.altered == []
    assert [shard.read_bytes() for shard in shards] == before
    assert len(set(asked)) < len(blocks(3)) / 2
    assert ActivationStore.open(tmp_path / "s").changed() == []


def test_other_blocks_than_before_are_refused(tmp_path: Path):
    assert not by_several(tmp_path / "s", 3, None, 2, stop_after=12)
    assert made_by_several(tmp_path / "s")
    with (SharedWriter.open(tmp_path / "s", meta(None), limit=LIMIT, rank=0, exchange=lambda value: [value]) as writer,
          pytest.raises(StoreError, match="the source has changed")):
        for number, cursor, rows, columns, dropped in blocks(4):
            if writer.missing(number):
                writer.hold(number, cursor, rows, columns, dropped)
                writer.store()


def test_a_second_command_is_refused_while_any_writer_of_the_first_lives(tmp_path: Path):
    assert not by_several(tmp_path / "s", 3, None, 2, stop_after=12)
    talk = Talk(2, None)
    opened: list[SharedWriter] = []
    workers = [threading.Thread(target=lambda rank=rank: opened.append(SharedWriter.open(
        tmp_path / "s", meta(None), limit=LIMIT, rank=rank, exchange=talk.by(rank)))) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    first, second = sorted(opened, key=lambda writer: writer._rank)
    with first:
        pass
    with second, pytest.raises(StoreError, match="another process is writing it"):
        StoreWriter.open(tmp_path / "s", meta(None))
