"""Rows chosen from a store, to iterate over as often as needed.

Legend: B rows of a batch, D = d_in.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConfigError, StoreError
from .dtypes import DTYPES
from .split import Split
from .stream import Source, in_order, shuffled

if TYPE_CHECKING:
    from .reader import ActivationStore

WINDOW_BYTES = 256 << 20


class Rows:
    """Some of a store's rows; iterate as often as needed, from one thread each time.

    Args:
        store: the store.
        split: which of its rows.
        counts: (chunks,) how many rows of each chunk belong to it.
    """

    def __init__(self, store: "ActivationStore", split: Split, counts: np.ndarray) -> None:
        self.store = store
        self.split = split
        self._counts = counts
        stored = DTYPES[store.dtype]
        self._source = Source(store.d_in, stored, counts, store.chunk, self._kept)

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return int(self._counts.sum())

    @property
    def d_in(self) -> int:
        """Dimensions of a row."""
        return self.store.d_in

    def batches(self, batch_size: int, *, seed: int, epoch: int,
                window_bytes: int = WINDOW_BYTES) -> Iterator[np.ndarray]:
        """One epoch of shuffled batches; the next ones are prepared by threads meanwhile.

        Every row comes exactly once. The chunks are taken in a random order, and the rows of as many as fill a
        window are mixed. The order is a function of the rows, seed, epoch, batch size and window alone.

        Args:
            batch_size: rows of a batch, at least 1; the last of the epoch may be short.
            seed: at least 0.
            epoch: at least 0.
            window_bytes: size of the window as float32. Two windows are held, in the stored type.

        Yields:
            (B, D) float32, writable. Valid until the next batch is asked for: its memory is used again then.

        Raises:
            StoreError: a shard is missing or damaged.
        """
        _check_batch_size(batch_size)
        return shuffled(self._source, batch_size, (seed, epoch), window_bytes)

    def sequential(self, batch_size: int) -> Iterator[np.ndarray]:
        """The rows in stored order; the next batches are prepared by threads meanwhile.

        Args:
            batch_size: rows of a batch, at least 1; the last may be short.

        Yields:
            (B, D) float32, writable. Valid until the next batch is asked for: its memory is used again then.

        Raises:
            StoreError: a shard is missing or damaged.
        """
        _check_batch_size(batch_size)
        return in_order(self._source, batch_size)

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
        return self._column(name, batch_size)

    def _column(self, name: str, batch_size: int) -> Iterator[np.ndarray]:
        waiting = np.empty(0, np.int64)
        for chunk in np.flatnonzero(self._counts):
            kept = self._kept(int(chunk))
            values = self.store.chunk_column(int(chunk), name)
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


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, got {batch_size}")
