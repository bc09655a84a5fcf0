"""The base of all solvers: the descent step with its schedules, and the state needed to resume.

Shapes: B rows, D = d_in, F = d_sae. All rows are normalised (see `training/rows.py`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..base.distributed import ALONE, Communicator
from ..base.precision import products_in
from ..sae.batch import Batch, mixed
from ..sae.codes import Codes
from ..sae.dictionary import SAE, Dictionary, Loss
from .maintenance import directions_of_worst, revive
from .optimizers import OPTIMIZERS
from .options import REVIVAL_ROWS, WINDOW, SolverConfig, weight_at
from .smoothing import Smoothing
from .task import StepReport, Task

REVIVAL = 0.9  # fraction of all steps during which dead latents are revived; the rest is for them to settle
DECODER_STEP, REVIVING, MIXING, CALIBRATING = 1, 2, 3, 4  # kinds of draws besides those of steps
COUNTERS = ("steps", "outer", "revived")  # of a solver, which a checkpoint keeps
PROXIMAL = {"W_enc": "mu_enc", "b_enc": "nu_enc"}  # options: proximal weight of each tensor


class Solver(ABC):
    """Trains a dictionary on batches that are pushed to it.

        solver.begin_epoch()
        for batch in rows: reports = solver.step(batch)
        solver.end_epoch()

    After each of these calls a decoder step may be `due`; then, before any other call, `begin_pass`, `observe` with
    each batch of a pass over `due` rows, and `end_pass`, until none is due.

    Args:
        dictionary: trained in place.
        held: names of its parameters that descent does not move.
        task: the training problem.
        config: the solver's options.
        outers: number of outer iterations in all of training, for the schedules of proximal weights.
        communicator: of the processes that train on other parts of each batch.
    """

    _every: float = math.inf  # batches in a part of an epoch, after each of which but the last `_end_part` is called

    def __init__(self, dictionary: Dictionary, held: Collection[str], task: Task, config: SolverConfig, outers: int,
                 communicator: Communicator = ALONE) -> None:
        kind = OPTIMIZERS[config.optimizer]
        self.dictionary, self.config, self.communicator = dictionary, config, communicator
        self.task = (replace(task, lr=1.0, training=replace(task.training, sparsity_warm_up=0.0))
                     if kind.to_tolerance else task)
        self.smoothing = Smoothing(task.training.smoothing, task.sample.x, task.sample.y)
        # Sparse products read the weights latent by latent, so each latent's are contiguous, as in the decoder.
        dictionary.W_enc.data = dictionary.W_enc.data.T.contiguous().T
        for name, parameter in dictionary.named_parameters():
            parameter.requires_grad_(name not in (*held, task.held, *dictionary.activation.estimates))
        clip_norm = math.inf if config.clip_norm is None else config.clip_norm
        self.optimizer = kind(dict(dictionary.named_parameters()), clip_norm,
                              communicator.all_reduce if communicator.world_size > 1 else None)
        self.steps = 0
        self.outer = 0
        self.revived = 0
        self._outers = outers
        self._window: list[Batch] = []
        self._hold_encoder()

    @property
    def due(self) -> int | None:
        """Number of rows that the due decoder step has to observe; None if none is due."""
        return None

    @property
    def finished(self) -> bool:
        """Whether the task's steps are used up."""
        return self.steps >= self.task.steps

    def begin_epoch(self) -> None:
        """Begin a pass over the rows."""
        self._batches = 0  # of the epoch, taken so far

    def step(self, batch: Batch) -> list[StepReport]:
        """Collect a batch of the epoch, and train once there is a window of them.

        Returns:
            The reports of the optimiser steps taken: none if the task's steps are used up, or if more batches are
            collected first.
        """
        if self.finished:
            return []
        self._batches += 1
        self._window.append(batch)
        enough = len(self._window) >= (1 if self.config.inner_steps == 1 else WINDOW)
        ends = self._batches % self._every == 0
        reports = self._inner_steps() if enough or ends else []
        if ends and self._batches < self.task.batches and not self.finished:
            self._end_part()
        return reports

    def end_epoch(self) -> list[StepReport]:
        """End the pass. Returns the reports of the steps on batches collected so far."""
        return self._inner_steps()

    def _inner_steps(self) -> list[StepReport]:
        """`inner_steps` rounds over the collected batches, their rows mixed anew in each: as many consecutive steps on
        one batch would overfit to that batch, the more so with a decoder that is held fixed."""
        batches, self._window = self._window, []
        if not batches:
            return []
        waiting, inner, size, reports = len(batches), self.config.inner_steps, batches[0].size, []
        whole = Batch.joined(batches) if inner > 1 else None
        rounds = min(inner, math.ceil((self.task.steps - self.steps) / waiting))
        for round_ in range(rounds):
            if whole is not None:
                order = torch.randperm(whole.size, generator=self.draws(self.steps, MIXING))
                batches = mixed(whole, order, size)
            for batch in batches:
                if self.finished:
                    break
                report, smoothed, codes = self.descend(batch)
                reports.append(report)
                if round_ == rounds - 1:
                    self._trained(codes, smoothed)
        return reports

    @abstractmethod
    def _trained(self, codes: Codes, batch: Batch) -> None:
        """Take the codes, (b, F), that a batch had in the last round over its window: each row of an epoch comes here
        once."""

    @abstractmethod
    def _end_part(self) -> None:
        """A part of an epoch is over, its batches trained on; the last part ends with the epoch."""

    def begin_pass(self, again: Callable[[], Iterable[Batch]]) -> None:
        """Begin the decoder step that is due; `again` gives the pass' batches once more, for an iterative solve."""
        raise TypeError(f"{type(self).__name__} has no decoder step")

    def observe(self, batch: Batch) -> None:
        """Take a batch of the decoder step's pass."""
        raise TypeError(f"{type(self).__name__} has no decoder step")

    def end_pass(self) -> None:
        """End the decoder step's pass: solve."""
        raise TypeError(f"{type(self).__name__} has no decoder step")

    def extra_loss(self) -> Tensor | float:
        """The encoder's proximal terms and the weight decay of the tensors that descent trains, divided by N."""
        total: Tensor | float = 0.0
        for name, held in self._held.items():
            if weight := self.weight(PROXIMAL[name]):
                total = total + weight * (getattr(self.dictionary, name) - held).square().sum()
        if self.config.weight_decay:
            weights = (tensor for tensor in self.optimizer.tensors.values() if tensor.dim() == 2)
            total = total + self.config.weight_decay * sum(tensor.square().sum() for tensor in weights)
        return total / self.task.rows

    def weight(self, name: str) -> float:
        """The proximal weight of an option at the current outer iteration."""
        return weight_at(getattr(self.config, name), self.outer, self._outers)

    def _hold_encoder(self) -> None:
        """Take the current encoder as the reference of its proximal terms, if there are any."""
        self._held = {name: getattr(self.dictionary, name).detach().clone() for name, weight in PROXIMAL.items()
                      if getattr(self.config, weight)}

    @property
    def _revives(self) -> bool:
        """Whether latents are revived now: not if training is about to end."""
        return self.config.revive and not self.task.held and self.steps < REVIVAL * self.task.steps

    def revive(self, fired: Tensor, rows: float) -> None:
        """Re-aim latents that did not fire on enough rows at the sampled rows reconstructed worst, unless training is
        about to end.

        Args:
            fired: the latents that fired on any row, a mask, (F,), of all processes' rows.
            rows: the number of rows.
        """
        sample, dead = self.task.sample, ~fired
        if not self._revives or not len(sample.x) or rows < REVIVAL_ROWS * len(dead):
            return
        count = int(dead.sum())
        if not 0 < count < len(dead):
            return
        with torch.no_grad():
            residuals = sample.y - self.dictionary(sample.x)
            if not residuals.isfinite().all():  # training has diverged, and whoever measures its loss will say so
                return
            directions = directions_of_worst(residuals, count, self.draws(self.steps, REVIVING))
            revive(self.dictionary, dead, self.communicator.broadcast(directions), self.task.B)
        self.optimizer.forget(dead, self.dictionary.latent_dimension)
        self.revived += count

    def record(self) -> dict[str, float]:
        """The solver's own measures for `metrics.jsonl` and the final summary: how many times a latent was revived."""
        return {"revived": self.revived}

    def notes(self) -> list[str]:
        """Sentences for the user at the end of training."""
        return []

    def sae(self) -> SAE:
        """The current SAE, acting on normalised rows."""
        return self.dictionary.sae().without_training_parameters()

    def descend(self, batch: Batch) -> tuple[StepReport, Batch, Codes]:
        """One step of the optimiser on a batch: its report, the batch smoothed, and its codes."""
        batch = self.smoothing(batch, self.draws(self.steps))
        evaluations: list[Loss] = []  # the first and the latest

        def loss() -> Tensor:
            found = self.dictionary.loss(batch, self.task.training.sparsity, self.task.penalty_weight(self.steps))
            value = found.value + self.extra_loss() / self.communicator.world_size
            evaluations[1:] = [Loss(value.detach(), found.squared_error.detach(), found.codes.detach())]
            return value

        with products_in(self.task.training.precision):
            self.optimizer.descend(loss, self.task.learning_rate(self.steps))
        first, latest = evaluations[0], evaluations[-1]
        with torch.no_grad():
            activation, parameters = self.dictionary.activation, self.dictionary.activation_parameters
            self.steps += 1
            for name, value in activation.estimated(latest.codes, parameters, self.steps / self.task.steps).items():
                parameters[name].copy_(self.communicator.mean(value))
        report = StepReport(self.steps, batch.size, first.value, first.squared_error,
                            first.codes.count().double() / batch.size)
        return report, batch, latest.codes

    @torch.no_grad()
    def calibrate(self) -> None:
        """Set the activation's estimates for unsmoothed rows; training estimated them on smoothed ones."""
        activation, parameters = self.dictionary.activation, self.dictionary.activation_parameters
        sample, encoded = self.task.sample.x, self.dictionary.pre_activations
        if not activation.estimates or not len(sample):
            return

        def smoothed(width: float) -> Tensor:
            narrower = Smoothing(min(width, self.smoothing.width), sample)
            return encoded(narrower(Batch.of(sample), self.draws(self.steps, CALIBRATING)).x)

        for name, value in activation.calibrated(encoded(sample), parameters, smoothed).items():
            parameters[name].copy_(value)

    def draws(self, number: int, kind: int = 0) -> torch.Generator:
        """A generator that is a pure function of the seed, the step's number and the kind of step."""
        return torch.Generator().manual_seed(((self.task.training.seed * 7 + kind) * 1_000_000_007 + number) % 2**63)

    def state(self) -> dict[str, Tensor]:
        """All tensors needed to resume, by name."""
        own = {f"dictionary.{name}": tensor for name, tensor in self.dictionary.state_dict().items()}
        return own | self.optimizer.state() | {name: torch.tensor(getattr(self, name)) for name in COUNTERS}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume from the tensors of `state`."""
        for name in COUNTERS:
            setattr(self, name, int(state[name]))
        with torch.no_grad():
            for name, tensor in self.dictionary.state_dict().items():
                tensor.copy_(state[f"dictionary.{name}"])
        self.optimizer.restore(state)
        self._hold_encoder()
