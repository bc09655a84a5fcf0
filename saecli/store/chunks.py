"""The chunks of a store's shards: reading them and their columns, and finding a row's.

Legend: R rows, D = d_in.
"""

from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from .codec import Column
from .schema import SHARDS, StoreMeta
from .shard import MappedShards, demand_room


class Chunks:
    """A store's chunks; of an unfinished store, the chunks of its whole shards.

    Attributes:
        shard_starts: (shards + 1,) number of each shard's first row, then the number of rows in all.
    """

    def __init__(self, path: Path, meta: StoreMeta) -> None:
        self.path, self.meta = path, meta
        self._shards = MappedShards(path, meta)
        rows = np.array([shard.rows for shard in meta.shards], np.int64)
        self._chunk_starts = np.concatenate([[0], np.cumsum(-(-rows // meta.chunk_rows))])
        self.shard_starts = np.concatenate([[0], np.cumsum(rows)])

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def rows(self) -> int:
        return self.meta.rows

    @property
    def d_in(self) -> int:
        return self.meta.d_in

    @property
    def dtype(self) -> str:
        return self.meta.dtype

    def demand_shards(self) -> None:
        """Refuse a store with a shard that is missing or truncated. Cost: one `stat` per shard."""
        for shard in self.meta.shards:
            demand_room(self.path / SHARDS / shard.file, self.meta, shard)

    @cached_property
    def chunk_sizes(self) -> np.ndarray:
        """(chunks,) rows of each chunk, in stored order."""
        meta = self.meta
        self.demand_shards()  # before arrays are made from counts that a damaged `store.json` may exaggerate
        sizes = [np.minimum(meta.chunk_rows, shard.rows - np.arange(0, shard.rows, meta.chunk_rows))
                 for shard in meta.shards]
        return np.concatenate(sizes) if sizes else np.empty(0, np.int64)

    def chunk(self, chunk: int) -> np.ndarray:
        """The rows of a chunk, by its number within the store, in the storage dtype; a read-only view."""
        return self._shards.chunk(*self._within_shard(chunk))

    def expect(self, chunk: int) -> None:
        """Have the system prefetch a chunk from disk, if it has not been read yet."""
        self._shards.expect(*self._within_shard(chunk))

    def chunk_column(self, chunk: int, name: str) -> Column:
        """A column's values for the rows of a chunk; a read-only view."""
        shard, within = self._within_shard(chunk)
        start = within * self.meta.chunk_rows
        return self._shards.column(shard, name)[start : start + self.chunk_sizes[chunk]]

    def chunk_ids(self, chunk: int) -> np.ndarray:
        """The numbers by which a chunk's rows are split: their documents', else their own within the store."""
        shard, within = self._within_shard(chunk)
        start, size = within * self.meta.chunk_rows, self.chunk_sizes[chunk]
        if "document" in self.meta.columns:
            return self._documents(shard)[start : start + size]
        return int(self.shard_starts[shard]) + np.arange(start, start + size)

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each row's chunk, and its number within that chunk, from its number within the store."""
        shards = np.searchsorted(self.shard_starts, rows, side="right") - 1
        chunks, within = np.divmod(rows - self.shard_starts[shards], self.meta.chunk_rows)
        return self._chunk_starts[shards] + chunks, within

    def row_ids(self, rows: np.ndarray) -> np.ndarray:
        """As `chunk_ids`, for rows given by their ascending numbers within the store; (R,)."""
        if "document" not in self.meta.columns:
            return rows
        shards = np.searchsorted(self.shard_starts, rows, side="right") - 1
        within = rows - self.shard_starts[shards]
        ends = np.flatnonzero(np.diff(shards, append=-1)) + 1
        none = np.empty(0, np.int64)
        return np.concatenate([none, *(self._documents(int(shards[begin]))[within[begin:end]]
                                       for begin, end in pairwise([0, *ends.tolist()]))])

    def in_memory(self) -> bool:
        """Whether all shards can be read from the system's page cache at once."""
        return self._shards.in_memory()

    def whole_shards(self) -> list[np.ndarray]:
        """The rows of each shard in the storage dtype, where `in_memory`; read-only views."""
        return [self._shards.whole(shard) for shard in range(len(self.meta.shards))]

    def _documents(self, shard: int) -> np.ndarray:
        column = self._shards.column(shard, "document")
        assert isinstance(column, np.ndarray)
        return column

    def _within_shard(self, chunk: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._chunk_starts, chunk, side="right")) - 1
        return shard, chunk - int(self._chunk_starts[shard])
