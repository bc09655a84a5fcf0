"""Descent by Adam on a dictionary, for all solvers and fine-tuning.

B rows, normalised, D = d_in, E = d_out, F = d_sae.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from ..base.processes import ALONE, Communicator
from ..sae.activations import Parameters
from ..sae.dictionary import SAE, Batch, Dictionary
from .moments import Pass
from .options import Paper, SolverConfig, TrainingConfig
from .rows import TrainingRows

# Torch's second, 0.999, averages over more steps than are between decoder steps: FVU of SmolLM2 is 2 to 3% higher.
BETAS = (0.9, 0.99)


class Draws(IntEnum):
    """Streams of random numbers."""

    STEP = 0
    DECODER_STEP = 1
    REVIVAL = 2


@dataclass(frozen=True, eq=False)
class Task:
    """The training problem: the mean over a batch's rows of `||y_hat - y||^2 + sparsity_weight * penalty`; terms that
    the paper adds to a sum over all N rows are divided by N."""

    training: TrainingConfig
    rows: int  # N
    steps: int  # of the optimiser in all of training
    lr: float  # the peak
    # Spread over all rows, (n, D), targets (n, E): for smoothing, revival and estimates. May be empty.
    sample: Batch = field(default_factory=lambda: Batch.of(torch.empty(0, 0)))
    # Rows kept out of training, on which thresholds are set, else on the sample.
    unseen: Batch | None = None
    B: Tensor | None = (
        None  # the targets' regression on the rows, (D, E); None if they are the rows
    )
    fixed: str | None = None  # W_enc or W_dec, bit for bit; then no latent is re-aimed or rescaled
    from_sae: bool = False  # then latents are revived once, before the first step
    memory: float = math.inf  # bytes that a decoder step may use

    @property
    def batches(self) -> int:
        return self.training.epoch_batches(self.rows)

    @property
    def sparsity(self) -> str:
        return self.training.sparsity or "none"

    def learning_rate(self, step: int) -> float:
        """Linear rise, plateau, linear fall to zero; steps count from 0."""
        rise = (step + 1) / max(1, math.ceil(self.training.lr_warm_up * self.steps))
        fall = (self.steps - step) / max(1, math.ceil(self.training.lr_decay * self.steps))
        return self.lr * min(1.0, rise, fall)

    def penalty_weight(self, step: int) -> float:
        rise = (step + 1) / max(1, math.ceil((self.training.sparsity_warm_up or 0.0) * self.steps))
        return (self.training.sparsity_weight or 0.0) * min(1.0, rise)

    def draws(self, number: int, purpose: Draws) -> torch.Generator:
        seed = (self.training.seed * 7 + purpose) * 1_000_000_007 + number
        return torch.Generator().manual_seed(seed % 2**32)  # the CPU's generator takes no more bits


@dataclass(frozen=True)
class StepReport:
    """A process' part of a batch's measures before its step; tensors, so nothing waits for the device."""

    step: int
    rows: int
    loss: Tensor  # with penalty and proximal terms
    squared_error: Tensor  # mean ||y_hat - y||^2
    l0: Tensor  # mean


class Descent(ABC):
    """A dictionary trained in place, but for the parameters in `fixed`; subclasses give the loss."""

    schedule: Mapping[int, Pass] = {}  # the decoder steps, by the steps of descent before them
    inflation = 1.0  # variance of the rows as they are trained on, over their own

    def __init__(
        self,
        dictionary: Dictionary,
        fixed: Collection[str],
        task: Task,
        config: SolverConfig,
        communicator: Communicator = ALONE,
    ) -> None:
        self.dictionary, self.task, self.config = dictionary, task, config
        self.communicator = communicator
        # Sparse products read the weights latent by latent, so each latent's are contiguous, as in the decoder.
        dictionary.W_enc.data = dictionary.W_enc.data.T.contiguous().T
        without_gradient = {*fixed, task.fixed, *dictionary.estimates}
        for name, parameter in dictionary.named_parameters():
            parameter.requires_grad_(name not in without_gradient)
        clip_norm = config.clip_norm if isinstance(config, Paper) else None
        self.optimizer = Adam(dict(dictionary.named_parameters()), clip_norm, communicator)
        self.steps = 0
        self.revived = 0  # latents

    @abstractmethod
    def train(self, batches: Iterable[Any], rows: TrainingRows) -> Iterator[StepReport]:
        """Take a step per batch, and decoder steps over `rows` where due, before the next batch is asked for."""

    @property
    def finished(self) -> bool:
        return self.steps >= self.task.steps

    def move(self) -> None:
        self.optimizer.step(self.task.learning_rate(self.steps))
        self.steps += 1

    @torch.no_grad()
    def calibrated(self, dictionary: Dictionary) -> Parameters:
        """The activation's estimates for rows not trained on."""
        parameters = dictionary.activation_parameters
        rows = self.task.sample if self.task.unseen is None else self.task.unseen
        if not dictionary.estimates or not len(rows.x):
            return {}
        pre = dictionary.pre_activations(rows.x)
        penalty = dictionary.activation.penalty(self.task.sparsity)
        of_activation = dictionary.activation.calibrated(pre, parameters)
        return of_activation | penalty.calibrated(pre, parameters)

    def sae(self) -> SAE:
        """On normalised rows."""
        return self.dictionary.sae().without_training_parameters()

    def record(self) -> dict[str, float]:
        return {"revived": self.revived}

    def notes(self) -> list[str]:
        return []

    def state(self) -> dict[str, Tensor]:
        """All tensors to resume; collective over processes."""
        weights = self.dictionary.state_dict().items()
        return {
            **{f"dictionary.{name}": tensor for name, tensor in weights},
            **self.optimizer.state(),
            "steps": torch.tensor(self.steps),
            "revived": torch.tensor(self.revived),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.steps, self.revived = int(state["steps"]), int(state["revived"])
        with torch.no_grad():
            for name, tensor in self.dictionary.state_dict().items():
                tensor.copy_(state[f"dictionary.{name}"])
        self.optimizer.restore(state)


class Adam:
    """`torch.optim.Adam`, fused, with `BETAS`, on the tensors that need a gradient; gradients are summed over processes
    and clipped to a joint norm."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        clip_norm: float | None = None,
        communicator: Communicator = ALONE,
    ) -> None:
        self.clip_norm, self.communicator = clip_norm, communicator
        self.tensors = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        self._adam = torch.optim.Adam([*self.tensors.values()], betas=BETAS, fused=True)
        self._begin(self.tensors)

    def include(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor
        self._adam.add_param_group({"params": [tensor]})
        self._begin([name])

    def _begin(self, names: Collection[str]) -> None:
        """Make the state that torch makes at the first step, so that it has one form to save."""
        for name in names:
            tensor = self.tensors[name]
            self._adam.state[tensor] = {
                "step": torch.zeros((), device=tensor.device),
                "exp_avg": torch.zeros_like(tensor),
                "exp_avg_sq": torch.zeros_like(tensor),
            }

    def zero_grad(self) -> None:
        self._adam.zero_grad()

    @torch.no_grad()
    def step(self, lr: float) -> None:
        if self.communicator.world_size > 1:
            self._reduce_gradients()
        if self.clip_norm is not None:
            clip_grad_norm_([*self.tensors.values()], self.clip_norm)
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()

    def _reduce_gradients(self) -> None:
        """All-reduce gradients in one buffer; a process without rows contributes zeros."""
        tensors = self.tensors.values()
        gradients = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in tensors
        ]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        flat = self.communicator.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            # The fused step needs a tensor and its gradient to have the same strides.
            tensor.grad = torch.empty_like(tensor).copy_(part.view_as(tensor))

    def state(self) -> dict[str, Tensor]:
        return {
            f"adam.{key}.{name}": value
            for name, tensor in self.tensors.items()
            for key, value in self._adam.state[tensor].items()
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name, own in self.state().items():
            own.copy_(state[name])

    @torch.no_grad()
    def forget(
        self, latents: Tensor, others: Tensor, dimension: Callable[[str], int | None]
    ) -> None:
        """Reset the moments of re-aimed latents: the first to 0, the second to the mean of others; masks (F,).

        The second moment of a latent long without gradient would make its first steps several times lr.
        """
        for name, tensor in self.tensors.items():
            latent_dimension = dimension(name)
            if latent_dimension is None:
                continue
            average = self._adam.state[tensor]["exp_avg"].movedim(latent_dimension, -1)
            square = self._adam.state[tensor]["exp_avg_sq"].movedim(latent_dimension, -1)
            # Unlike indexing by a mask, masked_fill does not synchronise.
            average.masked_fill_(latents, 0)
            mean = square.masked_fill(~others, 0).sum(-1, keepdim=True) / others.sum()
            square.copy_(torch.where(latents, mean, square))
