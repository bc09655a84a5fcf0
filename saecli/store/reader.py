"""Opening a store, checking its shards, and choosing rows to iterate over.

Legend: B rows of a batch, R rows, D = d_in.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..errors import ConfigError, StoreError
from .checks import changed, damaged_world, find_damage, no_show
from .schema import SHARDS, StoreMeta, read_meta
from .shard import MappedShards, demand_room, read_layout
from .shard_statistics import stored_statistics
from .shuffle import Deal
from .sparse_rows import CODES, SparseRows, stacked
from .split import TEST_FRACTION, Split, Which
from .statistics import Spread
from .stream import WHOLE, Part, Source, in_order, numbers_shuffled, shuffled

WINDOW_BYTES = 256 << 20
STATISTICS_ROWS = 1024  # rows per batch of a pass that measures rows
# Subtracting held-out rows must leave at least this fraction of the scatter in every dimension, which keeps 9 of
# float64's 15 digits.
LEAST_LEFT = 1e-6
UNIT_BYTES = 64 << 10  # random reads of this size reach about half a disk's speed, or more where others are near


class Rows:
    """Some of a store's rows, to iterate over as often as needed, each time from one thread.

    Args:
        store: the store.
        split: which of its rows.
        counts: (chunks,) number of its rows in each chunk.
        decoded: whether batches are float32, rather than of the storage dtype.
    """

    widths: tuple[int, ...] = ()  # this and the next two: see `JoinedRows`
    places: tuple[int, ...] = ()
    d_target = 0

    def __init__(self, store: "ActivationStore", split: Split, counts: np.ndarray, decoded: bool = True) -> None:
        self.store = store
        self.split = split
        self._counts = counts
        self._source = Source(store, counts, self._kept, decoded)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self._counts.sum())

    @property
    def d_in(self) -> int:
        """Dimensions of a row."""
        return self.store.d_in

    def as_stored(self) -> "Rows":
        """The same rows, in batches of the storage dtype: bfloat16 as its bits, in uint16."""
        return Rows(self.store, self.split, self._counts, decoded=False)

    def whole(self) -> "Rows":
        """All rows of the store."""
        return self.store.split("all")

    def batches(self, batch_size: int, *, seed: int, epoch: int, window_bytes: int = WINDOW_BYTES,
                part: Part = WHOLE, row_bytes: int | None = None) -> Iterator[np.ndarray]:
        """One epoch of shuffled batches, read ahead by threads.

        Every row comes exactly once. A batch holds no more pairs of rows of one document than under a uniform shuffle
        (see `shuffle.py`). The order depends only on the rows, seed, epoch, batch size and window.

        Args:
            batch_size: rows per batch, at least 1; the epoch's last may be short.
            seed: at least 0.
            epoch: at least 0.
            window_bytes: size of a window as stored. Two are held in memory, or none where the store lies in the
                system's page cache, from which rows are then gathered; a store smaller than a window is shuffled
                uniformly.
            part: this process's part of every batch, where several divide them; batches of which it has no row are
                skipped. Only its own rows are read.
            row_bytes: of a row of the store whose order to take, that of this store by default.

        Yields:
            (B, D) float32, or as stored, writable; its memory is reused for the next batch.

        Raises:
            StoreError: a shard is missing or damaged.
        """
        _check_batch_size(batch_size)
        row_bytes = row_bytes or self.store.meta.row_bytes
        return shuffled(self._source, self._deal(batch_size, seed, epoch, window_bytes, row_bytes), batch_size, part,
                        row_bytes)

    def order(self, batch_size: int, *, seed: int, epoch: int) -> Iterator[np.ndarray]:
        """The numbers within the store, (B,), of the rows of each of the `batches`."""
        row_bytes = self.store.meta.row_bytes
        return numbers_shuffled(self._deal(batch_size, seed, epoch, WINDOW_BYTES, row_bytes), batch_size, row_bytes)

    def _deal(self, batch_size: int, seed: int, epoch: int, window_bytes: int, row_bytes: int) -> Deal:
        return Deal(self.store.rows, self.rows, self._keeps, (seed, epoch), window_bytes // row_bytes,
                    UNIT_BYTES // row_bytes, batch_size)

    def sequential(self, batch_size: int, part: Part = WHOLE) -> Iterator[np.ndarray]:
        """The rows in stored order, read ahead by threads.

        Args:
            batch_size: rows per batch, at least 1; the last may be short.
            part: this process's part of the batches, where several divide them.

        Yields:
            (B, D) float32, or as stored, writable; its memory is reused for the next batch.

        Raises:
            StoreError: a shard is missing or damaged.
        """
        _check_batch_size(batch_size)
        return in_order(self._source, batch_size, part)

    def spread(self) -> Spread:
        """Their mean and scatter, exact to rounding.

        Raises:
            StoreError: a shard is missing or damaged.

        Cost: for all training rows, a pass over the held-out ones; else, and where a shard has no statistics or nearly
        all of some dimension's scatter is held out, a pass over the rows themselves.
        """
        store, split = self.store, self.split
        whole = stored_statistics(store.path, store.meta) if split.which == "train" and split.fraction == 1 else None
        if whole is None:
            return self._measured()
        if self.rows == store.rows:
            return whole.spread
        rest = whole.spread - store.split("test", seed=split.seed, test_fraction=split.test_fraction)._measured()
        return self._measured() if (rest.scatter < LEAST_LEFT * whole.spread.scatter).any() else rest

    def _measured(self) -> Spread:
        return Spread.measured(self.sequential(STATISTICS_ROWS), self.d_in)

    def column(self, name: str, batch_size: int) -> Iterator[np.ndarray]:
        """A column's values for these rows, in stored order.

        Args:
            name: one of the store's columns.
            batch_size: values at a time, at least 1; the last batch may be short.

        Yields:
            (B,) integers.

        Raises:
            StoreError: the store has no such column, or a shard is missing or damaged.
        """
        _check_batch_size(batch_size)
        if name not in self.store.meta.columns:
            there = ", ".join(self.store.meta.columns) or "none"
            raise StoreError(f"{self.store.path} has no column {name}; expected one of its columns ({there})")
        return self._beside(lambda chunk: self.store.chunk_column(chunk, name), batch_size)

    def numbers(self, batch_size: int) -> Iterator[np.ndarray]:
        """The numbers of these rows within the store, from 0, in stored order, in batches as of `column`."""
        _check_batch_size(batch_size)
        starts = np.cumsum(self.store.chunk_sizes) - self.store.chunk_sizes
        return self._beside(lambda chunk: starts[chunk] + np.arange(self.store.chunk_sizes[chunk]), batch_size)

    def codes(self, batch_size: int) -> Iterator[SparseRows]:
        """The true codes of these rows, in stored order, in batches as of `column`; StoreError if there are none, or a
        shard is missing or damaged."""
        _check_batch_size(batch_size)
        if self.store.meta.world is None:
            raise StoreError(f"{self.store.path} has no true codes; expected a store of rows made of known features")
        return self._beside(lambda chunk: self.store.chunk_column(chunk, CODES), batch_size)

    def _beside(self, of_chunk: Callable[[int], Any], batch_size: int) -> Iterator[Any]:
        """Values of these rows in batches; `of_chunk` gives those of all rows of a chunk."""
        waiting = None
        for chunk in np.flatnonzero(self._counts):
            kept = self._kept(int(chunk))
            values = of_chunk(int(chunk))
            values = values if kept is None else values[kept]
            waiting = values if waiting is None else stacked([waiting, values])
            whole = len(waiting) - len(waiting) % batch_size
            yield from (waiting[begin : begin + batch_size] for begin in range(0, whole, batch_size))
            waiting = waiting[whole:]
        if waiting is not None and len(waiting):
            yield waiting

    def _kept(self, chunk: int) -> np.ndarray | None:
        """Indices of these rows within a chunk; None for all. Not kept, so that memory is constant."""
        if self._counts[chunk] == self.store.chunk_sizes[chunk]:
            return None
        return np.flatnonzero(self.split.keeps(self.store.chunk_ids(chunk)))

    def _keeps(self, rows: np.ndarray) -> np.ndarray | None:
        """Whether each of some rows of the store is one of these; None for all. See `Deal`."""
        return None if self.rows == self.store.rows else self.split.keeps(self.store.row_ids(rows))


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ConfigError("batch_size", "must be at least 1, got {got}", got=batch_size)


class ActivationStore:
    """A store open for reading; of an unfinished one, the whole shards.

    Args:
        path: the store's folder.
        meta: its `store.json`.
        homed: whether it is in the home, where its name finds it.

    Attributes:
        shard_starts: (shards + 1,) number of each shard's first row, then the number of rows in all.
    """

    def __init__(self, path: Path, meta: StoreMeta, homed: bool = True) -> None:
        self.path = path
        self.meta = meta
        self.homed = homed
        self._shards = MappedShards(path, meta)
        rows = np.array([shard.rows for shard in meta.shards], np.int64)
        self._chunk_starts = np.concatenate([[0], np.cumsum(-(-rows // meta.chunk_rows))])
        self.shard_starts = np.concatenate([[0], np.cumsum(rows)])

    @classmethod
    def open(cls, path: Path, homed: bool = True) -> Self:
        """Open a store.

        Args:
            path: its folder, e.g. `home.stores.find(name)`.
            homed: whether that is in the home.

        Raises:
            StoreError: there is none, or its `store.json` is damaged or of a newer version. Damage to a shard is
                found when the shard is first read.
        """
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
        """What finds the store again: its name, and of one outside the home its folder."""
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
        """The stored type of the rows; reading always gives float32."""
        return self.meta.dtype

    @property
    def stored_bytes(self) -> int:
        """Bytes of the activations as stored."""
        return self.rows * self.meta.row_bytes

    @property
    def complete(self) -> bool:
        """Whether the store was finished."""
        return self.meta.complete

    @cached_property
    def chunk_sizes(self) -> np.ndarray:
        """(chunks,) rows of each chunk, in stored order."""
        meta = self.meta
        for shard in meta.shards:  # before arrays are made from counts that a damaged `store.json` may exaggerate
            demand_room(self.path / SHARDS / shard.file, meta, shard)
        sizes = [np.minimum(meta.chunk_rows, shard.rows - np.arange(0, shard.rows, meta.chunk_rows))
                 for shard in meta.shards]
        return np.concatenate(sizes) if sizes else np.empty(0, np.int64)

    def split(self, which: Which, *, fraction: float = 1.0, seed: int = 0,
              test_fraction: float = TEST_FRACTION) -> Rows:
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
        split = Split(which, fraction, seed, test_fraction).fitted(
            lambda: map(self.chunk_ids, range(len(self.chunk_sizes))))
        counts = self.chunk_sizes.copy()
        if which != "all":
            for chunk in range(len(counts)):
                counts[chunk] = np.count_nonzero(split.keeps(self.chunk_ids(chunk)))
        if not counts.sum():
            raise split.empty(self.path, self.meta)
        return Rows(self, split, counts)

    def changed(self) -> list[int]:
        """The numbers of the shards that are missing, or may have changed since the store was written or last checked.

        Cost: one `stat` per shard.
        """
        return changed(self.path, self.meta)

    def verify(self, shards: Sequence[int] | None = None, show: Callable[[float], None] = no_show) -> list[str]:
        """Read shards whole and compare them with their checksums.

        Args:
            shards: the numbers of the shards to read; None for all.
            show: called with the number of bytes read so far.

        Returns:
            One sentence per missing or damaged shard, which names its file.

        Cost: that of `find_damage`.
        """
        chosen = range(len(self.meta.shards)) if shards is None else shards
        return list(find_damage(self.path, self.meta, chosen, show).values())

    def misfits(self) -> list[str]:
        """A sentence for the first shard, or for `world.safetensors`, if it differs from its description in
        `store.json`; none where all agree.

        Cost: opens every shard, and reads no activations.
        """
        try:
            for shard in self.meta.shards:
                read_layout(self.path / SHARDS / shard.file, self.meta, shard)
        except StoreError as error:
            return [str(error)]
        return damaged_world(self.path, self.meta)

    def chunk(self, chunk: int) -> np.ndarray:
        """The rows of a chunk, by its number within the store, in the storage dtype; a read-only view."""
        return self._shards.chunk(*self._within_shard(chunk))

    def expect(self, chunk: int) -> None:
        """Have the system prefetch a chunk from disk, if it has not been read yet."""
        self._shards.expect(*self._within_shard(chunk))

    def chunk_column(self, chunk: int, name: str) -> np.ndarray:
        """A column's values for the rows of a chunk; a read-only view."""
        shard, within = self._within_shard(chunk)
        start = within * self.meta.chunk_rows
        return self._shards.column(shard, name)[start : start + self.chunk_sizes[chunk]]

    def chunk_ids(self, chunk: int) -> np.ndarray:
        """The numbers by which a chunk's rows are split: their documents', else their own within the store."""
        if "document" in self.meta.columns:
            return self.chunk_column(chunk, "document")
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
        if "document" not in self.meta.columns:
            return rows
        shards = np.searchsorted(self.shard_starts, rows, side="right") - 1
        within = rows - self.shard_starts[shards]
        ends = np.flatnonzero(np.diff(shards, append=-1)) + 1
        none = np.empty(0, np.int64)
        return np.concatenate([none, *(self._shards.column(int(shards[begin]), "document")[within[begin:end]]
                                       for begin, end in pairwise([0, *ends.tolist()]))])

    def in_memory(self) -> bool:
        """Whether all shards can be read from the system's page cache at once."""
        return self._shards.in_memory()

    def whole_shards(self) -> list[np.ndarray]:
        """The rows of each shard in the storage dtype, where `in_memory`; read-only views."""
        return [self._shards.whole(shard) for shard in range(len(self.meta.shards))]

    def _within_shard(self, chunk: int) -> tuple[int, int]:
        """The shard of a chunk, and the chunk's number within it."""
        shard = int(np.searchsorted(self._chunk_starts, chunk, side="right")) - 1
        return shard, chunk - int(self._chunk_starts[shard])
