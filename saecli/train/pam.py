"""The paper's PAM-SGD, `--solver pam`: descent on the encoder alternates with the decoder's closed-form optimum.

Source: the paper's Algorithm 3.1. Outer iteration t takes encoder steps over all rows, with the decoder held, on

    sum ||x_hat - x||^2 + penalty + mu_enc ||W_enc - W_enc^t||_F^2 + nu_enc ||b_enc - b_enc^t||^2

(no term has a 1/2), and then the decoder step: the minimum over (W_dec, b_dec), for the codes of all rows, of

    sum ||x_hat - x||^2 + penalty + alpha ||W_dec||_F^2 + beta ||b_dec||^2
        + mu_dec ||W_dec - W_dec^t||_F^2 + nu_dec ||b_dec - b_dec^t||^2
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from ..base.processes import ALONE, Communicator
from ..sae.dictionary import SAE, Batch, Coupled
from .descent import StepReport, Task
from .moments import Moments, Pass, Solution, alpha_rule, penalty_decay
from .options import ClosedForm, Pam
from .ridge import DecoderState, Terms
from .rows import TrainingRows
from .solver import Solver


class PamSolver(Solver):
    """Algorithm 3.1: `train` is its loop, `step` its encoder step, `decoder_step` the decoder's optimum."""

    config: ClosedForm
    dictionary: Coupled  # W_dec = c W_enc' + Delta with c = 0: Delta is W_dec
    solved_for: tuple[str, ...] = ("Delta", "b_dec", "W_skip")

    def __init__(
        self, initial: SAE, task: Task, config: ClosedForm, communicator: Communicator = ALONE
    ) -> None:
        dictionary = self.dictionary_of(initial.sae(), task)
        super().__init__(dictionary, self.solved_for, task, config, communicator)
        self.schedule = {due.step: due for due in self.passes()}
        self.solution = Solution(dictionary.W_enc.norm().item())

    @staticmethod
    def dictionary_of(start: SAE, task: Task) -> Coupled:
        return Coupled(start, 0.0, start.W_dec, task.B)

    def passes(self) -> list[Pass]:
        """The decoder steps: after each epoch, over all rows."""
        task, chooses = self.task, self.config.alpha == "auto"
        ends = [*range(task.batches, task.steps, task.batches), task.steps]
        return [
            Pass(t, step, task.rows, alpha_rule(t) if chooses else "keep", last=step == task.steps)
            for t, step in enumerate(ends)
        ]

    def train(self, batches: Iterable[Batch], rows: TrainingRows) -> Iterator[StepReport]:
        for batch in batches:
            yield self.step(batch)  # of W_enc and b_enc, the decoder held
            if self.steps in self.schedule and not self.finished:  # an epoch has ended
                self.decoder_step(self.schedule[self.steps], rows)
        self.calibrate()
        self.decoder_step(self.schedule[self.task.steps], rows)

    @torch.no_grad()
    def decoder_step(self, due: Pass, rows: TrainingRows) -> None:
        """W_dec and b_dec: the optimum for the codes of the pass; W_enc^t and b_enc^t of the next iteration."""
        moments = self.moments(due, rows)
        state = moments.optimum(self.terms(moments), due.alpha, self.task.rows, self.communicator)
        self.take(state)
        self.hold_encoder()

    def moments(self, due: Pass, rows: TrainingRows) -> Moments:
        """For each row z = act(x W_enc + b_enc); and N, sum z, sum y, sum z z', sum z y'."""
        task, encoded = self.task, partial(self.encoded, due, rows)
        moments = Moments.of(
            self.dictionary, task.sparsity, due.rows, task.memory, self.config.solve, encoded
        )
        for codes, batch in encoded():
            moments.add(codes, batch)
        moments.reduce(self.communicator)
        return moments

    def terms(self, moments: Moments) -> Terms:
        """What is added to the squared error, in proportion to the rows of the pass; the penalty as quadratics."""
        assert isinstance(self.config, Pam)
        part = moments.rows / self.task.rows
        weights = self.task.penalty_weight(self.steps - 1) * moments.norm_weights
        return Terms(
            W_t=moments.W_t,
            b_t=moments.b_t,
            alpha=part * self.alpha,
            beta=part * self.config.beta,
            mu=part * self.config.mu_dec,
            nu=part * self.config.nu_dec,
            decay=penalty_decay(self.dictionary, weights, self.solution.encoder_norm),
            skip=moments.skip,
        )

    @property
    def alpha(self) -> float:
        chosen = self.config.alpha == "auto"  # a fixed one stays, if a decoder step had to raise it
        return self.solution.alpha if chosen else float(self.config.alpha)

    def take(self, state: DecoderState) -> None:
        self.dictionary.set_decoder(state.c, state.Delta, state.b, state.skip)
        self.solution = self.solution.after(state)

    def record(self) -> dict[str, float]:
        return super().record() | self.solution.record()

    def notes(self) -> list[str]:
        return self.solution.notes(chosen=self.config.alpha == "auto")

    def state(self) -> dict[str, Tensor]:
        return super().state() | self.solution.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self.solution = Solution.restored(state)
