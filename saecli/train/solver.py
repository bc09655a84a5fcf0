"""Descent on batches of rows, which all solvers share; and SGD, the baseline of the field's tools."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..base.devices import products_in
from ..base.processes import ALONE, Communicator
from ..sae.activations import KeepsK
from ..sae.activations.base import FALL
from ..sae.codes import Codes, in_cache, joined
from ..sae.dictionary import SAE, Batch, Coupled, Dictionary
from .descent import Descent, Draws, StepReport, Task
from .moments import Pass
from .options import REVIVAL_ROWS, Paper, Sgd, SolverConfig
from .rows import Smoothing, TrainingRows
from .upkeep import revive

DECODER_STEPS = 20  # aimed at in all of training; SGD looks for dead latents as often
PROXIMAL = {"W_enc": "mu_enc", "b_enc": "nu_enc"}  # options: proximal weight of each tensor


class Solver(Descent):
    """Descent on the loss of smoothed batches, with the paper's proximal terms and weight decay."""

    def __init__(
        self,
        dictionary: Dictionary,
        fixed: Collection[str],
        task: Task,
        config: SolverConfig,
        communicator: Communicator = ALONE,
    ) -> None:
        super().__init__(dictionary, fixed, task, config, communicator)
        self.paper = config if isinstance(config, Paper) else Paper()
        self.penalty = dictionary.activation.penalty(task.sparsity)
        self._k = dictionary.k or 0
        self.smoothing = Smoothing(float(task.training.smoothing), task.sample.x, task.sample.y)
        self.inflation = self.smoothing.inflation
        self.hold_encoder()

    def train(self, batches: Iterable[Batch], rows: TrainingRows) -> Iterator[StepReport]:
        for batch in batches:
            yield self.step(batch)
        self.calibrate()

    def step(self, batch: Batch) -> StepReport:
        report, _ = self.descend(batch)
        return report

    def descend(self, batch: Batch) -> tuple[StepReport, Codes]:
        """One optimiser step; also the smoothed batch's codes."""
        task, dictionary, step = self.task, self.dictionary, self.steps
        self._lower_k()
        batch = self.smoothing(batch, task.draws(step, Draws.STEP))
        self.optimizer.zero_grad()
        with products_in(task.training.precision):
            loss = dictionary.loss(batch, task.sparsity, task.penalty_weight(step))
            value = loss.value + self.extra_loss() / self.communicator.world_size
            value.backward()
            self.move()
        codes = loss.codes.detach()
        self._estimate(codes)
        l0 = codes.count().double() / batch.size
        squared_error = loss.squared_error.detach()
        return StepReport(self.steps, batch.size, value.detach(), squared_error, l0), codes

    def _lower_k(self) -> None:
        """k falls from `k_start` over the first half of the steps."""
        activation, k_start = self.dictionary.activation, self.task.training.k_start
        if k_start is not None and isinstance(activation, KeepsK):
            left = max(0.0, 1 - self.steps / (FALL * self.task.steps))
            k = self._k + round((k_start - self._k) * left)
            self.dictionary.activation = replace(activation, k=k)

    def extra_loss(self) -> Tensor | float:
        """The paper's proximal terms and weight decay, over N."""
        total: Tensor | float = 0.0
        for name, reference in self._references.items():
            weight = getattr(self.paper, PROXIMAL[name])
            total = total + weight * (getattr(self.dictionary, name) - reference).square().sum()
        if self.paper.weight_decay:
            matrices = [tensor for tensor in self.optimizer.tensors.values() if tensor.dim() == 2]
            squares = sum(matrix.square().sum() for matrix in matrices)
            total = total + self.paper.weight_decay * squares
        return total / self.task.rows

    def hold_encoder(self) -> None:
        """Take this encoder as W_enc^t and b_enc^t of the proximal terms."""
        self._references = {
            name: getattr(self.dictionary, name).detach().clone()
            for name, weight in PROXIMAL.items()
            if getattr(self.paper, weight)
        }

    @torch.no_grad()
    def _estimate(self, codes: Codes) -> None:
        parameters, progress = self.dictionary.activation_parameters, self.steps / self.task.steps
        estimates = self.dictionary.activation.after_step(codes, parameters)
        estimates |= self.penalty.after_step(codes, parameters, progress)
        for name, estimate in estimates.items():
            parameters[name].copy_(self.communicator.mean(estimate))

    @torch.no_grad()
    def calibrate(self) -> None:
        for name, value in self.calibrated(self.dictionary).items():
            self.dictionary.activation_parameters[name].copy_(value)

    @torch.no_grad()
    def encoded(self, due: Pass, rows: TrainingRows) -> Iterator[tuple[Codes, Batch]]:
        """A pass' codes and rows, smoothed and in the precision of descent; exact in the last."""
        draws = self.task.draws(due.number, Draws.DECODER_STEP)
        for batch in rows.some(due.rows, due.step):
            if not due.last:
                batch = self.smoothing(batch, draws)
            # Cosines of latents are made for each block.
            whole = self.dictionary.activation.compares_directions
            blocks = (batch.x,) if whole else in_cache(batch.x)
            with products_in("float32" if due.last else self.task.training.precision):
                codes = joined([self.dictionary.codes(part) for part in blocks])
            yield codes, batch

    def state(self) -> dict[str, Tensor]:
        references = {f"reference.{name}": tensor for name, tensor in self._references.items()}
        return super().state() | references

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self._references = {
            name: state[f"reference.{name}"].to(reference)
            for name, reference in self._references.items()
        }


class SgdSolver(Solver):
    config: Sgd

    def __init__(
        self, initial: SAE, task: Task, config: Sgd, communicator: Communicator = ALONE
    ) -> None:
        super().__init__(self.dictionary_of(initial, task, config), (), task, config, communicator)
        self._between = min(task.batches, math.ceil(task.steps / DECODER_STEPS))
        self._forget_firing()

    @staticmethod
    def dictionary_of(initial: SAE, task: Task, config: Sgd) -> Dictionary:
        return Coupled(initial.sae(), 1.0, None, task.B) if config.tied else initial.sae()

    def step(self, batch: Batch) -> StepReport:
        # Before it, so that a step follows where a text ends early too.
        enough = min(self.task.rows, REVIVAL_ROWS * self.dictionary.d_sae)
        if self.steps % self._between == 0 and self._seen >= enough:
            fired = self.communicator.all_reduce(self._fired.to(torch.int32)) > 0
            revive(self, fired, min(self._seen, self.task.rows))
            self._forget_firing()
        report, codes = self.descend(batch)
        self._seen += batch.size
        self._fired |= codes.fired()
        if self.steps % self.task.batches == 0:
            self.hold_encoder()
        return report

    def _forget_firing(self) -> None:
        self._seen, self._fired = 0, torch.zeros_like(self.dictionary.b_enc, dtype=torch.bool)

    def state(self) -> dict[str, Tensor]:
        fired = self.communicator.all_reduce(self._fired.to(torch.int32))
        return super().state() | {"seen": torch.tensor(self._seen), "fired": fired}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self._seen, self._fired = int(state["seen"]), state["fired"].to(self._fired.device) > 0
