"""The rows that a store admits, and writing one shard of them.

HDF5 writes its headers and the columns into memory, as on a full disk it can crash the process; the activations go to
the offset that the headers give by plain writes, whose failure is an OSError.

Legend: R rows, D = d_in.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_64_intdigest

from ..base.files import file_sha256, make_folder, partial_path, settle
from .schema import ACTIVATIONS, CHECKSUM, CHUNK_CHECKSUMS, COLUMNS, STATISTICS, Frame, StoreMeta
from .shard import frame_checksum
from .values import (
    CODES,
    DTYPES,
    INDEX,
    OFFSET,
    VALUE,
    Column,
    Dropped,
    Statistics,
    row_norms,
    stacked,
)
from .windows import WINDOWS, Windows

if TYPE_CHECKING:
    import h5py

ALIGNMENT = 64  # bytes; NumPy is slow on unaligned numbers


ADMITTED, NONFINITE, HIGH_NORM = range(3)  # verdicts, one uint8 per row
REASONS = {NONFINITE: "nonfinite", HIGH_NORM: "high_norm"}

Columns = Mapping[str, Column]


class Admission:
    """Drops and counts rows that are not finite in the stored type, or have a norm above `max_norm_multiple` times the
    median of the first block that has a finite row."""

    def __init__(self, path: Path, meta: StoreMeta) -> None:
        self._path, self._meta = path, meta
        self.median = meta.median_norm

    @property
    def waits(self) -> bool:
        """Whether the median is needed and not yet known."""
        return self._meta.max_norm_multiple is not None and self.median is None

    def judge(self, activations: np.ndarray) -> np.ndarray:
        return self._judged(self._as_rows(activations))

    def __call__(
        self,
        activations: np.ndarray,
        columns: Columns,
        dropped: Mapping[str, np.ndarray],
        verdict: np.ndarray | None = None,
        counted: int | None = None,
    ) -> tuple[np.ndarray, Columns, Dropped]:
        """The rows and columns of a block to store, and the rows dropped, of its own among the first `counted` of the
        block; see `StoreWriter.append`."""
        rows, out = self._as_rows(activations), Dropped.of(dropped)
        if columns.keys() != set(self._meta.row_values):
            raise ValueError(
                f"a block does not fit {self._path}: expected columns {list(self._meta.row_values)}, "
                f"got {list(columns)}"
            )
        for name, column in columns.items():
            if isinstance(column, np.ndarray) and (
                column.shape != (len(rows),) or column.dtype.kind not in "iu"
            ):
                raise ValueError(
                    f"column {name} does not fit {self._path}: expected {len(rows)} integers, "
                    f"got {column.dtype} of shape {column.shape}"
                )
        verdict = self._judged(rows) if verdict is None else verdict
        if not verdict.any():
            return rows, columns, out
        first = slice(counted)
        out += Dropped.of(
            {
                name: self._row_norms(rows[first][verdict[first] == reason])
                for reason, name in REASONS.items()
            }
        )
        kept = verdict == ADMITTED
        return rows[kept], {name: columns[name][kept] for name in self._meta.row_values}, out

    def _as_rows(self, activations: np.ndarray) -> np.ndarray:
        meta = self._meta
        if activations.ndim != 2 or activations.shape[1] != meta.d_in:
            raise ValueError(
                f"a block does not fit {self._path}: expected shape (rows, {meta.d_in}), "
                f"got {activations.shape}"
            )
        if activations.dtype == DTYPES[meta.dtype].storage:
            return activations
        if activations.dtype.kind != "f":
            raise ValueError(
                f"a block does not fit {self._path}: expected floats, got {activations.dtype}"
            )
        with np.errstate(over="ignore"):  # overflow gives infinities, which are dropped
            return activations.astype(np.float32, copy=False)

    def _judged(self, rows: np.ndarray) -> np.ndarray:
        """The verdict on undecoded rows; sets the median if it is needed and not yet known."""
        keeps = DTYPES[self._meta.dtype].keeps(rows)
        verdict = np.where(keeps, np.uint8(ADMITTED), np.uint8(NONFINITE))
        if self._meta.max_norm_multiple is not None and keeps.any():
            norms = self._row_norms(rows if keeps.all() else rows[keeps])
            self.median = float(np.median(norms)) if self.median is None else self.median
            verdict[np.flatnonzero(keeps)[norms > self._meta.max_norm_multiple * self.median]] = (
                HIGH_NORM
            )
        return verdict

    def _row_norms(self, rows: np.ndarray) -> np.ndarray:
        """Norms, (R,), of undecoded rows; infinite for rows with a NaN or infinity in the stored type."""
        if rows.dtype.kind == "f":
            return row_norms(rows)
        decoded = np.empty(rows.shape, np.float32)
        DTYPES[self._meta.dtype].decode_rows(rows, decoded)
        return row_norms(decoded)


class ShardWriter:
    """Writes one shard under a hidden name; `commit` makes it appear whole, with `statistics` of its rows.

    Memory: one chunk as stored, in float32 and in float64, and the columns.
    """

    def __init__(self, path: Path, meta: StoreMeta) -> None:
        self.path = path
        self.rows = 0
        self._meta = meta
        self.statistics: Statistics | None = None
        self._chunk = np.empty((meta.chunk_rows, meta.d_in), DTYPES[meta.dtype].storage)
        # Allocating these for every chunk costs more than the arithmetic on them.
        self._decoded = np.empty(self._chunk.shape, np.float32)
        self._scratch = np.empty(self._chunk.shape, np.float64)
        self._filled = 0  # rows of the chunk being gathered
        self._columns: dict[str, list[Column]] = {name: [] for name in meta.row_values}
        self._windows: list[Windows] = []
        self._checksums: list[int] = []  # per chunk
        _, self._start = _headers(meta, meta.shard_rows)
        self._end = self._start
        make_folder(path.parent)
        self._file_path = partial_path(path)
        self._file = os.open(self._file_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)

    def count(self, column: str, value: int) -> int:
        return sum(int(np.sum(part == value)) for part in self._columns[column])

    def append(
        self, rows: np.ndarray, columns: Mapping[str, Column], windows: Windows | None = None
    ) -> None:
        """Append rows, and the windows whose first row is one of them, by its number within the shard."""
        if windows is not None:
            self._windows.append(windows)
        for name, parts in self._columns.items():
            column = columns[name]
            parts.append(
                column.astype(COLUMNS[name]) if isinstance(column, np.ndarray) else column.copy()
            )
        self.rows += len(rows)
        while len(rows):
            room = len(self._chunk) - self._filled
            taken, rows = rows[:room], rows[room:]
            self._chunk[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            if self._filled == len(self._chunk):
                self._flush_chunk()

    def commit(self) -> tuple[str, Frame]:
        """Finish the shard, flush it and rename it to its final path; returns its SHA-256 and its frame."""
        if self._filled:
            if self.rows < len(
                self._chunk
            ):  # the only chunk is exactly its rows; else the last is padded
                self._chunk = self._chunk[: self.rows]
            self._chunk[self._filled :] = 0
            self._flush_chunk()
        columns = {name: stacked(parts) for name, parts in self._columns.items()}
        columns[CHUNK_CHECKSUMS] = np.array(self._checksums, CHECKSUM)
        assert self.statistics is not None
        windows = Windows.joined(self._windows) if self._meta.windows else None
        image, start = _headers(self._meta, self.rows, columns, self.statistics, windows)
        assert start == self._start, "the offset of the activations depends on their number"
        for offset, data in image.writes:
            _write(self._file, data, offset)
        os.ftruncate(self._file, image.size)
        os.close(self._file)
        self._file = -1
        digest = file_sha256(self._file_path)
        with self._file_path.open("rb", buffering=0) as file:
            frame = Frame(start, frame_checksum(file, start, self._end))
        settle(self._file_path, self.path)
        return digest, frame

    def abandon(self) -> None:
        """Remove the hidden file; does nothing after `commit`."""
        if self._file >= 0:
            with suppress(OSError):  # some systems report failed writes on closing
                os.close(self._file)
            self._file = -1
        self._file_path.unlink(missing_ok=True)

    def _flush_chunk(self) -> None:
        # Chunk by chunk and as stored, so that the statistics do not depend on how rows were appended.
        rows, decoded, scratch = (
            array[: self._filled] for array in (self._chunk, self._decoded, self._scratch)
        )
        DTYPES[self._meta.dtype].decode_rows(rows, decoded)
        np.copyto(scratch, decoded)
        found = Statistics.of(scratch)
        self.statistics = found if self.statistics is None else self.statistics + found
        self._checksums.append(xxh3_64_intdigest(self._chunk.data))
        _write(self._file, self._chunk.data.cast("B"), self._end)
        self._end += self._chunk.nbytes
        self._filled = 0


def _write(file: int, data: memoryview | bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


class _Image(io.RawIOBase):
    """A file object that records HDF5's writes: offset and bytes of each, and the file's size."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, bytes]] = []
        self.size = 0
        self._at = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        self.writes.append((self._at, bytes(data)))
        self._at += len(data)
        self.size = max(self.size, self._at)
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        self.size = self._at if size is None else size
        return self.size


def _headers(
    meta: StoreMeta,
    rows: int,
    columns: Mapping[str, Column] | None = None,
    statistics: Statistics | None = None,
    windows: Windows | None = None,
) -> tuple[_Image, int]:
    """All bytes of a shard but its activations, and their byte offset.

    A fixed-size, unfiltered, chunked dataset that is allocated at once has consecutive chunks and needs no index of
    them (version 1.10 of the format); the bytes before them do not depend on `rows`.
    """
    import h5py  # `sae list` need not wait for it

    image = _Image()
    creation, access = h5py.h5p.create(h5py.h5p.FILE_CREATE), h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    creation.set_obj_track_times(False)  # equal rows make equal bytes
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, image)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_libver_bounds(h5py.h5f.LIBVER_V110, h5py.h5f.LIBVER_V110)
    access.set_alignment(1, ALIGNMENT)
    with h5py.File(h5py.h5f.create(b"shard", h5py.h5f.ACC_TRUNC, creation, access)) as file:
        for name in meta.columns:
            _create(file, name, h5py.h5t.py_create(COLUMNS[name]), (rows,))
        chunk = (min(meta.chunk_rows, rows), meta.d_in)
        _create(file, CHUNK_CHECKSUMS, h5py.h5t.py_create(CHECKSUM), (-(-rows // chunk[0]),))
        activations = _create(file, ACTIVATIONS, DTYPES[meta.dtype].hdf5, (rows, meta.d_in), chunk)
        for name, column in (columns or {}).items():
            if isinstance(column, np.ndarray):
                file[name][...] = column
            else:
                _put(
                    file,
                    CODES,
                    {
                        "offset": column.indptr.astype(OFFSET),
                        "index": column.indices.astype(INDEX),
                        "value": column.data.astype(VALUE),
                    },
                )
        if windows is not None:
            _put(file, WINDOWS, windows.datasets())
        if statistics is not None:
            bins = np.flatnonzero(statistics.norm_counts)
            group = _put(
                file,
                STATISTICS,
                {
                    "mean": statistics.spread.mean,
                    "scatter": statistics.spread.scatter,
                    "norm_bin": bins.astype("<i4"),
                    "norm_count": statistics.norm_counts[bins],
                },
            )
            for name, value in (
                ("norm_mean", statistics.norms.mean),
                ("norm_max", statistics.norms.max),
            ):
                group.attrs.create(name, value, dtype="<f8")
        start = activations.get_chunk_info_by_coord((0, 0)).byte_offset
    return image, start


def _put(file: h5py.File, name: str, columns: Mapping[str, np.ndarray]) -> h5py.Group:
    import h5py

    creation = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    creation.set_obj_track_times(False)
    group = h5py.Group(h5py.h5g.create(file.id, name.encode(), gcpl=creation))
    for key, values in columns.items():
        group.create_dataset(key, data=values, track_times=False)
    return group


def _create(
    file: h5py.File,
    name: str,
    kind: h5py.h5t.TypeID,
    shape: tuple[int, ...],
    chunk: tuple[int, ...] | None = None,
) -> h5py.h5d.DatasetID:
    import h5py

    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    layout.set_obj_track_times(False)
    if chunk:
        layout.set_chunk(chunk)
        layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    return h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple(shape), layout)
