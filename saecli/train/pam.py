"""The paper's PAM-SGD: descent on the encoder alternates with the decoder's closed-form optimum.

Source: the paper's Algorithm 3.1. One outer iteration t is a pass of encoder steps, on

    sum ||x_hat - x||^2 + penalty + mu_enc ||W_enc - W_enc^t||_F^2 + nu_enc ||b_enc - b_enc^t||^2

(no term has a 1/2), and then the decoder step, the minimum over (W_dec, b_dec) of

    sum ||x_hat - x||^2 + alpha ||W_dec||_F^2 + beta ||b_dec||^2
        + mu_dec ||W_dec - W_dec^t||_F^2 + nu_dec ||b_dec - b_dec^t||^2

`PamSolver`, `--solver pam`, is this and nothing else: for each batch the loop calls `step`, and when a decoder step is
due `decoder_step`, `add` with the rows of its pass, and `update`. `--solver pam-sgd` builds on it (`pam_sgd.py`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..base.devices import products_in
from ..base.processes import ALONE, Communicator
from ..sae.codes import Codes, in_cache, joined
from ..sae.dictionary import SAE, Batch, Coupled
from .moments import Moments, Pass, alpha_is_due, broadcast_state, penalty_decay
from .options import ClosedForm, Pam, Precision
from .ridge import TOLERANCE, DecoderState, Terms, choose_alpha, method_for, optimal_decoder
from .solver import Draws, Solver, Task

FIGURES = ("relative_alpha", "condition", "residual")  # of the last solution


class DecoderStep:
    """One optimal decoder update; the loop pushes it the rows of its pass."""

    def __init__(
        self, solver: "PamSolver", due: Pass, reread: Callable[[], Iterable[Batch]]
    ) -> None:
        self.solver, self.due, self._reread = solver, due, reread
        self._draws = solver.draws(due.number, Draws.DECODER_STEP)
        self.moments = solver.new_moments(due, self._codes_again)

    @torch.no_grad()
    def add(self, batch: Batch) -> None:
        """For each row: z = act(x W_enc + b_enc), and N, sum z, sum x, sum z z', sum z x'."""
        codes, batch = self.solver.encode_batch(self.due, batch, self._draws)
        self.moments.add(codes, batch)

    @torch.no_grad()
    def finish(self) -> DecoderState:
        """The theorem on optimal decoding (`ridge/`)."""
        self.moments.reduce(self.solver.communicator)
        return self.solver.solve_for_decoder(self.due, self.moments)

    def _codes_again(self) -> Iterator[Codes]:
        """The codes that `add` has seen, for an iterative solution that cannot keep them."""
        draws = self.solver.draws(self.due.number, Draws.DECODER_STEP)
        for batch in self._reread():
            # Draws are for all processes' rows.
            codes, _ = self.solver.encode_batch(self.due, batch, draws)
            if len(batch.x):
                yield codes


class PamSolver(Solver):
    """Algorithm 3.1, in the paper's order; its encoder step, the decoder held, is `Solver.step`."""

    config: ClosedForm
    dictionary: Coupled
    c = 0.0  # W_dec = c W_enc' + Delta: the unknown Delta is W_dec itself
    solved_for: tuple[str, ...] = ("Delta", "W_skip", "b_dec")  # which descent holds

    def __init__(
        self, initial: SAE, task: Task, config: ClosedForm, communicator: Communicator = ALONE
    ) -> None:
        assert task.held != "W_dec", "a decoder that is solved for cannot be held"
        start = initial.sae()
        direction = Coupled(start, 1.0, None, task.B).direction()
        Delta = torch.sub(start.W_dec.detach(), direction, alpha=self.c)
        dictionary = Coupled(start, self.c, Delta, task.B)
        super().__init__(dictionary, self.solved_for, task, config, communicator)
        self.schedule = self.passes()
        self.alpha = math.nan if config.alpha == "auto" else float(config.alpha)
        self.figures = dict.fromkeys(FIGURES, math.nan)
        self.raised = 0.0  # the largest ridge that a decoder step used instead of a smaller one
        self.encoder_norm = dictionary.W_enc.norm().item()  # at the start

    def passes(self) -> dict[int, Pass]:
        """When decoder steps are due, by the encoder steps before them: after each epoch over all rows."""
        task, chooses = self.task, self.config.alpha == "auto"
        steps = [*range(task.batches, task.steps, task.batches), task.steps]
        return {
            step: Pass(number, step, task.rows, "mid", chooses and alpha_is_due(number))
            for number, step in enumerate(steps)
        }

    def decoder_step(self, due: Pass, reread: Callable[[], Iterable[Batch]]) -> DecoderStep:
        return DecoderStep(self, due, reread)

    @torch.no_grad()
    def update(self, step: DecoderStep) -> None:
        """W_dec, b_dec: the optimum; and (W_enc^t, b_enc^t) of the next outer iteration."""
        state = step.finish()
        self.dictionary.set_decoder(state.c, state.Delta, state.b, state.skip)
        self._keep_figures(state)
        if not self.is_last(step.due):  # a change would be neither trained nor solved for
            self.mend(step, state)
        self.hold_encoder()

    def is_last(self, due: Pass) -> bool:
        """Whether training ends with this decoder step, perhaps early."""
        return due.step == self.task.steps

    def mend(self, step: DecoderStep, state: DecoderState) -> None:
        """Change latents after a decoder step; Algorithm 3.1 changes none."""

    def terms(self, step: Pass, moments: Moments, alpha: float) -> Terms:
        """The quadratic terms, in proportion to the rows of the pass."""
        config = self.config if isinstance(self.config, Pam) else Pam()
        fraction = moments.rows / self.task.rows
        b_dec = self.dictionary.b_dec.detach()
        if moments.skip is not None:
            b_dec = torch.cat([b_dec, b_dec.new_zeros(self.dictionary.d_in)])
        return Terms(
            alpha=fraction * alpha,
            beta=fraction * config.beta,
            mu=fraction * config.mu_dec,
            nu=fraction * config.nu_dec,
            W_t=self.dictionary.decoder().detach(),
            b_t=b_dec,
            decay=self._decay(step, moments),
            skip=moments.skip,
        )

    def _decay(self, due: Pass, moments: Moments) -> Tensor:
        """The penalty on decoder norms, as quadratics; the last pass leaves it out."""
        weight = 0.0 if due.kind == "last" else self.task.penalty_weight(self.steps - 1)
        weights = weight * moments.norm_weights
        return penalty_decay(self.dictionary, weights, self.encoder_norm)

    def encode_batch(self, due: Pass, batch: Batch, draws: torch.Generator) -> tuple[Codes, Batch]:
        """A batch's codes, and the batch: smoothed, and encoded in the precision of descent, but for the last pass."""
        precision: Precision = "float32"
        if not self.is_last(due):
            batch = self.smoothing(batch, draws)
            precision = self.task.training.precision
        with products_in(precision):
            codes = joined([self.dictionary.codes(rows) for rows in in_cache(batch.x)])
        return codes, batch

    def new_moments(self, due: Pass, codes_again: Callable[[], Iterator[Codes]]) -> Moments:
        """Empty sums, of the kind that solves for this decoder in the memory there is."""
        dictionary = self.dictionary
        W_dec = dictionary.decoder().detach()
        if dictionary.W_skip is not None:  # the rows' dimensions are targets too
            W_dec = torch.cat([W_dec, W_dec.new_zeros(len(W_dec), dictionary.d_in)], 1)
        d_sae, d_out = W_dec.shape
        system = method_for(
            due.rows, d_sae, d_out, self.task.memory, self.config.solve, dictionary.prefixes
        ).system(W_dec, codes_again)
        return Moments(system, dictionary, self.task.training.sparsity or "none", due.rows)

    def solve_for_decoder(self, due: Pass, moments: Moments) -> DecoderState:
        """The decoder's optimum, the same in all processes."""
        dictionary = self.dictionary
        needless = 0 if self.is_last(due) else self.needless(moments)
        # A fixed alpha that one decoder step had to raise is asked for again at the next.
        alpha = self.alpha if self.config.alpha == "auto" else float(self.config.alpha)
        terms = self.terms(due, moments, alpha)  # in all processes: it may turn latents off
        tensors = {
            "Delta": dictionary.Delta,
            "b": dictionary.b_dec,
            "skip": dictionary.W_skip,
            "needless": dictionary.b_enc.detach() if needless else None,
        }
        like = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        state = None
        if self.communicator.is_main or moments.solved_together:
            state = self._solution(due, moments, terms, needless)
            rounded: dict[str, Any] = {
                name: getattr(state, name).to(dictionary.W_enc.dtype) for name in like
            }
            state = replace(state, alpha=state.alpha * self.task.rows / moments.rows, **rounded)
        return broadcast_state(state, like, self.communicator)

    def needless(self, moments: Moments) -> int:
        """How many latents the solution finds that are missed least."""
        return 0

    def _solution(self, due: Pass, moments: Moments, terms: Terms, needless: int) -> DecoderState:
        chooses = due.chooses or math.isnan(terms.alpha)
        penalised = bool(self.task.training.sparsity_weight) and moments.norm_weights.any()
        if due.kind == "last" and penalised and self.config.alpha == "auto":
            # Without the penalty it is another problem.
            terms = replace(terms, alpha=math.nan)
            chooses = True
        factorisation = None
        if chooses:
            last_alpha = None if math.isnan(terms.alpha) else terms.alpha
            factorisation = choose_alpha(moments.system, terms, moments.z, moments.y, last_alpha)
            terms = replace(terms, alpha=factorisation.alpha)
        state = optimal_decoder(moments.system, terms, factorisation, needless)
        if state.skip is not None and self.dictionary.W_skip is not None:
            state = replace(state, skip=state.skip + self.dictionary.W_skip)
        return state

    def _keep_figures(self, state: DecoderState) -> None:
        self.alpha = state.alpha
        self.figures = {name: getattr(state, name) for name in FIGURES}
        if state.raised:
            self.raised = max(self.raised, state.ridge)

    def record(self) -> dict[str, float]:
        known = {name: value for name, value in self.figures.items() if not math.isnan(value)}
        return {**super().record(), "alpha": self.alpha, **known}

    def notes(self) -> list[str]:
        notes = []
        if self.figures["residual"] > 2 * TOLERANCE:
            notes.append(
                f"the last decoder step was solved to a residual of {self.figures['residual']:.1g} only, "
                f"where {TOLERANCE:g} was wanted; give a larger --alpha, or --solve direct"
            )
        if self.raised:
            advice = (
                "the codes are degenerate: see `sae sparsity`, and try a lower --lr"
                if self.config.alpha == "auto"
                else "give a larger --alpha, or leave the choice to --alpha auto"
            )
            notes.append(
                f"a decoder step could not be solved with the ridge asked for, and took "
                f"{self.raised:.3g} instead; {advice}"
            )
        return notes

    def state(self) -> dict[str, Tensor]:
        numbers = {
            **self.figures,
            "alpha": self.alpha,
            "tie": self.dictionary.c,
            "raised": self.raised,
            "encoder_norm": self.encoder_norm,
        }
        tensors = {
            f"decoder.{name}": torch.tensor(value, dtype=torch.float64)
            for name, value in numbers.items()
        }
        return super().state() | tensors

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self.figures = {name: state[f"decoder.{name}"].item() for name in FIGURES}
        self.alpha = state["decoder.alpha"].item()
        self.dictionary.c = state["decoder.tie"].item()
        self.raised = state["decoder.raised"].item()
        self.encoder_norm = state["decoder.encoder_norm"].item()
