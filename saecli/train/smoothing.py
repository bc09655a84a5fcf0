"""Smoothing: training on rows moved along differences of other rows.

    x_i + width ||x_i|| (x_j - x_k) / sqrt(||x_j||^2 + ||x_k||^2),    j and k drawn from a sample of all rows

(norms about the sample's mean). Rows are then drawn from a kernel estimate of their density, with a kernel of the
data's own shape, instead of being repeated, so the encoder overfits less. The step is relative to each row's norm,
since rows of activations and of images differ in norm a hundredfold. Targets that are not the rows are moved along with
them, by the same multiple of their own difference.

Source: the smoothed bootstrap (Silverman and Young, 1987), with the kernel taken from pairs of rows.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..base.devices import moved
from ..sae.dictionary import Batch
from .config import WIDEST


@dataclass(frozen=True, eq=False)
class Smoothing:
    """Moves rows, independently of their batch.

    Args:
        width: fraction of its norm by which a row is moved; 0 for no smoothing.
        sample: rows whose differences are used, spread over all, (n, D); with n < 2 nothing moves.
        targets: their targets, (n, E); None if these are the rows.
    """

    width: float
    sample: Tensor
    targets: Tensor | None = None

    @property
    def inflation(self) -> float:
        """Variance of smoothed rows over the variance of the rows themselves."""
        return 1 + self.width**2 if self.moves else 1.0

    @property
    def moves(self) -> bool:
        return self.width > 0 and len(self.sample) > 1

    @cached_property
    def _mean(self) -> Tensor:
        return self.sample.mean(0)

    @cached_property
    def _squares(self) -> Tensor:
        return (self.sample - self._mean).square().sum(1)

    def __call__(self, batch: Batch, generator: torch.Generator) -> Batch:
        """A batch with its rows moved, each by about `width` of its norm, in new tensors.

        Draws are made on the CPU, the same for every device, and for the whole batch, whose other rows may be
        elsewhere.
        """
        x = batch.x
        if not self.moves:
            return batch
        n = len(self.sample)
        first = torch.randint(n, (batch.size,), generator=generator)
        second = (first + 1 + torch.randint(n - 1, (batch.size,), generator=generator)) % n  # another row each
        if batch.index is not None:
            first, second = first[batch.index], second[batch.index]
        first, second = moved(torch.stack([first, second]), x.device)
        both = self._squares[first] + self._squares[second]
        relative = ((x - self._mean).square().sum(1) / both.clamp(min=torch.finfo(x.dtype).tiny)).sqrt()
        step = (self.width * relative)[:, None]
        moved_x = x + step * (self.sample[first] - self.sample[second])
        if batch.y is x:
            return replace(batch, x=moved_x, y=moved_x)
        assert self.targets is not None
        return replace(batch, x=moved_x, y=batch.y + step * (self.targets[first] - self.targets[second]))


def default_width(rows: int, d_in: int, d_sae: int) -> float:
    """`WIDEST` for up to max(d_sae, 4 d_in) rows, then falling as 1 / sqrt(rows), as overfitting does."""
    return WIDEST * min(1.0, math.sqrt(max(d_sae, 4 * d_in) / rows))
