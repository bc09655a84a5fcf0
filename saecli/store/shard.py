"""Reading shards: checking that an HDF5 file is what the store says, and mapping its bytes.

Legend: R rows, D = d_in.
"""

import mmap
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from ..errors import StoreError
from .dtypes import DTYPES
from .schema import ACTIVATIONS, COLUMNS, SHARDS, StoreMeta

MEND_SHARD = "restore it, or remove the store and make it again"
# What h5py raises, by no rule that could be relied on, for files that are not as they should be.
HDF5_ERRORS = (OSError, RuntimeError, KeyError, TypeError, ValueError)


@dataclass(frozen=True)
class Layout:
    """Where a shard's bytes lie.

    Args:
        rows: rows in the shard.
        chunk_rows: rows in a chunk; the last may be padded.
        chunks: (chunks,) byte offset of each chunk of activations.
        columns: byte offset of each column.
        end: a byte offset that the file reaches at least.
    """

    rows: int
    chunk_rows: int
    chunks: np.ndarray
    columns: dict[str, int]
    end: int


def read_layout(path: Path, meta: StoreMeta, rows: int) -> Layout:
    """Find out where a shard's bytes lie, and that it is what its store says.

    Args:
        path: the shard.
        meta: the store's.
        rows: how many rows it should hold.

    Raises:
        StoreError: it is missing, foreign, truncated, or of another shape, type or layout.

    Cost: reads the file's metadata only.
    """
    try:
        with h5py.File(path, "r", locking=False) as file:
            return _checked_layout(file, meta, rows, path.stat().st_size)
    except FileNotFoundError as error:
        raise StoreError(f"shard {path} is missing; {MEND_SHARD}") from error
    except HDF5_ERRORS as error:
        # HDF5 tells of addresses and times where the system has a plain reason, as that this is a directory.
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number else " ".join(str(error).split())
        raise StoreError(f"cannot read shard {path}: {reason}; {MEND_SHARD}") from error


def _checked_layout(file: h5py.File, meta: StoreMeta, rows: int, size: int) -> Layout:
    dataset, stored = file[ACTIVATIONS], DTYPES[meta.dtype]
    chunk_rows = min(meta.chunk_rows, rows)
    layout = dataset.id.get_create_plist()
    _expect("shape", (rows, meta.d_in), dataset.shape)
    _expect("type", f"little-endian {meta.dtype}", f"little-endian {meta.dtype}"
            if dataset.id.get_type().equal(stored.hdf5) else str(dataset.dtype))
    _expect("chunks of shape", (chunk_rows, meta.d_in), dataset.chunks)
    _expect("filters", 0, layout.get_nfilters())
    count, chunk_bytes = -(-rows // chunk_rows), chunk_rows * meta.d_in * stored.storage.itemsize
    chunks = np.full(count, -1, np.int64)

    def note(info: h5py.h5d.StoreInfo) -> None:
        _expect("bytes in a chunk", chunk_bytes, info.size)
        chunks[info.chunk_offset[0] // chunk_rows] = info.byte_offset

    dataset.id.chunk_iter(note)
    _expect("chunks", count, int((chunks >= 0).sum()))
    columns = {}
    for name in meta.columns:
        column = file[name]
        _expect(f"shape of {name}", (rows,), column.shape)
        _expect(f"type of {name}", COLUMNS[name], column.dtype)
        columns[name] = column.id.get_offset()
        _expect(f"layout of {name}", "contiguous", "contiguous" if columns[name] is not None else "chunked")
    ends = [int(chunks.max()) + chunk_bytes, *(at + rows * COLUMNS[name].itemsize for name, at in columns.items())]
    if size < max(ends):
        raise ValueError(f"expected {max(ends)} bytes or more, got {size}")
    return Layout(rows, chunk_rows, chunks, columns, max(ends))


def _expect(what: str, expected: object, got: object) -> None:
    if expected != got:
        raise ValueError(f"expected {what} {expected}, got {got}")


class MappedShards:
    """The shards of a store, opened when first read and read through memory maps; safe to use from threads.

    Args:
        store: the store's folder.
        meta: its `store.json`.
    """

    # A map keeps a file descriptor; 1024 of them is all that many systems grant a process.
    MAPS = 256

    def __init__(self, store: Path, meta: StoreMeta) -> None:
        self._store, self._meta = store, meta
        self._layouts: dict[int, Layout] = {}
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._lock = threading.Lock()

    def path(self, shard: int) -> Path:
        """A shard's file."""
        return self._store / SHARDS / self._meta.shards[shard].file

    def check(self, shard: int) -> None:
        """Check a shard's metadata and length; `StoreError` where they are not as they should be."""
        read_layout(self.path(shard), self._meta, self._meta.shards[shard].rows)

    def chunk(self, shard: int, chunk: int) -> np.ndarray:
        """A chunk's rows.

        Returns:
            (R, D) in the storage dtype, read-only, in the page cache's own memory.

        Raises:
            StoreError: the shard is missing, damaged or foreign.
        """
        layout, mapped = self._open(shard)
        rows = min(layout.chunk_rows, layout.rows - chunk * layout.chunk_rows)
        return np.ndarray((rows, self._meta.d_in), DTYPES[self._meta.dtype].storage, mapped, layout.chunks[chunk])

    def column(self, shard: int, name: str) -> np.ndarray:
        """A column of a whole shard.

        Returns:
            (rows,) of the column's type, read-only.

        Raises:
            StoreError: the shard is missing, damaged or foreign.
        """
        layout, mapped = self._open(shard)
        return np.ndarray((layout.rows,), COLUMNS[name], mapped, layout.columns[name])

    def _open(self, shard: int) -> tuple[Layout, mmap.mmap]:
        with self._lock:
            if shard in self._maps:
                self._maps.move_to_end(shard)
                return self._layouts[shard], self._maps[shard]
            path = self.path(shard)
            if shard not in self._layouts:
                self._layouts[shard] = read_layout(path, self._meta, self._meta.shards[shard].rows)
            layout = self._layouts[shard]
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            # Reading a map beyond its file's end would kill the process.
            if len(mapped) < layout.end:
                raise StoreError(f"shard {path} was cut short: expected {layout.end} bytes, got {len(mapped)}; "
                                 "remove the store and make it again")
            self._maps[shard] = mapped
            if len(self._maps) > self.MAPS:
                self._maps.popitem(last=False)
            return layout, mapped
