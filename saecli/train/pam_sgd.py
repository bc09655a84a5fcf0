"""`--solver pam-sgd`: Algorithm 3.1 with another unknown, Delta in `W_dec = c W_enc' + Delta`, and upkeep of latents.

The decoder step solves for Delta, c and b_dec with the ridge alpha on Delta; the encoder step holds Delta and c,
differentiates through c W_enc', and moves b_dec. A large alpha is SGD with tied weights, a small one the free decoder.

Alternation moves slowly along valleys that joint descent follows, so from some step on the decoder is released: trained
by gradient too, and replaced by its optimum as before; but where leave-one-out chooses a large alpha, the rows support
no decoder far from the tie, and it is held (`--release`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..sae.codes import Codes
from ..sae.dictionary import SAE, Coupled
from .descent import Task
from .moments import AlphaRule, Pass, alpha_rule, penalty_decay
from .options import RELEASE, RELEASED_BELOW, PamSgd
from .pam import PamSolver
from .ridge import DecoderState, Terms
from .rows import PASS_ROWS, TrainingRows
from .solver import DECODER_STEPS
from .upkeep import SILENT, needless, release, revive, silence

LAST_ROWS = 256  # per latent, of the last decoder step; others have `PASS_ROWS`


class PamSgdSolver(PamSolver):
    config: PamSgd
    solved_for = ("Delta", "W_skip")

    @staticmethod
    def dictionary_of(start: SAE, task: Task) -> Coupled:
        direction = Coupled(start, 1.0, None, task.B).direction()
        return Coupled(start, 1.0, start.W_dec.detach() - direction, task.B)

    def passes(self) -> list[Pass]:
        task, d_sae = self.task, self.dictionary.d_sae
        every = self.config.decoder_every
        if every == "auto":
            every = steps_between(task, d_sae)
        steps = [*range(every, task.steps, every), task.steps]
        passes = passes_after(steps, task.rows, d_sae, self._release_from())
        if self.config.alpha != "auto":
            return [replace(due, alpha="keep") for due in passes]
        *_, last = passes
        if self._penalises_norms():
            passes[-1] = replace(last, alpha="anew")  # without the penalty it is another problem
        elif self.smoothing.moves and len(passes) > 1:
            # Rows fitted exactly would choose one too small: the last keeps the alpha of smoothed rows.
            passes[-1] = replace(last, alpha="keep")
        return passes

    def _penalises_norms(self) -> bool:
        """Whether decoder steps, but for the last, have a part of the penalty."""
        dictionary = self.dictionary
        codes = Codes(torch.ones_like(dictionary.b_enc)[None])
        weights = dictionary.activation.norm_weights(
            self.task.sparsity, codes, dictionary.decoder(), dictionary.activation_parameters
        )
        return bool(self.task.training.sparsity_weight) and bool(weights.any())

    def _release_from(self) -> float:
        """As a fraction of the steps; 1 for never."""
        if self.config.release != "auto":
            return float(self.config.release)
        # A transcoder's targets support no tie: on an MLP of tiny-gemma2 FVU is 0.212 untied, 0.220 from half way on.
        if self.task.B is not None:
            return 0.0
        # Matching pursuit explains rows by the encoder's directions: on docstrings FVU is 0.100 held, 0.107 released.
        if self.dictionary.activation.compares_directions:
            return 1.0
        return RELEASE

    @torch.no_grad()
    def decoder_step(self, due: Pass, rows: TrainingRows) -> None:
        """Delta, c and b_dec: the optimum for the codes of the pass; then upkeep, unless it is the last."""
        moments, dictionary = self.moments(due, rows), self.dictionary
        weight = 0.0 if due.last else self.task.penalty_weight(self.steps - 1)
        weights = weight * moments.norm_weights
        decay = penalty_decay(dictionary, weights, self.solution.encoder_norm)
        if not self.task.fixed:
            # `SILENT` squared of what they would get is left.
            silenced = SILENT**-2 * moments.system.scale(1.0)
            decay = decay.masked_fill(silence(dictionary, moments), silenced)
        terms = Terms(
            W_t=moments.W_t,
            b_t=moments.b_t,
            alpha=moments.rows / self.task.rows * self.alpha,
            direction=dictionary.direction().detach(),
            decay=decay,
            skip=moments.skip,
        )
        sought = 0 if due.last else needless(self, moments)
        state = moments.optimum(terms, due.alpha, self.task.rows, self.communicator, sought)
        self.take(state)
        if not due.last:  # else a change would be neither trained nor solved for
            if due.release and self.may_release(state):
                release(dictionary, self.optimizer)
            revive(self, moments.used(state), moments.rows)

    def may_release(self, state: DecoderState) -> bool:
        alpha_decides = self.config.release == "auto" and self.task.B is None
        return not alpha_decides or state.relative_alpha < RELEASED_BELOW

    def record(self) -> dict[str, float]:
        return super().record() | {"released": int(self.dictionary.untied)}

    def state(self) -> dict[str, Tensor]:
        return super().state() | {
            "decoder.c": torch.tensor(self.dictionary.c, dtype=torch.float64),
            "decoder.released": torch.tensor(self.dictionary.untied),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if state["decoder.released"]:
            release(self.dictionary, self.optimizer)
        super().restore(state)
        self.dictionary.c = state["decoder.c"].item()


def passes_after(steps: Sequence[int], rows: int, d_sae: int, release_from: float) -> list[Pass]:
    """Passes after these steps, ascending: `PASS_ROWS` rows per latent each, the last `LAST_ROWS`.

    Alpha is chosen at passes 0, 1, 2, 4, ..., at the last, and at the release: the first pass, but not the last, due
    after the fraction `release_from` of the steps.
    """
    *earlier, total = steps
    passes = []
    released = False
    for number, step in enumerate(earlier):
        release = not released and step >= release_from * total
        released = released or release
        rule: AlphaRule = "walk" if release and number else alpha_rule(number)
        passes.append(Pass(number, step, min(rows, PASS_ROWS * d_sae), rule, release=release))
    rule = "walk" if earlier else "anew"
    last = Pass(len(earlier), total, min(rows, LAST_ROWS * d_sae), rule, last=True)
    return [*passes, last]


def steps_between(task: Task, d_sae: int) -> int:
    """Encoder steps between decoder steps: for `DECODER_STEPS` in all, or if their passes would take more than half of
    the rows of the encoder steps, one per epoch."""
    rows_of_steps = task.steps * task.training.batch_size
    affordable = rows_of_steps / (2 * min(task.rows, PASS_ROWS * d_sae))
    epochs = math.ceil(task.steps / task.batches)
    return math.ceil(task.steps / min(DECODER_STEPS, max(round(affordable), epochs)))
