"""What a solver is given, smoothing of rows, and what it reports of each step.

B rows, n sampled; D = d_in, E = d_out. All rows are normalised (see `rows.py`).
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ..base.devices import moved
from ..sae.dictionary import Batch
from .options import WIDEST, TrainingConfig


@dataclass(frozen=True, eq=False)
class Task:
    """The training problem. A batch's loss is the mean over its rows of `||y_hat - y||^2 + sparsity_weight * penalty`;
    terms that the paper adds to the sum over all N rows are divided by N."""

    training: TrainingConfig
    rows: int  # N
    steps: int  # of the optimiser in all of training
    lr: float  # the peak
    # Spread over all rows, (n, D) with targets (n, E), for smoothing and an activation's estimates; may be empty.
    sample: Batch = field(default_factory=lambda: Batch.of(torch.empty(0, 0)))
    B: Tensor | None = None  # the targets' linear regression on the rows, (D, E); None if they are the rows
    held: str | None = None  # W_enc or W_dec, kept bit for bit; then no latent is revived, silenced or rescaled
    memory: float = math.inf  # bytes that the solver may use

    @property
    def batches(self) -> int:
        return self.training.epoch_batches(self.rows)

    def learning_rate(self, step: int) -> float:
        """At a step, from 0: a linear rise, a plateau, a linear fall to zero."""
        rise = (step + 1) / max(1, math.ceil(self.training.lr_warm_up * self.steps))
        fall = (self.steps - step) / max(1, math.ceil(self.training.lr_decay * self.steps))
        return self.lr * min(1.0, rise, fall)

    def penalty_weight(self, step: int) -> float:
        rise = (step + 1) / max(1, math.ceil(self.training.sparsity_warm_up * self.steps))
        return (self.training.sparsity_weight or 0.0) * min(1.0, rise)


@dataclass(frozen=True)
class StepReport:
    """A process' part of a smoothed batch's measures before its step; tensors, so that nothing waits for the device."""

    step: int
    rows: int
    loss: Tensor  # with penalty and proximal terms
    squared_error: Tensor  # mean ||y_hat - y||^2
    l0: Tensor  # mean


@dataclass(frozen=True, eq=False)
class Smoothing:
    """Moves rows along differences of other rows, each independently of its batch.

        x_i + width ||x_i|| (x_j - x_k) / sqrt(||x_j||^2 + ||x_k||^2),    j and k drawn from a sample of all rows

    (norms about the sample's mean). Rows are then drawn from a kernel estimate of their density, with a kernel of the
    data's own shape, so the encoder overfits less. Targets move by the same multiple of their own difference.

    Source: the smoothed bootstrap (Silverman and Young, 1987), with the kernel taken from pairs of rows.
    """

    width: float  # fraction of its norm by which a row is moved; 0 for none
    sample: Tensor  # (n, D); with n < 2 nothing moves
    targets: Tensor | None = None  # the sample's, (n, E); None if these are the rows

    @property
    def inflation(self) -> float:
        """Variance of smoothed rows over the rows' own."""
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
        """A batch with its rows moved, in new tensors; draws are on the CPU, for all processes' rows."""
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
