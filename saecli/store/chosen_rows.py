"""Rows chosen from a store, to iterate over as often as needed.

Legend: B rows of a batch, R rows, D = d_in.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from ..errors import ConfigError, StoreError
from .shard_statistics import stored_statistics
from .shuffle import Deal
from .split import TEST_FRACTION, Split, Which
from .statistics import Spread
from .stream import WHOLE, Part, Source, StoredChunks, in_order, shuffled


def window_starts(documents: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The indices, ascending, of the rows with which a window begins, the first row of all not counted.

    A window of a store is told by its rows: they are of one document, and their positions ascend.

    Args:
        documents: (R,) integers, of rows in stored order.
        positions: (R,) integers, of the same rows.
    """
    return 1 + np.flatnonzero((np.diff(documents) != 0) | (np.diff(positions) <= 0))


WINDOW_BYTES = 256 << 20
STATISTICS_ROWS = 1024  # of a batch, in a pass that measures rows
# Of the scatter of all rows, at least so much must be left in every dimension when that of some is taken from it: of
# the 15 digits of float64 this leaves 9.
LEAST_LEFT = 1e-6
UNIT_BYTES = 64 << 10  # what a disk reads from anywhere at about half its speed, or more where others are near


class SplitStore(StoredChunks, Protocol):
    """A store that rows can be chosen from, as `ActivationStore` is one."""

    path: Path

    @property
    def name(self) -> str: ...

    @property
    def rows(self) -> int: ...

    @property
    def chunk_sizes(self) -> np.ndarray: ...

    def chunk_column(self, chunk: int, name: str) -> np.ndarray: ...

    def chunk_ids(self, chunk: int) -> np.ndarray: ...

    def row_ids(self, rows: np.ndarray) -> np.ndarray: ...

    def split(self, which: Which, *, fraction: float = 1.0, seed: int = 0,
              test_fraction: float = TEST_FRACTION) -> "Rows": ...


class Rows:
    """Some of a store's rows; iterate as often as needed, from one thread each time.

    Args:
        store: the store.
        split: which of its rows.
        counts: (chunks,) how many rows of each chunk belong to it.
    """

    def __init__(self, store: SplitStore, split: Split, counts: np.ndarray) -> None:
        self.store = store
        self.split = split
        self._counts = counts
        self._source = Source(store, counts, self._kept)

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return int(self._counts.sum())

    @property
    def d_in(self) -> int:
        """Dimensions of a row."""
        return self.store.d_in

    def batches(self, batch_size: int, *, seed: int, epoch: int, window_bytes: int = WINDOW_BYTES,
                part: Part = WHOLE) -> Iterator[np.ndarray]:
        """One epoch of shuffled batches; the next ones are prepared by threads meanwhile.

        Every row comes exactly once. A batch holds no more pairs of rows of one document than a uniform shuffle's
        (see `shuffle.py`). The order is a function of the rows, seed, epoch, batch size and window alone.

        Args:
            batch_size: rows of a batch, at least 1; the last of the epoch may be short.
            seed: at least 0.
            epoch: at least 0.
            window_bytes: size of a window as stored. Two are held, or none where the store lies in the system's page
                cache, from which rows are then gathered; a store smaller than a window is shuffled uniformly.
            part: the part of every batch that is yielded, where several processes share them; one that it has no rows
                of is left out. Only its own rows are read.

        Yields:
            (B, D) float32, writable. Valid until the next batch is asked for: its memory is used again then.

        Raises:
            StoreError: a shard is missing or damaged.
        """
        _check_batch_size(batch_size)
        row_bytes = self.store.meta.row_bytes
        deal = Deal(self.store.rows, self.rows, self._keeps, (seed, epoch), window_bytes // row_bytes,
                    UNIT_BYTES // row_bytes, batch_size)
        return shuffled(self._source, deal, batch_size, part)

    def sequential(self, batch_size: int, part: Part = WHOLE) -> Iterator[np.ndarray]:
        """The rows in stored order; the next batches are prepared by threads meanwhile.

        Args:
            batch_size: rows of a batch, at least 1; the last may be short.
            part: the part of the batches that is yielded, where several processes share them.

        Yields:
            (B, D) float32, writable. Valid until the next batch is asked for: its memory is used again then.

        Raises:
            StoreError: a shard is missing or damaged.
        """
        _check_batch_size(batch_size)
        return in_order(self._source, batch_size, part)

    def spread(self) -> Spread:
        """Their mean and scatter; see `spread_of`."""
        return spread_of(self)

    def column(self, name: str, batch_size: int) -> Iterator[np.ndarray]:
        """A column's values for these rows, in stored order.

        Args:
            name: one of the store's columns.
            batch_size: values at a time, at least 1; the last may be fewer.

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
        """The numbers of these rows within the store, counted from 0, in stored order; takes and yields what `column`
        does."""
        _check_batch_size(batch_size)
        starts = np.cumsum(self.store.chunk_sizes) - self.store.chunk_sizes
        return self._beside(lambda chunk: starts[chunk] + np.arange(self.store.chunk_sizes[chunk]), batch_size)

    def _beside(self, of_chunk: Callable[[int], np.ndarray], batch_size: int) -> Iterator[np.ndarray]:
        """What `of_chunk` gives for the rows of each chunk, (rows of it,), of those that belong to these."""
        waiting = np.empty(0, np.int64)
        for chunk in np.flatnonzero(self._counts):
            kept = self._kept(int(chunk))
            values = of_chunk(int(chunk))
            waiting = np.concatenate([waiting, values if kept is None else values[kept]])
            whole = len(waiting) - len(waiting) % batch_size
            yield from np.split(waiting[:whole], range(batch_size, whole, batch_size)) if whole else ()
            waiting = waiting[whole:]
        if len(waiting):
            yield waiting

    def _kept(self, chunk: int) -> np.ndarray | None:
        """Which rows of a chunk belong to these, as indices; None for all. Found anew, so that memory is constant."""
        if self._counts[chunk] == self.store.chunk_sizes[chunk]:
            return None
        return np.flatnonzero(self.split.keeps(self.store.chunk_ids(chunk)))

    def _keeps(self, rows: np.ndarray) -> np.ndarray | None:
        """Which of some rows belong to these; None for all. See `Deal`."""
        return None if self.rows == self.store.rows else self.split.keeps(self.store.row_ids(rows))


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ConfigError("batch_size", "must be at least 1, got {got}", got=batch_size)


def spread_of(rows: Rows) -> Spread:
    """Mean and scatter of a split's own rows, exact to rounding whatever the store knows.

    Where the split is the whole store but for the held-out rows, it is the store's less theirs.

    Raises:
        StoreError: a shard is missing or damaged.

    Cost: a pass over the held-out rows where the rows are all others; a pass over the rows themselves where they are
    fewer (a fraction), where a shard has no statistics, or where next to all of some dimension's scatter is held out.
    """
    store, split = rows.store, rows.split
    whole = stored_statistics(store.path, store.meta) if split.which == "train" and split.fraction == 1 else None
    if whole is None:
        return _measured(rows)
    if rows.rows == store.rows:
        return whole.spread
    rest = whole.spread - _measured(store.split("test", seed=split.seed, test_fraction=split.test_fraction))
    return _measured(rows) if (rest.scatter < LEAST_LEFT * whole.spread.scatter).any() else rest


def _measured(rows: Rows) -> Spread:
    return Spread.measured(rows.sequential(STATISTICS_ROWS), rows.d_in)
