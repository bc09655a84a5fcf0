"""Rows in stored order, in blocks of whole windows, with the tokens of these windows.

Shapes: B rows of a block, W windows, n tokens, D = d_in.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..extract.options import COLUMNS
from ..store.reader import Rows
from ..store.split import window_starts

LONGEST = 8  # batches that a window may span before it is split, which keeps memory constant


class Texts(NamedTuple):
    """The tokens of a block's windows, in order: also those that are no rows, if the store keeps them."""

    token_ids: np.ndarray  # (n,)
    starts: np.ndarray  # (W + 1,) the begin of each window among them, and the end of the last
    stored: np.ndarray  # (n,) bool, which are rows of the block
    gaps: np.ndarray  # (n,) bool, whether tokens are missing before it

    @classmethod
    def of_windows(cls, windows: list[tuple[np.ndarray, np.ndarray]]) -> "Texts":
        """From the token ids of each window, and which of them are rows."""
        token_ids, stored = (np.concatenate(part) for part in zip(*windows, strict=True))
        starts = np.cumsum([0, *(len(window) for window, _ in windows)])
        return cls(token_ids, starts, stored, np.zeros(len(stored), bool))

    @classmethod
    def of_columns(cls, columns: np.ndarray) -> "Texts":
        """From values of `COLUMNS`, (3, B): the rows alone."""
        documents, positions, token_ids = columns
        rows = len(token_ids)
        starts = np.concatenate([[0], window_starts(documents, positions), [rows]])
        gaps = np.diff(positions, prepend=positions[:1]) > 1
        return cls(token_ids, starts, np.ones(rows, bool), gaps)


@dataclass(frozen=True)
class Block:
    """Some rows, in stored order."""

    x: Tensor  # (B, D)
    numbers: np.ndarray  # within the store, (B,)
    # Values of `COLUMNS`, (3, B); None if the store lacks one: then each row is a window.
    columns: np.ndarray | None
    roles: np.ndarray | None = None  # numbers in `chats.ROLES`, (B,), of a store of chats
    windows: Texts | None = None  # of a store that keeps them

    @cached_property
    def texts(self) -> Texts | None:
        if self.windows is not None or self.columns is None:
            return self.windows
        return Texts.of_columns(self.columns)

    @cached_property
    def starts(self) -> np.ndarray:
        """The first row of each window and the end of the last, (W + 1,)."""
        if self.texts is None:
            return np.arange(len(self.x) + 1)
        return np.searchsorted(np.flatnonzero(self.texts.stored), self.texts.starts)


class _PendingWindows:
    """The windows of rows, read as far as the rows are."""

    def __init__(self, rows: Rows) -> None:
        self._windows = rows.windows()
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        self._rows = 0  # of those pending

    def whole(self, rows: int) -> int:
        """How many of the next rows are in windows that end within them."""
        while self._rows < rows:
            self._pending.append(next(self._windows))
            self._rows += int(self._pending[-1][1].sum())
        if self._rows == rows:
            return rows
        return self._rows - int(self._pending[-1][1].sum())

    def take(self, rows: int) -> Texts:
        """The windows of the next rows; one that goes on is split after the last of them."""
        taken = []
        self._rows -= rows
        while rows:
            token_ids, stored = self._pending.pop(0)
            in_window = int(stored.sum())
            if in_window > rows:
                end = int(np.flatnonzero(stored)[rows])
                self._pending.insert(0, (token_ids[end:], stored[end:]))
                token_ids, stored, in_window = token_ids[:end], stored[:end], rows
            taken.append((token_ids, stored))
            rows -= in_window
        return Texts.of_windows(taken)


def in_blocks(batches: Iterable[Tensor], rows: Rows, batch_rows: int) -> Iterator[Block]:
    """Batches of these rows, (B, D), as blocks of about a batch. With tokens they
    hold whole windows: only a window of more than `LONGEST` batches is split."""
    meta = rows.store.meta
    numbers = rows.numbers(batch_rows)
    if not set(COLUMNS) <= set(meta.columns):
        for x, numbers_of_batch in zip(batches, numbers, strict=True):
            yield Block(x, numbers_of_batch, None)
        return
    names = [*COLUMNS, "role"] if "role" in meta.columns else [*COLUMNS]
    columns = [rows.column(name, batch_rows) for name in names]
    pending = _PendingWindows(rows) if meta.windows else None

    def block(x: Tensor, table: np.ndarray) -> Block:
        windows = None if pending is None else pending.take(len(x))
        return Block(x, table[0], table[1:4], table[4] if len(table) > 4 else None, windows)

    x, table = torch.empty(0), np.empty((1 + len(names), 0), np.int64)  # of a window begun
    for batch, *values in zip(batches, numbers, *columns, strict=True):
        x = torch.cat([x, batch]) if len(x) else batch
        table = np.concatenate([table, np.stack(values)], axis=1)
        end = pending.whole(len(x)) if pending else int(window_starts(*table[1:3]).max(initial=0))
        if not end and len(x) > LONGEST * batch_rows:
            end = len(x)
        if end:
            yield block(x[:end], table[:, :end])
        x, table = x[end:], table[:, end:]
    if len(x):
        yield block(x, table)
