"""PAM-SGD: SGD on the encoder alternates with the decoder's closed-form optimum.

Source: the paper's Algorithm 3.1. One outer iteration t is a pass of encoder steps, on

    sum ||x_hat - x||^2 + penalty + mu_enc ||W_enc - W_enc^t||_F^2 + nu_enc ||b_enc - b_enc^t||^2

(no term has a 1/2), and then the decoder step of `saecli/train/ridge`, with proximal weights mu_dec and nu_dec. All
four may follow schedules in t.

The paper's decoder, `free`, is the unknown W_dec itself. The default, `residual`, has the unknown Delta in
`W_dec = c W_enc' + Delta`: the decoder step solves for Delta, c and b_dec with the ridge alpha on Delta, and the
encoder step holds Delta and c fixed and differentiates through c W_enc'; it moves b_dec too, if no term weighs that.
As alpha grows it tends to SGD with tied weights, as alpha falls to the free decoder.

Held to the end, alternating minimisation moves slowly along valleys that joint descent follows. From some step on the
decoder is therefore released: W_dec becomes a parameter of its own, which descends beside the encoder, and is replaced
by the decoder step's optimum at the end of each pass as before. Where leave-one-out chooses a large alpha the rows
don't support a decoder far from the tie, and it is held to the end (`--release`). A transcoder's is released at once.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..base.distributed import ALONE, Communicator
from ..sae.batch import Batch
from ..sae.codes import Codes
from ..sae.dictionary import SAE, Coupled
from .decoder_pass import DecoderPass, Observed, broadcast, notes_on
from .maintenance import balance, least_useful, penalty_decay, silence
from .optimizers import is_choosing_step, outer_iterations
from .options import DECODER_STEPS, RELEASE, RELEASED_BELOW, PamSgd, takes_all_rows
from .ridge import DecoderState, Place, Plan, Terms, by_place, choose_alpha, plan, solve
from .solver import DECODER_STEP, Solver
from .task import StepReport, Task

# Rows per latent that a decoder step takes, other ones each time. All of 117 took 1.4 times as long on tiny-gemma2, and
# were no better: FVU 0.1346 for 0.1333, in a world of known features 0.148 for 0.145.
PASS_ROWS = 32
MOST_ROWS = 256  # of the step that decides on the release, and of the last
PASS_FRACTION = 1 / 3
DOF_ROWS = 512  # sample of rows for the effective degrees of freedom


def batches_between_decoder_steps(task: Task, config: PamSgd, d_sae: int) -> float:
    """Batches between decoder steps within an epoch; infinite for none."""
    if not isinstance(config.decoder_every, str):
        return config.decoder_every
    if config.decoder_every == "epoch" or config.decoder_first or takes_all_rows(config):
        return math.inf
    epochs = task.steps / (task.batches * config.inner_steps)
    affordable = PASS_FRACTION * task.steps * task.rows / task.batches / (PASS_ROWS * d_sae)
    parts = int(min(DECODER_STEPS, affordable) / epochs)  # of an epoch
    return math.ceil(task.batches / parts) if parts > 1 else math.inf


class PamSgdSolver(Solver):
    """The alternation: encoder steps, and the decoder steps between them."""

    def __init__(self, initial: SAE, task: Task, config: PamSgd, communicator: Communicator = ALONE) -> None:
        assert task.held != "W_dec", "a decoder that is solved for cannot be held"
        start, c = initial.sae(), 1.0 if config.decoder == "residual" else 0.0
        dictionary = Coupled(start, c, start.W_dec.detach().clone(), task.B)
        dictionary.Delta.sub_(dictionary.direction(), alpha=c)
        self._every = batches_between_decoder_steps(task, config, initial.d_sae)
        outers = outer_iterations(math.ceil(task.steps / config.inner_steps), task.batches, self._every)
        held = ["Delta", "W_skip"]
        if config.decoder == "free" or config.beta or config.nu_dec:  # terms on b_dec, which encoder steps lack
            held.append("b_dec")
        super().__init__(dictionary, held, task, config, outers, communicator)
        nan = math.nan
        self.decoder = DecoderState(c, dictionary.Delta.detach(), dictionary.b_dec.detach(),
                                    nan if config.alpha == "auto" else config.alpha, nan, nan, False, nan, nan, nan)
        # A transcoder's targets support no tie: on an MLP of tiny-gemma2 FVU is 0.212 untied from the start, 0.220 from
        # half way on, where SGD has 0.218.
        at_once = config.release == "auto" and task.B is not None and not takes_all_rows(config)
        self._release_from = 0.0 if at_once else config.release
        self.released = self._decided = False
        self.raised = 0.0
        self._size = dictionary.W_enc.norm().item()
        self._ratios = [1.0] * len(dictionary.places)  # of a crosscoder's alphas to the one of all places
        self._due: int | None = None
        self._last = self._silenced = False
        width, batch_size = max(initial.d_in, initial.d_out), math.ceil(task.rows / task.batches)
        self._memory = task.memory - config.beside(task.rows, batch_size, width, initial.d_sae)

    @property
    def due(self) -> int | None:
        return self._due

    def begin_epoch(self) -> None:
        super().begin_epoch()
        if self.config.decoder_first:
            self._due = self.task.rows

    def _end_part(self) -> None:
        self._due = self._rows_of_step()

    def end_epoch(self) -> list[StepReport]:
        """Take steps on the batches collected, and ask for the epoch's decoder step."""
        reports = super().end_epoch()
        if self.config.decoder_first:
            if self.finished:
                self.calibrate()
            return reports
        self._last, self._silenced = self.finished, False
        self._due = self._rows_of_step()
        return reports

    def _rows_of_step(self) -> int:
        """The number of rows that a decoder step now observes."""
        if takes_all_rows(self.config):
            return self.task.rows
        return min(self.task.rows, (MOST_ROWS if self._last or self._decides else PASS_ROWS) * self.dictionary.d_sae)

    def _plan(self, rows: int) -> Plan:
        dictionary = self.dictionary
        targets = dictionary.d_out + (0 if dictionary.W_skip is None else dictionary.d_in)
        return plan(rows, dictionary.d_sae, targets, self._memory, self.config.solve, dictionary.prefixes)

    def _trained(self, codes: Codes, batch: Batch) -> None:
        pass

    @torch.no_grad()
    def begin_pass(self, again: Callable[[], Iterable[Batch]]) -> None:
        """Begin a decoder step.

        Before the last, it minimises the objective of the encoder steps: over smoothed rows, with the sparsity penalty
        on the decoder's norms. The last one does without either, so that codes shrunk by a penalty reconstruct the
        unsmoothed rows as well as they can.
        """
        if self._last and not self._silenced:
            self.calibrate()
        self._drawn = self.draws(self.outer, DECODER_STEP)

        def codes_again() -> Iterator[Codes]:
            drawn = self.draws(self.outer, DECODER_STEP)
            for batch in again():
                if len(batch.x):
                    yield self._encoded(batch, drawn)[0]

        start = self.dictionary.decoder().detach()
        if self.dictionary.W_skip is not None:  # the rows' dimensions are targets too
            start = torch.cat([start, start.new_zeros(len(start), self.dictionary.d_in)], 1)
        system = self._plan(self._due).system(start, codes_again)
        self._pass = DecoderPass(system, self.dictionary, self.task.training.sparsity, self._due)

    @torch.no_grad()
    def observe(self, batch: Batch) -> None:
        self._pass.add(*self._encoded(batch, self._drawn))

    def _encoded(self, batch: Batch, drawn: torch.Generator) -> tuple[Codes, Batch]:
        batch = batch if self._last else self.smoothing(batch, drawn)
        return self.dictionary.codes(batch.x), batch

    @torch.no_grad()
    def end_pass(self) -> None:
        """Solve for the decoder, revive dead latents, and take the result as the reference of proximal terms.

        If a penalty has silenced latents before the last decoder step, another pass is due.
        """
        observed, self._pass = self._pass.finish(self.communicator), None
        silenced = not self.task.held and silence(self.dictionary, observed.norm_weights, observed.rows)
        if silenced and self._last and not self._silenced:
            self._silenced = True
            return
        self._due = None
        state = self._solved(observed)
        releases, self._decided = self._releases(state), self._decided or self._decides
        if releases:
            self._release()
        self._apply(state)
        self.outer += 1
        weak = torch.zeros_like(observed.fired) if state.effect is None else least_useful(state.effect, observed.fired)
        self.revive(observed.fired & ~weak, observed.rows)
        self._balance()
        self._hold_encoder()

    def _solved(self, observed: Observed) -> DecoderState:
        """The decoder for the rows observed, on all processes; alpha is chosen first if it is time to.

        The last step keeps the alpha chosen on smoothed rows, since rows that the encoder has fitted exactly would
        choose one too small. After training with a penalty, rows are not fitted exactly, and the last step, without
        the penalty, is another problem: alpha is then chosen anew.
        """
        state = None
        if self.communicator.is_main or observed.solve_together:
            fraction, dtype = observed.rows / self.task.rows, self.dictionary.W_enc.dtype
            terms, alpha, factorisation = self._terms(observed, fraction), self.decoder.alpha, None
            if self.config.alpha == "auto":
                pulled = bool(observed.norm_weights.any()) and self.task.training.sparsity_weight > 0
                new_problem = math.isnan(alpha) or (self._last and pulled)
                settled = self._last and self.smoothing.moves
                if new_problem or ((is_choosing_step(self.outer) or self._decides or self._last) and not settled):
                    before = None if new_problem else fraction * alpha
                    factorisation = choose_alpha(observed.system, terms, observed.z, observed.y, before)
                    if terms.places:
                        alpha, factorisation = factorisation.alpha / fraction, None
                        terms = by_place(observed.system, terms, observed.z, observed.y, fraction * alpha)
                        self._ratios = [place.ratio for place in terms.places]
            z = None
            if self._last or self.outer + 1 == self._outers:
                whole = len(observed.z) == observed.rows
                z = observed.z if whole else observed.z[:: math.ceil(len(observed.z) / DOF_ROWS)]
            found = solve(observed.system, replace(terms, alpha=fraction * alpha), factorisation, z, self._revives)
            tensors = {"Delta": found.Delta, "b": found.b} | ({"effect": found.effect} if self._revives else {})
            if found.skip is not None:
                tensors["skip"] = found.skip + self.dictionary.W_skip  # targets lacked what the last skip predicts
            state = replace(found, alpha=found.alpha / fraction,
                            **{name: tensor.to(dtype) for name, tensor in tensors.items()})
        like = {"Delta": self.dictionary.Delta, "b": self.dictionary.b_dec}
        like |= {} if self.dictionary.W_skip is None else {"skip": self.dictionary.W_skip}
        like |= {"effect": self.dictionary.b_enc.detach()} if self._revives else {}
        return broadcast(state, like, self.communicator)

    def _terms(self, observed: Observed, fraction: float) -> Terms:
        """The decoder step's terms, scaled to a fraction of all rows, with alpha left at 0."""
        dictionary, b_dec = self.dictionary, self.dictionary.b_dec.detach()
        direction = dictionary.direction().detach() if self.config.decoder == "residual" else None
        W_dec = dictionary.decoder().detach()
        if observed.skip is not None:
            b_dec = torch.cat([b_dec, b_dec.new_zeros(dictionary.d_in)])
        weights = self.task.penalty_weight(self.steps - 1) * (not self._last) * observed.norm_weights
        decay = penalty_decay(W_dec, weights, self._size, dictionary.places)
        places = [Place(*one) for one in zip(dictionary.places, decay, self._ratios, strict=True)]
        return Terms(0.0, fraction * self.config.beta, fraction * self.weight("mu_dec"),
                     fraction * self.weight("nu_dec"), direction, W_dec, b_dec, decay.mean(0),
                     self.config.bias == "joint", observed.skip, places if len(places) > 1 else [])

    def _apply(self, state: DecoderState) -> None:
        """Put a solved decoder into the dictionary."""
        if math.isnan(state.dof):
            state = replace(state, dof=self.decoder.dof)
        if state.raised:
            self.raised = max(self.raised, state.ridge)
        self.decoder, dictionary = state, self.dictionary
        dictionary.b_dec.data = state.b
        if state.skip is not None:
            dictionary.W_skip.copy_(state.skip)
        if self.released:
            dictionary.Delta.copy_(torch.add(state.Delta, dictionary.direction(), alpha=state.c))
        else:
            dictionary.c, dictionary.Delta.data = state.c, state.Delta

    @property
    def _decides(self) -> bool:
        """Whether the next decoder step, the first after half of the steps, decides on the release."""
        config = self.config
        may = not takes_all_rows(config) and not config.decoder_first
        return (self._release_from == "auto" and may and not self._decided and not self.finished
                and self.steps >= RELEASE * self.task.steps)

    def _releases(self, state: DecoderState) -> bool:
        """Whether the decoder is to be released now that it has been solved for."""
        if self._release_from == "auto":
            return self._decides and state.relative_alpha < RELEASED_BELOW
        return not self.released and not self.finished and self.steps >= self._release_from * self.task.steps

    @torch.no_grad()
    def _release(self) -> None:
        """Turn `c W_enc' + Delta` into a parameter that descends: Delta, with c = 0."""
        dictionary = self.dictionary
        dictionary.untie()
        self.released = True
        for name in ("Delta", "b_dec", *(["W_skip"] * (dictionary.W_skip is not None))):
            tensor = getattr(dictionary, name).requires_grad_(True)
            if name not in self.optimizer.tensors:
                self.optimizer.include(name, tensor)

    def _balance(self) -> None:
        """Give encoder and decoder one norm, unless the encoder is held, or alpha, which determines their ratio."""
        adapts = self.config.alpha == "auto" and not self.task.held
        if adapts and (factor := balance(self.dictionary, self._size)):
            state = self.decoder
            self.decoder = replace(state, c=state.c / factor**2, alpha=state.alpha * factor**2)
            factors = {"Delta": 1 / factor, "b_dec": 1.0, "W_skip": 1.0}  # the others are the codes'
            self.optimizer.rescale({name: factors.get(name, factor) for name in self.optimizer.tensors})

    def record(self) -> dict[str, float]:
        """The decoder step's alpha, beside a sum over normalised rows, and over the Gram matrix's mean diagonal; its
        condition estimate; whether the decoder is released; the number of revivals; the residual of an iterative
        solve; and at the end the effective degrees of freedom."""
        state = self.decoder
        known = {name: value for name, value in (("residual", state.residual), ("dof", state.dof))
                 if not math.isnan(value)}
        return super().record() | {"alpha": state.alpha, "relative_alpha": state.relative_alpha,
                                   "condition": state.condition, "released": int(self.released)} | known

    def notes(self) -> list[str]:
        """Sentences on the last decoder step; see `notes_on`."""
        return notes_on(self.decoder, self.config.alpha == "auto", self.task.rows, self.dictionary.d_sae, self.raised)

    def state(self) -> dict[str, Tensor]:
        return super().state() | {f"decoder.{name}": torch.tensor(value, dtype=torch.float64)
                                  for name, value in self._numbers().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume from the tensors of `state`, taken after a decoder step."""
        if state["decoder.released"]:
            self._release()
        super().restore(state)
        self._decided = self.steps >= RELEASE * self.task.steps
        numbers = {name: state[f"decoder.{name}"].item() for name in self._numbers()}
        self.raised, self._size, _ = (numbers.pop(name) for name in ("most_raised", "size", "released"))
        self._ratios = [numbers.pop(name) for name in sorted(numbers) if name.startswith("ratio.")] or [1.0]
        self.decoder = replace(self.decoder, **numbers, Delta=self.dictionary.Delta.detach(),
                               b=self.dictionary.b_dec.detach())
        if not self.released:
            self.dictionary.c = self.decoder.c

    def _numbers(self) -> dict[str, float]:
        """The decoder's numbers in a checkpoint, beside its tensors."""
        own = {name: getattr(self.decoder, name) for name in ("c", "alpha", "relative_alpha", "ridge", "condition",
                                                              "residual", "dof")}
        ratios = {f"ratio.{number:03}": ratio for number, ratio in enumerate(self._ratios) if len(self._ratios) > 1}
        return own | {"most_raised": self.raised, "released": self.released, "size": self._size} | ratios
