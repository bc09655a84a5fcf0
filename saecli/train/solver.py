"""What every solver has: descent steps, revival, and the state needed to resume.

Shapes: B rows, D = d_in, F = d_sae. All rows are normalised (see `rows.py`).
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor

from ..base.devices import products_in
from ..base.processes import ALONE, Communicator
from ..sae.codes import Codes
from ..sae.dictionary import SAE, Batch, Dictionary, mixed
from .decoder_step import Pass, directions_of_worst, revive
from .optimizers import Adam
from .options import REVIVAL_ROWS, WINDOW, SolverConfig
from .smoothing import Smoothing
from .task import StepReport, Task

REVIVAL = 0.9  # fraction of all steps during which dead latents are revived; the rest is for them to settle
DECODER_STEP, REVIVING, MIXING, CALIBRATING = 1, 2, 3, 4  # kinds of draws; 0 for steps
PROXIMAL = {"W_enc": "mu_enc", "b_enc": "nu_enc"}  # options: proximal weight of each tensor


class Solver:
    """Trains a dictionary on batches that are pushed to it.

        solver.begin_epoch()
        for batch in rows: reports = solver.step(batch)
        solver.end_epoch()

    At each of its `passes`, by epoch and number of batches, a decoder step is made: `begin_pass`, `observe` with each
    batch of the pass, and `end_pass`, until that returns True.

    Args:
        dictionary: trained in place.
        held: names of its parameters that descent does not move.
        every: batches after which the epoch's rows so far have been trained on.
    """

    passes: Mapping[tuple[int, int], Pass] = {}

    def __init__(self, dictionary: Dictionary, held: Collection[str], task: Task, config: SolverConfig, every: int,
                 communicator: Communicator = ALONE) -> None:
        self.dictionary, self.task, self.config, self.communicator = dictionary, task, config, communicator
        self.every = every
        self.smoothing = Smoothing(float(task.training.smoothing), task.sample.x, task.sample.y)
        # Sparse products read the weights latent by latent, so each latent's are contiguous, as in the decoder.
        dictionary.W_enc.data = dictionary.W_enc.data.T.contiguous().T
        for name, parameter in dictionary.named_parameters():
            parameter.requires_grad_(name not in (*held, task.held, *dictionary.activation.estimates))
        self.optimizer = Adam(dict(dictionary.named_parameters()), config.clip_norm,
                              communicator.all_reduce if communicator.world_size > 1 else None)
        self.steps = 0
        self.revived = 0
        self._window: list[Batch] = []
        self.hold_encoder()

    @property
    def finished(self) -> bool:
        return self.steps >= self.task.steps

    def begin_epoch(self) -> None:
        """Begin a pass over the rows."""
        self.batches = 0  # of the epoch, taken so far

    def step(self, batch: Batch) -> list[StepReport]:
        """Collect a batch of the epoch, and train once there is a window of them: the reports of the optimiser steps
        taken, none while batches are collected or once the task's steps are used up."""
        if self.finished:
            return []
        self.batches += 1
        self._window.append(batch)
        whole = len(self._window) == (1 if self.config.rounds == 1 else WINDOW)
        return self._train_window() if whole or self.batches % self.every == 0 else []

    def end_epoch(self) -> list[StepReport]:
        """Train on the batches collected so far; after the last epoch set the activation's estimates."""
        reports = self._train_window()
        if self.finished:
            self.calibrate()
        return reports

    def _train_window(self) -> list[StepReport]:
        """`inner_steps` rounds over the collected batches, their rows mixed anew in each: consecutive steps on one
        batch would overfit to it, the more so with a decoder that is held fixed."""
        batches, self._window = self._window, []
        if not batches:
            return []
        waiting, inner, size, reports = len(batches), self.config.rounds, batches[0].size, []
        whole = Batch.joined(batches) if inner > 1 else None
        rounds = min(inner, math.ceil((self.task.steps - self.steps) / waiting))
        for round_ in range(rounds):
            taken: Iterable[Batch] = batches
            if whole is not None:
                order = torch.randperm(whole.size, generator=self.draws(self.steps, MIXING))
                taken = mixed(whole, order, size)
            for batch in taken:
                if self.finished:
                    break
                report, codes = self.descend(batch)
                reports.append(report)
                if round_ == rounds - 1:
                    self.trained(codes, report.rows)
        return reports

    def descend(self, batch: Batch) -> tuple[StepReport, Codes]:
        """One step of the optimiser on a batch, and its codes, smoothed."""
        task, training, dictionary, step = self.task, self.task.training, self.dictionary, self.steps
        batch = self.smoothing(batch, self.draws(step))
        self.optimizer.zero_grad()
        with products_in(training.precision):
            loss = dictionary.loss(batch, training.sparsity or "none", task.penalty_weight(step))
            value = loss.value + self.extra_loss() / self.communicator.world_size
            value.backward()
            self.optimizer.step(task.learning_rate(step))
        self.steps, codes = step + 1, loss.codes.detach()
        with torch.no_grad():
            parameters = dictionary.activation_parameters
            estimates = dictionary.activation.estimated(codes, parameters, self.steps / task.steps)
            for name, estimate in estimates.items():
                parameters[name].copy_(self.communicator.mean(estimate))
        return StepReport(self.steps, batch.size, value.detach(), loss.squared_error.detach(),
                          codes.count().double() / batch.size), codes

    def trained(self, codes: Codes, rows: int) -> None:
        """Take a batch's codes, (b, F), in the last round over its window, where each row of an epoch is once."""

    def begin_pass(self, now: Pass, again: Callable[[], Iterable[Batch]]) -> None:
        """Begin one of `passes`; `again` gives its batches once more, for an iterative solution."""
        raise TypeError(f"{type(self).__name__} has no decoder step")

    def observe(self, batch: Batch) -> None:
        """Take a batch of the pass."""
        raise TypeError(f"{type(self).__name__} has no decoder step")

    def end_pass(self) -> bool:
        """Solve for the decoder. False if the pass has to be made again first."""
        raise TypeError(f"{type(self).__name__} has no decoder step")

    def extra_loss(self) -> Tensor | float:
        """The encoder's proximal terms and the weight decay of the tensors that descent trains, divided by N."""
        total: Tensor | float = 0.0
        for name, held in self._held.items():
            weight = getattr(self.config, PROXIMAL[name])
            total = total + weight * (getattr(self.dictionary, name) - held).square().sum()
        if self.config.weight_decay:
            weights = (tensor for tensor in self.optimizer.tensors.values() if tensor.dim() == 2)
            total = total + self.config.weight_decay * sum(tensor.square().sum() for tensor in weights)
        return total / self.task.rows

    def hold_encoder(self) -> None:
        """Take the current encoder as the reference of its proximal terms."""
        self._held = {name: getattr(self.dictionary, name).detach().clone() for name, weight in PROXIMAL.items()
                      if getattr(self.config, weight)}

    @property
    def revives(self) -> bool:
        """Whether latents are revived now: not if training is about to end."""
        return self.config.revive and not self.task.held and self.steps < REVIVAL * self.task.steps

    def revive(self, fired: Tensor, rows: float) -> None:
        """Re-aim latents that did not fire on any of enough rows, of all processes, at the sampled rows reconstructed
        worst, unless training is about to end; `fired` is a mask, (F,)."""
        sample, dead = self.task.sample, ~fired
        if not self.revives or not len(sample.x) or rows < REVIVAL_ROWS * len(dead):
            return
        count = int(dead.sum())
        if not 0 < count < len(dead):
            return
        with torch.no_grad():
            residuals = sample.y - self.dictionary(sample.x)
            if not residuals.isfinite().all():  # training has diverged, and the check of the loss will say so
                return
            directions = directions_of_worst(residuals, count, self.draws(self.steps, REVIVING))
            revive(self.dictionary, dead, self.communicator.broadcast(directions), self.task.B)
        self.optimizer.forget(dead, self.dictionary.latent_dimension)
        self.revived += count

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

    def record(self) -> dict[str, float]:
        """The solver's own measures for `metrics.jsonl` and the final summary."""
        return {"revived": self.revived}

    def notes(self) -> list[str]:
        """Sentences for the user at the end of training."""
        return []

    def sae(self) -> SAE:
        """The current SAE, acting on normalised rows."""
        return self.dictionary.sae().without_training_parameters()

    def draws(self, number: int, kind: int = 0) -> torch.Generator:
        """A generator that is a pure function of the seed, the step's number and the kind of step."""
        return torch.Generator().manual_seed(((self.task.training.seed * 7 + kind) * 1_000_000_007 + number) % 2**63)

    def state(self) -> dict[str, Tensor]:
        """All tensors needed to resume."""
        own = {f"dictionary.{name}": tensor for name, tensor in self.dictionary.state_dict().items()}
        return own | self.optimizer.state() | {"steps": torch.tensor(self.steps), "revived": torch.tensor(self.revived)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.steps, self.revived = int(state["steps"]), int(state["revived"])
        with torch.no_grad():
            for name, tensor in self.dictionary.state_dict().items():
                tensor.copy_(state[f"dictionary.{name}"])
        self.optimizer.restore(state)
        self.hold_encoder()

