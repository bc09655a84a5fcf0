"""Writing one store by several processes, which take turns at a producer's blocks.

Every process fills shards of its own, which are whole ones, and says in each which rows of which blocks it holds: any
number of processes can go on from there, and a damaged shard can be written anew. Which rows are stored, and how many
are left out for which reason, is what one process would store; only their order in the store is another.

Legend: R rows, D = d_in.
"""

import dataclasses
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..errors import StoreError
from ..home import STORE_MARKER
from .admission import Columns
from .checks import no_show
from .claim import claim, remove_empty, take_lock
from .dropped import Dropped
from .dtypes import DTYPES
from .open_writer import OpenWriter
from .partial import remove_partials
from .schema import SHARDS, Piece, Resume, ShardRecord, StoreMeta, read_meta, shard_name, write_meta
from .shard_statistics import norm_fields, with_shard
from .shard_writer import ShardWriter
from .turns import Finished, Held, Known, Offer, Rest
from .writer import SOURCE_CHANGED

Exchange = Callable[[Any], list[Any]]


def made_by_several(path: Path) -> bool:
    """Whether a store, where there is one, has been written by several processes: one alone goes on as one of those.

    Raises:
        StoreError: its `store.json` is damaged or of a newer version.
    """
    return (path / STORE_MARKER).exists() and any(shard.pieces for shard in read_meta(path).shards)


class SharedWriter(OpenWriter):
    """One of the processes that write a store. All come to the same calls in the same order:

        with SharedWriter.open(path, meta, limit=limit, rank=rank, exchange=exchange) as writer:
            block, cursor = writer.start
            # of the blocks from `cursor` on that are `missing`, in their order, each process takes one a turn
            writer.hold(block, cursor, rows, columns, dropped)  # where there is one for it
            writer.store()
            ...
            writer.finish()

    Leaving the `with` without `finish` keeps the whole shards; a store without a shard is removed.
    """

    def __init__(self, path: Path, meta: StoreMeta, lock: int, limit: int, damaged: list[int], rank: int,
                 exchange: Exchange) -> None:
        super().__init__(path, meta, lock, damaged, claimed=rank == 0)
        self._limit, self._rank, self._exchange = limit, rank, exchange
        self._numbered = len(meta.shards)  # shards that are whole or will be at the end of this turn
        self._fill = [0] * len(exchange(None))  # rows in each process' unfinished shard
        self._held: Held | None = None
        self._begin_shard()
        in_order = [shard for shard in meta.shards if not shard.pieces]  # one process' own
        last = in_order[-1].resume if in_order else Resume({}, 0)
        self._first = last.cursor or None
        self._blocks: dict[int, Known] = {}
        self._before = [sum(shard.rows for shard in in_order) - last.skip]  # rows kept of all blocks before each
        for piece in (piece for shard in meta.shards for piece in shard.pieces):
            known = self._blocks.setdefault(piece.block, Known(piece.cursor, piece.kept, 0))
            known.stored = max(known.stored, piece.end)
        self._skip = last.skip  # of the first block, stored by the one process
        self._count()

    @classmethod
    def open(cls, path: Path, meta: StoreMeta, *, limit: int, rank: int, exchange: Exchange,
             show: Callable[[float], None] = no_show) -> Self:
        """Begin a store, or go on with one.

        Args:
            path: the store's folder; made if need be.
            meta: what it is to hold; see `StoreWriter.open`.
            limit: the number of rows after which the store is full.
            rank: the number of this process; that of number 0 claims the folder, and alone writes `store.json`.
            exchange: gives all processes' values, by rank, for each one's own.
            show: told how many bytes are read to check shards that may have changed since they were written.

        Raises:
            StoreError: other processes are writing it, it holds something else, or a shard that one process made in
                the order of its rows is damaged.
        """
        if rank:
            there, damaged = exchange(None)[0]
            if there.request() != meta.request():
                raise StoreError(f"cannot write to {path} together: expected the same model, text and options in every "
                                 f"process, got others in this one; give all of them the same files")
            lock = take_lock(path, together=True)
            try:
                return cls(path, there, lock, limit, damaged, rank, exchange)
            except BaseException:
                os.close(lock)
                raise
        lock, there, damaged = claim(path, meta, show)
        try:
            if in_order := [index for index in damaged if not there.shards[index].pieces]:
                raise StoreError(f"shard {there.shards[in_order[0]].file} of {path} is damaged, and was written by one "
                                 f"process in the order of its rows; run the command once without torchrun, which "
                                 f"writes it anew")
            for unfinished in (path / SHARDS).glob(".*.partial"):
                unfinished.unlink()
            there = dataclasses.replace(there, partial=None)  # the blocks that it came from are given out anew
            remove_partials(path)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            exchange((there, damaged))
            return cls(path, there, lock, limit, damaged, rank, exchange)
        except BaseException:
            if not there.shards:
                remove_empty(path)
            os.close(lock)
            raise

    @property
    def meta(self) -> StoreMeta:
        """The store's `store.json`, in the process of number 0; in others as it was at first."""
        return self._meta

    @property
    def rows(self) -> int:
        """Rows stored, those of all unfinished shards included."""
        if self._meta.complete:
            return self._meta.rows
        return self._numbered * self._meta.shard_rows + sum(self._fill)

    @property
    def complete(self) -> bool:
        """Whether all rows are there, damaged or not."""
        return self._meta.complete

    @property
    def full(self) -> bool:
        """Whether the blocks so far hold as many rows as are wanted."""
        return self._before[-1] >= self._limit

    @property
    def waits(self) -> bool:
        """Whether blocks must come one at a time, as the first row's norm is yet to be known."""
        return self._admit.waits

    @property
    def start(self) -> tuple[int, dict[str, Any] | None]:
        """Number and cursor of the block to begin with; None for the producer's beginning."""
        first = next(block for block in range(len(self._blocks) + 1) if self.missing(block))
        if first in self._blocks:
            return first, self._blocks[first].cursor
        return (first - 1, self._blocks[first - 1].cursor) if first else (0, self._first)

    def missing(self, block: int) -> bool:
        """Whether rows of a block are to be stored, as far as that is known before it has come."""
        known = self._blocks.get(block)
        return known is None or known.stored < known.kept

    def hold(self, block: int, cursor: dict[str, Any], activations: np.ndarray, columns: Columns,
             dropped: Mapping[str, np.ndarray]) -> None:
        """Take a block of this turn; arguments as of `StoreWriter.append`.

        Raises:
            ValueError: shapes or types do not fit the store.
        """
        rows, columns, left_out = self._admit(activations, columns, dropped)
        self._held = Held(block, json.loads(json.dumps(cursor)), rows, columns, left_out)

    def store(self) -> None:
        """Store what all processes hold, up to the limit; ends the turn.

        Raises:
            StoreError: the disk refuses it, or the producer gives other blocks than it did before.
        """
        held, self._held = self._held, None
        offers = self._exchange(held and Offer(held.block, held.cursor, len(held.rows), self._admit.median))
        met_before = self._blocks.keys() & {offer.block for offer in offers if offer}
        for offer in filter(None, offers):
            stored = self._skip if offer.block == 0 else 0
            known = self._blocks.setdefault(offer.block, Known(offer.cursor, offer.kept, stored))
            if known.kept != offer.kept or offer.kept < known.stored:
                raise self._differs(known, f"{offer.kept}")
            self._admit.median = offer.median if self._admit.median is None else self._admit.median
        self._count()
        numbered = self._numbered
        for rank, offer in enumerate(offers):
            if offer is None or self._before[offer.block] >= self._limit:
                continue
            known = self._blocks[offer.block]
            begin, known.stored = known.stored, min(known.kept, self._limit - self._before[offer.block])
            if known.stored == begin and offer.block in met_before:  # up to the limit it was there, and is counted
                continue
            filled = self._fill[rank] + known.stored - begin
            if rank == self._rank:
                part = slice(begin, known.stored)
                columns = {name: column[part] for name, column in held.columns.items()}
                with self._reporting():
                    self._put(held.rows[part], columns, Piece(*offer[:2], begin, known.stored, offer.kept),
                              held.left_out, iter(range(self._numbered, self._numbered + filled)))
            self._fill[rank] = filled % self._meta.shard_rows
            self._numbered += filled // self._meta.shard_rows
        if self._numbered > numbered:
            self._publish()

    def finish(self) -> None:
        """Say that the producer has ended, or that no more is wanted: the last rows of all processes are put together,
        and the store is marked complete.

        Raises:
            StoreError: there are no rows at all, or fewer than there were, or the disk refuses it.
        """
        for block, known in self._blocks.items():
            if known.stored < min(known.kept, self._limit - self._before_of(block)):
                raise self._differs(known, "nothing")
        own = Rest(self._pieces, self._left_out)
        if self._rank and self._shard:
            with self._reporting():
                own = Rest(self._pieces, self._left_out, self._shard.rows, *self._shard.lay_open())
        rests = self._exchange(own)
        if not self.rows:
            raise self._without_rows(sum((rest.left_out for rest in rests), Dropped()))
        if self._rank == 0:
            with self._reporting():
                self._join(rests[1:])
        self._exchange(None)  # the files of the others are needed until here

    def mend(self, produce: Callable[[dict[str, Any]], tuple[np.ndarray, Columns, Mapping[str, np.ndarray]]]) -> None:
        """Write damaged shards anew, each process some of them.

        Args:
            produce: gives the block at a cursor, as for `hold`.

        Raises:
            StoreError: the producer gives other blocks than it did before, or the disk refuses it.
        """
        found: list[Finished] = []
        for number in self._damaged[self._rank::len(self._fill)]:
            old = self._meta.shards[number]
            with self._reporting():
                self._shard = ShardWriter(self.path / SHARDS / old.file, self._meta)
                for piece in old.pieces:
                    rows, columns, _ = self._admit(*produce(piece.cursor))
                    if len(rows) != piece.kept:
                        raise StoreError(f"cannot mend shard {old.file} of {self.path}: expected {piece.kept} rows at "
                                         f"{piece.cursor}, got {len(rows)}; {SOURCE_CHANGED}")
                    part = slice(piece.begin, piece.end)
                    self._shard.append(self._as_stored(rows[part]),
                                       {name: column[part] for name, column in columns.items()})
                digest, frame = self._shard.commit()
            self._shard = None
            found.append(Finished(number, dataclasses.replace(old, sha256=digest, frame=frame), None))
        shards = list(self._meta.shards)
        for one in (one for some in self._exchange(found) for one in some):
            if one.record.sha256 != shards[one.number].sha256:
                self.altered.append(one.record.file)
            shards[one.number] = one.record
        self._meta, self._damaged = dataclasses.replace(self._meta, shards=tuple(shards)), []
        if self._rank == 0:
            write_meta(self.path, self._meta)  # younger than the shards, even where none came out otherwise

    def _count(self) -> None:
        """Sum up how many rows are kept of the blocks before each, as far as all of them are known."""
        while len(self._before) - 1 in self._blocks:
            self._before.append(self._before[-1] + self._blocks[len(self._before) - 1].kept)

    def _begin_shard(self) -> None:
        self._shard = None
        self._pieces: list[Piece] = []
        self._left_out = Dropped()
        self._finished: list[Finished] = []

    def _put(self, rows: np.ndarray, columns: Columns, piece: Piece, left_out: Dropped, numbers: Iterator[int]) -> None:
        """Append the rows of a piece to this process' shards, of which those that become whole take these numbers; what
        was left out of its block counts with its last row."""
        if not len(rows):
            self._pieces.append(piece)
            self._left_out += left_out
        while len(rows):
            self._shard = self._shard or ShardWriter(self.path / SHARDS / f"{self._rank}.h5", self._meta)
            count = min(len(rows), self._meta.shard_rows - self._shard.rows)
            self._shard.append(self._as_stored(rows[:count]),
                               {name: column[:count] for name, column in columns.items()})
            self._pieces.append(dataclasses.replace(piece, end=piece.begin + count))
            self._left_out += left_out if count == len(rows) else Dropped()
            if self._shard.rows == self._meta.shard_rows:
                self._commit(next(numbers))
            rows, columns = rows[count:], {name: column[count:] for name, column in columns.items()}
            piece = dataclasses.replace(piece, begin=piece.begin + count)

    def _commit(self, number: int) -> None:
        digest, frame = self._shard.commit(self.path / SHARDS / shard_name(number))
        last = self._pieces[-1]
        record = ShardRecord(shard_name(number), self._shard.rows, digest, dict(self._left_out.counts),
                             Resume(last.cursor, last.end), dict(self._left_out.norms), frame, tuple(self._pieces))
        finished = [*self._finished, Finished(number, record, self._shard.statistics)]
        self._begin_shard()
        self._finished = finished

    def _publish(self) -> None:
        """Say in `store.json` which shards have become whole in all processes."""
        found = [one for some in self._exchange(self._finished) for one in some]
        self._finished = []
        if self._rank == 0:
            self._record(found, complete=False)

    def _record(self, found: list[Finished], complete: bool, also: Dropped | None = None) -> None:
        meta = self._meta
        dropped = Dropped(meta.dropped, meta.dropped_norms) + (also or Dropped())
        for one in sorted(found, key=lambda one: one.number):
            self._statistics = with_shard(self.path, meta, self._statistics, one.statistics)
            dropped += Dropped(one.record.dropped, one.record.dropped_norms)
            meta = dataclasses.replace(meta, shards=(*meta.shards, one.record))
        meta = dataclasses.replace(meta, complete=complete, dropped=dict(dropped.counts),
                                   dropped_norms=dict(dropped.norms), median_norm=self._admit.median,
                                   **norm_fields(self._statistics))
        write_meta(self.path, meta)
        self._meta = meta

    def _join(self, rests: list[Rest]) -> None:
        """Put what the others hold that is no whole shard behind what this process holds."""
        numbers = iter(range(self._numbered, self._numbered + len(rests) + 1))
        for rest in rests:
            shape = (rest.rows, self._meta.d_in)
            storage = DTYPES[self._meta.dtype].storage
            rows = np.memmap(rest.file, storage, "r", rest.start, shape) if rest.rows else np.empty(shape, storage)
            self._left_out += rest.left_out
            at = 0
            for piece in rest.pieces:
                part = slice(at, at + piece.end - piece.begin)
                self._put(rows[part], {name: column[part] for name, column in rest.columns.items()}, piece, Dropped(),
                          numbers)
                at = part.stop
        if self._shard:
            self._commit(next(numbers))
        self._record(self._finished, complete=True, also=self._left_out)

    def _before_of(self, block: int) -> int:
        """Rows kept of the blocks before one; all that are wanted where one of those has not come."""
        return self._before[block] if block < len(self._before) else self._limit

    def _differs(self, known: Known, got: str) -> StoreError:
        return StoreError(f"cannot go on with {self.path}: expected {known.kept} rows at {known.cursor}, got {got}; "
                          f"{SOURCE_CHANGED}")
