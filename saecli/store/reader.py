"""Rows of stores to iterate over: shuffled, in order, with their columns.

Legend: B rows of a batch, R rows, D = d_in, of all inputs together, E the target's width; 0 without.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from ..base.errors import StoreError
from ..base.words import demand_at_least
from .schema import StoreMeta, read_meta
from .shard import Chunks
from .split import (
    TEST_FRACTION,
    WHOLE,
    Deal,
    Part,
    Source,
    Split,
    Stream,
    Which,
    in_order,
    shuffled,
)
from .values import CODES, Spread, TextWindow

if TYPE_CHECKING:
    from scipy.sparse import csr_array

STATISTICS_ROWS, SPREAD_ROWS = 1024, 65_536  # per batch of a pass over rows of a store, or others
# Fraction of the scatter that subtracting held-out rows must leave, which keeps 9 of float64's 15 digits.
LEAST_LEFT = 1e-6


class RowSource(ABC):
    """Rows to train and measure on: of stores, of an array, or of a running model."""

    name: str
    rows: int  # N
    d_in: int  # D
    d_target: int = 0  # E, 0 if the targets are the rows
    widths: tuple[int, ...] = ()  # of several inputs side by side; none for one
    # Widths of a crosscoder's hook points: several inputs that are their own targets.
    places: tuple[int, ...] = ()
    target: "Rows | None" = None  # as `inputs`
    passes: float = math.inf  # over the rows that are possible
    # How strongly a model reads each dimension, (D + E,), 1 where unknown; None if unknown for all.
    reads: np.ndarray | None = None

    @property
    def inputs(self) -> "tuple[Rows, ...]":
        """The rows of each store, if stored."""
        return ()

    @property
    def ready(self) -> int:
        """Number of rows that `sequential` gives."""
        return self.rows

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on rows that did not come."""
        return ()

    @abstractmethod
    def batches(
        self, batch_size: int, *, seed: int, epoch: int, part: Part = WHOLE, first: int = 0
    ) -> Stream:
        """One epoch of shuffled batches, (B, D + E), without the `first` ones; close a stream that is not read to its
        end."""

    @abstractmethod
    def sequential(self, batch_size: int, part: Part = WHOLE) -> Stream:
        """The rows in order, (B, D + E)."""

    def spread(self) -> Spread:
        """Of all D + E dimensions."""
        return Spread.measured(self.sequential(SPREAD_ROWS), self.d_in + self.d_target)

    def as_stored(self) -> "RowSource":
        """The same rows in the storage dtype, bfloat16 as its bits in uint16."""
        return self


class StoredRows(RowSource):
    @property
    def all(self) -> "tuple[Rows, ...]":
        return (*self.inputs, self.target) if self.target else self.inputs

    def batches(
        self,
        batch_size: int,
        *,
        seed: int,
        epoch: int,
        window_bytes: int | None = None,
        part: Part = WHOLE,
        first: int = 0,
    ) -> Stream:
        """One epoch of shuffled batches, (B, D + E), read ahead by threads.

        Their order depends only on the first input's rows, seed, epoch, batch size and window. See `Deal`.

        Args:
            batch_size: rows per batch; the epoch's last may be short.
            window_bytes: size of a window as stored, two of which are in memory; default: 256 MiB, for batches over
                2,048 more, up to 1 GiB. A smaller store is shuffled uniformly.
            part: this process's part of every batch; batches without rows in it are skipped.
            first: number of batches to leave out at the start. Rows left out are not read.
        """
        demand_at_least("batch_size", batch_size)
        deal = Deal(self.inputs[0].source, batch_size, (seed, epoch), window_bytes)
        return _side_by_side([shuffled(rows.source, deal, part, first) for rows in self.all])

    def sequential(self, batch_size: int, part: Part = WHOLE) -> Stream:
        """The rows in stored order, (B, D + E), read ahead by threads."""
        demand_at_least("batch_size", batch_size)
        return _side_by_side([in_order(rows.source, batch_size, part) for rows in self.all])


class Rows(StoredRows):
    """Some of a store's rows, `counts` of them in each chunk, (chunks,); in float32 if `decoded`, else as stored."""

    def __init__(
        self, store: "ActivationStore", split: Split, counts: np.ndarray, decoded: bool = True
    ) -> None:
        self.store, self.split, self.name, self.d_in = store, split, store.name, store.d_in
        self.reads = np.array(store.meta.reads) if store.meta.reads else None
        dtype = np.dtype(np.float32) if decoded else store.storage
        self.source = Source(store, split, counts, dtype)
        self.rows = self.source.rows

    @classmethod
    def chosen(cls, store: "ActivationStore", split: Split) -> Self:
        """StoreError if the split chooses no rows."""
        split = split.fitted(store.ids_and_sources)
        if not store.rows:
            raise StoreError(
                f"{store.path} holds no whole shard yet; run the command that makes it again"
            )
        counts = np.diff(store.chunk_starts)
        if split.which != "all":
            by_shard = [
                np.add.reduceat(
                    split.keeps(store.row_ids(rows)),
                    np.arange(0, len(rows), store.meta.chunk_rows),
                    dtype=np.int64,
                )
                for rows in store.rows_by_shard()
            ]
            counts = np.concatenate(by_shard)
        if not counts.sum():
            unit, remedy = "rows", "import more rows"
            if "document" in store.meta.columns:
                unit = "documents"
                remedy = "make a store of more documents (blank lines separate them in a .txt file)"
            raise StoreError(
                f"the {split.which} split of {store.path} is empty: of its {store.rows} rows, chosen by a hash "
                f"of their {unit}, none belongs to it; {remedy}, or use another --split-seed"
            )
        return cls(store, split, counts)

    @property
    def inputs(self) -> "tuple[Rows, ...]":
        return (self,)

    def as_stored(self) -> "Rows":
        return Rows(self.store, self.split, self.source.counts, decoded=False)

    def spread(self) -> Spread:
        """Mean and scatter, exact to rounding.

        Cost: for all training rows, a pass over the held-out ones, unless these have nearly all of some dimension's
        scatter; else a pass over the rows.
        """
        store, split = self.store, self.split
        if split.which == "train" and split.fraction == 1:
            whole = store.spread()
            if self.rows == store.rows:
                return whole
            rest = whole - Rows.chosen(store, replace(split, which="test")).measured()
            if (rest.scatter >= LEAST_LEFT * whole.scatter).all():
                return rest
        return self.measured()

    def measured(self) -> Spread:
        return Spread.measured(self.sequential(STATISTICS_ROWS), self.d_in)

    def column(self, name: str, batch_size: int) -> Iterator[np.ndarray]:
        """A column's values, (B,) integers at a time, in stored order."""
        if name not in self.store.meta.columns:
            columns = ", ".join(self.store.meta.columns) or "none"
            raise StoreError(
                f"{self.store.path} has no column {name}; expected one of its columns ({columns})"
            )
        return (self.store.row_values(name, rows) for rows in self.numbers(batch_size))

    def numbers(self, batch_size: int) -> Iterator[np.ndarray]:
        """The rows' numbers within the store, in stored order, (B,) at a time."""
        demand_at_least("batch_size", batch_size)
        waiting = np.empty(0, np.int64)
        for rows in self.store.rows_by_shard():
            chosen = self.source.keeps(rows)
            waiting = np.concatenate([waiting, rows if chosen is None else rows[chosen]])
            whole = len(waiting) // batch_size * batch_size
            for begin in range(0, whole, batch_size):
                yield waiting[begin : begin + batch_size]
            waiting = waiting[whole:]
        if len(waiting):
            yield waiting

    def windows(self, source: int | None = None) -> Iterator[TextWindow]:
        """The windows that hold one of these rows, in stored order; of a mixture only those of a `source`."""
        store = self.store
        for shard, start in enumerate(store.shard_starts[:-1].tolist()):
            windows = store.windows(shard)
            if not len(windows):
                continue
            begins = start + windows.first
            # Of an unfinished store the last window's rows may be in a shard to come.
            end = min(int(begins[-1] + windows.rows[-1]), store.rows)
            numbers = np.arange(begins[0], end)
            chosen = self.source.keeps(numbers)
            chosen = np.ones(len(numbers), bool) if chosen is None else chosen
            if source is not None:
                chosen &= store.row_values("source", numbers) == source
            for begin, (token_ids, stored) in zip(
                (begins - begins[0]).tolist(), windows.each(), strict=True
            ):
                tokens = np.flatnonzero(stored)
                is_chosen = chosen[begin : begin + len(tokens)]
                if is_chosen.any():
                    mask = np.zeros(len(stored), bool)
                    mask[tokens[: len(is_chosen)]] = is_chosen
                    yield TextWindow(token_ids.astype(np.int64), mask)

    def codes(self, batch_size: int) -> "Iterator[csr_array]":
        """True codes, (B, G), in stored order, of a store of known features."""
        return (self.store.row_values(CODES, rows) for rows in self.numbers(batch_size))


class JoinedRows(StoredRows):
    """The same rows of several stores: inputs, and their targets if not themselves."""

    inputs: tuple[Rows, ...] = ()

    def __init__(self, inputs: tuple[Rows, ...], target: Rows | None = None) -> None:
        self.inputs, self.target = inputs, target
        self.rows = inputs[0].rows
        self.widths = tuple(rows.d_in for rows in inputs)
        self.d_in, self.d_target = sum(self.widths), target.d_in if target else 0
        self.places = self.widths if len(inputs) > 1 and target is None else ()
        self.name = in_words([rows.name for rows in inputs], target.name if target else None)
        reads = [rows.reads for rows in self.all]
        if any(known is not None for known in reads):
            self.reads = np.concatenate(
                [
                    np.ones(rows.d_in) if known is None else known
                    for rows, known in zip(self.all, reads, strict=True)
                ]
            )

    def as_stored(self) -> "JoinedRows":
        return JoinedRows(
            tuple(rows.as_stored() for rows in self.inputs), self.target and self.target.as_stored()
        )

    def spread(self) -> Spread:
        spreads = [rows.spread() for rows in self.all]
        return Spread(
            self.rows,
            np.concatenate([spread.mean for spread in spreads]),
            np.concatenate([spread.scatter for spread in spreads]),
        )


def _side_by_side(streams: list[Stream]) -> Stream:
    if len(streams) == 1:
        yield from streams[0]
        return
    with ExitStack() as opened:
        for stream in streams:
            opened.enter_context(closing(stream))
        for parts in zip(*streams, strict=True):
            yield np.concatenate(parts, axis=1)


def in_words(inputs: Sequence[str], target: str | None) -> str:
    names = " + ".join(inputs)
    return f"{names} -> {target}" if target else names


class ActivationStore(Chunks):
    """A store open for reading."""

    cached = False  # whether the command that would make it found it finished

    def __init__(self, path: Path, meta: StoreMeta, homed: bool = True) -> None:
        super().__init__(path, meta)
        self.complete = meta.complete
        self.homed = homed  # in the home, where its name finds it

    @classmethod
    def open(cls, path: Path, homed: bool = True) -> Self:
        """Open the store in a folder; damage to a shard is found when it is first read."""
        return cls(path, read_meta(path), homed)

    def __repr__(self) -> str:
        unfinished = "" if self.complete else ", unfinished"
        return (
            f"ActivationStore({self.name!r}, rows={self.rows}, d_in={self.d_in}, {self.dtype}{unfinished}, "
            f"path={str(self.path)!r})"
        )

    @property
    def reference(self) -> str:
        """The store's name, or its folder if it is outside the home."""
        return self.name if self.homed else str(self.path.resolve())

    def split(
        self,
        which: Which,
        *,
        fraction: float = 1.0,
        seed: int = 0,
        test_fraction: float = TEST_FRACTION,
        rest: bool = False,
    ) -> Rows:
        """Choose rows: by document where the store knows documents, else by row.

        Args:
            which: "train", "test" (held out) or "all".
            fraction: fraction of the training rows to keep, in (0, 1]; smaller ones are subsets of larger ones.
            test_fraction: fraction of the documents held out, in [0, 1); unless 0, at least one of two or more of each
                source.
            rest: keep the training rows outside of `fraction` instead.

        Raises:
            StoreError: the split is empty, or a shard is damaged.

        Cost: reads and hashes the document of every row (about 50 ms per million rows).
        """
        return Rows.chosen(self, Split(which, fraction, seed, test_fraction, rest=rest))

    def ids_and_sources(self) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        mixed = "source" in self.meta.columns
        for rows in self.rows_by_shard():
            yield self.row_ids(rows), self.row_values("source", rows) if mixed else None

    def verify(self) -> list[str]:
        """A sentence for each damaged shard. Cost: reads every byte, and its XXH3-64."""
        return [problem for shard in self.shards if (problem := shard.problem())]
