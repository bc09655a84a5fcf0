"""Batches of rows. Shapes: B rows in a batch, b in this process, D = d_in, E the width of the targets."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from ..base.devices import moved


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows and their targets; each process holds a part of the batch.

    Args:
        x: this process' rows, (b, D).
        y: their targets, (b, E); x itself for reconstruction.
        size: B.
        index: ascending positions of this process' rows in the batch, (b,), on the CPU; None for all.
    """

    x: Tensor
    y: Tensor
    size: int
    index: Tensor | None = None

    @classmethod
    def of(cls, rows: Tensor, d_in: int | None = None, size: int | None = None, index: Tensor | None = None) -> Self:
        """Rows to reconstruct, (b, D), or if wider than `d_in`, with targets, (b, D + E); whole without a size."""
        size = len(rows) if size is None else size
        if d_in is None or rows.shape[1] == d_in:
            return cls(rows, rows, size, index)
        return cls(rows[:, :d_in].contiguous(), rows[:, d_in:].contiguous(), size, index)

    @classmethod
    def joined(cls, batches: Sequence[Self]) -> Self:
        """Several batches as one."""
        x = torch.cat([batch.x for batch in batches])
        y = x if all(batch.y is batch.x for batch in batches) else torch.cat([batch.y for batch in batches])
        *before, size = accumulate((batch.size for batch in batches), initial=0)
        if all(batch.index is None for batch in batches):
            return cls(x, y, size)
        return cls(x, y, size, torch.cat([batch.numbers + begin for batch, begin in zip(batches, before, strict=True)]))

    @property
    def numbers(self) -> Tensor:
        """Positions of this process' rows in the batch, (b,), on the CPU."""
        return torch.arange(self.size) if self.index is None else self.index

    def first(self, count: int) -> "Batch":
        own = min(count, self.size) if self.index is None else int((self.index < count).sum())
        x = self.x[:own]
        return Batch(x, x if self.y is self.x else self.y[:own], min(count, self.size),
                     None if self.index is None else self.index[:own])


def mixed(whole: Batch, order: Tensor, size: int) -> Iterator[Batch]:
    """A batch's rows in a given order, (B,), in batches of `size`."""
    here = torch.full((whole.size,), -1)
    here[whole.numbers] = torch.arange(len(whole.x))
    for numbers in order.split(size):
        own = here[numbers]
        index = (own >= 0).nonzero()[:, 0]
        rows = moved(own[index], whole.x.device)
        x = whole.x[rows]
        yield Batch(x, x if whole.y is whole.x else whole.y[rows], len(numbers),
                    None if whole.index is None else index)
