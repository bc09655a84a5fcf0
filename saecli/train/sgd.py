"""SGD: encoder and decoder trained together by descent; the baseline of the paper and of the field's tools."""

import math

import torch

from ..base.processes import ALONE, Communicator
from ..sae.codes import Codes
from ..sae.dictionary import SAE, Batch, Coupled, Dictionary
from .options import Sgd
from .solver import Solver
from .task import StepReport, Task

REVIVALS = 20  # times that dead latents are looked for in all of training, at least once per epoch


def solver(initial: SAE, task: Task, config: Sgd, communicator: Communicator = ALONE) -> "SgdSolver":
    """A solver that starts from a copy of `initial`."""
    start = initial.sae()
    return SgdSolver(Coupled(start, 1.0, None, task.B) if config.tied else start, task, config, communicator)


class SgdSolver(Solver):
    """Descent on all parameters of a dictionary together. Dead latents are revived a few times per epoch."""

    def __init__(self, dictionary: Dictionary, task: Task, config: Sgd, communicator: Communicator = ALONE) -> None:
        looks = max(1, round(task.batches * config.rounds * REVIVALS / task.steps))
        super().__init__(dictionary, (), task, config, math.ceil(task.batches / looks), communicator)

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self._forget_firing()

    def step(self, batch: Batch) -> list[StepReport]:
        reports = super().step(batch)
        if self.batches % self.every == 0 and self.batches < self.task.batches and not self.finished:
            self._revive_silent()
        return reports

    def trained(self, codes: Codes, rows: int) -> None:
        """Note which latents fire."""
        self._seen += rows
        self._fired |= codes.fired()

    def end_epoch(self) -> list[StepReport]:
        reports = super().end_epoch()
        self._revive_silent()
        self.hold_encoder()
        return reports

    def _revive_silent(self) -> None:
        """Revive latents that have not fired since the last call."""
        if self.config.revive:
            fired = self.communicator.all_reduce(self._fired.to(torch.int32)) > 0
            self.revive(fired, self._seen)
        self._forget_firing()

    def _forget_firing(self) -> None:
        self._seen, self._fired = 0, torch.zeros_like(self.dictionary.b_enc, dtype=torch.bool)
