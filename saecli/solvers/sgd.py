"""SGD: encoder and decoder trained together by descent; the baseline of the paper and of the field's tools."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..config import option
from ..distributed import latents_axis
from ..sae import SAE
from .base import Rows, Solver, SolverConfig, StepReport, Task
from .optimizers import OPTIMIZERS


@dataclass(frozen=True)
class Sgd(SolverConfig):
    """Options of SGD."""

    name: ClassVar[str] = "sgd"

    tied: bool = option(False, "Tie the decoder to the encoder: W_dec = W_enc'.")

    def build(self, initial: SAE, task: Task) -> "SgdSolver":
        """A solver that starts from `initial`."""
        return SgdSolver(initial, task, self)

    def memory(self, rows: int, batch_size: int, d_in: int, d_sae: int) -> int:
        """Weights, their gradients, what the optimiser keeps, and for `mu_enc` the encoder as it was, in float32."""
        matrices = (2 + OPTIMIZERS[self.optimizer].vectors) * (1 if self.tied else 2) + bool(self.mu_enc)
        return 4 * matrices * d_in * d_sae // latents_axis().size


class SgdSolver(Solver):
    """Descent on encoder and decoder together, or with tied weights on the one matrix they share."""

    def __init__(self, initial: SAE, task: Task, config: Sgd) -> None:
        self.tied = config.tied
        decoder = {"b_dec": initial.b_dec} | ({} if self.tied else {"W_dec": initial.W_dec.contiguous()})
        super().__init__(initial, task, decoder, config, math.ceil(task.steps / task.batches))

    def decoder(self) -> tuple[Tensor, Tensor]:
        """W_dec (F, D) and b_dec (D,), both trained."""
        W_dec = self.trained["W_enc"].T if self.tied else self.trained["W_dec"]
        return W_dec, self.trained["b_dec"]

    def epoch(self, rows: Rows, epoch: int) -> Iterator[StepReport]:
        """One step a batch."""
        for batch in rows.shuffled(epoch):
            if self.step >= self.task.steps:
                break
            yield self.descend(batch)
        self.outer += 1
        self._hold_encoder()
        if self.step >= self.task.steps:
            self.calibrate()
