"""Rows of a store with what stands beside them, cut where windows end. Shapes: B rows, W windows, D = d_in."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..store import Rows, window_starts

COLUMNS = ("document", "position", "token_id")
LONGEST = 8  # batches that a window may reach over before it is parted, which keeps memory constant


@dataclass(frozen=True)
class Block:
    """Some rows, in stored order.

    Args:
        x: the rows, (B, D).
        numbers: their numbers within the store, (B,).
        columns: the columns of `COLUMNS` of them, (3, B); None where the store lacks one, so that it has no windows.
    """

    x: Tensor
    numbers: np.ndarray
    columns: np.ndarray | None

    @property
    def starts(self) -> np.ndarray:
        """Where each window begins, and the last one ends, (W + 1,); without tokens each row is a window."""
        rows = len(self.x)
        if self.columns is None:
            return np.arange(rows + 1)
        return np.concatenate([[0], window_starts(self.columns[0], self.columns[1]), [rows]])


def in_blocks(batches: Iterable[Tensor], rows: Rows, batch_rows: int) -> Iterator[Block]:
    """Batches with the columns that belong to them; where there are tokens, in whole windows.

    Args:
        batches: the rows in stored order, in batches (B, D).
        rows: the same rows.
        batch_rows: rows of every batch but the last.

    Yields:
        Blocks of about a batch. Only a window that reaches over more than `LONGEST` batches is parted. A block's rows
        are valid until the next is asked for.
    """
    numbers = rows.numbers(batch_rows)
    if not set(COLUMNS) <= set(rows.store.meta.columns):
        for x, own in zip(batches, numbers, strict=True):
            yield Block(x, own, None)
        return
    streams = [rows.column(name, batch_rows) for name in COLUMNS]
    waiting: Block | None = None
    for x, own, *columns in zip(batches, numbers, *streams, strict=True):
        block = Block(x, own, np.stack(columns))
        block = block if waiting is None else _joined(waiting, block)
        end = int(block.starts[-2]) or (len(block.x) if len(block.x) > LONGEST * batch_rows else 0)
        if end:
            yield _part(block, slice(0, end))
        waiting = _part(block, slice(end, None))
        waiting = Block(waiting.x.clone(), waiting.numbers, waiting.columns)  # the batch's memory is used again
    if waiting is not None and len(waiting.x):
        yield waiting


def _joined(first: Block, second: Block) -> Block:
    return Block(torch.cat([first.x, second.x]), np.concatenate([first.numbers, second.numbers]),
                 np.concatenate([first.columns, second.columns], axis=1))


def _part(block: Block, which: slice) -> Block:
    return Block(block.x[which], block.numbers[which], block.columns[:, which])
