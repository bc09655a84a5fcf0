"""What the writers of a store share: a folder that is claimed, a shard that is being written, and what goes wrong."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from ..errors import StoreError
from .admission import Admission
from .claim import refused, remove_empty
from .dropped import Dropped
from .dtypes import DTYPES
from .schema import StoreMeta
from .shard_writer import ShardWriter
from .statistics import Statistics


class OpenWriter:
    """A store that is open for writing; leaving the `with` keeps what is stored, and removes a store without a row.

    Args:
        path: the store's folder.
        meta: its `store.json`.
        lock: the descriptor that holds its lock, closed at the end.
        damaged: numbers of shards to write anew, ascending.
        claimed: whether this process claimed the folder, and so is the one that may remove it.

    Attributes:
        path: the store's folder.
        altered: damaged shards that were written anew, but not with the bytes that were recorded, as another machine
            rounds in other ways.
    """

    def __init__(self, path: Path, meta: StoreMeta, lock: int, damaged: list[int], claimed: bool = True) -> None:
        self.path, self._meta, self._lock, self._damaged, self._claimed = path, meta, lock, damaged, claimed
        self.altered: list[str] = []
        self._admit = Admission(path, meta)
        self._statistics: Statistics | None = None  # of all shards, once one has been added
        self._shard: ShardWriter | None = None
        self._failed = False

    @property
    def damaged(self) -> list[str]:
        """The shards that are still to be written anew, by the names of their files."""
        return [self._meta.shards[index].file for index in self._damaged]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try:
            self._drop_shard()
        finally:
            if self._claimed and not self._meta.saved_rows:
                remove_empty(self.path)
            os.close(self._lock)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Turn what the disk refuses into a StoreError, after which this writer takes no more."""
        if self._failed:
            raise StoreError(f"cannot write to {self.path}: an earlier write failed; open it again to go on")
        try:
            yield
        except OSError as error:
            self._failed = True
            self._drop_shard()
            raise refused(self.path, self._meta.rows, error) from error

    def _as_stored(self, rows: np.ndarray) -> np.ndarray:
        """Rows, (R, D), in the storage dtype."""
        stored = DTYPES[self._meta.dtype]
        return rows if rows.dtype == stored.storage else stored.encode_rows(np.ascontiguousarray(rows))

    def _without_rows(self, left_out: Dropped) -> StoreError:
        """What to raise where the producer has ended and no row is there."""
        counts = ", ".join(f"{count} {reason}" for reason, count in left_out.counts.items())
        return StoreError(f"there are no rows to store in {self.path}; expected at least one, got none "
                          f"(dropped: {counts or 'none'}); give more or other data")

    def _drop_shard(self) -> None:
        if self._shard:
            self._shard.abandon()
            self._shard = None
