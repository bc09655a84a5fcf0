"""A store written by several ranks: each writes its own in `ranks/NNNNN` by a `StoreWriter`, and rank 0 joins them.

Rank 0 locks the store and records how many rows each rank is to store. Joining renames the ranks' shards and then marks
the store complete in `store.json`; a killed join resumes with the shards that remain.
"""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from ..base.files import flush_to_disk, lock_folder, make_folder
from ..base.home import STORE_MARKER
from .schema import RANKS, SHARDS, RankShards, ShardRecord, StoreMeta, read_meta, shard_name, write_meta
from .shard import stored_statistics
from .statistics import Dropped, norm_fields
from .writer import ClaimedStore, claim, no_rows, other_number, remove_empty

WAIT_SECONDS = 10.0  # how long an interrupted rank 0 waits for the others to end
POLL_SECONDS = 0.05


def rank_folder(store: Path, rank: int) -> Path:
    return store / RANKS / f"{rank:05d}"


def rank_meta(meta: StoreMeta) -> StoreMeta:
    """The `store.json` to begin each rank's own store with, from the joint store's."""
    return replace(meta, ranks=())


def joining_began(store: Path) -> bool:
    """Whether a join has moved shards already, all ranks being complete; then only `RankedStore.join` may resume."""
    return (store / RANKS).exists() and any((store / SHARDS).glob("*.h5"))


def saved_rows(store: Path) -> int:
    """Rows in the whole shards of a store, including all ranks'."""
    meta = read_meta(store)
    if meta.complete or not meta.ranks:
        return meta.rows
    folders = [rank_folder(store, rank) for rank in range(len(meta.ranks))]
    return sum(read_meta(folder).rows for folder in folders if (folder / STORE_MARKER).exists())


def wait_for_ranks(store: Path) -> None:
    until = time.monotonic() + WAIT_SECONDS
    for folder in sorted((store / RANKS).glob("*")):
        while time.monotonic() < until:
            try:
                os.close(lock_folder(folder))
                break
            except BlockingIOError:
                time.sleep(POLL_SECONDS)


class RankedStore(ClaimedStore):
    """Rank 0's lock on a store that several ranks write; leaving the `with` removes a store without rows."""

    @classmethod
    def open(cls, path: Path, meta: StoreMeta, *, world_size: int) -> Self:
        """Begin or resume a store; StoreError if another command is writing it, it holds something else, or another
        number of processes began it."""
        lock, there = claim(path, meta)
        begun = len(there.ranks) or (1 if there.rows else world_size)
        if not there.complete and begun != world_size:
            os.close(lock)
            raise other_number(path, begun, world_size)
        return cls(path, there, lock)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try:
            if not self._meta.complete:
                wait_for_ranks(self.path)
                if not saved_rows(self.path):
                    remove_empty(self.path)
        finally:
            super().__exit__(kind, error, trace)

    def begin(self, rows: Sequence[int], median_norm: float | None = None) -> None:
        """Record the number of rows that each rank is to store, and the median norm to drop rows by."""
        if not any(rows):
            raise no_rows(self.path, {})
        with self._reporting():
            self._write(replace(self._meta, ranks=tuple(map(RankShards, rows)), median_norm=median_norm))

    def join(self) -> None:
        """Join the ranks' stores, all complete, into one; StoreError if the disk refuses it."""
        parts = [read_meta(folder) if (folder / STORE_MARKER).exists() else None
                 for folder in (rank_folder(self.path, rank) for rank in range(len(self._meta.ranks)))]
        shards: list[ShardRecord] = []
        dropped = Dropped()
        with self._reporting():
            make_folder(self.path / SHARDS)
            for rank, part in enumerate(parts):
                for record in part.shards if part else ():
                    joined = replace(record, file=shard_name(len(shards)))
                    source = rank_folder(self.path, rank) / SHARDS / record.file
                    if source.exists():  # else an earlier, killed join moved it
                        source.rename(self.path / SHARDS / joined.file)
                    shards.append(joined)
                dropped += Dropped(part.dropped, part.dropped_norms) if part else Dropped()
            flush_to_disk(self.path / SHARDS)
            ranks = tuple(RankShards(noted.rows, len(part.shards) if part else 0)
                          for noted, part in zip(self._meta.ranks, parts, strict=True))
            meta = replace(self._meta, complete=True, shards=tuple(shards), ranks=ranks, dropped=dict(dropped.counts),
                           dropped_norms=dict(dropped.norms))
            self._write(replace(meta, **norm_fields(stored_statistics(self.path, meta))))
            shutil.rmtree(self.path / RANKS)

    def _write(self, meta: StoreMeta) -> None:
        write_meta(self.path, meta)
        self._meta = meta
