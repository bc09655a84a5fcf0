"""The windows of tokens that rows came from: what rebuilds a model's input, whichever rows are stored.

A window's rows follow each other in a store, perhaps over several shards. The shard that holds the
first of them keeps the window.

Legend: W windows, n their tokens, R rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

WINDOWS = "windows"  # the group of a shard
KINDS = {"offset": "<i8", "first": "<i8", "token_id": "<i4", "stored": "u1"}


@dataclass(frozen=True)
class Windows:
    """Windows in stored order; token j of window i is at `offset[i] + j`."""

    offset: np.ndarray  # (W + 1,) from 0
    first: np.ndarray  # (W,) number of its first row, within the block or the shard
    token_id: np.ndarray  # (n,)
    stored: np.ndarray  # (n,) bool, the tokens whose activations are rows

    @classmethod
    def of(cls, lengths: np.ndarray, token_ids: np.ndarray, stored: np.ndarray) -> Self:
        """The windows of a block, from the tokens of each, all tokens, and which of them are rows."""
        offset = np.concatenate([[0], np.cumsum(lengths)])
        before = np.concatenate([[0], np.cumsum(stored)])
        return cls(offset, before[offset[:-1]], token_ids, stored)

    def __len__(self) -> int:
        return len(self.first)

    @property
    def rows(self) -> np.ndarray:
        """(W,) rows of each window."""
        before = np.concatenate([[0], np.cumsum(self.stored)])
        return np.diff(before[self.offset])

    def admitted(self, kept: np.ndarray, end: int) -> Self:
        """Where of all the rows, (R,), only those `kept` are stored, and of these the first `end`."""
        stored = self.stored.copy()
        stored[self.stored] = kept & (np.cumsum(kept) <= end)
        return type(self).of(np.diff(self.offset), self.token_id, stored)

    def part(self, begin: int, stop: int, at: int) -> Self:
        """The windows whose first row is from `begin` to before `stop`, if `begin` is numbered `at`."""
        own = (self.rows > 0) & (self.first >= begin) & (self.first < stop)
        tokens = np.repeat(own, np.diff(self.offset))
        offset = np.concatenate([[0], np.cumsum(np.diff(self.offset)[own])])
        first = self.first[own] + (at - begin)
        return type(self)(offset, first, self.token_id[tokens], self.stored[tokens])

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        lengths = np.concatenate([[0], *(np.diff(part.offset) for part in parts)])
        first, token_id, stored = (
            np.concatenate([np.empty(0, np.int64), *(getattr(part, name) for part in parts)])
            for name in ("first", "token_id", "stored")
        )
        return cls(np.cumsum(lengths), first, token_id, stored)

    def datasets(self) -> dict[str, np.ndarray]:
        """As a shard stores them."""
        return {name: getattr(self, name).astype(kind) for name, kind in KINDS.items()}

    def each(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The tokens and the mask of each window, (T,), views."""
        for begin, end in zip(self.offset[:-1].tolist(), self.offset[1:].tolist(), strict=True):
            yield self.token_id[begin:end], self.stored[begin:end]
