"""PAM-SGD: SGD on the encoder alternates with the decoder's closed-form optimum.

Source: the paper's Algorithm 3.1. One outer iteration t is a pass of encoder steps, on

    sum ||x_hat - x||^2 + penalty + mu_enc ||W_enc - W_enc^t||_F^2 + nu_enc ||b_enc - b_enc^t||^2

(no term has a 1/2), and then the decoder step of `saecli/train/ridge`, with proximal weights mu_dec and nu_dec.

The paper's decoder, `free`, is the unknown W_dec itself. The default, `residual`, has the unknown Delta in
`W_dec = c W_enc' + Delta`: the decoder step solves for Delta, c and b_dec with the ridge alpha on Delta, and the
encoder step holds Delta and c fixed and differentiates through c W_enc'; it moves b_dec too, if no term weighs that.
As alpha grows it tends to SGD with tied weights, as alpha falls to the free decoder.

Alternating minimisation moves slowly along valleys that joint descent follows. From some step on the decoder is
therefore released: W_dec becomes a parameter of its own, trained by gradient with the encoder, and decoder steps
replace it by its optimum as before. Where leave-one-out chooses a large alpha the rows don't support a decoder far from
the tie, and it is held to the end (`--release`), as is that of matching pursuit. A transcoder's is released at once.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..base.processes import ALONE, Communicator
from ..sae.codes import Codes, in_cache, joined
from ..sae.dictionary import SAE, Batch, Coupled
from .decoder_step import (
    MOST_REAIMED,
    DecoderPass,
    Observed,
    Pass,
    balance,
    broadcast,
    penalty_decay,
    silence,
    solved,
)
from .options import (
    DECODER_STEPS,
    MOST_STEPS,
    PENALISED_STEPS,
    RELEASE,
    RELEASE_STEPS,
    RELEASED_BELOW,
    REVIVAL_ROWS,
    PamSgd,
)
from .ridge import TOLERANCE, DecoderState, Terms, plan
from .solver import DECODER_STEP, Solver, Task

# Rows per latent of a decoder step, resampled for each. Using all 117 took 1.4 times as long on tiny-gemma2, and was no
# better: FVU 0.1346 instead of 0.1333, in a world of known features 0.148 instead of 0.145.
PASS_ROWS = 32
MOST_ROWS = 256  # of the last
PASS_FRACTION = (
    1 / 2
)  # rows of all decoder steps within epochs, over those of all encoder steps, at most
# A given alpha is warned about if rows and latents are within this ratio, and degrees of freedom above this fraction
# of the rows.
THRESHOLD_RATIO, THRESHOLD_FRACTION = 2, 0.8
NUMBERS = (
    "c",
    "alpha",
    "relative_alpha",
    "ridge",
    "condition",
    "residual",
    "dof",
)  # of a decoder, in a checkpoint


def decoder_steps(task: Task, config: PamSgd, d_sae: int, holds: bool = False) -> list[Pass]:
    """All decoder steps: after each epoch (before it with `decoder_first`), or if these are many every few, and every
    `batches_between` batches within.

    Each takes `PASS_ROWS` rows per latent, the last `MOST_ROWS`; with the paper's decoder all. Alpha is chosen at the
    first, at the release, and 1, 2, 4, ... later, since it settles. The last keeps the alpha of smoothed rows: rows
    fitted exactly would choose one too small.
    """
    batches, free, first = task.batches, config.decoder == "free", config.decoder_first
    every, smooths = (
        batches_between(task, config, d_sae),
        float(task.training.smoothing) > 0 and len(task.sample.x) > 1,
    )
    # A transcoder's targets support no tie: on an MLP of tiny-gemma2 FVU is 0.212 untied from the start, 0.220 from
    # half way on, where SGD has 0.218.
    at_once = config.release == "auto" and task.B is not None and not free
    asks = config.release == "auto" and not (at_once or free or first or holds)
    given = 1.0 if config.release == "auto" else float(config.release)
    release_from = (
        0.0 if at_once else RELEASE * min(1, task.steps / RELEASE_STEPS) if asks else given
    )
    passes: list[Pass] = []
    held, chosen, epochs = True, 0, math.ceil(task.steps / (batches * config.rounds))
    apart = (
        1
        if config.decoder_every != "auto" or config.takes_all_rows
        else max(1, epochs // MOST_STEPS)
    )
    for epoch in range((epochs - 1) % apart, epochs, apart):
        for batch in [0] if first else [*range(every, batches, every), batches]:
            steps, number = (epoch * batches + batch) * config.rounds, len(passes)
            over = steps >= task.steps
            if over and batch < batches:
                continue  # the epoch is cut short
            last, turns = (
                over and not first,
                held and not over and steps >= release_from * task.steps,
            )
            held, chosen = held and not turns, number if turns else chosen
            chooses = last or not (number - chosen) & (number - chosen - 1)  # after 0, 1, 2, 4, ...
            rows = (
                task.rows
                if config.takes_all_rows
                else min(task.rows, (MOST_ROWS if last else PASS_ROWS) * d_sae)
            )
            passes.append(
                Pass(
                    number,
                    epoch,
                    batch,
                    rows,
                    last=last,
                    decides=turns and asks,
                    releases=turns and not asks,
                    chooses=config.alpha == "auto"
                    and chooses
                    and not (last and smooths and number > 0),
                )
            )
    return passes


def batches_between(task: Task, config: PamSgd, d_sae: int) -> int:
    if isinstance(config.decoder_every, int):
        return config.decoder_every
    if config.decoder_every == "epoch" or config.takes_all_rows:
        return task.batches
    epochs = task.steps / (task.batches * config.rounds)
    affordable = PASS_FRACTION * task.steps * task.rows / task.batches / (PASS_ROWS * d_sae)
    wanted = PENALISED_STEPS if task.training.penalised else DECODER_STEPS
    parts = round(min(wanted, affordable) / epochs)  # of an epoch
    return math.ceil(task.batches / parts) if parts > 1 else task.batches


class PamSgdSolver(Solver):
    """Encoder steps, and the decoder steps between them."""

    config: PamSgd
    dictionary: Coupled

    def __init__(
        self, initial: SAE, task: Task, config: PamSgd, communicator: Communicator = ALONE
    ) -> None:
        assert task.held != "W_dec", "a decoder that is solved for cannot be held"
        start, c = initial.sae(), 1.0 if config.decoder == "residual" else 0.0
        direction = Coupled(start, 1.0, None, task.B).direction()
        Delta = torch.sub(start.W_dec.detach(), direction, alpha=c)
        dictionary = Coupled(start, c, Delta, task.B)
        held = ["Delta", "W_skip"]
        if (
            config.decoder == "free" or config.beta or config.nu_dec
        ):  # terms on b_dec, which encoder steps lack
            held.append("b_dec")
        every = batches_between(task, config, initial.d_sae)
        super().__init__(dictionary, held, task, config, every, communicator)
        # Matching pursuit explains rows by the encoder's directions: on docstrings FVU is 0.100 held, 0.107 released.
        holds = initial.activation.one_scale
        self.passes = {
            (one.epoch, one.after_batch): one
            for one in decoder_steps(task, config, initial.d_sae, holds)
        }
        nan, alpha = math.nan, math.nan if config.alpha == "auto" else float(config.alpha)
        self.decoder = DecoderState(
            c,
            Delta,
            dictionary.b_dec.detach(),
            alpha,
            nan,
            nan,
            False,
            nan,
            nan,
            nan,
        )
        self.released = False
        self.raised = 0.0  # the largest ridge that a decoder step used instead of a smaller one
        self._size = dictionary.W_enc.norm().item()
        width, batch_size = max(initial.d_in, initial.d_out), math.ceil(task.rows / task.batches)
        self._memory = task.memory - config.other_bytes(task.rows, batch_size, width, initial.d_sae)

    @property
    def _residual(self) -> Tensor:
        assert self.dictionary.Delta is not None
        return self.dictionary.Delta

    @torch.no_grad()
    def begin_pass(self, now: Pass, again: Callable[[], Iterable[Batch]]) -> None:
        """Begin a decoder step; the last without smoothing and penalty, so that shrunk codes reconstruct their best."""
        self._now, self._drawn = now, self.draws(now.number, DECODER_STEP)

        def codes_again() -> Iterator[Codes]:
            drawn = self.draws(now.number, DECODER_STEP)
            for batch in again():
                codes, _ = self._encoded(batch, drawn)  # draws for the other processes' batches too
                if len(batch.x):
                    yield codes

        dictionary = self.dictionary
        start = dictionary.decoder().detach()
        if dictionary.W_skip is not None:  # the rows' dimensions are targets too
            start = torch.cat([start, start.new_zeros(len(start), dictionary.d_in)], 1)
        way = plan(
            now.rows,
            len(start),
            start.shape[1],
            self._memory,
            self.config.solve,
            dictionary.prefixes,
        )
        sparsity = self.task.training.sparsity or "none"
        self._pass = DecoderPass(way.system(start, codes_again), dictionary, sparsity, now.rows)

    @torch.no_grad()
    def observe(self, batch: Batch) -> None:
        self._pass.add(*self._encoded(batch, self._drawn))

    def _encoded(self, batch: Batch, drawn: torch.Generator) -> tuple[Codes, Batch]:
        batch = batch if self._now.last else self.smoothing(batch, drawn)
        return joined([self.dictionary.codes(rows) for rows in in_cache(batch.x)]), batch

    @torch.no_grad()
    def end_pass(self) -> bool:
        """Solve, release, revive, balance. False, with nothing solved, if the last pass silenced latents."""
        now, observed = self._now, self._pass.finish(self.communicator)
        del self._pass
        if (
            not self.task.held
            and silence(self.dictionary, observed.norm_weights, observed.firings, observed.rows)
            and now.last
        ):
            return False
        state = self._solve(now, observed)
        if now.releases or (now.decides and state.relative_alpha < RELEASED_BELOW):
            self._release()
        if math.isnan(state.dof):
            state = replace(state, dof=self.decoder.dof)
        if state.raised:
            self.raised = max(self.raised, state.ridge)
        self.decoder, dictionary = state, self.dictionary
        dictionary.set_decoder(state.c, state.Delta, state.b, state.skip)
        fired = observed.fired
        if state.replaceable is not None:
            fired &= state.replaceable == 0
        self.revive(fired, observed.rows)
        # Not if the encoder is held, or alpha, which determines the ratio of the norms.
        adapts = self.config.alpha == "auto" and not self.task.held
        if adapts and (factor := balance(dictionary, self._size)):
            self.decoder = replace(
                self.decoder, c=state.c / factor**2, alpha=state.alpha * factor**2
            )
            factors = {
                "Delta": 1 / factor,
                "b_dec": 1.0,
                "W_skip": 1.0,
            }  # the others are the codes'
            self.optimizer.rescale(
                {name: factors.get(name, factor) for name in self.optimizer.tensors}
            )
        self.hold_encoder()
        return True

    def _solve(self, now: Pass, observed: Observed) -> DecoderState:
        dictionary, fraction = self.dictionary, observed.rows / self.task.rows
        # With fewer rows each latent's codes are near a combination of the others'.
        enough = self.revives and observed.rows >= REVIVAL_ROWS * dictionary.d_sae
        most_replaceable = int(MOST_REAIMED * dictionary.d_sae) if enough else 0
        tensors = {
            "Delta": dictionary.Delta,
            "b": dictionary.b_dec,
            "skip": dictionary.W_skip,
            "replaceable": dictionary.b_enc.detach() if most_replaceable else None,
        }
        like = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        state = None
        if self.communicator.is_main or observed.solve_together:
            pulled = bool(observed.norm_weights.any()) and bool(self.task.training.sparsity_weight)
            # The last step, without a penalty, is another problem, with an alpha of its own.
            another = now.last and pulled and self.config.alpha == "auto"
            terms = self._terms(
                now, observed, math.nan if another else fraction * self.decoder.alpha
            )
            last = now.number + 1 == len(self.passes)
            found = solved(observed, terms, now.chooses or another, most_replaceable, last)
            if (
                found.skip is not None and dictionary.W_skip is not None
            ):  # targets lacked what the last skip predicts
                found = replace(found, skip=found.skip + dictionary.W_skip)
            state = replace(
                found,
                alpha=found.alpha / fraction,
                **{name: getattr(found, name).to(dictionary.W_enc.dtype) for name in like},
            )
        return broadcast(state, like, self.communicator)

    def _terms(self, now: Pass, observed: Observed, alpha: float) -> Terms:
        dictionary, config, fraction = self.dictionary, self.config, observed.rows / self.task.rows
        W_dec, b_dec = dictionary.decoder().detach(), dictionary.b_dec.detach()
        if observed.skip is not None:
            b_dec = torch.cat([b_dec, b_dec.new_zeros(dictionary.d_in)])
        weights = self.task.penalty_weight(self.steps - 1) * (not now.last) * observed.norm_weights
        penalised = dictionary.weighed(W_dec.double()).norm(dim=1)
        return Terms(
            alpha,
            fraction * config.beta,
            fraction * config.mu_dec,
            fraction * config.nu_dec,
            direction=dictionary.direction().detach() if config.decoder == "residual" else None,
            W_t=W_dec,
            b_t=b_dec,
            decay=penalty_decay(W_dec, penalised, weights, self._size),
            joint=config.bias == "joint",
            skip=observed.skip,
        )

    @torch.no_grad()
    def _release(self) -> None:
        self.dictionary.untie()
        self.released = True
        for name in ("Delta", "b_dec", *(["W_skip"] * (self.dictionary.W_skip is not None))):
            tensor = getattr(self.dictionary, name).requires_grad_(True)
            if name not in self.optimizer.tensors:
                self.optimizer.include(name, tensor)

    def record(self) -> dict[str, float]:
        state = self.decoder
        known = {
            name: value
            for name, value in (("residual", state.residual), ("dof", state.dof))
            if not math.isnan(value)
        }
        return (
            super().record()
            | {
                "alpha": state.alpha,
                "relative_alpha": state.relative_alpha,
                "condition": state.condition,
                "released": int(self.released),
            }
            | known
        )

    def notes(self) -> list[str]:
        chosen, rows, latents = self.config.alpha == "auto", self.task.rows, self.dictionary.d_sae
        alpha, dof, notes = self.decoder.alpha, self.decoder.dof, []
        if (
            not chosen
            and dof > THRESHOLD_FRACTION * rows
            and 1 / THRESHOLD_RATIO <= rows / latents <= THRESHOLD_RATIO
        ):
            notes.append(
                f"--alpha {alpha:.3g} lets the decoder fit nearly every one of {rows:,} rows by itself with "
                f"{latents:,} latents, which is where the error on other rows peaks; use --alpha auto, or a "
                "larger --alpha"
            )
        if self.decoder.residual > 2 * TOLERANCE:
            notes.append(
                f"the last decoder step was solved to a residual of {self.decoder.residual:.1g} only, where "
                f"{TOLERANCE:g} was wanted; give a larger --alpha, or --solve direct"
            )
        if self.raised:
            advice = (
                "the codes are degenerate: see `sae sparsity`, and try a lower --lr"
                if chosen
                else "give a larger --alpha, or leave the choice to --alpha auto"
            )
            notes.append(
                f"a decoder step could not be solved with the ridge asked for, and took "
                f"{self.raised:.3g} instead; {advice}"
            )
        return notes

    def state(self) -> dict[str, Tensor]:
        numbers = {name: getattr(self.decoder, name) for name in NUMBERS}
        numbers |= {"most_raised": self.raised, "released": self.released, "size": self._size}
        kept = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
        return super().state() | {f"decoder.{name}": value for name, value in kept.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if state["decoder.released"]:
            self._release()
        super().restore(state)
        self.raised, self._size = state["decoder.most_raised"].item(), state["decoder.size"].item()
        numbers: dict[str, Any] = {name: state[f"decoder.{name}"].item() for name in NUMBERS}
        self.decoder = replace(
            self.decoder,
            **numbers,
            Delta=self._residual.detach(),
            b=self.dictionary.b_dec.detach(),
        )
        if not self.released:
            self.dictionary.c = self.decoder.c
