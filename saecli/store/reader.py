"""Opening a store, choosing rows of it, checking its shards.

Legend: R rows, D = d_in.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np

from ..errors import StoreError
from .checks import changed, find_damage, no_show
from .chosen_rows import Rows
from .schema import SHARDS, StoreMeta, read_meta
from .shard import MappedShards, demand_room, read_layout
from .split import TEST_FRACTION, Split, Which


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
            fraction: share of the training rows to keep, in (0, 1]; a smaller fraction's rows are among a
                larger one's, and the test rows do not depend on it.
            seed: another seed holds out other rows.
            test_fraction: share of the documents held out, in [0, 1). Of two documents or more at least one is
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
        """What `store.json` says of shards that they do not hold, a sentence for the first of them.

        Cost: opens every shard, and reads none of their activations.
        """
        try:
            for shard in self.meta.shards:
                read_layout(self.path / SHARDS / shard.file, self.meta, shard)
        except StoreError as error:
            return [str(error)]
        return []

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
