"""Writing a store so that after any kill the same producer, run again, completes it identically.

Legend: R rows, D = d_in.
"""

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from ..base.errors import StoreError
from ..base.files import LOCK, lock_folder
from ..base.home import STORE_MARKER
from .codec import DTYPES, Column, SparseRows
from .schema import RANKS, SHARDS, WORLD_FILE, Resume, ShardRecord, StoreMeta, read_meta, shard_name, write_meta
from .shard import stored_statistics
from .shard_writer import ShardWriter
from .statistics import Dropped, norm_fields, row_norms

ADMITTED, NONFINITE, HIGH_NORM, BESIDE = range(4)  # verdicts, one uint8 per row
REASONS = {NONFINITE: "nonfinite", HIGH_NORM: "high_norm", BESIDE: "beside"}

Columns = Mapping[str, Column]
Key = TypeVar("Key")


def jointly(verdicts: Mapping[Key, np.ndarray]) -> dict[Key, np.ndarray]:
    """Verdicts on a block of stores that hold the same rows, from each store's own: a row that one drops is dropped
    from all, with the reason `BESIDE` where it could have been stored."""
    dropped = np.logical_or.reduce([verdict != ADMITTED for verdict in verdicts.values()])
    return {key: np.where((verdict == ADMITTED) & dropped, np.uint8(BESIDE), verdict)
            for key, verdict in verdicts.items()}


class Admission:
    """Drops and counts rows that are not finite in the stored type, or have a norm above `max_norm_multiple` times
    `median`, the median norm of the first block that has a finite row."""

    def __init__(self, path: Path, meta: StoreMeta) -> None:
        self._path, self._meta = path, meta
        self.median = meta.median_norm

    @property
    def waits(self) -> bool:
        """Whether the median is needed and not yet known."""
        return self._meta.max_norm_multiple is not None and self.median is None

    def judge(self, activations: np.ndarray) -> np.ndarray:
        return self._judged(self._as_rows(activations))

    def __call__(self, activations: np.ndarray, columns: Columns, dropped: Mapping[str, np.ndarray],
                 verdict: np.ndarray | None = None) -> tuple[np.ndarray, Columns, Dropped]:
        """The rows and columns of a block to store, and the rows dropped; see `StoreWriter.append`."""
        rows, out = self._as_rows(activations), Dropped.of(dropped)
        self._check_columns(columns, len(rows))
        verdict = self._judged(rows) if verdict is None else verdict
        if not verdict.any():
            return rows, columns, out
        out += Dropped.of({name: self._row_norms(rows[verdict == reason]) for reason, name in REASONS.items()})
        kept = verdict == ADMITTED
        return rows[kept], {name: columns[name][kept] for name in self._meta.row_values}, out

    def _as_rows(self, activations: np.ndarray) -> np.ndarray:
        meta = self._meta
        if activations.ndim != 2 or activations.shape[1] != meta.d_in:
            raise ValueError(f"a block does not fit {self._path}: expected shape (rows, {meta.d_in}), "
                             f"got {activations.shape}")
        if activations.dtype == DTYPES[meta.dtype].storage:
            return activations
        if activations.dtype.kind != "f":
            raise ValueError(f"a block does not fit {self._path}: expected floats, got {activations.dtype}")
        with np.errstate(over="ignore"):  # overflow gives infinities, which are dropped
            return activations.astype(np.float32, copy=False)

    def _check_columns(self, columns: Columns, rows: int) -> None:
        if columns.keys() != set(self._meta.row_values):
            raise ValueError(f"a block does not fit {self._path}: expected columns {list(self._meta.row_values)}, "
                             f"got {list(columns)}")
        for name, column in columns.items():
            if not isinstance(column, SparseRows) and (column.shape != (rows,) or column.dtype.kind not in "iu"):
                raise ValueError(f"column {name} does not fit {self._path}: expected {rows} integers, "
                                 f"got {column.dtype} of shape {column.shape}")

    def _judged(self, rows: np.ndarray) -> np.ndarray:
        """The verdict on undecoded rows; sets the median if it is needed and not yet known."""
        keeps = DTYPES[self._meta.dtype].keeps(rows)
        verdict = np.where(keeps, np.uint8(ADMITTED), np.uint8(NONFINITE))
        if self._meta.max_norm_multiple is not None and keeps.any():
            norms = self._row_norms(rows if keeps.all() else rows[keeps])
            self.median = float(np.median(norms)) if self.median is None else self.median
            verdict[np.flatnonzero(keeps)[norms > self._meta.max_norm_multiple * self.median]] = HIGH_NORM
        return verdict

    def _row_norms(self, rows: np.ndarray) -> np.ndarray:
        """Norms, (R,), of undecoded rows; infinite for rows with a NaN or infinity in the stored type."""
        if rows.dtype.kind == "f":
            return row_norms(rows)
        decoded = np.empty(rows.shape, np.float32)
        DTYPES[self._meta.dtype].decode_rows(rows, decoded)
        return row_norms(decoded)


class ClaimedStore:
    """A store that only this process may write; a context manager that releases its lock, a descriptor."""

    def __init__(self, path: Path, meta: StoreMeta, lock: int) -> None:
        self.path, self._meta, self._lock = path, meta, lock
        self._failed = False

    @property
    def meta(self) -> StoreMeta:
        return self._meta

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        os.close(self._lock)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Turn a failed write into a StoreError, after which nothing more is written."""
        if self._failed:
            raise StoreError(f"cannot write to {self.path}: an earlier write failed; open it again to go on")
        try:
            yield
        except OSError as error:
            self._failed = True
            raise refused(self.path, self._meta.rows, error) from error


class StoreWriter(ClaimedStore):
    """Appends a producer's blocks of rows to a store, in shards that appear whole or not at all.

    A producer yields deterministic blocks, each at a cursor, a JSON object from which it can yield that block and the
    following ones again:

        with StoreWriter.open(path, meta) as writer:
            for cursor, rows, columns, dropped in produce(since=writer.cursor):
                writer.append(rows, columns, cursor, dropped)
                if writer.full:
                    break
            meta = writer.finish()

    After an interruption the block at the cursor comes again; the writer skips its rows that are stored. Leaving the
    `with` without `finish` drops the unfinished shard, and removes a store without rows.
    """

    def __init__(self, path: Path, meta: StoreMeta, lock: int, limit: int | None) -> None:
        super().__init__(path, meta, lock)
        self.admission = Admission(path, meta)
        self._limit = limit
        self._statistics = None if meta.complete else stored_statistics(path, meta)  # of all shards
        self._shard: ShardWriter | None = None
        self._resume = meta.shards[-1].resume if meta.shards else None  # until the first block has come again
        self._last: Resume | None = None  # where the last row stored came from
        self._ended = Dropped()  # in blocks that ended since the last shard
        self._current = Dropped()  # in the latest block

    @classmethod
    def open(cls, path: Path, meta: StoreMeta, *, limit: int | None = None) -> Self:
        """Begin a store, or resume one that was interrupted; StoreError if another process is writing it, it holds
        something else, or a shard is missing or damaged.

        Args:
            limit: the number of rows after which the store is full.
        """
        lock, there = claim(path, meta)
        try:
            if there.ranks and not there.complete:
                raise other_number(path, len(there.ranks), 1)
            return cls(path, there, lock, limit)
        except BaseException:
            os.close(lock)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try:
            if self._shard:
                self._shard.abandon()
        finally:
            if not self._meta.rows:
                remove_empty(self.path)
            super().__exit__(kind, error, trace)

    @property
    def cursor(self) -> dict[str, Any] | None:
        """Where the producer must start; None for its beginning."""
        return self._meta.shards[-1].resume.cursor if self._meta.shards else None

    @property
    def rows(self) -> int:
        return self._meta.rows + (self._shard.rows if self._shard else 0)

    @property
    def full(self) -> bool:
        """Whether no more rows are needed; never before the block at `cursor` has come again."""
        return self.complete or (self._limit is not None and self._resume is None and self.rows >= self._limit)

    @property
    def complete(self) -> bool:
        return self._meta.complete

    def append(self, activations: np.ndarray, columns: Columns, cursor: dict[str, Any],
               dropped: Mapping[str, np.ndarray] | None = None, verdict: np.ndarray | None = None) -> None:
        """Append one block, without the rows that `Admission` drops.

        Args:
            activations: (R, D) float, or uint16 bits if the store is bfloat16; R may be 0.
            columns: (R,) integers for each of the store's columns, and true codes if it has them.
            cursor: where this block begins.
            dropped: norms of the rows of this block that the producer itself dropped, by reason; NaN if unknown.
            verdict: keep or drop, per row, shared by stores written together; see `jointly`.

        Raises:
            StoreError: the write fails (whole shards stay), or the producer does not resume where the store ends.
            ValueError: shapes or types do not fit the store.
        """
        if self.complete:
            raise StoreError(f"{self.path} is complete, with {self.rows} rows; expected one to go on with; choose "
                             "another --name, or remove that store")
        rows, columns, left_out = self.admission(activations, columns, dropped or {}, verdict)
        cursor = json.loads(json.dumps(cursor))
        self._ended, self._current = self._ended + self._current, left_out
        begin, end = self._after_stored(len(rows), cursor), len(rows)
        if self._limit is not None:
            end = min(end, begin + max(0, self._limit - self.rows))
        with self._reporting():
            while begin < end:
                if self._shard is None:
                    self._shard = ShardWriter(self.path / SHARDS / shard_name(len(self._meta.shards)), self._meta)
                stop = min(end, begin + self._meta.shard_rows - self._shard.rows)
                self._shard.append(self._as_stored(rows[begin:stop]),
                                   {name: columns[name][begin:stop] for name in self._meta.row_values})
                self._last = Resume(cursor, stop)
                if self._shard.rows == self._meta.shard_rows:
                    self._record()
                begin = stop

    def finish(self) -> StoreMeta:
        """Write the last shard and mark the store complete; StoreError if there are no rows, or fewer than there were.
        """
        if self.complete:
            return self._meta
        if self._resume is not None and self._resume.skip:
            raise self._differs("nothing")
        self._ended, self._current = self._ended + self._current, Dropped()
        if not self.rows:
            raise no_rows(self.path, self._ended.counts)
        with self._reporting():
            self._record(complete=True)
        return self._meta

    def _after_stored(self, kept: int, cursor: dict[str, Any]) -> int:
        """How many of the block's kept rows were stored before an interruption."""
        if self._resume is None:
            return 0
        if Resume(cursor, self._resume.skip).position != self._resume.position or kept < self._resume.skip:
            raise self._differs(f"{kept} rows at {cursor}")
        skip, self._resume = self._resume.skip, None
        return skip

    def _record(self, complete: bool = False) -> None:
        """Commit the shard, if there is one, and record it in `store.json`.

        The last shard and the store's completion are recorded together: if a short shard were in an unfinished store,
        resuming would count its dropped rows twice.
        """
        shards = self._meta.shards
        if self._shard:
            assert self._last is not None
            digest, frame = self._shard.commit()
            found = self._shard.statistics
            self._statistics = self._statistics and found and self._statistics + found if shards else found
            shards += (ShardRecord(self._shard.path.name, self._shard.rows, digest, dict(self._ended.counts),
                                   self._last, dict(self._ended.norms), frame),)
        dropped = Dropped(self._meta.dropped, self._meta.dropped_norms) + self._ended
        meta = dataclasses.replace(
            self._meta, complete=complete, shards=shards, dropped=dict(dropped.counts),
            dropped_norms=dict(dropped.norms), median_norm=self.admission.median, **norm_fields(self._statistics))
        write_meta(self.path, meta)
        self._meta, self._shard, self._ended = meta, None, Dropped()

    def _as_stored(self, rows: np.ndarray) -> np.ndarray:
        stored = DTYPES[self._meta.dtype]
        return rows if rows.dtype == stored.storage else stored.encode_rows(np.ascontiguousarray(rows))

    def _differs(self, got: str) -> StoreError:
        assert self._resume is not None
        return StoreError(f"cannot go on with {self.path}: expected {self._resume.skip} rows or more at "
                          f"{self._resume.cursor}, got {got}; the source has changed, so remove the store and make it "
                          "again")


def claim(path: Path, meta: StoreMeta) -> tuple[int, StoreMeta]:
    """Lock a folder and begin or resume a store in it; the lock's descriptor, and the `store.json` to resume from."""
    try:
        lock = lock_folder(path)  # the system releases it if the process dies
    except BlockingIOError as error:
        raise StoreError(f"cannot write to {path}: another process is writing it; wait for that one, or choose "
                         "another --name") from error
    except OSError as error:
        raise refused(path, 0, error) from error
    try:
        return lock, _begun(path, meta)
    except BaseException as error:
        if not (path / STORE_MARKER).exists():
            _forsake(path)
        os.close(lock)
        if isinstance(error, OSError):
            raise refused(path, 0, error) from error
        raise


def _begun(path: Path, meta: StoreMeta) -> StoreMeta:
    """The `store.json` to resume from, written if there was none."""
    if not (path / STORE_MARKER).exists():
        foreign = [entry.name for entry in path.iterdir() if not entry.name.startswith(".")]
        if foreign:
            raise StoreError(f"cannot make a store in {path}: expected an empty folder, got one that holds "
                             f"{foreign[0]}; choose another --name")
        write_meta(path, meta)
        return meta
    there = read_meta(path)
    wanted, got = meta.request(), there.request()
    if wanted != got:
        name = next(n for n in {**wanted, **got} if wanted.get(n) != got.get(n))
        raise StoreError(f"{path} holds something else: expected {name} {wanted.get(name)}, got {got.get(name)}; "
                         "choose another --name, or remove that store")
    return there


def _forsake(path: Path) -> None:
    """Remove the lock's file, while the lock is held, and the folder if nothing else is in it."""
    with suppress(OSError):
        (path / LOCK).unlink(missing_ok=True)
        path.rmdir()


def remove_empty(path: Path) -> None:
    """Remove a store whose `store.json` lists no shard, while its lock is held."""
    with suppress(OSError):
        for folder in (path / SHARDS, path / RANKS):
            if folder.exists():
                shutil.rmtree(folder)
        (path / STORE_MARKER).unlink(missing_ok=True)
        (path / WORLD_FILE).unlink(missing_ok=True)
    _forsake(path)


def no_rows(path: Path, left_out: Mapping[str, int]) -> StoreError:
    """The error for a source without a row to store; `left_out` counts rows by reason."""
    counts = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
    return StoreError(f"there are no rows to store in {path}; expected at least one, got none "
                      f"(dropped: {counts or 'none'}); give more or other data")


def other_number(path: Path, expected: int, got: int) -> StoreError:
    """The error for resuming a store with another number of processes than began it."""
    command = f"`torchrun --nproc-per-node {expected}`" if expected > 1 else "one process, without torchrun"
    return StoreError(f"cannot go on with {path}: expected the number of processes that began it, {expected}, got "
                      f"{got}; run the command with {command}, or remove that store")


def refused(path: Path, rows: int, error: OSError) -> StoreError:
    """The error for a failed write, with `rows` stored so far."""
    if isinstance(error, StoreError):
        return error
    reason = os.strerror(error.errno) if error.errno else " ".join(str(error).split())
    remedy = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "fix that"
    return StoreError(f"cannot write to {path}: {reason}; {remedy} and run the same command again, "
                      f"which goes on after the {rows} rows that are safe")
