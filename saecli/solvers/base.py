"""What all solvers share: the descent step with its schedule, and the state that resuming needs.

Shapes: B rows, D = d_in, F = d_sae. Rows are normalised rows throughout (see `training/rows.py`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..batch import Batch
from ..codes import Codes
from ..config import PAPER, Config, option
from ..dictionary import SAE, Dictionary, Loss
from ..distributed import ALONE, Communicator
from ..errors import ConfigError
from .optimizers import OPTIMIZERS, check_schedule, weight_at
from .smoothing import Smoothing

DEFAULT_STEPS = 4000  # optimiser steps that defaults aim at
WARM_UP = 0.02  # fraction of all steps over which the learning rate rises
DECAY = 0.5  # fraction of all steps, the last ones, over which it falls to zero
PENALTY_WARM_UP = 0.2  # fraction of all steps over which the sparsity penalty rises
PROXIMAL = {"W_enc": "mu_enc", "b_enc": "nu_enc"}  # options that weigh how far a tensor moves in an outer iteration


@dataclass(frozen=True)
class Task:
    """What is to be minimised, and for how long.

    The loss of a batch is the mean over its rows of `||x_hat - x||^2 + sparsity_weight * penalty`; terms
    that the paper adds to the sum over all N rows are divided by N alike.

    Args:
        rows: N, the number of training rows.
        steps: optimiser steps in the whole of training.
        lr: the learning rate at its highest.
        sparsity: the activation's penalty, or `none`.
        sparsity_weight: its weight.
        sample: some of the training rows, spread over all, (n, D): smoothing takes differences from it, and an
            activation's estimates are set on it at the end; empty where there is neither.
        smoothing: width by which training rows are smoothed (see `smoothing.py`); 0 for none.
        seed: of what a solver draws.
        batches: how many an epoch has.
        penalty_warm_up: fraction of all steps over which the sparsity penalty rises.
        lr_warm_up: fraction of all steps over which the learning rate rises.
        lr_decay: fraction of all steps, the last ones, over which it falls to zero.
        memory: bytes that the solver may take.
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
    """What one batch, smoothed, showed before the step that it caused; tensors, so that nothing waits for a device.

    Of several processes each reports its part of the measures, of its rows, which are the parts' sums.

    Args:
        step: the step's number, from 1.
        rows: B.
        loss: the batch's loss, penalty and proximal terms included.
        squared_error: mean over rows of `||x_hat - x||^2`.
        l0: mean number of non-zero codes.
    """

    step: int
    rows: int
    loss: Tensor
    squared_error: Tensor
    l0: Tensor


class Solver(ABC):
    """Trains a dictionary on batches that are pushed to it.

        solver.begin_epoch()
        for batch in rows: reports = solver.step(batch)
        solver.end_epoch()

    After each of these calls a decoder step may be `due`; then, before anything else, `begin_pass`, `observe` with each
    batch of a pass over as many rows as it asks for, and `end_pass`, until none is due.

    Args:
        dictionary: what is trained, in place.
        held: parameters of it, by name, that descent does not move.
        task: what is to be minimised.
        config: the solver's options.
        outers: how many outer iterations training comes to: those that schedules of proximal weights run over.
        communicator: reaches the processes that train on other parts of each batch.
    """

    def __init__(self, dictionary: Dictionary, held: Collection[str], task: Task, config: "SolverConfig", outers: int,
                 communicator: Communicator = ALONE) -> None:
        kind = OPTIMIZERS[config.optimizer]
        self.dictionary, self.config, self.communicator = dictionary, config, communicator
        self.task = replace(task, lr=1.0, penalty_warm_up=0.0) if kind.to_tolerance else task
        self.smoothing = Smoothing(task.smoothing, task.sample)
        # Products over few latents read the weights of each side by side in memory, encoder and decoder alike.
        dictionary.W_enc.data = dictionary.W_enc.data.T.contiguous().T
        for name, parameter in dictionary.named_parameters():
            parameter.requires_grad_(name not in held and name not in dictionary.activation.estimates)
        clip_norm = math.inf if config.clip_norm is None else config.clip_norm
        self.optimizer = kind(dict(dictionary.named_parameters()), clip_norm,
                              communicator.all_reduce if communicator.world_size > 1 else None)
        self.steps = 0
        self.outer = 0
        self._outers = outers
        self._hold_encoder()

    @property
    def due(self) -> int | None:
        """How many rows the decoder step that is due wants to observe; None where none is due."""
        return None

    @property
    def finished(self) -> bool:
        """Whether the task's steps are used up."""
        return self.steps >= self.task.steps

    def begin_epoch(self) -> None:
        """A pass over the rows begins."""
        self._batches = 0  # of the epoch, taken so far

    @abstractmethod
    def step(self, batch: Batch) -> list[StepReport]:
        """Take a batch of the epoch: the reports of the optimiser steps that it led to, none where the task's steps are
        used up or it waits for others."""

    @abstractmethod
    def end_epoch(self) -> list[StepReport]:
        """The pass is over: the reports of the steps that were waiting."""

    def begin_pass(self, again: Callable[[], Iterable[Batch]]) -> None:
        """Begin the decoder step that is due; `again` gives the batches that are to be observed once more, for a solve
        that goes through them many times."""
        raise TypeError(f"{type(self).__name__} has no decoder step")

    def observe(self, batch: Batch) -> None:
        """Take a batch of the decoder step's pass."""
        raise TypeError(f"{type(self).__name__} has no decoder step")

    def end_pass(self) -> None:
        """End the decoder step's pass: solve."""
        raise TypeError(f"{type(self).__name__} has no decoder step")

    def extra_loss(self) -> Tensor | float:
        """The encoder's proximal terms and the decay of what descent trains, divided by N."""
        total: Tensor | float = 0.0
        for name, held in self._held.items():
            if weight := self.weight(PROXIMAL[name]):
                total = total + weight * (getattr(self.dictionary, name) - held).square().sum()
        if self.config.weight_decay:
            weights = (tensor for tensor in self.optimizer.tensors.values() if tensor.dim() == 2)
            total = total + self.config.weight_decay * sum(tensor.square().sum() for tensor in weights)
        return total / self.task.rows

    def weight(self, name: str) -> float:
        """A proximal weight at the outer iteration under way, by its option's field."""
        return weight_at(getattr(self.config, name), self.outer, self._outers)

    def _hold_encoder(self) -> None:
        """Let the proximal terms, where there are any, refer to the encoder as it is."""
        self._held = {name: getattr(self.dictionary, name).detach().clone() for name, weight in PROXIMAL.items()
                      if getattr(self.config, weight)}

    def record(self) -> dict[str, float]:
        """Figures of the solver's own for `metrics.jsonl` and the final summary."""
        return {}

    def notes(self) -> list[str]:
        """Sentences that the user should read at the end."""
        return []

    def sae(self) -> SAE:
        """The SAE as it stands, acting on normalised rows."""
        return self.dictionary.sae()

    def descend(self, batch: Batch) -> tuple[StepReport, Batch, Codes]:
        """One step of the optimiser on a batch: its report, the batch smoothed, and its codes."""
        batch = batch.with_rows(self.smoothing(batch, self.draws(self.steps)))
        evaluations: list[Loss] = []  # the first and the latest

        def loss() -> Tensor:
            found = self.dictionary.loss(batch, self.task.sparsity, self.task.penalty_weight(self.steps))
            value = found.value + self.extra_loss() / self.communicator.world_size
            evaluations[1:] = [Loss(value.detach(), found.squared_error.detach(), found.codes.detach())]
            return value

        self.optimizer.descend(loss, self.task.learning_rate(self.steps))
        first, latest = evaluations[0], evaluations[-1]
        with torch.no_grad():
            activation, parameters = self.dictionary.activation, self.dictionary.activation_parameters
            for name, value in activation.estimated(latest.codes, parameters).items():
                parameters[name].copy_(self.communicator.mean(value))
        self.steps += 1
        report = StepReport(self.steps, batch.size, first.value, first.squared_error,
                            first.codes.count().double() / batch.size)
        return report, batch, latest.codes

    @torch.no_grad()
    def calibrate(self) -> None:
        """Set what the activation estimates for rows as they are; the last batches, smoothed, gave it for others."""
        activation, parameters = self.dictionary.activation, self.dictionary.activation_parameters
        if not activation.estimates or not len(self.task.sample):
            return
        pre = self.dictionary.pre_activations(self.task.sample)
        for name, value in activation.calibrated(pre, parameters).items():
            parameters[name].copy_(value)

    def draws(self, number: int, kind: int = 0) -> torch.Generator:
        """Random numbers that are a pure function of the seed, of the number of a step and of the kind of step."""
        return torch.Generator().manual_seed(((self.task.seed * 7 + kind) * 1_000_000_007 + number) % 2**63)

    def state(self) -> dict[str, Tensor]:
        """Everything that training goes on from, by name."""
        own = {f"dictionary.{name}": tensor.detach() for name, tensor in self.dictionary.named_parameters()}
        return own | self.optimizer.state() | {"steps": torch.tensor(self.steps), "outer": torch.tensor(self.outer)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        self.steps, self.outer = int(state["steps"]), int(state["outer"])
        with torch.no_grad():
            for name, tensor in self.dictionary.named_parameters():
                tensor.copy_(state[f"dictionary.{name}"])
        self.optimizer.restore(state)
        self._hold_encoder()


def proximal(difference: str, more: str) -> Any:
    """Declare a proximal weight: a number or a schedule."""
    return option(0.0, f"Proximal weight of ||{difference}||^2{more}.", minimum=0, check=check_schedule,
                  metavar="FLOAT|FIRST:LAST|A,B,...", **PAPER)


@dataclass(frozen=True)
class SolverConfig(Config, ABC):
    """A solver's options; `build` makes the solver."""

    panel: ClassVar[str] = "Solver"
    name: ClassVar[str]
    memory_advice: ClassVar[str] = "use a smaller {d_sae}"

    optimizer: str = option("adam", "What takes the descent steps: adam; sgd, plain gradient steps as in the paper's "
                                    "algorithm, for which --lr must be a number; lbfgs, a solve to tolerance on all "
                                    "rows as one batch, without learning rate, smoothing or warm-up.",
                            choices=tuple(OPTIMIZERS), **PAPER)
    clip_norm: float | None = option(None, "Largest norm of a step's gradient, of the mean loss over a batch; a larger "
                                           "gradient is scaled down to it.", above=0, **PAPER)
    weight_decay: float = option(0.0, "Weight of ||W_enc||^2, with sgd of ||W_dec||^2 too, beside the squared error "
                                      "summed over all rows.", minimum=0, **PAPER)
    mu_enc: float | str = proximal("W_enc - W_enc^t", ", beside the squared error summed over all rows: a number, or a "
                                   "schedule over the outer iterations t (with sgd, epochs), FIRST:LAST (geometric) or "
                                   "A,B,... (one each, then the last)")
    nu_enc: float | str = proximal("b_enc - b_enc^t", ", as --mu-enc")

    @property
    def steps_per_batch(self) -> int:
        """Optimiser steps on each batch."""
        return 1

    def resolved(self, batches: int | None) -> Self:
        """The same with every default filled in that depends on how many batches there will be in all; None where
        optimiser steps are counted instead."""
        return self

    def check(self, rows: int, batch_size: int, lr: float | str, smoothing: float | str) -> None:
        """Refuse settings of training that cannot work with the solver's options; see `Optimizer.check`. Raises
        ConfigError."""
        OPTIMIZERS[self.optimizer].check(rows, batch_size, lr, smoothing)
        if OPTIMIZERS[self.optimizer].to_tolerance and self.clip_norm is not None:
            raise ConfigError("clip_norm", "does nothing with {optimizer} {given}, whose line search finds its steps",
                              "leave it out, or use {optimizer} adam or sgd", given=self.optimizer)

    def default_smoothing(self, rows: int, d_in: int, d_sae: int) -> float:
        """The width by which training rows are smoothed when the user gives none."""
        return 0.0

    @abstractmethod
    def build(self, initial: SAE, task: Task, communicator: Communicator = ALONE) -> Solver:
        """A solver that starts from a copy of `initial`, alone or with the other processes of a communicator."""

    @abstractmethod
    def memory(self, rows: int, batch_size: int, d_in: int, d_sae: int) -> int:
        """Bytes that the solver takes at its peak in each process, the codes of a batch left out."""
