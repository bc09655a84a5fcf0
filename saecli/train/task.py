"""What a solver is given, and what it reports of each step.

Shapes: n rows, D = d_in, E = d_out. Rows are normalised rows (see `training/rows.py`).
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .options import DECAY, PENALTY_WARM_UP, WARM_UP


@dataclass(frozen=True)
class Task:
    """The training problem: its objective and its length.

    The loss of a batch is the mean over its rows of `||y_hat - y||^2 + sparsity_weight * penalty`; terms
    that the paper adds to the sum over all N rows are divided by N.

    Args:
        rows: N, the number of training rows.
        steps: optimiser steps in all of training.
        lr: the peak learning rate.
        sparsity: the activation's penalty, or `none`.
        sparsity_weight: its weight.
        sample: some training rows, spread over all, (n, D): smoothing takes differences of them, and an activation's
            estimates are set on them at the end; empty if neither is needed.
        smoothing: width of smoothing (see `smoothing.py`); 0 for none.
        seed: of the solver's random numbers.
        batches: per epoch.
        penalty_warm_up: fraction of all steps over which the sparsity penalty rises.
        lr_warm_up: fraction of all steps over which the learning rate rises.
        lr_decay: last fraction of all steps, over which it falls to zero.
        memory: bytes that the solver may use.
        targets: of the sampled rows, (n, E); None for the rows themselves.
        B: the targets' linear regression on the rows, (D, E); None where they are the rows.
        held: the weights that keep their start bit for bit, W_enc or, where they are a parameter, W_dec; None for none.
            No latent is then revived, and with W_enc none is silenced or rescaled.
        precision: in which descent steps multiply: float32, tf32 or bf16; decoder steps multiply in the rows' own.
    """

    rows: int
    steps: int
    lr: float
    sparsity: str
    sparsity_weight: float
    sample: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    smoothing: float = 0.0
    seed: int = 0
    batches: int = 1
    penalty_warm_up: float = PENALTY_WARM_UP
    lr_warm_up: float = WARM_UP
    lr_decay: float = DECAY
    memory: float = math.inf
    targets: Tensor | None = None
    B: Tensor | None = None
    held: str | None = None
    precision: str = "float32"

    @property
    def sample_targets(self) -> Tensor:
        """The targets of the sampled rows, (n, E)."""
        return self.sample if self.targets is None else self.targets

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, from 0: a short linear rise, a plateau, and a linear fall to zero."""
        rise = (step + 1) / max(1, math.ceil(self.lr_warm_up * self.steps))
        fall = (self.steps - step) / max(1, math.ceil(self.lr_decay * self.steps))
        return self.lr * min(1.0, rise, fall)

    def penalty_weight(self, step: int) -> float:
        """The penalty's weight at a step, from 0."""
        return self.sparsity_weight * min(1.0, (step + 1) / max(1, math.ceil(self.penalty_warm_up * self.steps)))


@dataclass(frozen=True)
class StepReport:
    """Measures of one smoothed batch before its step; tensors, so that the host does not wait for the device.

    With several processes each reports its part of the measures, from its rows, and the parts sum to the batch's.

    Args:
        step: the step's number, from 1.
        rows: B.
        loss: the batch's loss, penalty and proximal terms included.
        squared_error: mean over rows of `||y_hat - y||^2`.
        l0: mean number of non-zero codes.
    """

    step: int
    rows: int
    loss: Tensor
    squared_error: Tensor
    l0: Tensor
