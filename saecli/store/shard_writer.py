"""Writing one shard.

HDF5, which can crash the process on a full disk, writes into memory, and leaves a gap for the activations. These and
the rest go to disk by plain writes.
"""

from __future__ import annotations

import io
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_64_intdigest

from ..base.files import make_folder, partial_path, settle
from .blocks import RowBlock, Windows
from .schema import ACTIVATIONS, CHECKSUM, CHUNK_CHECKSUMS, COLUMNS, STATISTICS, Frame, StoreMeta
from .shard import frame_checksum
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
