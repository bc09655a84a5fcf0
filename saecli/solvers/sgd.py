"""SGD: encoder and decoder trained together by descent; the baseline of the paper and of the field's tools."""

import math
from dataclasses import dataclass
from typing import ClassVar

from ..batch import Batch
from ..config import option
from ..dictionary import SAE, Coupled, Dictionary
from ..distributed import ALONE, Communicator
from .base import Solver, SolverConfig, StepReport, Task
from .optimizers import OPTIMIZERS


@dataclass(frozen=True)
class Sgd(SolverConfig):
    """Options of SGD."""

    name: ClassVar[str] = "sgd"

    tied: bool = option(False, "Tie the decoder to the encoder: W_dec = W_enc'.")

    def build(self, initial: SAE, task: Task, communicator: Communicator = ALONE) -> "SgdSolver":
        start = initial.sae()
        return SgdSolver(Coupled(start, 1.0, None) if self.tied else start, task, self, communicator)

    def memory(self, rows: int, batch_size: int, d_in: int, d_sae: int) -> int:
        """Weights, gradients, optimiser state, and for `mu_enc` the encoder's reference, in float32."""
        matrices = (2 + OPTIMIZERS[self.optimizer].vectors) * (1 if self.tied else 2) + bool(self.mu_enc)
        return 4 * matrices * d_in * d_sae


class SgdSolver(Solver):
    """Descent on all parameters of a dictionary together."""

    def __init__(self, dictionary: Dictionary, task: Task, config: Sgd, communicator: Communicator = ALONE) -> None:
        super().__init__(dictionary, (), task, config, math.ceil(task.steps / task.batches), communicator)

    def step(self, batch: Batch) -> list[StepReport]:
        return [] if self.finished else [self.descend(batch)[0]]

    def end_epoch(self) -> list[StepReport]:
        """Nothing waits; after the last epoch the activation's estimates are set."""
        self.outer += 1
        self._hold_encoder()
        if self.finished:
            self.calibrate()
        return []
