"""What all solvers share: the batch objective, the descent step with its schedule, and the state that resuming needs.

Shapes: B rows, D = d_in, F = d_sae. Rows are normalised rows throughout (see `normalise.py`). Where processes share
latents, tensors of latents are those of this process' own, F of them here.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from ..config import PAPER, Config, option
from ..distributed import latents_axis, rows_axis
from ..errors import ConfigError
from ..products import pre_activations, reconstructions
from ..sae import SAE
from .optimizers import OPTIMIZERS
from .portions import Portion, as_portion
from .schedules import check_schedule, weight_at
from .smoothing import Smoothing

DEFAULT_STEPS = 4000  # optimiser steps that defaults aim at
WARM_UP = 0.02  # share of all steps over which the learning rate rises
DECAY = 0.5  # share of all steps, the last ones, over which it falls to zero
PENALTY_WARM_UP = 0.2  # share of all steps over which the sparsity penalty rises
PROXIMAL = {"W_enc": "mu_enc", "b_enc": "nu_enc"}  # options that weigh how far a tensor moves in an outer iteration


class Rows(Protocol):
    """Rows to train on, streamed as often as a solver asks; a batch handed out is not written to again.

    Where several processes train together, each is handed its share of every batch, be it empty.
    """

    rows: int
    d_in: int

    def shuffled(self, epoch: int) -> Iterator[Tensor | Portion]:
        """Every row once, in batches (B, D), in an order that is a pure function of the epoch."""

    def sequential(self) -> Iterator[Tensor | Portion]:
        """Every row once, in batches (B, D), in stored order, each of which one process has whole."""


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
        penalty_warm_up: share of all steps over which the sparsity penalty rises.
        lr_warm_up: share of all steps over which the learning rate rises.
        lr_decay: share of all steps, the last ones, over which it falls to zero.
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

    Of several processes each tells its part of the measures, of its rows and latents, which are the parts' sums.

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
    """Trains an SAE's encoder by descent on batches; subclasses say what the decoder is.

    Args:
        initial: the SAE to start from, of its latents those that this process holds.
        task: what is to be minimised.
        also: tensors trained by descent besides the encoder and the activation's parameters, by name.
        config: the solver's options.
        outers: how many outer iterations training comes to: those that schedules of proximal weights run over.
    """

    def __init__(self, initial: SAE, task: Task, also: dict[str, Tensor], config: "SolverConfig", outers: int) -> None:
        kind = OPTIMIZERS[config.optimizer]
        self.config = config
        self.activation = initial.activation
        self.d_sae = initial.d_sae * latents_axis().size
        self.task = replace(task, lr=1.0, penalty_warm_up=0.0) if kind.to_tolerance else task
        self.smoothing = Smoothing(task.smoothing, task.sample)
        self.step = 0
        # Products over few latents read the weights of each side by side in memory, encoder and decoder alike.
        trained = {"W_enc": initial.W_enc.T.contiguous().T, "b_enc": initial.b_enc, **initial.parameters, **also}
        self.trained = {name: tensor.clone().requires_grad_(name not in self.activation.estimates)
                        for name, tensor in trained.items()}
        self._parameter_names = tuple(initial.parameters)
        self.optimizer = kind(self.trained, math.inf if config.clip_norm is None else config.clip_norm)
        self.outer = torch.tensor(0)
        self._outers = outers
        self._hold_encoder()

    @abstractmethod
    def decoder(self) -> tuple[Tensor, Tensor]:
        """W_dec (F, D) and b_dec (D,), differentiable in what is trained of them."""

    @abstractmethod
    def epoch(self, rows: Rows, epoch: int) -> Iterator[StepReport]:
        """One pass over the rows, a report a batch; ends early where the task's steps are used up."""

    def extra_loss(self) -> Tensor | float:
        """The encoder's proximal terms and the decay of what descent trains, divided by N."""
        total: Tensor | float = 0.0
        for name, held in self._held.items():
            if weight := self.weight(PROXIMAL[name]):
                total = total + weight * (self.trained[name] - held).square().sum()
        if self.config.weight_decay:
            weights = (self.trained[name] for name in ("W_enc", "W_dec") if name in self.trained)
            total = total + self.config.weight_decay * sum(tensor.square().sum() for tensor in weights)
        return total / self.task.rows

    def weight(self, name: str) -> float:
        """A proximal weight at the outer iteration under way, by its option's field."""
        return weight_at(getattr(self.config, name), int(self.outer), self._outers)

    def _hold_encoder(self) -> None:
        """Let the proximal terms, where there are any, refer to the encoder as it is."""
        self._held = {name: self.trained[name].detach().clone() for name, weight in PROXIMAL.items()
                      if getattr(self.config, weight)}

    def record(self) -> dict[str, float]:
        """Figures of the solver's own for `metrics.jsonl` and the final summary."""
        return {}

    def notes(self) -> list[str]:
        """Sentences that the user should read at the end."""
        return []

    def sae(self) -> SAE:
        """The SAE as it stands, acting on normalised rows."""
        with torch.no_grad():
            W_dec, b_dec = self.decoder()
            return SAE(self.trained["W_enc"].detach().clone(), self.trained["b_enc"].detach().clone(),
                       W_dec.detach().clone(), b_dec.detach().clone(), self.activation,
                       {name: value.detach().clone() for name, value in self._parameters().items()})

    def descend(self, batch: Tensor | Portion) -> StepReport:
        """One step of the optimiser on a batch (B, D), of which this process may have but a portion."""
        portion = as_portion(batch)
        portion = replace(portion, x=self.smoothing(portion, self.draws(self.step)))
        evaluations: list[list[Tensor]] = []  # the first and the latest

        def loss() -> Tensor:
            found = self._loss(portion)
            evaluations[1:] = [[tensor.detach() for tensor in found]]
            return found[0]

        self.optimizer.descend(loss, self.task.learning_rate(self.step))
        before, squared_error, z = evaluations[0]
        with torch.no_grad():
            for name, value in self.activation.estimated(evaluations[-1][2], self._parameters()).items():
                self.trained[name].copy_(value)
        self.step += 1
        return StepReport(self.step, portion.size, before, squared_error, z.count_nonzero().double() / portion.size)

    @torch.no_grad()
    def calibrate(self) -> None:
        """Set what the activation estimates for rows as they are; the last batches, smoothed, gave it for others."""
        if not self.activation.estimates or not len(self.task.sample):
            return
        pre = torch.addmm(self.trained["b_enc"], self.task.sample, self.trained["W_enc"])
        for name, value in self.activation.calibrated(pre, self._parameters()).items():
            self.trained[name].copy_(value)

    def _loss(self, batch: Tensor | Portion) -> tuple[Tensor, Tensor, Tensor]:
        """What this process adds to the loss of a batch and to its squared error, and the codes of its rows, (b, F)."""
        W_dec, b_dec = self.decoder()
        portion = as_portion(batch)
        x = portion.x
        pre = pre_activations(x, self.trained["W_enc"], self.trained["b_enc"])  # (b, F)
        z = self.activation.training_codes(pre, self._parameters())
        if not len(x):
            nothing = 0.0 * self.trained["b_enc"].sum()
            return nothing + self.extra_loss() / rows_axis().size, nothing, z
        x_hat = reconstructions(z, W_dec, b_dec, self.activation.moves_zeros)
        squared_error = (x_hat - x).square().sum(-1).sum() / (portion.size * latents_axis().size)
        loss = squared_error + self.extra_loss() / rows_axis().size
        if self.task.sparsity != "none":  # a mean over the rows that there are here
            penalty = self.activation.penalty(self.task.sparsity, pre, z, W_dec, self._parameters())
            loss = loss + self.task.penalty_weight(self.step) * (len(x) / portion.size) * penalty
        return loss, squared_error, z

    def draws(self, number: int, kind: int = 0) -> torch.Generator:
        """Random numbers that are a pure function of the seed, of the number of a step and of the kind of step."""
        return torch.Generator().manual_seed(((self.task.seed * 7 + kind) * 1_000_000_007 + number) % 2**63)

    def state(self) -> dict[str, Tensor]:
        """Everything that training goes on from, by name."""
        trained = {f"trained.{name}": tensor.detach() for name, tensor in self.trained.items()}
        return trained | self.optimizer.state() | {"step": torch.tensor(self.step), "outer": self.outer}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        self.step = int(state["step"])
        self.outer = state["outer"].clone()
        with torch.no_grad():
            for name, tensor in self.trained.items():
                tensor.copy_(state[f"trained.{name}"])
        self.optimizer.restore(state)
        self._hold_encoder()

    def _parameters(self) -> dict[str, Tensor]:
        return {name: self.trained[name] for name in self._parameter_names}


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
        """The same with every default filled in that depends on the length of training.

        Args:
            batches: how many there will be in all; None where optimiser steps are counted instead.
        """
        return self

    def check(self, rows: int, batch_size: int, lr: float | str, smoothing: float | str) -> None:
        """Refuse settings of training that cannot work with the solver's options; see `Optimizer.check`.

        Raises:
            ConfigError: they cannot.
        """
        OPTIMIZERS[self.optimizer].check(rows, batch_size, lr, smoothing)
        if OPTIMIZERS[self.optimizer].to_tolerance and self.clip_norm is not None:
            raise ConfigError("clip_norm", "does nothing with {optimizer} {given}, whose line search finds its steps",
                              "leave it out, or use {optimizer} adam or sgd", given=self.optimizer)

    def check_shared_latents(self) -> None:
        """Refuse options that cannot work where several processes hold the latents together.

        Raises:
            ConfigError: there are such.
        """
        if not OPTIMIZERS[self.optimizer].shares_latents:
            raise ConfigError("optimizer", "{given} looks at all weights at once, which {latent_shards} spreads over "
                                           "processes", "leave that out, or use {optimizer} adam or sgd",
                              given=self.optimizer)

    def default_smoothing(self, rows: int, d_in: int, d_sae: int) -> float:
        """The width by which training rows are smoothed when the user gives none."""
        return 0.0

    @abstractmethod
    def build(self, initial: SAE, task: Task) -> Solver:
        """A solver that starts from `initial`."""

    @abstractmethod
    def memory(self, rows: int, batch_size: int, d_in: int, d_sae: int) -> int:
        """Bytes that the solver takes at its peak in each process, the codes of a batch left out; d_sae is that of all
        processes together."""
