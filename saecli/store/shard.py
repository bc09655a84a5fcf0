"""Reading shards: checking that an HDF5 file agrees with `store.json`, and mapping its bytes.

No byte is used before its checksum is verified, as the HDF5 library crashes on some damaged headers: the frame when a
shard is first opened, each chunk when it is first read.

Legend: R rows, D = d_in.
"""

import hashlib
import mmap
import os
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from xxhash import xxh3_64_intdigest

from ..base.errors import StoreError
from ..base.home import STORE_MARKER, UNREADABLE
from .checks import damage, found_file, frame_checksum, make_anew, open_shard, unreadable
from .codec import CODES, DTYPES, INDEX, OFFSET, VALUE, Column, SparseRows
from .schema import ACTIVATIONS, CHECKSUM, CHUNK_CHECKSUMS, COLUMNS, SHARDS, STATISTICS, ShardRecord, StoreMeta
from .statistics import BINS, Norms, Spread, Statistics

# What h5py raises, unpredictably, for damaged or foreign files.
HDF5_ERRORS = (OSError, RuntimeError, KeyError, TypeError, ValueError)

SAMPLED = 8  # every 8th chunk is looked up in the page cache


@dataclass(frozen=True)
class Layout:
    """The byte offsets in a shard.

    Args:
        chunk_rows: rows in a chunk; the last may be padded.
        chunks: (chunks,) byte offset of each chunk of activations.
        codes: byte offset, type and length of each dataset of true codes.
        checksums: byte offset of the chunks' checksums; 0 where the whole file has been checked.
        end: the file's minimum size in bytes.
        checked: (chunks,) whether a chunk's checksum has been verified.
        file: inode, size and `ctime` of the file when this was read.
    """

    rows: int
    chunk_rows: int
    chunks: np.ndarray
    columns: dict[str, int]
    codes: dict[str, tuple[int, np.dtype, int]]
    checksums: int
    end: int
    checked: np.ndarray
    file: tuple[int, int, int]


def read_layout(path: Path, meta: StoreMeta, record: ShardRecord) -> Layout:
    """Find the byte offsets in a shard.

    Raises:
        StoreError: it is missing, truncated or damaged outside its activations; or its shape, type or layout differ
            from `store.json`.

    Cost: reads all but the activations, or the whole file where there is no frame.
    """
    return _read(path, meta, record, _check(path, meta, record))


def _read(path: Path, meta: StoreMeta, record: ShardRecord, found: tuple[int, int, int]) -> Layout:
    """The layout of a shard whose checksum is verified."""
    try:
        with hdf5_file(path) as file:
            return _checked_layout(file, meta, record, found)
    except HDF5_ERRORS as error:
        # HDF5's message gives addresses and times even where the system has a plain reason, such as a directory.
        number = getattr(error, "errno", None)
        if number:
            raise unreadable(path, os.strerror(number)) from error
        raise StoreError(f"{path.parents[1] / STORE_MARKER} does not fit shard {path}, which is as it was written: "
                         f"{' '.join(str(error).split())}; {UNREADABLE}") from error


def hdf5_file(path: Path) -> h5py.File:
    """A file to read, without a lock; with HDF5's own where this process holds it open so."""
    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        if "locking flag" not in str(error):
            raise
        return h5py.File(path, "r")


def demand_room(path: Path, meta: StoreMeta, record: ShardRecord, start: int = 0) -> int:
    """Refuse a shard that is too short for its rows; reads it only if it is.

    Returns:
        The byte offset at which its activations end, given the one at which they start.
    """
    chunk_rows = min(meta.chunk_rows, record.rows)
    rows = -(-record.rows // chunk_rows) * chunk_rows
    end = start + rows * meta.row_bytes
    size = found_file(path).st_size
    if size < end:
        _demand_fit(path, meta, record)
        raise StoreError(f"shard {path} is truncated: expected {end} bytes or more, got {size}; "
                         f"{make_anew(path.parents[1])}")
    return end


def _demand_fit(path: Path, meta: StoreMeta, record: ShardRecord) -> None:
    """If a shard seems damaged but is as it was written, say where `store.json` is wrong. Cost: one read of the shard.
    """
    with open_shard(path) as file:
        found = _identity(file.fileno())
        if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
            return
    _read(path, meta, record, found)
    raise StoreError(f"{path.parents[1] / STORE_MARKER} does not fit shard {path}, which is as it was written: "
                     f"expected its frame, got another; {UNREADABLE}")


def _identity(path: Path | int) -> tuple[int, int, int]:
    there = os.stat(path)
    return there.st_ino, there.st_size, there.st_ctime_ns


def _check(path: Path, meta: StoreMeta, record: ShardRecord) -> tuple[int, int, int]:
    """Compare the frame, or without one the whole file, with its checksum; returns the file's identity."""
    with open_shard(path) as file:
        found = _identity(file.fileno())
        if record.frame is None:
            digest, expected, what = hashlib.file_digest(file, "sha256").hexdigest(), record.sha256, "SHA-256"
        else:
            start = record.frame.start
            end = demand_room(path, meta, record, start)
            digest, expected = frame_checksum(file, start, end), record.frame.xxh3
            what = "the XXH3-64 of its headers and columns to be"
    if digest != expected:
        _demand_fit(path, meta, record)
        raise damage(path, what, expected, digest)
    return found


def _checked_layout(file: h5py.File, meta: StoreMeta, record: ShardRecord, found: tuple[int, int, int]) -> Layout:
    dataset, rows = file[ACTIVATIONS], record.rows
    chunk_rows = min(meta.chunk_rows, rows)
    layout, kind = dataset.id.get_create_plist(), dataset.id.get_type()
    _expect("shape", (rows, meta.d_in), dataset.shape)
    _expect("type", f"little-endian {meta.dtype}", next(
        (f"little-endian {name}" for name, stored in DTYPES.items() if kind.equal(stored.hdf5)), str(dataset.dtype)))
    _expect("columns", sorted(meta.columns), sorted(COLUMNS.keys() & file.keys()))
    _expect("chunks of shape", (chunk_rows, meta.d_in), dataset.chunks)
    _expect("filters", 0, layout.get_nfilters())
    count, chunk_bytes = -(-rows // chunk_rows), chunk_rows * meta.row_bytes
    chunks = np.full(count, -1, np.int64)

    def note(info: h5py.h5d.StoreInfo) -> None:
        _expect("bytes in a chunk", chunk_bytes, info.size)
        chunks[info.chunk_offset[0] // chunk_rows] = info.byte_offset

    dataset.id.chunk_iter(note)
    _expect("chunks", count, int((chunks >= 0).sum()))
    ends = [int(chunks.max()) + chunk_bytes]

    def offset_of(name: str, length: int, kind: np.dtype) -> int:
        column = file[name]
        _expect(f"shape of {name}", (length,), column.shape)
        _expect(f"type of {name}", kind, column.dtype)
        offset = column.id.get_offset()
        _expect(f"layout of {name}", "contiguous", "contiguous" if offset is not None else "chunked")
        ends.append(offset + length * kind.itemsize)
        return offset

    columns = {name: offset_of(name, rows, COLUMNS[name]) for name in meta.columns}
    codes = {}
    _expect("known features", meta.world is not None, CODES in file)
    if meta.world:
        entries = len(file[CODES]["index"])
        for name, length, kind in (("offset", rows + 1, OFFSET), ("index", entries, INDEX), ("value", entries, VALUE)):
            codes[name] = (offset_of(f"{CODES}/{name}", length, kind) if length else 0, kind, length)
    checksums = offset_of(CHUNK_CHECKSUMS, count, CHECKSUM) if record.frame else 0
    if found[1] < max(ends):
        raise ValueError(f"truncated file: expected {max(ends)} bytes or more, got {found[1]}")
    checked = np.full(count, record.frame is None)
    return Layout(rows, chunk_rows, chunks, columns, codes, checksums, max(ends), checked, found)


def _expect(what: str, said: object, held: object) -> None:
    if said != held:
        raise ValueError(f"expected {what} {held}, got {said}")


class MappedShards:
    """The shards of a store, memory-mapped when first read; thread-safe. Errors are StoreErrors that name the shard."""

    # Each map holds a file descriptor, and many systems allow a process only 1024.
    MAPS = 512

    def __init__(self, store: Path, meta: StoreMeta) -> None:
        self._folder, self._meta = store / SHARDS, meta
        self._layouts: dict[int, Layout] = {}
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._lock = threading.Lock()

    def path(self, shard: int) -> Path:
        return self._folder / self._meta.shards[shard].file

    def chunk(self, shard: int, chunk: int) -> np.ndarray:
        """A chunk's rows, (R, D) in the storage dtype, a read-only view of the page cache.

        Cost: the first time, a pass of XXH3-64 over the chunk: 20 to 30 GB/s, or 0.03 CPU seconds per GiB.
        """
        layout, mapped = self._open(shard)
        whole = np.ndarray((layout.chunk_rows, self._meta.d_in), DTYPES[self._meta.dtype].storage, mapped,
                           layout.chunks[chunk])
        first = chunk * layout.chunk_rows
        rows = min(layout.chunk_rows, layout.rows - first)
        if not layout.checked[chunk]:
            checksums = np.ndarray(layout.checked.shape, CHECKSUM, mapped, layout.checksums)
            expected, got = int(checksums[chunk]), xxh3_64_intdigest(whole.data)
            if expected != got:
                raise damage(self.path(shard), f"the XXH3-64 of its rows {first} to {first + rows - 1} to be",
                             f"{expected:016x}", f"{got:016x}")
            layout.checked[chunk] = True
        return whole[:rows]

    def expect(self, shard: int, chunk: int) -> None:
        """Have the system prefetch a chunk from disk, if it is yet to be checked."""
        layout, mapped = self._open(shard)
        if not layout.checked[chunk]:
            end = int(layout.chunks[chunk]) + layout.chunk_rows * self._meta.row_bytes
            start = int(layout.chunks[chunk]) // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_WILLNEED, start, end - start)

    def whole(self, shard: int) -> np.ndarray:
        """All rows of a shard whose chunks are consecutive, as `in_memory` checks; see `chunk`."""
        layout, mapped = self._open(shard)
        for chunk in np.flatnonzero(~layout.checked).tolist():
            self.chunk(shard, chunk)
        return np.ndarray((layout.rows, self._meta.d_in), DTYPES[self._meta.dtype].storage, mapped, layout.chunks[0])

    def in_memory(self) -> bool:
        """Whether all shards can stay mapped, and are in the page cache, by a sample of pages."""
        return (len(self._meta.shards) <= self.MAPS and hasattr(os, "RWF_NOWAIT")
                and all(self._in_memory(shard) for shard in range(len(self._meta.shards))))

    def _in_memory(self, shard: int) -> bool:
        layout, _ = self._open(shard)
        if (np.diff(layout.chunks) != layout.chunk_rows * self._meta.row_bytes).any():
            return False
        with open_shard(self.path(shard)) as file:
            try:
                for offset in layout.chunks[::SAMPLED].tolist():
                    os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT)
            except OSError:  # it would block, or the file system cannot tell
                return False
        return True

    def column(self, shard: int, name: str) -> Column:
        """A column of a shard, (rows,), or its true codes; read-only."""
        layout, mapped = self._open(shard)
        if name == CODES:
            return SparseRows(*(np.ndarray((length,), kind, mapped, offset)
                                for offset, kind, length in layout.codes.values()))
        return np.ndarray((layout.rows,), COLUMNS[name], mapped, layout.columns[name])

    def _open(self, shard: int) -> tuple[Layout, mmap.mmap]:
        with self._lock:
            if shard not in self._maps:
                self._maps[shard] = self._map(shard, self.path(shard))
                if len(self._maps) > self.MAPS:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(shard)
            layout, mapped = self._layouts[shard], self._maps[shard]
        with suppress(FileNotFoundError):  # a map outlives its file
            there = os.stat(f"{self._folder}{os.sep}{self._meta.shards[shard].file}")
            # Reading a map past the end of its file would kill the process.
            if there.st_ino == layout.file[0] and there.st_size < layout.end:
                raise StoreError(f"shard {self.path(shard)} was cut short: expected {layout.end} bytes, got "
                                 f"{there.st_size}; {make_anew(self._folder.parent)}")
        return layout, mapped

    def _map(self, shard: int, path: Path) -> mmap.mmap:
        """Map a shard, and read its layout if it is not known or the file has changed since."""
        if shard not in self._layouts or self._layouts[shard].file != _identity(path):
            self._layouts[shard] = read_layout(path, self._meta, self._meta.shards[shard])
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def stored_statistics(path: Path, meta: StoreMeta) -> Statistics | None:
    """The statistics of all rows of a store; None if there is no shard, or one was written without them.

    Cost: opens every shard, and reads no rows.
    """
    total = None
    for record in meta.shards:
        found = _shard_statistics(path / SHARDS / record.file, meta, record)
        if found is None:
            return None
        total = found if total is None else total + found
    return total


def _shard_statistics(path: Path, meta: StoreMeta, record: ShardRecord) -> Statistics | None:
    read_layout(path, meta, record)  # verifies the checksum before any byte is used
    try:
        with hdf5_file(path) as file:
            if STATISTICS not in file:
                return None
            group = file[STATISTICS]
            mean, scatter, bins, number = (group[name][:] for name in ("mean", "scatter", "norm_bin", "norm_count"))
            norms = Norms(record.rows, *(float(group.attrs[name]) for name in ("norm_mean", "norm_max")))
            counts = np.zeros(BINS, np.int64)
            counts[bins] = number
    except (*HDF5_ERRORS, IndexError) as error:
        raise StoreError(f"cannot read the statistics of shard {path}: {' '.join(str(error).split())}; "
                         f"{make_anew(path.parents[1])}") from error
    if not (mean.shape == scatter.shape == (meta.d_in,) and (scatter >= 0).all() and counts.sum() == record.rows
            and np.isfinite([*mean, *scatter, norms.mean, norms.max]).all()):
        raise StoreError(f"cannot use the statistics of shard {path}: expected those of {record.rows} rows of "
                         f"{meta.d_in} dimensions, got others; {make_anew(path.parents[1])}")
    return Statistics(Spread(record.rows, mean, scatter), norms, counts)
