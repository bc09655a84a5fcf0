"""Writing a store so that whatever kills the process, the same producer run again completes it identically.

Legend: R rows, D = d_in.
"""

import dataclasses
import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from ..errors import StoreError
from ..home import STORE_MARKER
from .claim import begin, forsake, remove_empty, take_lock
from .dropped import Dropped, row_norms
from .dtypes import DTYPES
from .schema import SHARDS, Resume, ShardRecord, StoreMeta, shard_name, write_meta
from .shard_writer import ShardWriter

NONFINITE = "nonfinite"


class StoreWriter:
    """Appends a producer's blocks of rows to a store, in shards that appear whole or not at all.

    A producer is anything that yields deterministic blocks, each at a cursor: a small JSON object from which
    it can yield that block, and those after it, again. It starts at `writer.cursor`:

        with StoreWriter.open(path, meta) as writer:
            for cursor, rows, columns, dropped in produce(since=writer.cursor):
                writer.append(rows, columns, cursor, dropped)
                if writer.full:
                    break
            meta = writer.finish()

    After an interruption the first block comes a second time; the writer discards of it what is stored.
    Leaving the `with` without `finish` keeps the whole shards and drops the rows of the unfinished one; a store
    without a shard is removed.
    """

    def __init__(self, path: Path, meta: StoreMeta, lock: int, limit: int | None) -> None:
        self._path, self._meta, self._lock, self._limit = path, meta, lock, limit
        self._shard: ShardWriter | None = None
        self._resume = meta.shards[-1].resume if meta.shards else None
        self._failed = False
        self._last: Resume | None = None  # where the last row stored came from
        self._ended = Dropped()  # in blocks that ended since the last shard
        self._current = Dropped()  # in the block that came last

    @classmethod
    def open(cls, path: Path, meta: StoreMeta, *, limit: int | None = None) -> Self:
        """Begin a store, or go on with one that was interrupted.

        Args:
            path: the store's folder; made if need be.
            meta: what it is to hold; `created`, `dropped` and `shards` are an interrupted store's own.
            limit: the number of rows after which the store is full; None for no limit.

        Returns:
            A context manager that holds the store's lock until it exits.

        Raises:
            StoreError: another process is writing it, it is complete, or it holds something else.
        """
        try:
            lock = take_lock(path)
        except OSError as error:
            raise _refused(path, 0, error) from error
        try:
            return cls(path, begin(path, meta), lock, limit)
        except OSError as error:
            if not (path / STORE_MARKER).exists():
                forsake(path)
            os.close(lock)
            raise _refused(path, 0, error) from error
        except BaseException:
            os.close(lock)
            raise

    @property
    def cursor(self) -> dict[str, Any] | None:
        """Where the producer must start: None for its beginning."""
        return self._meta.shards[-1].resume.cursor if self._meta.shards else None

    @property
    def rows(self) -> int:
        """Rows stored, those of the unfinished shard included."""
        return self._meta.rows + (self._shard.rows if self._shard else 0)

    @property
    def full(self) -> bool:
        """Whether `limit` is reached; never before the block at `cursor` has come again."""
        return self._limit is not None and self._resume is None and self.rows >= self._limit

    @property
    def meta(self) -> StoreMeta:
        """The store's `store.json` as it stands on disk."""
        return self._meta

    def append(self, activations: np.ndarray, columns: Mapping[str, np.ndarray], cursor: dict[str, Any],
               dropped: Mapping[str, np.ndarray] | None = None) -> None:
        """Append one block; rows that are not finite in the stored type are dropped and counted.

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
        rows, cursor = self._checked(activations, columns), json.loads(json.dumps(cursor))
        kept = DTYPES[self._meta.dtype].keeps(rows)
        self._ended, self._current = self._ended + self._current, Dropped.of(dropped or {})
        if not kept.all():
            bad = rows[~kept]
            norms = row_norms(bad) if bad.dtype.kind == "f" else np.full(len(bad), np.nan)
            self._current += Dropped.of({NONFINITE: norms})
            rows, columns = rows[kept], {name: columns[name][kept] for name in self._meta.columns}
        begin, end = self._after_stored(len(rows), cursor), len(rows)
        if self._limit is not None:
            end = min(end, begin + max(0, self._limit - self.rows))
        with self._reporting():
            self._store(rows, columns, begin, end, cursor)

    def finish(self) -> StoreMeta:
        """Write the last shard and mark the store complete.

        Returns:
            The finished store's `store.json`.

        Raises:
            StoreError: there are no rows at all, or the disk refuses it.
        """
        if self._resume is not None:
            raise self._differs("nothing")
        self._ended, self._current = self._ended + self._current, Dropped()
        if not self.rows:
            counts = ", ".join(f"{count} {reason}" for reason, count in self._ended.counts.items())
            raise StoreError(f"there are no rows to store in {self._path}; expected at least one, got none "
                             f"(dropped: {counts or 'none'}); give more or other data")
        with self._reporting():
            self._record(complete=True)
        return self._meta

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try:
            self._drop_shard()
        finally:
            if not self._meta.shards:
                remove_empty(self._path)
            os.close(self._lock)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Turn what the disk refuses into a StoreError, after which this writer takes no more."""
        if self._failed:
            raise StoreError(f"cannot write to {self._path}: an earlier write failed; open it again to go on")
        try:
            yield
        except OSError as error:
            self._failed = True
            self._drop_shard()
            raise _refused(self._path, self._meta.rows, error) from error

    def _checked(self, activations: np.ndarray, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        meta = self._meta
        if activations.ndim != 2 or activations.shape[1] != meta.d_in:
            raise ValueError(f"a block does not fit {self._path}: expected shape (rows, {meta.d_in}), "
                             f"got {activations.shape}")
        if columns.keys() != set(meta.columns):
            raise ValueError(f"a block does not fit {self._path}: expected columns {list(meta.columns)}, "
                             f"got {list(columns)}")
        for name, column in columns.items():
            if column.shape != (len(activations),) or column.dtype.kind not in "iu":
                raise ValueError(f"column {name} does not fit {self._path}: expected {len(activations)} integers, "
                                 f"got {column.dtype} of shape {column.shape}")
        if activations.dtype == DTYPES[meta.dtype].storage:
            return activations
        if activations.dtype.kind != "f":
            raise ValueError(f"a block does not fit {self._path}: expected floats, got {activations.dtype}")
        with np.errstate(over="ignore"):  # what overflows is infinite, and dropped
            return activations.astype(np.float32, copy=False)

    def _after_stored(self, kept: int, cursor: dict[str, Any]) -> int:
        """How many of the block's kept rows are stored already, as those before an interruption are."""
        if self._resume is None:
            return 0
        if cursor != self._resume.cursor or kept < self._resume.skip:
            raise self._differs(f"{kept} rows at {cursor}")
        skip, self._resume = self._resume.skip, None
        return skip

    def _store(self, rows: np.ndarray, columns: Mapping[str, np.ndarray], begin: int, end: int,
               cursor: dict[str, Any]) -> None:
        stored = DTYPES[self._meta.dtype]
        while begin < end:
            if self._shard is None:
                name = shard_name(len(self._meta.shards))
                self._shard = ShardWriter(self._path / SHARDS / name, self._meta)
            stop = min(end, begin + self._meta.shard_rows - self._shard.rows)
            part = rows[begin:stop]
            if part.dtype != stored.storage:
                part = stored.encode_rows(np.ascontiguousarray(part))
            self._shard.append(part, {name: columns[name][begin:stop] for name in self._meta.columns})
            self._last = Resume(cursor, stop)
            if self._shard.rows == self._meta.shard_rows:
                self._record()
            begin = stop

    def _record(self, complete: bool = False) -> None:
        """Close the shard, if there is one, and say so in `store.json`.

        The last shard and the store's completion are said in one: a short shard in a store that is not
        complete would have its dropped rows counted twice when the producer comes back.
        """
        shards = self._meta.shards
        if self._shard:
            assert self._last is not None
            digest = self._shard.commit()
            shards += (ShardRecord(self._shard.path.name, self._shard.rows, digest, dict(self._ended.counts),
                                   self._last, dict(self._ended.norms)),)
        dropped = Dropped(self._meta.dropped, self._meta.dropped_norms) + self._ended
        meta = dataclasses.replace(self._meta, complete=complete, shards=shards, dropped=dict(dropped.counts),
                                   dropped_norms=dict(dropped.norms))
        write_meta(self._path, meta)
        self._meta, self._shard, self._ended = meta, None, Dropped()

    def _drop_shard(self) -> None:
        if self._shard:
            self._shard.abandon()
            self._shard = None

    def _differs(self, got: str) -> StoreError:
        assert self._resume is not None
        return StoreError(f"cannot go on with {self._path}: expected {self._resume.skip} rows or more at "
                          f"{self._resume.cursor}, got {got}; the source has changed, so remove the store and "
                          "make it again")


def _refused(path: Path, rows: int, error: Exception) -> Exception:
    """What to raise when the disk refuses to write; a StoreError says its own already."""
    if isinstance(error, StoreError):
        return error
    number = getattr(error, "errno", None)
    reason = os.strerror(number) if number else " ".join(str(error).split())
    remedy = "free some space" if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "mend that"
    return StoreError(f"cannot write to {path}: {reason}; {remedy} and run the same command again, "
                      f"which goes on after the {rows} rows that are safe")
