"""`--solver pam-sgd`: Algorithm 3.1 with another unknown, and the upkeep of its latents between the steps.

The unknown is Delta in `W_dec = c W_enc' + Delta`: the decoder step solves for Delta, c and b_dec with the ridge alpha
on Delta, and the encoder step holds Delta and c and differentiates through c W_enc'; it moves b_dec too. As alpha grows
it tends to SGD with tied weights, as alpha falls to the free decoder.

Alternating minimisation moves slowly along valleys that joint descent follows. From some step on the decoder is
therefore released: W_dec becomes a parameter of its own, trained by gradient with the encoder, and decoder steps
replace it by its optimum as before. Where leave-one-out chooses a large alpha the rows don't support a decoder far from
the tie, and it is held to the end (`--release`), as is that of matching pursuit. A transcoder's is released at once.

D = d_in, E = d_out, F = d_sae.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..sae.dictionary import Dictionary
from .moments import Kind, Moments, Pass, alpha_is_due
from .options import RELEASE, RELEASED_BELOW, REVIVAL_ROWS, PamSgd
from .pam import DecoderStep, PamSolver
from .ridge import DecoderState, Terms
from .solver import DECODER_STEPS, Task

# Rows per latent of a decoder step, resampled for each. Using all 117 took 1.4 times as long on tiny-gemma2, and was no
# better: FVU 0.1346 instead of 0.1333, in a world of known features 0.148 instead of 0.145.
PASS_ROWS = 32
LAST_ROWS = 256  # of the last
SILENT = 1e-3  # part of a row's norm: a penalty has silenced latents that contribute less where they fire
REAIMED = 0.02  # largest fraction of the latents re-aimed at a decoder step as missed least


class PamSgdSolver(PamSolver):
    config: PamSgd
    c = 1.0
    solved_for = ("Delta", "W_skip")

    def passes(self) -> dict[int, Pass]:
        task, config, d_sae = self.task, self.config, self.dictionary.d_sae
        every = config.decoder_every
        if every == "auto":
            every = steps_between(task, d_sae)
        steps = [*range(int(every), task.steps, int(every)), task.steps]
        chooses = config.alpha == "auto"
        passes = passes_after(steps, task.rows, d_sae, self._release_from(), chooses)
        if chooses and self.smoothing.moves and len(passes) > 1:
            # Rows fitted exactly would choose one too small: the last keeps the alpha of smoothed rows.
            passes[task.steps] = replace(passes[task.steps], chooses=False)
        return passes

    def _release_from(self) -> float:
        """The fraction of the steps from which the decoder may be released; 1 for never."""
        if self.config.release != "auto":
            return float(self.config.release)
        # A transcoder's targets support no tie: on an MLP of tiny-gemma2 FVU is 0.212 untied from the start, 0.220
        # from half way on, where SGD has 0.218.
        if self.task.B is not None:
            return 0.0
        # Matching pursuit explains rows by the encoder's directions: on docstrings FVU is 0.100 held, 0.107 released.
        if self.dictionary.activation.one_scale:
            return 1.0
        return RELEASE

    def terms(self, due: Pass, moments: Moments, alpha: float) -> Terms:
        """The ridge alone, about the tie; silenced latents get nothing."""
        decay = self._decay(due, moments)
        if not self.task.held:
            silenced = silence(self.dictionary, moments)
            # A millionth of what they would get is left.
            decay = decay.masked_fill(silenced, 1e6 * moments.system.scale(1.0))
        direction = self.dictionary.direction().detach()
        return replace(super().terms(due, moments, alpha), direction=direction, decay=decay)

    def needless(self, moments: Moments) -> int:
        # With fewer rows each latent's codes are near a combination of the others'.
        d_sae = self.dictionary.d_sae
        enough = self.revives and moments.rows >= REVIVAL_ROWS * d_sae
        return int(REAIMED * d_sae) if enough else 0

    def mend(self, step: DecoderStep, state: DecoderState) -> None:
        """Release the decoder, unless leave-one-out chose too large an alpha; re-aim latents that fired on no row of
        the pass, or are missed least."""
        alpha_decides = self.config.release == "auto" and self.task.B is None
        releases = not alpha_decides or state.relative_alpha < RELEASED_BELOW
        if step.due.kind == "release" and releases:
            self.release()
        used = step.moments.fired
        if state.needless is not None:
            used = used & (state.needless == 0)
        self.revive(used, step.moments.rows)

    def release(self) -> None:
        """From here on W_dec, b_dec and a skip are trained by gradient."""
        self.dictionary.untie()
        names = ["Delta", "b_dec"]
        if self.dictionary.W_skip is not None:
            names.append("W_skip")
        for name in names:
            tensor = getattr(self.dictionary, name).requires_grad_(True)
            if name not in self.optimizer.tensors:
                self.optimizer.include(name, tensor)

    def record(self) -> dict[str, float]:
        return super().record() | {"released": int(self.dictionary.untied)}

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"decoder.released": torch.tensor(self.dictionary.untied)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if state["decoder.released"]:
            self.release()
        super().restore(state)


def passes_after(
    steps: Sequence[int], rows: int, d_sae: int, release_from: float, chooses: bool
) -> dict[int, Pass]:
    """Passes after these steps, ascending: `PASS_ROWS` rows per latent each, the last `LAST_ROWS`.

    The first one before the last that is due after the fraction `release_from` of the steps decides on the release.
    Alpha is chosen at passes 0, 1, 2, 4, ... and at the release, since it settles.
    """
    total = steps[-1]
    passes: dict[int, Pass] = {}
    released = False
    for number, step in enumerate(steps):
        kind: Kind = "mid"
        if step == total:
            kind = "last"
        elif not released and step >= release_from * total:
            kind, released = "release", True
        per_latent = LAST_ROWS if kind == "last" else PASS_ROWS
        choosing = alpha_is_due(number) or kind in ("release", "last")
        passes[step] = Pass(number, step, min(rows, per_latent * d_sae), kind, chooses and choosing)
    return passes


def steps_between(task: Task, d_sae: int) -> int:
    """Encoder steps between decoder steps: `DECODER_STEPS` times in all, or if their passes would take more than half
    of the rows of the encoder steps, once per epoch."""
    rows_of_steps = task.steps * task.training.batch_size
    affordable = rows_of_steps / (2 * min(task.rows, PASS_ROWS * d_sae))
    epochs = math.ceil(task.steps / task.batches)
    return math.ceil(task.steps / min(DECODER_STEPS, max(round(affordable), epochs)))


@torch.no_grad()
def silence(dictionary: Dictionary, moments: Moments) -> Tensor:
    """Turn off latents whose contribution to the rows on which they fire a penalty has driven to nothing: a mask, (F,).
    Otherwise a decoder step without the penalty would bring them back."""
    W_dec = dictionary.decoder()
    contributed = moments.norm_weights * W_dec.double().norm(dim=1) / math.sqrt(W_dec.shape[1])
    gone = (moments.norm_weights > 0) & (contributed < SILENT * moments.firings)
    dictionary.W_enc.masked_fill_(gone, 0)
    dictionary.b_enc.masked_fill_(gone, 0)
    return gone
