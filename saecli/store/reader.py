"""A store open for reading: its chunks, their columns, and choices of its rows.

Legend: R rows, D = d_in.
"""

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from ..base.errors import StoreError
from .checks import damaged_world, find_damage
from .codec import Column
from .schema import SHARDS, StoreMeta, read_meta
from .shard import MappedShards, demand_room, read_layout
from .split import TEST_FRACTION, Split, Which

if TYPE_CHECKING:
    from .rows import Rows


class ActivationStore:
    """A store open for reading; of an unfinished one, the whole shards.

    Attributes:
        homed: whether it is in the home, where its name finds it.
        cached: whether the command that would make it found it finished.
        shard_starts: (shards + 1,) number of each shard's first row, then the number of rows in all.
    """

    cached = False

    def __init__(self, path: Path, meta: StoreMeta, homed: bool = True) -> None:
        self.path, self.meta, self.homed = path, meta, homed
        self._shards = MappedShards(path, meta)
        rows = np.array([shard.rows for shard in meta.shards], np.int64)
        self._chunk_starts = np.concatenate([[0], np.cumsum(-(-rows // meta.chunk_rows))])
        self.shard_starts = np.concatenate([[0], np.cumsum(rows)])

    @classmethod
    def open(cls, path: Path, homed: bool = True) -> Self:
        """Open the store in a folder; damage to a shard is found when the shard is first read."""
        return cls(path, read_meta(path), homed)

    def __repr__(self) -> str:
        unfinished = "" if self.complete else ", unfinished"
        return (f"ActivationStore({self.name!r}, rows={self.rows}, d_in={self.d_in}, {self.dtype}{unfinished}, "
                f"path={str(self.path)!r})")

    @property
    def name(self) -> str:
        """The store's name."""
        return self.path.resolve().name

    @property
    def reference(self) -> str:
        """The store's name, or its folder if it is outside the home."""
        return self.name if self.homed else str(self.path.resolve())

    @property
    def rows(self) -> int:
        """Rows that can be read."""
        return self.meta.rows

    @property
    def d_in(self) -> int:
        """Dimensions of a row."""
        return self.meta.d_in

    @property
    def dtype(self) -> str:
        """The stored type of the rows."""
        return self.meta.dtype

    @property
    def stored_bytes(self) -> int:
        """Bytes of the activations as stored."""
        return self.rows * self.meta.row_bytes

    @property
    def complete(self) -> bool:
        """Whether the store was finished."""
        return self.meta.complete

    def split(self, which: Which, *, fraction: float = 1.0, seed: int = 0,
              test_fraction: float = TEST_FRACTION) -> "Rows":
        """Choose rows: by document where the store knows documents, else by row.

        Args:
            which: "train", "test" (held out) or "all".
            fraction: fraction of the training rows to keep, in (0, 1]; smaller fractions are subsets of larger ones,
                and the test rows do not depend on it.
            seed: another seed holds out other rows.
            test_fraction: fraction of the documents held out, in [0, 1). Unless it is 0, at least one of two or more
                documents is held out, and at least one is trained on.

        Raises:
            ConfigError: an argument out of its range.
            StoreError: the split is empty, or a shard is damaged.

        Cost: reads and hashes the document of every row (about 50 ms per million rows).
        """
        from .rows import Rows

        return Rows.chosen(self, Split(which, fraction, seed, test_fraction))

    def verify(self, show: Callable[[float], None] = lambda read: None) -> list[str]:
        """A sentence for each missing or damaged shard; see `find_damage`."""
        return find_damage(self.path, self.meta, show)

    def misfits(self) -> list[str]:
        """A sentence if a shard or `world.safetensors` differs from its description in `store.json`.

        Cost: opens every shard, and reads no activations.
        """
        try:
            for shard in self.meta.shards:
                read_layout(self.path / SHARDS / shard.file, self.meta, shard)
        except StoreError as error:
            return [str(error)]
        return damaged_world(self.path, self.meta)

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
        """The shard of a chunk, and the chunk's number within it."""
        shard = int(np.searchsorted(self._chunk_starts, chunk, side="right")) - 1
        return shard, chunk - int(self._chunk_starts[shard])
