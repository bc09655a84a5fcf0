"""SGD: encoder and decoder trained together by descent; the baseline of the paper and of the field's tools."""

import math

import torch

from ..base.distributed import ALONE, Communicator
from ..sae.batch import Batch
from ..sae.codes import Codes
from ..sae.dictionary import SAE, Coupled, Dictionary
from .options import Sgd
from .solver import Solver
from .task import StepReport, Task

REVIVALS = 20  # times that dead latents are looked for in all of training, at least once per epoch


def solver(initial: SAE, task: Task, config: Sgd, communicator: Communicator = ALONE) -> "SgdSolver":
    """A solver that starts from a copy of `initial`."""
    start = initial.sae()
    return SgdSolver(Coupled(start, 1.0, None, task.B) if config.tied else start, task, config, communicator)


class SgdSolver(Solver):
    """Descent on all parameters of a dictionary together."""

    def __init__(self, dictionary: Dictionary, task: Task, config: Sgd, communicator: Communicator = ALONE) -> None:
        super().__init__(dictionary, (), task, config, math.ceil(task.steps / task.batches), communicator)

    def begin_epoch(self) -> None:
        """Begin a pass over the rows, after each of a few parts of which dead latents are revived."""
        super().begin_epoch()
        steps_per_epoch = self.task.batches * self.config.inner_steps
        looks = max(1, round(steps_per_epoch * REVIVALS / self.task.steps))
        self._every = math.ceil(self.task.batches / looks)
        self._forget_firing()

    def _forget_firing(self) -> None:
        self._seen, self._fired = 0, torch.zeros_like(self.dictionary.b_enc, dtype=torch.bool)

    def _trained(self, codes: Codes, batch: Batch) -> None:
        """Note which latents fire."""
        self._seen += batch.size
        self._fired |= codes.fired()

    def _end_part(self) -> None:
        """Revive latents that did not fire in this part of the epoch."""
        if self.config.revive:
            fired = self.communicator.all_reduce(self._fired.to(torch.int32)) > 0
            self.revive(fired, self._seen)
        self._forget_firing()

    def end_epoch(self) -> list[StepReport]:
        """End the pass; after the last epoch the activation's estimates are set."""
        reports = super().end_epoch()
        self._end_part()
        self.outer += 1
        self._hold_encoder()
        if self.finished:
            self.calibrate()
        return reports
