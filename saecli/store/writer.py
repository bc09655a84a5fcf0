"""Writing a store so that after any kill the same producer, run again, completes it identically.

Each of several ranks writes a store of its own within the joint one, which rank 0 locks and begins.

Of a shard HDF5, which can crash the process on a full disk, writes into memory, and leaves a gap for the activations.
These and the rest go to disk by plain writes.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from xxhash import xxh3_64_intdigest

from ..base.errors import StoreError
from ..base.files import lock_folder, make_folder, partial_path, settle
from ..base.home import STORE_MARKER
from ..base.machine import is_disk_full
from ..base.processes import signals_deferred
from .blocks import Admission, RowBlock, Windows
from .schema import (
    ACTIVATIONS,
    CHECKSUM,
    CHUNK_CHECKSUMS,
    COLUMNS,
    MOST,
    SHARD_LIST,
    SHARDS,
    STATISTICS,
    WORLD_FILE,
    Frame,
    Resume,
    ShardRecord,
    StoreMeta,
    list_shard,
    list_shards,
    rank_folder,
    read_meta,
    shard_name,
    write_meta,
)
from .shard import Shard, frame_checksum
from .values import (
    CODES,
    DTYPES,
    Column,
    Norms,
    Spread,
    codes_datasets,
    row_norms,
    stacked,
)

if TYPE_CHECKING:
    import h5py


ALIGNMENT = 64  # bytes; NumPy is slow on unaligned numbers
SHARD_SECONDS = 60.0  # of work that a kill may lose


class ShardWriter:
    """Writes one shard under a hidden name; `commit` makes it appear whole. Memory: a few chunks, and the columns."""

    def __init__(self, path: Path, meta: StoreMeta) -> None:
        self.path = path
        self.rows = 0
        self._meta = meta
        self._spread: Spread | None = None
        self._norms: list[np.ndarray] = []
        self._chunk = np.empty((meta.chunk_rows, meta.d_in), DTYPES[meta.dtype].storage)
        self._filled = 0  # rows of the chunk being gathered
        self._columns: dict[str, list[Column]] = {name: [] for name in meta.row_values}
        self._windows: list[Windows] = []
        self._starts: list[int] = []  # the row of the shard at which each block starts
        self._checksums: list[int] = []  # per chunk
        self._start = _image(_AroundGap(), meta, 1)[1]
        self._end = self._start
        make_folder(path.parent)
        self._file_path = partial_path(path)
        self._file = os.open(self._file_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)

    def count(self, column: str, value: int) -> int:
        return sum(int(np.sum(part == value)) for part in self._columns[column])

    def append(self, block: RowBlock) -> None:
        if block.windows is not None:
            self._windows.append(block.windows)
            self._starts.append(self.rows)
        for name, parts in self._columns.items():
            column = block.columns[name]
            parts.append(
                column.astype(COLUMNS[name]) if isinstance(column, np.ndarray) else column.copy()
            )
        self.rows += len(block)
        rows = block.rows
        while len(rows):
            room = len(self._chunk) - self._filled
            taken, rows = rows[:room], rows[room:]
            self._chunk[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            if self._filled == len(self._chunk):
                self._flush_chunk()

    def commit(self) -> tuple[Frame, Norms]:
        if self._filled:
            if self.rows < len(self._chunk):  # the only chunk is its rows; else the last is padded
                self._chunk = self._chunk[: self.rows]
            self._chunk[self._filled :] = 0
            self._flush_chunk()
        norms = Norms.of(np.concatenate(self._norms))
        memory = _AroundGap(self._start, self._end)
        image, _ = _image(memory, self._meta, self.rows)
        for name, values in self._datasets().items():
            image.create_dataset(name, data=values)
        for name, value in asdict(norms).items():
            image[STATISTICS].attrs[name] = value
        image.flush()  # allocates what was put off, such as the rest of a long header
        size = image.id.get_filesize()
        image.close()
        content = memory.getbuffer()
        _write(self._file, content[: self._start], 0)
        _write(self._file, content[self._start :], self._end)
        os.ftruncate(self._file, size)
        os.close(self._file)
        self._file = -1
        with self._file_path.open("rb", buffering=0) as file:
            frame = Frame(self._start, frame_checksum(file, self._start, self._end))
        settle(self._file_path, self.path)
        return frame, norms

    def _datasets(self) -> dict[str, np.ndarray]:
        assert self._spread is not None
        datasets: dict[str, np.ndarray] = {}
        for name, parts in self._columns.items():
            column = stacked(parts)
            datasets |= codes_datasets(column) if name == CODES else {name: column}
        datasets[CHUNK_CHECKSUMS] = np.array(self._checksums, CHECKSUM)
        if self._meta.windows:
            datasets |= Windows.concatenated(self._windows, self._starts).datasets()
        datasets[f"{STATISTICS}/mean"] = self._spread.mean
        datasets[f"{STATISTICS}/scatter"] = self._spread.scatter
        return datasets

    def abandon(self) -> None:
        if self._file >= 0:
            with suppress(OSError):  # some systems report failed writes on closing
                os.close(self._file)
            self._file = -1
        self._file_path.unlink(missing_ok=True)

    def _flush_chunk(self) -> None:
        # Chunk by chunk and as stored, so that the statistics do not depend on how rows were appended.
        rows = self._chunk[: self._filled]
        wide = DTYPES[self._meta.dtype].decode_rows(rows).astype(np.float64)
        self._norms.append(row_norms(wide))
        spread = Spread.of(wide)
        self._spread = spread if self._spread is None else self._spread + spread
        self._checksums.append(xxh3_64_intdigest(self._chunk.data))
        _write(self._file, self._chunk.data.cast("B"), self._end)
        self._end += self._chunk.nbytes
        self._filled = 0


def _write(file: int, data: memoryview | bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


class _AroundGap(io.BytesIO):
    """The bytes of a file before a gap, in which nothing is read or written, and after it."""

    def __init__(self, start: int = 0, end: int = 0) -> None:
        super().__init__()
        self._start, self._gap = start, end - start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            return self._beyond(super().seek(offset, whence))
        return self._beyond(super().seek(self._within(offset)))

    def truncate(self, size: int | None = None) -> int:
        return super().truncate(None if size is None else self._within(size))

    def _within(self, offset: int) -> int:
        """Where an offset in the file is here."""
        return max(offset - self._gap, min(offset, self._start))

    def _beyond(self, offset: int) -> int:
        return offset + self._gap if offset > self._start else offset


def _image(memory: io.BytesIO, meta: StoreMeta, rows: int) -> tuple[h5py.File, int]:
    """A shard's file in memory, with a gap for the activations, and the offset of the gap.

    In version 1.10 of the format a fixed-size, unfiltered dataset that is allocated at once has consecutive chunks and
    needs no index of them. It comes first, so that its offset does not depend on what follows.
    """
    import h5py  # `sae list` need not wait for it

    alignment = {"alignment_threshold": 1, "alignment_interval": ALIGNMENT}
    file = h5py.File(memory, "w", libver="v110", **alignment)
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    layout.set_obj_track_times(False)
    layout.set_chunk((min(meta.chunk_rows, rows), meta.d_in))
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    shape = h5py.h5s.create_simple((rows, meta.d_in))
    kind = DTYPES[meta.dtype].hdf5
    activations = h5py.h5d.create(file.id, ACTIVATIONS.encode(), kind, shape, layout)
    return file, activations.get_chunk_info_by_coord((0, 0)).byte_offset


class StoreWriter:
    """Appends a producer's blocks of rows to a store, in shards that appear whole or not at all.

    A producer yields deterministic blocks, each at a cursor, a JSON object from which it can yield that block again:

        with StoreWriter.open(path, meta) as writer:
            for cursor, block in produce(since=writer.cursor):
                writer.append(block, cursor)
                if writer.full:
                    break
            meta = writer.finish()

    On resuming, the writer skips the rows of the first block that are stored. A shard ends early, at a whole chunk,
    once it is `SHARD_SECONDS` old, and where the `with` is left without `finish`, unless `append` has failed.
    """

    def __init__(
        self, path: Path, meta: StoreMeta, lock: int, limit: int, rank: int | None
    ) -> None:
        self.path, self.meta, self._lock, self._rank = path, meta, lock, rank
        self.admission = Admission(meta)
        self._limit = limit
        self._shard: ShardWriter | None = None
        self._started = 0.0  # when the shard was
        self._is_torn = False  # whether a block, or a shard, is stored in part
        # Until the first block has come again.
        self._resume = meta.resume
        self._stored = meta.rows  # in whole shards
        self._last: Resume | None = None  # where the last row stored came from
        self._ended: Counter[str] = Counter()  # dropped in blocks that ended since the last shard
        self._current: Counter[str] = Counter()  # dropped in the latest block

    @classmethod
    def open(
        cls, path: Path, meta: StoreMeta, *, limit: int | None = None, rank: int | None = None
    ) -> Self:
        """Begin or resume a store of at most `limit` rows, or a `rank`'s part of it, which may end without rows;
        StoreError if another process is writing it, it holds something else, or a shard is missing or damaged."""
        if rank is not None:
            path = rank_folder(path, rank)
        lock, stored = claim(path, meta)
        try:
            if not stored.complete:
                for shard in Shard.each(path, stored):
                    shard.layout()
                with _reporting(path, stored.rows):
                    list_shards(path, stored.shards)
            return cls(path, stored, lock, MOST if limit is None else limit, rank)
        except BaseException:
            os.close(lock)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        try:
            if self._shard and not self._is_torn:
                with signals_deferred(), _reporting(self.path, self._stored):
                    self._write(self._commit())
        finally:
            if self._shard:
                self._shard.abandon()
            os.close(self._lock)

    @property
    def cursor(self) -> dict[str, Any] | None:
        """Where the producer must start; None for its beginning."""
        return self.meta.resume.cursor if self.meta.resume else None

    @property
    def rows(self) -> int:
        return self._stored + (self._shard.rows if self._shard else 0)

    @property
    def full(self) -> bool:
        """Whether no more rows are needed; never before the block at `cursor` has come again."""
        return self.meta.complete or (self._resume is None and self.rows >= self._limit)

    def append(
        self, block: RowBlock, cursor: dict[str, Any], verdicts: np.ndarray | None = None
    ) -> None:
        """Append one block, without the rows that `Admission` drops; with `verdicts`, (R,), its rows are as stored.

        StoreError if the write fails (whole shards stay), or the producer does not resume where the store ends.
        """
        if verdicts is None:
            rows, verdicts = self.admission.verdicts(block.rows)
            block = replace(block, rows=rows)
        cursor = json.loads(json.dumps(cursor))
        block = block.admitted(verdicts)
        begin = self._stored_already(cursor, len(block))
        block = block.up_to(begin + max(0, self._limit - self.rows))
        self._ended += self._current
        self._current = block.counts()
        self._is_torn = True
        while begin < len(block):
            with _reporting(self.path, self._stored):
                begin = self._store(block, begin, cursor)
        self._is_torn = False

    def _stored_already(self, cursor: dict[str, Any], rows: int) -> int:
        if self._resume is None:
            return 0
        skip = self._resume.skip
        if Resume(cursor, skip).position != self._resume.position or rows < skip:
            raise self._differs(f"{rows} rows at {cursor}")
        self._resume = None
        return skip

    def _store(self, block: RowBlock, begin: int, cursor: dict[str, Any]) -> int:
        """Write a block's rows from `begin` to its or the shard's end; the number of the next."""
        if self._shard is None:
            path = self.path / SHARDS / shard_name(len(self.meta.shards))
            self._shard, self._started = ShardWriter(path, self.meta), time.monotonic()
        room = self.meta.shard_rows - self._shard.rows
        if time.monotonic() - self._started > SHARD_SECONDS:
            # Whole chunks, so that batches of the store do not depend on how fast it was made.
            chunk = self.meta.chunk_rows
            room = min(room, chunk - self._shard.rows % chunk)
        stop = min(len(block), begin + room)
        self._shard.append(block.between(begin, stop))
        self._last = Resume(cursor, stop)
        if stop - begin == room:
            self._write(self._commit())
        return stop

    def finish(self) -> StoreMeta:
        """StoreError if the store has no rows, or fewer than before."""
        if self.meta.complete:
            return self.meta
        if self._resume is not None and self._resume.skip:
            raise self._differs("nothing")
        self._ended, self._current = self._ended + self._current, Counter()
        if not self.rows and self._rank is None:
            raise no_rows(self.path, self._ended)
        with signals_deferred(), _reporting(self.path, self._stored):
            # At once with the last shard: resuming after a short one would count its dropped rows twice.
            meta = self._commit() if self._shard else self.meta
            meta = replace(
                meta,
                complete=True,
                dropped=dict(Counter(meta.dropped) + self._ended),
                control_tokens={name: rows for name, rows in meta.control_tokens.items() if rows},
            )
            self._ended = Counter()
            self._write(meta)
        return self.meta

    def _write(self, meta: StoreMeta) -> None:
        write_meta(self.path, meta)
        self._stored += sum(shard.rows for shard in meta.shards[len(self.meta.shards) :])
        self.meta = meta

    def _commit(self) -> StoreMeta:
        """Make the shard appear; the `store.json` that records it."""
        assert self._shard is not None and self._last is not None
        self._is_torn = True  # until there is a new shard
        sources, control = dict(self.meta.sources), dict(self.meta.control_tokens)
        for number, name in enumerate(sources):
            sources[name] += self._shard.count("source", number)
        for token_id in control:
            control[token_id] += self._shard.count("token_id", int(token_id))
        frame, norms = self._shard.commit()
        record = ShardRecord(self._shard.path.name, self._shard.rows, frame)
        list_shard(self.path, record)
        dropped = Counter(self.meta.dropped) + self._ended
        self._shard, self._ended = None, Counter()
        return replace(
            self.meta,
            shards=(*self.meta.shards, record),
            resume=self._last,
            dropped=dict(dropped),
            median_norm=self.admission.median,
            norms=norms if self.meta.norms is None else self.meta.norms + norms,
            sources=sources,
            control_tokens=control,
        )

    def _differs(self, got: str) -> StoreError:
        assert self._resume is not None
        return StoreError(
            f"cannot go on with {self.path}: expected {self._resume.skip} rows or more at {self._resume.cursor}, "
            f"got {got}; the source has changed, so remove the store and make it again"
        )


def claim(path: Path, meta: StoreMeta) -> tuple[int, StoreMeta]:
    """Lock a folder and begin or resume a store in it; the lock's descriptor, and the `store.json`."""
    with _reporting(path, 0):
        try:
            # The system releases it if the process dies.
            lock = lock_folder(path, (STORE_MARKER, SHARD_LIST, WORLD_FILE))
        except BlockingIOError as error:
            raise StoreError(
                f"cannot write to {path}: another process is writing it; wait for that one, or choose another --name"
            ) from error
        try:
            return lock, _begin(path, meta)
        except BaseException:
            os.close(lock)
            raise


def _begin(path: Path, meta: StoreMeta) -> StoreMeta:
    if not (path / STORE_MARKER).exists():
        if any(path.glob("[!.]*")):
            raise StoreError(f"{path} is no store, and not empty; choose another --name")
        write_meta(path, meta)
        return meta
    stored = read_meta(path)
    wanted, got = meta.request(), stored.request()
    same_ranks = stored.complete or stored.ranks == meta.ranks
    if wanted == got and same_ranks:
        return stored
    if not stored.complete and not stored.rows:  # it was stopped before it had a row
        if (path / SHARDS).exists():
            shutil.rmtree(path / SHARDS)
        (path / WORLD_FILE).unlink(missing_ok=True)
        write_meta(path, meta)
        return meta
    for name in {**wanted, **got}:
        if wanted.get(name) != got.get(name):
            raise StoreError(
                f"{path} holds something else: expected {name} {wanted.get(name)}, got {got.get(name)}; "
                "choose another --name, or remove that store"
            )
    raise StoreError(
        f"cannot go on with {path}: expected the number of processes that began it, {stored.ranks or 1}, "
        f"got {meta.ranks or 1}; run the command with as many, or remove that store"
    )


def no_rows(path: Path, left_out: Mapping[str, int]) -> StoreError:
    counts = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
    return StoreError(
        f"there are no rows to store in {path} (dropped: {counts or 'none'}); give more or other data"
    )


@contextmanager
def _reporting(path: Path, rows: int) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else " ".join(str(error).split())
        remedy = "free some space" if is_disk_full(error) else "fix that"
        raise StoreError(
            f"cannot write to {path}: {reason}; {remedy} and run the same command again, "
            f"which goes on after the {rows} rows that are safe"
        ) from error


@contextmanager
def ranked_store(path: Path, meta: StoreMeta) -> Iterator[None]:
    """Lock, begin or resume a store that `meta.ranks` processes write, and mark it complete when all parts are;
    StoreError as by `StoreWriter.open`."""
    lock, _ = claim(path, meta)
    try:
        yield
        if read_meta(path).complete:
            # Without the counts of its parts, which a reader adds.
            joint = StoreMeta.from_json((path / STORE_MARKER).read_bytes())
            with _reporting(path, joint.rows):
                write_meta(path, replace(joint, complete=True))
    finally:
        os.close(lock)
