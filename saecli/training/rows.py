"""Where batches of activations enter training, and the SAE that it starts from."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..activations import Activation
from ..devices import moved
from ..distributed import over_latents, own_part, rows_axis
from ..sae import SAE
from ..solvers import Portion
from ..store import Part
from ..store import Rows as StoredRows
from .array_rows import ArrayRows
from .normalise import Normalisation
from .shared_passes import Share, alone

STREAMED_ROWS = 2048  # rows at a time where their order does not matter
SUMMED_ROWS = 4096  # the same for sums over all rows, of which each block's go through all of a d_sae x d_sae matrix
SAMPLED_ROWS = 2048  # by which the learning rate and the initial scale are fitted, and rows smoothed
RATE_FACTOR, RATE_POWER, HIGHEST_RATE = 0.105, 1 / 3, 0.015
POWER_ITERATIONS = 30  # for an eigenvalue of which two digits are wanted


@dataclass(frozen=True)
class TrainingRows:
    """Normalised rows of a store's split, as solvers take them (see `solvers.Rows`)."""

    stored: StoredRows | ArrayRows
    normalisation: Normalisation
    batch_size: int
    seed: int
    share: Share = alone

    @property
    def rows(self) -> int:
        """How many."""
        return self.stored.rows

    @property
    def d_in(self) -> int:
        """Their width."""
        return self.stored.d_in

    def shuffled(self, epoch: int) -> Iterator[Tensor | Portion]:
        """Every row once, in batches (B, D), in an order that is a pure function of seed and epoch; of several
        processes each has its portion of every batch."""
        if rows_axis().size > 1:
            return self._portions(self._batches(epoch, part=own_rows()))
        return self.share("shuffled", lambda: self._batches(epoch), epoch)

    def sequential(self) -> Iterator[Tensor | Portion]:
        """Every row once, in batches (B, D), in stored order; of several processes each has some of the batches."""
        if rows_axis().size > 1:
            return self._blocks(self._normalised(self.stored.sequential(SUMMED_ROWS, part=own_rows())))
        return self.share("sequential", lambda: self._normalised(self.stored.sequential(SUMMED_ROWS)))

    def sample(self) -> Tensor:
        """The first rows of the shuffled order, `SAMPLED_ROWS` or all there are, (n, D); the same in all processes."""
        batches, seen = [], 0
        for batch in self._batches(0) if rows_axis().size > 1 else self.shuffled(0):
            batches.append(batch)
            seen += len(batch)
            if seen >= SAMPLED_ROWS:
                break
        return torch.cat(batches)[:SAMPLED_ROWS]

    def _batches(self, epoch: int, **part: Part) -> Iterator[Tensor]:
        return self._normalised(self.stored.batches(self.batch_size, seed=self.seed, epoch=epoch, **part))

    def _portions(self, own: Iterator[Tensor]) -> Iterator[Portion]:
        """This process' portion of every batch, which is empty where it has none."""
        for begin in range(0, self.rows, self.batch_size):
            size = min(self.batch_size, self.rows - begin)
            first, stop = own_rows().of(size)
            yield Portion(next(own) if stop > first else self._nothing(), size, torch.arange(first, stop))

    def _blocks(self, own: Iterator[Tensor]) -> Iterator[Portion]:
        """All blocks, of which another process' are empty."""
        first, stop = own_rows().of(math.ceil(self.rows / SUMMED_ROWS))
        for block, begin in enumerate(range(0, self.rows, SUMMED_ROWS)):
            size = min(SUMMED_ROWS, self.rows - begin)
            here = first <= block < stop
            yield Portion(next(own), size) if here else Portion(self._nothing(), size, torch.arange(0))

    def _nothing(self) -> Tensor:
        return self.normalisation.mean.new_empty(0, self.d_in)

    def _normalised(self, batches: Iterator[np.ndarray]) -> Iterator[Tensor]:
        mean = self.normalisation.mean
        for batch in batches:
            yield self.normalisation(moved(torch.from_numpy(batch), mean.device).to(mean.dtype))


def own_rows() -> Part:
    """The part of the rows that this process takes."""
    return Part(rows_axis().place, rows_axis().size)


def raw_batches(stored: StoredRows | ArrayRows) -> Iterator[Tensor]:
    """The rows as stored, of several processes each one's own, in batches (B, D), float32; each is valid until the
    next."""
    part = {"part": own_rows()} if rows_axis().size > 1 else {}
    return map(torch.from_numpy, stored.sequential(STREAMED_ROWS, **part))


def initial_sae(activation: Activation, d_sae: int, batch: Tensor, seed: int) -> SAE:
    """An SAE with random unit directions, decoder and encoder aligned, its scale fitted to a batch; of its latents
    those which this process holds.

    Where the activation is linear on pairs of opposites and there are two latents a dimension, half of the directions
    are the opposites of the others: what decoder there is can then be linear in the rows from the start, which random
    half-spaces come to late (without a penalty, test FVU after 50 passes over 700 rows of tiny-gemma2: 1e-7 for 1e-3).

    Args:
        activation: the activation.
        d_sae: F.
        batch: normalised rows, (B, D).
        seed: of the directions.
    """
    d_in = batch.shape[1]
    directions = torch.randn(d_in, d_sae, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if activation.opposites and d_sae >= 2 * d_in:
        half = d_sae // 2
        directions[:, half:2 * half] = -directions[:, :half]
    W_enc = own_part({"W_enc": directions / directions.norm(dim=0)})["W_enc"].to(batch)
    parameters = own_part({name: tensor.to(batch) for name, tensor in activation.parameters(d_sae).items()})
    x_hat = over_latents(activation.training_codes(batch @ W_enc, parameters) @ W_enc.T)
    size = x_hat.square().sum()
    fit = ((batch * x_hat).sum() / size).clamp(min=1e-3) if size > 0 else batch.new_ones(())
    W_enc = W_enc * fit.sqrt()
    return SAE(W_enc, batch.new_zeros(W_enc.shape[1]), W_enc.T.contiguous(), batch.new_zeros(d_in), activation,
               parameters)


def fitted_learning_rate(batch: Tensor) -> float:
    """The learning rate that suits rows of this size and spread.

    `lr = 0.105 / (D lambda)^(1/3)`, at most 0.015, with lambda the largest eigenvalue of
    `sum ||x||^2 x x' / sum ||x||^2` for rows of mean squared norm D. A step of Adam moves each of the D weights of a
    latent by up to lr, and so the pre-activations of rows along the leading direction by up to `lr sqrt(D lambda)`;
    the fourth moment in place of the second lets rows of large norm, which dominate the gradient, count for more. The
    power and the factor are fitted to the best rates measured: about 1.2e-2 on digits (D lambda 640), 8e-3 on
    activations of tiny-gemma2 (2,200), 4e-3 on image patches (46,000).

    Args:
        batch: normalised rows, (B, D).
    """
    x = batch.double()
    square = x.square().sum(1)
    direction, length = x[square.argmax()], square.max().sqrt()
    if not length > 0:
        return HIGHEST_RATE
    for _ in range(POWER_ITERATIONS):
        direction = x.T @ (square * (x @ (direction / length))) / square.sum()
        length = direction.norm()
    spread = (length / square.mean()).item()  # lambda / D, whatever the rows' scale
    return min(HIGHEST_RATE, RATE_FACTOR / (x.shape[1] ** 2 * spread) ** RATE_POWER)
