"""Writing a store so that whatever kills the process, the same producer run again completes it identically.

Legend: R rows, D = d_in.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..errors import StoreError
from ..home import STORE_MARKER
from .checks import no_show, suspect
from .claim import claim
from .dropped import Dropped
from .open_writer import OpenWriter
from .schema import SHARDS, Resume, ShardRecord, StoreMeta, shard_name, write_meta
from .shard_statistics import norm_fields, with_shard
from .shard_writer import ShardWriter

SOURCE_CHANGED = "the source has changed, so remove the store and make it again"


class StoreWriter(OpenWriter):
    """Appends a producer's blocks of rows to a store, in shards that appear whole or not at all.

    A producer is anything that yields deterministic blocks, each at a cursor: a small JSON object from which
    it can yield that block, and those after it, again. It starts at `writer.cursor`, once for each shard that is
    damaged or missing, and once for the store's end:

        with StoreWriter.open(path, meta) as writer:
            while not writer.complete:
                for cursor, rows, columns, dropped in produce(since=writer.cursor):
                    writer.append(rows, columns, cursor, dropped)
                    if writer.full:
                        break
                meta = writer.finish()

    After an interruption the first block comes a second time; the writer discards of it what is stored.
    Leaving the `with` without `finish` keeps the whole shards and drops the rows of the unfinished one; a store
    without a shard is removed.
    """

    def __init__(self, path: Path, meta: StoreMeta, lock: int, limit: int | None, damaged: Iterable[int]) -> None:
        super().__init__(path, meta, lock, sorted(damaged))
        self._limit = limit
        self._begin()

    def _begin(self) -> None:
        """Get ready for a producer that starts at the cursor."""
        self._shard = None
        self._resume = self._meta.shards[self._index - 1].resume if self._index else None
        self._mended = False  # whether the damaged shard that this was about is whole
        self._last: Resume | None = None  # where the last row stored came from
        self._ended = Dropped()  # in blocks that ended since the last shard
        self._current = Dropped()  # in the block that came last

    @classmethod
    def open(cls, path: Path, meta: StoreMeta, *, limit: int | None = None,
             show: Callable[[float], None] = no_show) -> Self:
        """Begin a store, or go on with one that was interrupted, or of which shards are damaged.

        Args:
            path: the store's folder; made if need be.
            meta: what it is to hold; `created`, `dropped` and `shards` are an interrupted store's own.
            limit: the number of rows after which the store is full; None for no limit.
            show: told how many bytes are read to check shards that may have changed since they were written.

        Returns:
            A context manager that holds the store's lock until it exits.

        Raises:
            StoreError: another process is writing it, or it holds something else.
        """
        lock, there, damaged = claim(path, meta, show)
        return cls(path, there, lock, limit, damaged)

    @property
    def cursor(self) -> dict[str, Any] | None:
        """Where the producer must start: None for its beginning."""
        return self._meta.shards[self._index - 1].resume.cursor if self._index else None

    @property
    def rows(self) -> int:
        """Rows stored, without those of damaged shards, with those of the unfinished shard."""
        lost = sum(self._meta.shards[index].rows for index in self._damaged)
        return self._meta.rows - lost + (self._shard.rows if self._shard else 0)

    @property
    def full(self) -> bool:
        """Whether no more rows are wanted from here; never before the block at `cursor` has come again."""
        if self._damaged or self._mended:
            return self._mended
        return self._limit is not None and self._resume is None and self.rows >= self._limit

    @property
    def complete(self) -> bool:
        """Whether all rows are there."""
        return self._meta.complete and not self._damaged

    @property
    def _index(self) -> int:
        """The number of the shard that is written."""
        return self._damaged[0] if self._damaged else len(self._meta.shards)

    @property
    def _room(self) -> int:
        """How many rows that shard is to have."""
        return self._meta.shards[self._index].rows if self._damaged else self._meta.shard_rows

    @property
    def meta(self) -> StoreMeta:
        """The store's `store.json` as it stands on disk."""
        return self._meta

    def append(self, activations: np.ndarray, columns: Mapping[str, np.ndarray], cursor: dict[str, Any],
               dropped: Mapping[str, np.ndarray] | None = None) -> None:
        """Append one block; rows that are not finite in the stored type or too large are dropped and counted.

        Too large is a norm above `max_norm_multiple` times the median norm of the first block that has a finite row.
        That median is noted with the first shard and stands from then on; with producers whose blocks are always the
        same, a store is then the same however often it was interrupted.

        Args:
            activations: (R, D) float, or uint16 bits where the store is bfloat16; R may be 0.
            columns: (R,) integers for each of the store's columns.
            cursor: where this block begins, a JSON object.
            dropped: norms of the rows of this block that the producer itself left out, by reason; NaN for a row
                whose norm it does not know.

        Raises:
            StoreError: the disk refuses it (whole shards stay, and the store can be gone on with), or the
                producer does not go on where the interrupted store ends.
            ValueError: shapes or types do not fit the store.
        """
        if self.complete and not self._mended:
            raise StoreError(f"{self.path} is complete, with {self.rows} rows; expected one to go on with; "
                             "choose another --name, or remove that store")
        rows, columns, left_out = self._admit(activations, columns, dropped or {})
        cursor = json.loads(json.dumps(cursor))
        self._ended, self._current = self._ended + self._current, left_out
        begin, end = self._after_stored(len(rows), cursor), len(rows)
        if self._damaged or self._mended:
            end = min(end, begin + (0 if self._mended else self._room - (self._shard.rows if self._shard else 0)))
        elif self._limit is not None:
            end = min(end, begin + max(0, self._limit - self.rows))
        with self._reporting():
            self._store(rows, columns, begin, end, cursor)

    def finish(self) -> StoreMeta:
        """Say that the producer has ended, or was stopped as no more was wanted.

        Unless that was for a damaged shard, the last shard is written and the store marked complete.

        Returns:
            The store's `store.json`.

        Raises:
            StoreError: there are no rows at all, or fewer than there were, or the disk refuses it.
        """
        if self._mended:
            self._begin()
            return self._meta
        if self._resume is not None or self._damaged:
            raise self._differs(f"{self._shard.rows} rows" if self._shard else "nothing")
        self._ended, self._current = self._ended + self._current, Dropped()
        if not self.rows:
            raise self._without_rows(self._ended)
        with self._reporting():
            self._record(complete=True)
        return self._meta

    def _after_stored(self, kept: int, cursor: dict[str, Any]) -> int:
        """How many of the block's kept rows are stored already, as those before an interruption are."""
        if self._resume is None:
            return 0
        if Resume(cursor, self._resume.skip).place != self._resume.place or kept < self._resume.skip:
            raise self._differs(f"{kept} rows at {cursor}")
        skip, self._resume = self._resume.skip, None
        return skip

    def _store(self, rows: np.ndarray, columns: Mapping[str, np.ndarray], begin: int, end: int,
               cursor: dict[str, Any]) -> None:
        while begin < end:
            if self._shard is None:
                self._shard = ShardWriter(self.path / SHARDS / shard_name(self._index), self._meta)
            stop = min(end, begin + self._room - self._shard.rows)
            self._shard.append(self._as_stored(rows[begin:stop]),
                               {name: columns[name][begin:stop] for name in self._meta.columns})
            self._last = Resume(cursor, stop)
            if self._shard.rows == self._room:
                (self._mend if self._damaged else self._record)()
            begin = stop

    def _mend(self) -> None:
        """Put the shard in the place of the damaged one that it stands for."""
        assert self._shard and self._last
        old = self._meta.shards[self._index]
        if self._last.place != old.resume.place:
            self._drop_shard()
            raise StoreError(f"cannot mend shard {old.file} of {self.path}: expected its last row to be row "
                             f"{old.resume.skip} of {old.resume.cursor}, got row {self._last.skip} of "
                             f"{self._last.cursor}; {SOURCE_CHANGED}")
        digest, frame = self._shard.commit()
        shards = list(self._meta.shards)
        shards[self._index] = dataclasses.replace(old, sha256=digest, frame=frame)
        self._shard, self._mended = None, True
        self._damaged.pop(0)
        if digest != old.sha256:
            self._meta = dataclasses.replace(self._meta, shards=tuple(shards))
            write_meta(self.path, self._meta)
            self.altered.append(old.file)
        if not self._damaged:
            suspect(self.path / STORE_MARKER)
        for index in self._damaged:  # they must stay younger than `store.json`
            suspect(self.path / SHARDS / self._meta.shards[index].file)

    def _record(self, complete: bool = False) -> None:
        """Close the shard, if there is one, and say so in `store.json`.

        The last shard and the store's completion are said in one: a short shard in a store that is not
        complete would have its dropped rows counted twice when the producer comes back.
        """
        shards = self._meta.shards
        if self._shard:
            assert self._last is not None
            digest, frame = self._shard.commit()
            self._statistics = with_shard(self.path, self._meta, self._statistics, self._shard.statistics)
            shards += (ShardRecord(self._shard.path.name, self._shard.rows, digest, dict(self._ended.counts),
                                   self._last, dict(self._ended.norms), frame),)
        dropped = Dropped(self._meta.dropped, self._meta.dropped_norms) + self._ended
        meta = dataclasses.replace(self._meta, complete=complete, shards=shards, dropped=dict(dropped.counts),
                                   dropped_norms=dict(dropped.norms), median_norm=self._admit.median,
                                   **norm_fields(self._statistics))
        write_meta(self.path, meta)
        self._meta, self._shard, self._ended = meta, None, Dropped()

    def _differs(self, got: str) -> StoreError:
        if self._resume is None:
            expected = f"{self._room} rows for shard {shard_name(self._index)}"
        else:
            expected = f"{self._resume.skip} rows or more at {self._resume.cursor}"
        return StoreError(f"cannot go on with {self.path}: expected {expected}, got {got}; {SOURCE_CHANGED}")
