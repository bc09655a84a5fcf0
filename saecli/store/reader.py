"""Opening a store, checking its shards, and choosing rows of it, to iterate over as often as needed.

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
from .stream import WHOLE, Part, Source, in_order, shuffled

WINDOW_BYTES = 256 << 20
STATISTICS_ROWS = 1024  # of a batch, in a pass that measures rows
# Of the scatter of all rows, at least so much must be left in every dimension when that of some is taken from it: of
# the 15 digits of float64 this leaves 9.
LEAST_LEFT = 1e-6
UNIT_BYTES = 64 << 10  # what a disk reads from anywhere at about half its speed, or more where others are near


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

    def codes(self, batch_size: int) -> Iterator[SparseRows]:
        """The true codes of these rows, in stored order; takes what `column` does. Raises StoreError where the store
        keeps none, or a shard is missing or damaged."""
        _check_batch_size(batch_size)
        if self.store.meta.world is None:
            raise StoreError(f"{self.store.path} keeps no true codes; expected a store of rows made of known features")
        return self._beside(lambda chunk: self.store.chunk_column(chunk, CODES), batch_size)

    def _beside(self, of_chunk: Callable[[int], Any], batch_size: int) -> Iterator[Any]:
        """What `of_chunk` gives for the rows of each chunk, as many as it has, of those that belong to these."""
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


class ActivationStore:
    """A store open for reading; the whole shards of one that is unfinished can be read too.

    Args:
        path: the store's folder.
        meta: its `store.json`.

    Attributes:
        shard_starts: (shards + 1,) number of each shard's first row, and behind them the number of all rows.
    """

    def __init__(self, path: Path, meta: StoreMeta) -> None:
        self.path = path
        self.meta = meta
        self._shards = MappedShards(path, meta)
        rows = np.array([shard.rows for shard in meta.shards], np.int64)
        self._chunk_starts = np.concatenate([[0], np.cumsum(-(-rows // meta.chunk_rows))])
        self.shard_starts = np.concatenate([[0], np.cumsum(rows)])

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a store.

        Args:
            path: its folder, e.g. `home.stores.find(name)`.

        Raises:
            StoreError: there is none, or its `store.json` is damaged or of a newer version. A damaged shard is
                found when it is first read.
        """
        return cls(path, read_meta(path))

    def __repr__(self) -> str:
        unfinished = "" if self.complete else ", unfinished"
        return (f"ActivationStore({self.name!r}, rows={self.rows}, d_in={self.d_in}, {self.dtype}{unfinished}, "
                f"path={str(self.path)!r})")

    @property
    def name(self) -> str:
        """The store's name."""
        return self.path.resolve().name

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
        """How the rows are stored; reading gives float32 in any case."""
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
        # Numbers that a damaged `store.json` says could be larger than memory; no file is shorter than its rows.
        for shard in self.meta.shards:
            demand_room(self.path / SHARDS / shard.file, self.meta, shard)
        return _chunk_sizes(self.meta)

    def split(self, which: Which, *, fraction: float = 1.0, seed: int = 0,
              test_fraction: float = TEST_FRACTION) -> Rows:
        """Choose rows: by document where the store knows documents, else by row.

        Args:
            which: "train", "test" (held out) or "all".
            fraction: fraction of the training rows to keep, in (0, 1]; a smaller fraction's rows are among a
                larger one's, and the test rows do not depend on it.
            seed: another seed holds out other rows.
            test_fraction: fraction of the documents held out, in [0, 1). Of two documents or more at least one is
                held out, unless it is 0, and likewise at least one of those left is trained on.

        Raises:
            ConfigError: an argument out of its range.
            StoreError: no row belongs to it, or a shard is damaged.

        Cost: reads and hashes the document of every row (about 50 ms a million rows).
        """
        split = Split(which, fraction, seed, test_fraction).fitted(self._ids)
        counts = self.chunk_sizes.copy()
        if which != "all":
            for chunk in range(len(counts)):
                counts[chunk] = np.count_nonzero(split.keeps(self.chunk_ids(chunk)))
        if not counts.sum():
            raise self._empty(split)
        return Rows(self, split, counts)

    def changed(self) -> list[int]:
        """The numbers of the shards that are missing, or may have changed since the store was written or last checked.

        Cost: one `stat` a shard.
        """
        return changed(self.path, self.meta)

    def verify(self, shards: Sequence[int] | None = None, show: Callable[[float], None] = no_show) -> list[str]:
        """Read shards whole and compare them with their checksums.

        Args:
            shards: the numbers of those to read; None for all.
            show: told how many bytes are read.

        Returns:
            One sentence for each shard that is missing or damaged, naming its file.

        Cost: as of `find_damage`.
        """
        chosen = range(len(self.meta.shards)) if shards is None else shards
        return list(find_damage(self.path, self.meta, chosen, show).values())

    def misfits(self) -> list[str]:
        """What `store.json` says of shards, or of `world.safetensors`, that they do not hold; a sentence for the first.

        Cost: opens every shard, and reads none of their activations.
        """
        try:
            for shard in self.meta.shards:
                read_layout(self.path / SHARDS / shard.file, self.meta, shard)
        except StoreError as error:
            return [str(error)]
        return damaged_world(self.path, self.meta)

    def chunk(self, chunk: int) -> np.ndarray:
        """The rows of one chunk, by its number within the store, as they are stored; a read-only view."""
        return self._shards.chunk(*self._within_shard(chunk))

    def expect(self, chunk: int) -> None:
        """Have the system fetch a chunk from disk meanwhile, if it is to be read for the first time."""
        self._shards.expect(*self._within_shard(chunk))

    def chunk_column(self, chunk: int, name: str) -> np.ndarray:
        """The part of a column that belongs to one chunk; a read-only view."""
        shard, within = self._within_shard(chunk)
        start = within * self.meta.chunk_rows
        return self._shards.column(shard, name)[start : start + self.chunk_sizes[chunk]]

    def chunk_ids(self, chunk: int) -> np.ndarray:
        """What the rows of a chunk are split by: their documents, else their numbers within the store."""
        if "document" in self.meta.columns:
            return self.chunk_column(chunk, "document")
        shard, within = self._within_shard(chunk)
        start = int(self.shard_starts[shard]) + within * self.meta.chunk_rows
        return np.arange(start, start + self.chunk_sizes[chunk])

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The chunks that rows are in, from their numbers within the store, and their numbers within those chunks."""
        shards = np.searchsorted(self.shard_starts, rows, side="right") - 1
        chunks, within = np.divmod(rows - self.shard_starts[shards], self.meta.chunk_rows)
        return self._chunk_starts[shards] + chunks, within

    def row_ids(self, rows: np.ndarray) -> np.ndarray:
        """What some rows are split by, as `chunk_ids`; (R,) from their ascending numbers within the store."""
        if "document" not in self.meta.columns:
            return rows
        shards = np.searchsorted(self.shard_starts, rows, side="right") - 1
        within = rows - self.shard_starts[shards]
        ends = np.flatnonzero(np.diff(shards, append=-1)) + 1
        return np.concatenate([self._shards.column(int(shards[begin]), "document")[within[begin:end]]
                               for begin, end in pairwise([0, *ends.tolist()])])

    def in_memory(self) -> bool:
        """Whether the rows can be read from the system's page cache, all shards at a time."""
        return self._shards.in_memory()

    def whole_shards(self) -> list[np.ndarray]:
        """The rows of each shard as stored, where `in_memory`; read-only views."""
        return [self._shards.whole(shard) for shard in range(len(self.meta.shards))]

    def _within_shard(self, chunk: int) -> tuple[int, int]:
        """The shard of a chunk, and the chunk's number within it."""
        shard = int(np.searchsorted(self._chunk_starts, chunk, side="right")) - 1
        return shard, chunk - int(self._chunk_starts[shard])

    def _ids(self) -> Iterator[np.ndarray]:
        return map(self.chunk_ids, range(len(self.chunk_sizes)))

    def _empty(self, split: Split) -> StoreError:
        unit = "documents" if "document" in self.meta.columns else "rows"
        if not self.rows:
            return StoreError(f"{self.path} holds no whole shard yet; run the command that makes it once more")
        remedy = ("make a store of more documents, which blank lines part in a .txt file" if unit == "documents"
                  else "import more rows")
        return StoreError(f"the {split.which} split of {self.path} is empty: of its {self.rows} rows, chosen by a "
                          f"hash of their {unit}, none belongs to it; {remedy}, or use another --split-seed")


def _chunk_sizes(meta: StoreMeta) -> np.ndarray:
    """(chunks,) rows of each chunk of the store."""
    sizes = [np.minimum(meta.chunk_rows, shard.rows - np.arange(0, shard.rows, meta.chunk_rows))
             for shard in meta.shards]
    return np.concatenate(sizes) if sizes else np.empty(0, np.int64)
