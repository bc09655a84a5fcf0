"""The rows that an SAE is trained on, from a store or in memory, normalised, and what training starts from.

Shapes: N rows, B rows of a batch, D = d_in, E the width of targets beside the rows, F = d_sae.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..base.devices import carried
from ..base.distributed import ALONE, Communicator
from ..sae.activations import Activation
from ..sae.batch import Batch
from ..sae.codes import Prefixes
from ..sae.dictionary import SAE
from ..store.rows import RowSource
from ..store.stream import Part
from .array_rows import HeldRows
from .normalisation import Normalisation

STREAMED_ROWS = 2048  # rows at a time if their order does not matter
SUMMED_ROWS = 4096  # the same for sums over all rows: each block goes through a whole d_sae x d_sae matrix
SAMPLED_ROWS = 2048  # sample to which learning rate and initial scale are fitted, and from which rows are smoothed
RATE_FACTOR, RATE_POWER = 0.105, 1 / 3
HIGHEST_RATE, OF_WIDTH = 0.008, 128
ENOUGH_FIRINGS, FIRINGS_POWER = 8, 2 / 3
REGRESSED_ROWS = 32  # per dimension
REGRESSION_RIDGES = 10.0 ** torch.arange(-12, 2)  # over the mean eigenvalue
EXACT = 1e-13  # fraction of the targets' square up to which an error is rounding
POWER_ITERATIONS = 30  # for two digits of an eigenvalue


@dataclass(frozen=True)
class TrainingRows:
    """Normalised rows of a store's split, in batches as solvers take them.

    Args:
        stored: the rows; where batches are moved, in the storage dtype, or there already.
        normalisation: of the rows, on the device that batches are moved to.
        batch_size: B.
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
        """Number of rows."""
        return self.stored.rows

    @property
    def d_in(self) -> int:
        """Width of the rows."""
        return self.stored.d_in

    def shuffled(self, epoch: int) -> Iterator[Batch]:
        """Every row once, in an order that is a pure function of seed and epoch; each process gets its part of every
        batch."""
        if self.communicator.world_size == 1:
            yield from (Batch.of(rows, self.d_in) for rows in self._batches(epoch))
            return
        part = part_of(self.communicator)
        own = self._batches(epoch, part=part)
        for begin in range(0, self.rows, self.batch_size):
            size = min(self.batch_size, self.rows - begin)
            first, stop = part.of(size)
            rows = next(own) if stop > first else self._nothing()
            yield Batch.of(rows, self.d_in, size, torch.arange(first, stop))

    def some(self, count: int, number: int) -> Iterator[Batch]:
        """`count` of the rows once, in larger batches: all in stored order, or the first in an order of that number."""
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
        """The linear regression of the targets on the rows, (D, E); None if the targets are the rows. See `regressed`.

        Cost: a pass over at most `REGRESSED_ROWS` rows per dimension.
        """
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
        own = self._normalised(self.stored.sequential(SUMMED_ROWS, part=part))
        first, stop = part.of(math.ceil(self.rows / SUMMED_ROWS))
        for block, begin in enumerate(range(0, self.rows, SUMMED_ROWS)):
            size, here = min(SUMMED_ROWS, self.rows - begin), first <= block < stop
            rows = next(own) if here else self._nothing()
            yield Batch.of(rows, self.d_in, size, None if here else torch.arange(0))

    def _batches(self, epoch: int, **part: Part) -> Iterator[Tensor]:
        return self._normalised(self.stored.batches(self.batch_size, seed=self.seed, epoch=epoch, **part))

    def _nothing(self) -> Tensor:
        return self.normalisation.mean.new_empty(0, self.d_in + self.stored.d_target)

    def _normalised(self, batches: Iterator[np.ndarray] | Iterator[Tensor]) -> Iterator[Tensor]:
        mean = self.normalisation.mean
        for batch in carried(batches, mean.device):
            yield self.normalisation(batch.to(mean.dtype))


def regressed(rows: int, xx: Tensor, xy: Tensor, yy: Tensor) -> Tensor:
    """Ridge regression of targets on rows, (D, E), its ridge by generalised cross-validation.

        B = (x'x + r I)^-1 x'y        GCV(r) = ||x B - y||^2 / (N - trace (x'x + r I)^-1 x'x)^2

    Args:
        rows: N.
        xx: `x'x`, (D, D), float64.
        xy: `x'y`, (D, E).
        yy: `||y||^2`, a scalar.

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
    """The rows as stored, with their targets beside them, this process' part of them, in batches, (B, D + E), float32;
    each is valid until the next."""
    part = {"part": part_of(communicator)} if communicator.world_size > 1 else {}
    return map(torch.from_numpy, stored.sequential(STREAMED_ROWS, **part))


def initial_sae(activation: Activation, d_sae: int, batch: Batch, seed: int, prefixes: Prefixes = (),
                B: Tensor | None = None, skip: bool = False, widths: Sequence[int] = ()) -> SAE:
    """An SAE with random unit directions, its decoder the encoder's, W_dec = W_enc' B, its scale fitted to a batch.

    If the activation is linear on pairs of opposites and there are at least two latents per dimension, half of the
    directions are the opposites of the others: the SAE can then be linear in the rows from the start, which random
    directions learn late (without a penalty, test FVU after 50 passes over 700 rows of tiny-gemma2: 1e-7 instead of
    1e-3).

    Args:
        activation: the activation.
        d_sae: F.
        batch: normalised rows.
        seed: of the directions.
        prefixes: of a nested SAE; none otherwise.
        B: the targets' linear regression on the rows, (D, E); None if they are the rows.
        skip: whether it has an affine skip, which is 0 at first.
        widths: of a crosscoder's places.
    """
    x, d_in = batch.x, batch.x.shape[1]
    directions = torch.randn(d_in, d_sae, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if activation.opposites and d_sae >= 2 * d_in:
        half = d_sae // 2
        directions[:, half:2 * half] = -directions[:, :half]
    W_enc = (directions / directions.norm(dim=0)).to(x)
    start = activation.parameters(d_sae) | activation.training_parameters(d_sae)
    parameters = activation.fitted(x @ W_enc, {name: tensor.to(x) for name, tensor in start.items()})
    y_hat = activation.training_codes(x @ W_enc, parameters).times(W_enc.T if B is None else W_enc.T @ B)
    size = y_hat.square().sum()
    fit = ((batch.y * y_hat).sum() / size).clamp(min=1e-3) if size > 0 else x.new_ones(())
    W_enc = W_enc * fit.sqrt()
    parameters = activation.fitted(x @ W_enc, parameters)
    W_dec, d_out = W_enc.T if B is None else W_enc.T @ B, batch.y.shape[1]
    return SAE(W_enc, x.new_zeros(d_sae), W_dec.contiguous(), x.new_zeros(d_out), activation, parameters, prefixes,
               x.new_zeros(d_in, d_out) if skip else None, widths)


def fitted_learning_rate(batch: Tensor, firings: float) -> float:
    """The learning rate that suits rows of this size and spread, and latents that fire this often.

        lr = min(0.008 sqrt(128 / D), 0.105 / (D lambda)^(1/3)) * min(1, firings / 8)^(2/3)

    lambda is the largest eigenvalue of `sum ||x||^2 x x' / sum ||x||^2` for rows of mean squared norm D. A step of Adam
    moves each of the D weights of a latent by up to lr: the latent, of norm about 1, by up to `lr sqrt(D)`, and the
    pre-activations of rows along the leading direction by up to `lr sqrt(D lambda)`; the fourth moment in place of the
    second lets rows of large norm, which dominate the gradient, count for more. Adam divides by the root of a mean
    square over all steps, so that the fewer rows of a batch a latent fires on, the noisier its steps.

    Powers and factors are fitted to the best of a few rates each, of 4,000 steps: 8e-3 on tiny-gemma2 (D = 128) at 8
    firings, 4e-3 there at 2, 4e-3 to 8e-3 on image patches (256), about 4e-3 in two worlds of known features at 2.5
    (128) and 3.8 (192).

    Args:
        batch: normalised rows, (B, D).
        firings: expected number of rows of a batch that a latent fires on, above 0.

    Source: Gao et al., "Scaling and evaluating sparse autoencoders" (2024), whose rate falls as 1/sqrt(d_sae).
    """
    most = HIGHEST_RATE * math.sqrt(OF_WIDTH / batch.shape[1])
    rarity = min(1.0, firings / ENOUGH_FIRINGS) ** FIRINGS_POWER
    x = batch.double()
    square = x.square().sum(1)
    direction, length = x[square.argmax()], square.max().sqrt()
    if not length > 0:
        return most * rarity
    for _ in range(POWER_ITERATIONS):
        direction = x.T @ (square * (x @ (direction / length))) / square.sum()
        length = direction.norm()
    spread = (length / square.mean()).item()  # lambda / D, whatever the rows' scale
    return min(most, RATE_FACTOR / (x.shape[1] ** 2 * spread) ** RATE_POWER) * rarity
