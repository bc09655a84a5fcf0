"""Normalised training rows in batches, and what is measured on them before training.

Shapes: N rows, B rows of a batch, D = d_in, E the width of targets next to the rows, 0 if the targets are the rows.
"""

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..base.devices import carried
from ..base.errors import ConfigError
from ..base.processes import ALONE, Communicator
from ..sae.dictionary import SAE, Batch
from ..store.rows import RowSource
from ..store.statistics import Spread
from ..store.stream import WHOLE, Part
from .array_rows import HeldRows

LEAST_SCALE = 1e-35  # weights for raw rows are divided by the scale, and float32's maximum is 3.4e38
STREAMED_ROWS = 2048  # rows per block if their order does not matter
SUMMED_ROWS = 4096  # rows per block of sums over all rows: each block goes through a whole d_sae x d_sae matrix
SAMPLED_ROWS = 2048  # sample for learning rate, initial scale and smoothing
REGRESSED_ROWS = 32  # rows per dimension of the targets' regression
REGRESSION_RIDGES = 10.0 ** torch.arange(-12, 2)  # over the mean eigenvalue
EXACT = 1e-13  # fraction of the targets' square up to which an error is rounding


@dataclass(frozen=True)
class Normalisation:
    """`(x - mean) / scale`, of rows with their targets next to them; folded into the saved weights.

    Args:
        mean, scale: (D + E,); scale is positive.
        variance: mean squared distance of the normalised targets of training rows from their mean, a scalar.
    """

    mean: Tensor
    scale: Tensor
    variance: Tensor
    d_in: int

    def tensors(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "scale": self.scale, "variance": self.variance}

    def to(self, device: torch.device) -> "Normalisation":
        return Normalisation(**{name: tensor.to(device) for name, tensor in self.tensors().items()}, d_in=self.d_in)

    def __call__(self, x: Tensor) -> Tensor:
        """The normalised rows, (B, D + E), as a new tensor."""
        return (x - self.mean) / self.scale

    def of_sae(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments of `SAE.on_raw_rows`: mean and scale of rows, (D,), and of targets, (E,)."""
        D = self.d_in
        targets = slice(D, None) if len(self.mean) > D else slice(None)
        return self.mean[:D], self.scale[:D], self.mean[targets], self.scale[targets]


def fit_normalisation(kind: str, spread: Spread, dtype: torch.dtype, widths: Sequence[int] = (),
                      d_target: int = 0) -> Normalisation:
    """The normalisation of rows, given their mean and scatter.

    Args:
        kind: `none`; `scale`, centre and divide by one number, so that the mean squared norm is D, for each input and
            the target alone; or `standardize`, centre and give each dimension unit variance, as the paper does. A
            dimension that varies by less than `LEAST_SCALE` is only centred.
        spread: of the training rows, with their targets next to them.
        widths: of inputs side by side; none for one.

    Raises:
        ConfigError: the rows do not vary, or by less than `LEAST_SCALE`.
    """
    mean, variance = torch.from_numpy(spread.mean), torch.from_numpy(spread.variance)
    d_in = len(mean) - d_target
    places = [*(widths or [d_in]), *([d_target] if d_target else [])]
    found = [_scale(kind, part, spread.rows) for part in variance.split(places)]
    mean, scale = (torch.zeros_like(mean) if kind == "none" else mean), torch.cat(found)
    of_targets = slice(d_in, None) if d_target else slice(None)
    left = (variance / scale.square())[of_targets].sum()
    return Normalisation(mean.to(dtype), scale.to(dtype), left.to(dtype), d_in)


def _scale(kind: str, variance: Tensor, rows: int) -> Tensor:
    """The scale of one input or of the targets, (D,), from its variances."""
    if variance.sum() == 0:
        raise ConfigError(f"there is nothing to learn: expected training rows that differ, got {rows}, all the same; "
                          "give another --data, or a larger --fraction")
    overall = variance.mean().sqrt()
    if overall < LEAST_SCALE:
        raise ConfigError(f"the training rows are nearly the same: their spread must be at least {LEAST_SCALE:g}, "
                          f"got {overall.item():.2g}; multiply them, and "
                          "import them again")
    if kind == "none":
        return torch.ones_like(variance)
    if kind == "scale":
        return overall.expand_as(variance)
    return torch.where(variance.sqrt() > LEAST_SCALE, variance.sqrt(), 1.0)


def on_raw_rows(sae: SAE, normalisation: Normalisation) -> SAE:
    """The SAE with the normalisation folded in, computed in float64."""
    folded = sae.copy_to(torch.float64).on_raw_rows(*(part.double() for part in normalisation.of_sae()))
    return folded.copy_to(sae.W_enc.dtype)


@dataclass(frozen=True)
class TrainingRows:
    """Normalised rows in batches, on the device of the normalisation.

    Args:
        stored: the rows, decoded or in storage dtype, perhaps there already.
        seed: of their order.
        communicator: of the processes that each take a part of each batch.
    """

    stored: RowSource | HeldRows
    normalisation: Normalisation
    batch_size: int
    seed: int
    communicator: Communicator = ALONE

    @property
    def rows(self) -> int:
        return self.stored.rows

    @property
    def d_in(self) -> int:
        return self.stored.d_in

    def shuffled(self, epoch: int) -> Generator[Batch, None, None]:
        """Every row once, in an order that is a pure function of seed and epoch."""
        if self.communicator.world_size == 1:
            yield from (Batch.of(rows, self.d_in) for rows in self._batches(epoch))
            return
        part = part_of(self.communicator)
        own = self._batches(epoch, part)
        for begin in range(0, self.rows, self.batch_size):
            size = min(self.batch_size, self.rows - begin)
            first, stop = part.of(size)
            rows = next(own) if stop > first else self._nothing()
            yield Batch.of(rows, self.d_in, size, torch.arange(first, stop))

    def some(self, count: int, number: int) -> Iterator[Batch]:
        """`count` of the rows once, in larger batches: all in stored order, or the first in shuffled order `number`."""
        if count == self.rows:
            yield from self._sequential()
            return
        left, pending = count, []
        for batch in self.shuffled(number):
            if not left:
                return
            pending.append(batch.first(left))
            left -= pending[-1].size
            if not left or sum(batch.size for batch in pending) >= SUMMED_ROWS:
                yield Batch.joined(pending)
                pending = []

    @cached_property
    def sample(self) -> Batch:
        """The first `SAMPLED_ROWS` rows in shuffled order, or all; the same in all processes."""
        batches, seen = [], 0
        for batch in self._batches(0):
            batches.append(batch)
            seen += len(batch)
            if seen >= SAMPLED_ROWS:
                break
        return Batch.of(torch.cat(batches)[:SAMPLED_ROWS], self.d_in)

    @cached_property
    def regression(self) -> Tensor | None:
        """The targets' regression on the rows, (D, E), by a pass over at most `REGRESSED_ROWS` rows per dimension; None
        if the targets are the rows."""
        if not self.stored.d_target:
            return None
        D = self.d_in
        count, mean = min(self.rows, REGRESSED_ROWS * D), self.normalisation.mean
        products = torch.zeros(D, D + self.stored.d_target, dtype=torch.float64, device=mean.device)
        square = torch.zeros((), dtype=torch.float64, device=mean.device)
        for batch in self.some(count, 0):
            x, y = batch.x.double(), batch.y.double()
            products += x.T @ torch.cat([x, y], 1)
            square += y.square().sum()
        if self.communicator.world_size > 1:
            products, square = self.communicator.all_reduce(products), self.communicator.all_reduce(square)
        return regressed(count, products[:, :D], products[:, D:], square).to(mean.dtype)

    def _sequential(self) -> Iterator[Batch]:
        """Every row once, in stored order; each batch is in one process, and empty in the others."""
        if self.communicator.world_size == 1:
            yield from (Batch.of(rows, self.d_in) for rows in self._normalised(self.stored.sequential(SUMMED_ROWS)))
            return
        part = part_of(self.communicator)
        own = self._normalised(self.stored.sequential(SUMMED_ROWS, part))
        first, stop = part.of(math.ceil(self.rows / SUMMED_ROWS))
        for block, begin in enumerate(range(0, self.rows, SUMMED_ROWS)):
            size, here = min(SUMMED_ROWS, self.rows - begin), first <= block < stop
            rows = next(own) if here else self._nothing()
            yield Batch.of(rows, self.d_in, size, None if here else torch.arange(0))

    def _batches(self, epoch: int, part: Part = WHOLE) -> Iterator[Tensor]:
        return self._normalised(self.stored.batches(self.batch_size, seed=self.seed, epoch=epoch, part=part))

    def _nothing(self) -> Tensor:
        return self.normalisation.mean.new_empty(0, self.d_in + self.stored.d_target)

    def _normalised(self, batches: Iterator[np.ndarray] | Iterator[Tensor]) -> Iterator[Tensor]:
        mean = self.normalisation.mean
        for batch in carried(batches, mean.device):
            yield self.normalisation(batch.to(mean.dtype))


def regressed(rows: int, xx: Tensor, xy: Tensor, yy: Tensor) -> Tensor:
    """Ridge regression of targets on rows, (D, E), its ridge by generalised cross-validation.

        B = (x'x + r I)^-1 x'y        GCV(r) = ||x B - y||^2 / (N - trace (x'x + r I)^-1 x'x)^2

    Given N, `x'x`, (D, D), `x'y`, (D, E), and `||y||^2`, in float64.

    Source: Golub, Heath and Wahba, "Generalized Cross-Validation as a Method for Choosing a Good Ridge Parameter"
    (1979).
    """
    values, Q = torch.linalg.eigh(xx)
    values = values.clamp(min=0)
    along, ridges = Q.T @ xy, REGRESSION_RIDGES.to(values) * values.mean()
    damped = 1 / (values + ridges[:, None])  # (k, D)
    error = yy - (along.square().sum(1) * damped * (2 - values * damped)).sum(1)
    left = rows - len(values) + (ridges[:, None] * damped).sum(1)  # which does not cancel where rows are few
    best = (error.clamp(min=EXACT * yy) / left.square()).argmin()
    return Q @ (along * damped[best][:, None])


def part_of(communicator: Communicator) -> Part:
    """The part of the rows that a process takes."""
    return Part(communicator.rank, communicator.world_size)


def raw_batches(stored: RowSource, communicator: Communicator = ALONE) -> Iterator[Tensor]:
    """This process' part of the rows with their targets, unnormalised, in batches, (B, D + E), float32; each is valid
    until the next."""
    return map(torch.from_numpy, stored.sequential(STREAMED_ROWS, part_of(communicator)))
