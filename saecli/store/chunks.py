"""A store's chunks and columns by number: shards mapped into memory, checked when first read.

Legend: R rows, D = d_in.
"""

import mmap
import threading
from collections import OrderedDict
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np

from .schema import CHECKSUM, COLUMNS, SHARDS, StoreMeta
from .shard import Layout, demand_chunk, demand_room, read_layout
from .values import CODES, DTYPES, Column
from .windows import WINDOWS, Windows


class Chunks:
    """A store's chunks, by number within the store; of an unfinished store, those of its whole shards.

    Shards are memory-mapped when first read; thread-safe. Errors are StoreErrors that name the shard.
    """

    # Each map holds a file descriptor, and many systems allow a process only 1024.
    MAPS = 512

    def __init__(self, path: Path, meta: StoreMeta) -> None:
        self.path, self.meta, self.name = path, meta, path.resolve().name
        self.rows, self.d_in, self.dtype = meta.rows, meta.d_in, meta.dtype
        self.storage = DTYPES[meta.dtype].storage
        rows = np.array([shard.rows for shard in meta.shards], np.int64)
        self._chunk_starts = np.concatenate([[0], np.cumsum(-(-rows // meta.chunk_rows))])
        # Each one's first row, then their number.
        self.shard_starts = np.concatenate([[0], np.cumsum(rows)])
        self._files = [path / SHARDS / shard.file for shard in meta.shards]
        self._layouts: dict[int, Layout] = {}
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._lock = threading.Lock()

    def demand_shards(self) -> None:
        """Refuse a store with a shard that is missing or truncated. Cost: one `stat` per shard."""
        for path, shard in zip(self._files, self.meta.shards, strict=True):
            demand_room(path, self.meta, shard)

    @cached_property
    def chunk_sizes(self) -> np.ndarray:
        """(chunks,) rows of each chunk, in stored order."""
        meta = self.meta
        self.demand_shards()  # before arrays are made from counts that a damaged `store.json` may exaggerate
        sizes = [
            np.minimum(meta.chunk_rows, shard.rows - np.arange(0, shard.rows, meta.chunk_rows))
            for shard in meta.shards
        ]
        return np.concatenate([np.empty(0, np.int64), *sizes])

    def chunk(self, chunk: int) -> np.ndarray:
        """A chunk's rows, (R, D) in the storage dtype, a read-only view of the page cache.

        Cost: the first time, a pass of XXH3-64 over the chunk: 20 to 30 GB/s, or 0.03 CPU seconds per GiB.
        """
        shard, within = self._within_shard(chunk)
        layout, mapped = self._open(shard)
        first = within * layout.chunk_rows
        whole = np.ndarray(
            (layout.chunk_rows, self.d_in),
            self.storage,
            mapped,
            layout.start + first * self.meta.row_bytes,
        )
        if not layout.checked[within]:
            checksums = np.ndarray(layout.checked.shape, CHECKSUM, mapped, layout.checksums)
            demand_chunk(self._files[shard], layout, within, int(checksums[within]), whole.data)
            layout.checked[within] = True
        return whole[: layout.rows - first]

    def expect(self, chunk: int) -> None:
        """Have the system prefetch a chunk from disk, if it is yet to be checked."""
        shard, within = self._within_shard(chunk)
        layout, mapped = self._open(shard)
        if not layout.checked[within]:
            size = layout.chunk_rows * self.meta.row_bytes
            end = layout.start + (within + 1) * size
            start = (end - size) // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_WILLNEED, start, end - start)

    def chunk_column(self, chunk: int, name: str) -> Column:
        """A column's values for the rows of a chunk, or their true codes; a read-only view."""
        shard, within = self._within_shard(chunk)
        start = within * self.meta.chunk_rows
        return self._column(shard, name)[start : start + self.chunk_sizes[chunk]]

    def chunk_ids(self, chunk: int) -> np.ndarray:
        """The numbers by which a chunk's rows are split: their documents', else their own."""
        if "document" in self.meta.columns:
            return cast(np.ndarray, self.chunk_column(chunk, "document"))
        shard, within = self._within_shard(chunk)
        start = int(self.shard_starts[shard]) + within * self.meta.chunk_rows
        return np.arange(start, start + self.chunk_sizes[chunk])

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each row's chunk, and its number within that chunk, from its number within the store."""
        shards = np.searchsorted(self.shard_starts, rows, side="right") - 1
        chunks, within = np.divmod(rows - self.shard_starts[shards], self.meta.chunk_rows)
        return self._chunk_starts[shards] + chunks, within

    def row_ids(self, rows: np.ndarray) -> np.ndarray:
        """As `chunk_ids`, for rows given by their ascending numbers within the store; (R,)."""
        return rows if "document" not in self.meta.columns else self.row_values("document", rows)

    def row_values(self, name: str, rows: np.ndarray) -> np.ndarray:
        """A column's values for rows given by their ascending numbers within the store; (R,)."""
        shards = np.searchsorted(self.shard_starts, rows, side="right") - 1
        within = rows - self.shard_starts[shards]
        ends = np.flatnonzero(np.diff(shards, append=-1)) + 1
        parts = (
            cast(np.ndarray, self._column(int(shards[begin]), name))[within[begin:end]]
            for begin, end in pairwise([0, *ends.tolist()])
        )
        return np.concatenate([np.empty(0, np.int64), *parts])

    def _column(self, shard: int, name: str) -> Column:
        """A column of a shard, (rows,), or its true codes; read-only."""
        layout, mapped = self._open(shard)
        if name == CODES:
            from scipy.sparse import csr_array  # `sae list` need not wait for it

            assert self.meta.world is not None
            parts = self._group(shard, CODES)
            return csr_array(
                (parts["value"], parts["index"], parts["offset"]),
                shape=(layout.rows, self.meta.world.features),
            )
        return np.ndarray((layout.rows,), COLUMNS[name], mapped, layout.columns[name])

    def _group(self, shard: int, name: str) -> dict[str, np.ndarray]:
        """The datasets of a group of a shard; read-only."""
        layout, mapped = self._open(shard)
        return {
            part: np.ndarray((length,), kind, mapped, offset)
            for part, (offset, kind, length) in layout.groups[name].items()
        }

    def windows(self, shard: int) -> Windows:
        """The windows whose first row is in a shard, of a store that keeps them."""
        parts = self._group(shard, WINDOWS)
        return Windows(**parts | {"stored": parts["stored"].astype(bool)})

    def _within_shard(self, chunk: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._chunk_starts, chunk, side="right")) - 1
        return shard, chunk - int(self._chunk_starts[shard])

    def _open(self, shard: int) -> tuple[Layout, mmap.mmap]:
        path = self._files[shard]
        with self._lock:
            if shard not in self._maps:
                if shard not in self._layouts:
                    self._layouts[shard] = read_layout(path, self.meta, self.meta.shards[shard])
                with path.open("rb") as file:
                    self._maps[shard] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                if len(self._maps) > self.MAPS:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(shard)
            layout, mapped = self._layouts[shard], self._maps[shard]
        return layout, mapped
