"""What a solver is given, and what it reports of each step.

Shapes: B rows, n sampled rows, D = d_in, E = d_out. All rows are normalised (see `rows.py`).
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..sae.dictionary import Batch
from .config import TrainingConfig


@dataclass(frozen=True, eq=False)
class Task:
    """The training problem: its settings, its length, and what is measured on its rows.

    The loss of a batch is the mean over its rows of `||y_hat - y||^2 + sparsity_weight * penalty`; terms that the paper
    adds to the sum over all N rows are divided by N.

    Args:
        training: resolved settings.
        rows: N, the number of training rows.
        steps: optimiser steps in all of training.
        lr: the peak learning rate.
        sample: training rows spread over all, (n, D), and their targets, (n, E), for smoothing and for an activation's
            estimates; may be empty.
        B: the targets' linear regression on the rows, (D, E); None if they are the rows.
        held: W_enc or W_dec, to keep its start bit for bit; None for neither. No latent is then revived, silenced or
            rescaled.
        memory: bytes that the solver may use.
    """

    training: TrainingConfig
    rows: int
    steps: int
    lr: float
    sample: Batch = field(default_factory=lambda: Batch.of(torch.empty(0, 0)))
    B: Tensor | None = None
    held: str | None = None
    memory: float = math.inf

    @property
    def batches(self) -> int:
        """Batches per epoch."""
        return self.training.epoch_batches(self.rows)

    def learning_rate(self, step: int) -> float:
        """From 0: a short linear rise, a plateau, and a linear fall to zero."""
        rise = (step + 1) / max(1, math.ceil(self.training.lr_warm_up * self.steps))
        fall = (self.steps - step) / max(1, math.ceil(self.training.lr_decay * self.steps))
        return self.lr * min(1.0, rise, fall)

    def penalty_weight(self, step: int) -> float:
        """At a step, from 0."""
        rise = (step + 1) / max(1, math.ceil(self.training.sparsity_warm_up * self.steps))
        return (self.training.sparsity_weight or 0.0) * min(1.0, rise)


@dataclass(frozen=True)
class StepReport:
    """Measures of one smoothed batch before its step; tensors, so that the host does not wait for the device.

    With several processes each reports its part, and the parts sum to the batch's measures.

    Args:
        step: from 1.
        rows: B.
        loss: penalty and proximal terms included.
        squared_error: mean over rows of `||y_hat - y||^2`.
        l0: mean number of non-zero codes.
    """

    step: int
    rows: int
    loss: Tensor
    squared_error: Tensor
    l0: Tensor
