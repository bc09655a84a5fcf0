"""Writing a store so that after any kill the same producer, run again, completes it identically.

Legend: R rows, D = d_in.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from ..base.errors import StoreError
from ..base.home import STORE_MARKER
from .admission import Admission
from .checks import no_show, suspect
from .claim import ClaimedStore, claim, no_rows, other_number, remove_empty
from .dtypes import DTYPES
from .schema import SHARDS, Partial, Resume, ShardRecord, StoreMeta, shard_name, write_meta
from .shard_statistics import norm_fields, with_shard
from .shard_writer import SAVE_SECONDS, ShardWriter, remove_partials, store_partial, taken_up
from .sparse_rows import SparseRows
from .statistics import Dropped, Statistics

SOURCE_CHANGED = "the source has changed, so remove the store and make it again"


class StoreWriter(ClaimedStore):
    """Appends a producer's blocks of rows to a store, in shards that appear whole or not at all.

    A producer yields deterministic blocks, each at a cursor: a small JSON object from which it can yield that block and
    the following ones again. It starts at `writer.cursor`, once per damaged or missing shard, and once for the store's
    end:

        with StoreWriter.open(path, meta) as writer:
            while not writer.complete:
                for cursor, rows, columns, dropped in produce(since=writer.cursor):
                    writer.append(rows, columns, cursor, dropped)
                    if writer.full:
                        break
                meta = writer.finish()

    After an interruption the first block comes a second time; the writer skips its rows that are stored. The rows of an
    unfinished shard are saved once a minute, and when an exception, such as an interrupt, ends the `with`. Leaving it
    without `finish` and without an exception drops the rows since then; a store without rows is removed.

    A finished store of several ranks can be opened to rewrite damaged shards: each needs the producer of the rank
    `rank`.

    Attributes:
        path: the store's folder.
        admission: decides which rows it stores.
        altered: damaged shards that were rewritten with other bytes than recorded, as another machine may round
            differently.
    """

    def __init__(self, path: Path, meta: StoreMeta, lock: int, limit: int | None, damaged: Iterable[int],
                 save_seconds: float) -> None:
        super().__init__(path, meta, lock)
        self._damaged = sorted(damaged)
        self.altered: list[str] = []
        self.admission = Admission(path, meta)
        self._statistics: Statistics | None = None  # of all shards, once one has been added
        self._shard: ShardWriter | None = None
        self._limit, self._save_seconds = limit, save_seconds
        remove_partials(path, meta.partial)
        self._begin()

    def _begin(self) -> None:
        """Get ready for a producer that starts at the cursor."""
        self._shard = None
        before = self._meta.before(self._index)
        self._resume = before.resume if before else None
        self._mended = False  # whether this pass's damaged shard has been rewritten
        self._last: Resume | None = None  # where the last row stored came from
        self._ended = Dropped()  # in blocks that ended since the last shard
        self._onward: tuple[Resume, Dropped] | None = None  # where to resume from here, and the rows dropped by then
        self._current = Dropped()  # in the latest block
        self._saved = self._appended = time.monotonic()
        if self._meta.partial and not self._damaged:
            self._take_up(self._meta.partial)

    def _take_up(self, partial: Partial) -> None:
        """Resume an unfinished shard."""
        self._shard = taken_up(self.path, self._meta)
        if self._shard is None:
            self._meta = dataclasses.replace(self._meta, partial=None)
            remove_partials(self.path)
            return
        self._resume, self._last = partial.onward, partial.shard.resume
        self._ended = Dropped(partial.shard.dropped, partial.shard.dropped_norms)
        self._onward = partial.onward, self._ended
        if not partial.onward.skip and self._limit is not None and self.rows >= self._limit:
            self._resume = None  # full at the end of a block: nothing of the next is wanted or counted

    @classmethod
    def open(cls, path: Path, meta: StoreMeta, *, limit: int | None = None, save_seconds: float = SAVE_SECONDS,
             show: Callable[[float], None] = no_show) -> Self:
        """Begin a store, or resume one that was interrupted or has damaged shards.

        Args:
            path: the store's folder; created if missing.
            meta: what it is to hold; `created`, `dropped` and `shards` are taken from an interrupted store.
            limit: the number of rows after which the store is full; None for no limit.
            save_seconds: interval at which the rows of an unfinished shard are saved.
            show: called with the number of bytes read to check shards that may have changed since they were written.

        Returns:
            A context manager that holds the store's lock until it exits.

        Raises:
            StoreError: another process is writing it, or it holds something else.
        """
        lock, there, damaged = claim(path, meta, show)
        if there.ranks and not there.complete:
            os.close(lock)
            raise other_number(path, len(there.ranks), 1)
        return cls(path, there, lock, limit, damaged, save_seconds)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try:
            if error is not None and not self._failed:
                with suppress(OSError):  # report the error that ended it; what is stored stays
                    self._save()
        finally:
            try:
                self._drop_shard()
            finally:
                if not self._meta.saved_rows:
                    remove_empty(self.path)
                super().__exit__(kind, error, trace)

    @property
    def damaged(self) -> list[str]:
        """The names of the shard files that are still to be rewritten."""
        return [self._meta.shards[index].file for index in self._damaged]

    @property
    def rank(self) -> int:
        """The rank whose rows come next; 0 where one process writes the store."""
        return self._meta.rank_of(self._index)

    @property
    def cursor(self) -> dict[str, Any] | None:
        """Where the producer must start; None for its beginning."""
        if self._meta.partial and not self._damaged:
            return self._meta.partial.onward.cursor
        before = self._meta.before(self._index)
        return before.resume.cursor if before else None

    @property
    def rows(self) -> int:
        """Rows stored, including the unfinished shard's, without damaged shards'."""
        lost = sum(self._meta.shards[index].rows for index in self._damaged)
        return self._meta.rows - lost + (self._shard.rows if self._shard else 0)

    @property
    def full(self) -> bool:
        """Whether this pass needs no more rows; never before the block at `cursor` has come again."""
        if self._damaged or self._mended:
            return self._mended
        return self._limit is not None and self._resume is None and self.rows >= self._limit

    @property
    def complete(self) -> bool:
        """Whether all rows are stored."""
        return self._meta.complete and not self._damaged

    @property
    def _index(self) -> int:
        """The number of the shard being written."""
        return self._damaged[0] if self._damaged else len(self._meta.shards)

    @property
    def _room(self) -> int:
        """The number of rows that shard is to have."""
        return self._meta.shards[self._index].rows if self._damaged else self._meta.shard_rows

    def append(self, activations: np.ndarray, columns: Mapping[str, np.ndarray | SparseRows], cursor: dict[str, Any],
               dropped: Mapping[str, np.ndarray] | None = None, after: dict[str, Any] | None = None,
               verdict: np.ndarray | None = None) -> None:
        """Append one block; drop and count rows that are not finite in the stored type, or too large.

        A row is too large if its norm exceeds `max_norm_multiple` times the median norm of the first block that has a
        finite row. That median is recorded with the first shard and kept, so that a store does not depend on
        interruptions.

        Args:
            activations: (R, D) float, or uint16 bits where the store is bfloat16; R may be 0.
            columns: (R,) integers for each of the store's columns, and true codes if it has them.
            cursor: where this block begins, a JSON object.
            dropped: norms of the rows of this block that the producer itself dropped, by reason; NaN where unknown.
            after: where the next block begins; None where the producer does not know.
            verdict: on the rows, (R,), for stores that are to hold the same rows: one of `jointly`, from the
                `admission` of each; None where the store drops rows for itself.

        Raises:
            StoreError: the write fails (whole shards stay, and the store can be resumed), or the producer does not
                resume where the interrupted store ends.
            ValueError: shapes or types do not fit the store.
        """
        if self.complete and not self._mended:
            raise StoreError(f"{self.path} is complete, with {self.rows} rows; expected one to go on with; choose "
                             "another --name, or remove that store")
        rows, columns, left_out = self.admission(activations, columns, dropped or {}, verdict)
        cursor = json.loads(json.dumps(cursor))
        self._ended, self._current = self._ended + self._current, left_out
        begin, end = self._after_stored(len(rows), cursor), len(rows)
        if self._damaged or self._mended:
            end = min(end, begin + (0 if self._mended else self._room - (self._shard.rows if self._shard else 0)))
        elif self._limit is not None:
            end = min(end, begin + max(0, self._limit - self.rows))
        with self._reporting():
            self._store(rows, columns, begin, end, cursor, after)

    def finish(self) -> StoreMeta:
        """End a pass of the producer, at its end or once the store is `full`.

        Unless the pass was for a damaged shard, write the last shard and mark the store complete.

        Returns:
            The store's `store.json`.

        Raises:
            StoreError: there are no rows at all, or fewer than there were, or the write fails.
        """
        if self._mended:
            self._begin()
            return self._meta
        if (self._resume is not None and self._resume.skip) or self._damaged:
            raise self._differs(f"{self._shard.rows} rows" if self._shard else "nothing")
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

    def _store(self, rows: np.ndarray, columns: Mapping[str, np.ndarray | SparseRows], begin: int, end: int,
               cursor: dict[str, Any], after: dict[str, Any] | None) -> None:
        some = begin < end
        onward, self._onward = self._onward, None  # one cannot resume while this block is being stored
        while begin < end:
            if self._shard is None:
                self._shard = ShardWriter(self.path / SHARDS / shard_name(self._index), self._meta)
            stop = min(end, begin + self._room - self._shard.rows)
            self._shard.append(self._as_stored(rows[begin:stop]),
                               {name: columns[name][begin:stop] for name in self._meta.row_values})
            self._last = Resume(cursor, stop)
            if self._shard.rows == self._room:
                (self._mend if self._damaged else self._record)()
            begin = stop
        if after is not None and end == len(rows):
            onward = Resume(after, 0), self._ended + self._current
        elif some:
            onward = Resume(cursor, end), self._ended
        self._onward, now = onward, time.monotonic()
        # Due now, or before the next block if that takes as long as this one.
        if 2 * now - self._saved - self._appended >= self._save_seconds:
            self._save()
        self._appended = now

    def _save(self) -> None:
        """Save the rows of the unfinished shard, if some are not saved."""
        before = self._meta.partial
        if (self._shard is None or self._onward is None or self._damaged or self._mended
                or self._shard.rows <= (before.rows if before else 0)):
            return
        assert self._last is not None
        partial = store_partial(self.path, self._meta, self._shard, self._last, *self._onward)
        self._write(dataclasses.replace(self._meta, partial=partial, median_norm=self.admission.median))

    def _write(self, meta: StoreMeta) -> None:
        """Write `store.json`, and remove the partial shard that it no longer names."""
        write_meta(self.path, meta)
        if self._meta.partial and self._meta.partial != meta.partial:
            (self.path / SHARDS / self._meta.partial.shard.file).unlink(missing_ok=True)
        self._meta, self._saved = meta, time.monotonic()

    def _mend(self) -> None:
        """Replace the damaged shard by the rewritten one."""
        assert self._shard and self._last
        old = self._meta.shards[self._index]
        if self._last.position != old.resume.position:
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
        for index in self._damaged:  # their `ctime` must stay later than that of `store.json`
            suspect(self.path / SHARDS / self._meta.shards[index].file)

    def _record(self, complete: bool = False) -> None:
        """Commit the shard, if there is one, and record it in `store.json`.

        The last shard and the store's completion are recorded together: if a short shard were in an unfinished store,
        resuming would count its dropped rows twice.
        """
        shards = self._meta.shards
        if self._shard:
            assert self._last is not None
            digest, frame = self._shard.commit()
            self._statistics = with_shard(self.path, self._meta, self._statistics, self._shard.statistics)
            shards += (ShardRecord(self._shard.path.name, self._shard.rows, digest, dict(self._ended.counts),
                                   self._last, dict(self._ended.norms), frame),)
        dropped = Dropped(self._meta.dropped, self._meta.dropped_norms) + self._ended
        self._write(dataclasses.replace(
            self._meta, complete=complete, shards=shards, partial=None, dropped=dict(dropped.counts),
            dropped_norms=dict(dropped.norms), median_norm=self.admission.median, **norm_fields(self._statistics)))
        self._shard, self._ended = None, Dropped()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            with super()._reporting():
                yield
        except StoreError:
            if self._failed:
                self._drop_shard()
            raise

    def _as_stored(self, rows: np.ndarray) -> np.ndarray:
        """Rows, (R, D), in the storage dtype."""
        stored = DTYPES[self._meta.dtype]
        return rows if rows.dtype == stored.storage else stored.encode_rows(np.ascontiguousarray(rows))

    def _drop_shard(self) -> None:
        if self._shard:
            self._shard.abandon()
            self._shard = None

    def _differs(self, got: str) -> StoreError:
        if self._resume is None:
            expected = f"{self._room} rows for shard {shard_name(self._index)}"
        else:
            expected = f"{self._resume.skip} rows or more at {self._resume.cursor}"
        return StoreError(f"cannot go on with {self.path}: expected {expected}, got {got}; {SOURCE_CHANGED}")
