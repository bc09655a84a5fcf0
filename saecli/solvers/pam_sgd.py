"""PAM-SGD: SGD on the encoder alternates with the decoder's closed-form optimum.

Source: the paper's Algorithm 3.1. One outer iteration t is a pass of encoder steps, on

    sum ||x_hat - x||^2 + penalty + mu_enc ||W_enc - W_enc^t||_F^2 + nu_enc ||b_enc - b_enc^t||^2

(no term has a 1/2), and then the decoder step of `saecli/ridge`, with proximal weights mu_dec and nu_dec. All four
may follow schedules in t.

The paper's decoder, `free`, is the unknown W_dec itself. The default, `residual`, has the unknown Delta in
`W_dec = c W_enc' + Delta`: the decoder step solves for Delta, c and b_dec with the ridge alpha on Delta, and the
encoder step holds them fixed and differentiates through c W_enc'. As alpha grows it tends to SGD with tied
weights, as alpha falls to the free decoder.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..batch import Batch, mixed
from ..codes import Codes
from ..config import PAPER, option
from ..dictionary import SAE, Coupled
from ..distributed import ALONE, Communicator
from ..errors import ConfigError
from ..ridge import DecoderState, Plan, Terms, choose_alpha, plan, solve
from .base import DEFAULT_STEPS, Solver, SolverConfig, StepReport, Task, proximal
from .decoder_pass import SAMPLED_ROWS, DecoderPass, Observed, broadcast, notes_on
from .maintenance import balance, directions_of_worst, penalty_decay, revive, silence
from .optimizers import OPTIMIZERS, is_choosing_step, outer_iterations
from .running import Running
from .smoothing import default_width

LAST_ROWS = 32  # rows per latent that the last decoder step takes where rows are read once
RUNNING_ROWS = 8  # rows per latent, of the latest steps, that a decoder step without a pass takes
WINDOW = 16  # batches among which inner steps mix rows
REVIVAL = 0.9  # fraction of all steps during which dead latents are revived; the rest is for them to settle
REVIVAL_ROWS = 2  # rows per latent, at least, for revival: with fewer, latents are dead because rows are few
DECODER_STEP, REVIVING, MIXING = 1, 2, 3  # kinds of draws besides encoder steps'
DOF_ROWS = 512  # sample of rows for the effective degrees of freedom
MOST_INNER_STEPS = 10


@dataclass(frozen=True)
class PamSgd(SolverConfig):
    """Options of PAM-SGD; penalties are in the units of a sum of squared errors over all training rows."""

    name: ClassVar[str] = "pam-sgd"
    memory_advice: ClassVar[str] = "use a smaller {d_sae}, or {solver} sgd, which solves for no decoder"

    decoder: str = option("residual", "Unknown of the decoder step: residual, Delta in W_dec = c W_enc' + Delta; free, "
                                      "W_dec itself, as in the paper.", choices=("residual", "free"), **PAPER)
    alpha: float | str = option("auto", "Ridge of the decoder step, beside the squared error summed over all rows: "
                                        "weight of ||W_dec - c W_enc'||^2, with --decoder free of ||W_dec||^2. auto: "
                                        "the best by leave-one-out.",
                                choices=("auto",), minimum=0)
    beta: float = option(0.0, "Weight of ||b_dec||^2, beside the squared error summed over all rows.", minimum=0,
                         **PAPER)
    bias: str = option("joint", "How the decoder step finds b_dec: joint, together with W_dec; after, as the mean of "
                                "what a W_dec solved without bias leaves, as in the paper's code, for which --alpha "
                                "must be a number.", choices=("joint", "after"), **PAPER)
    mu_dec: float | str = proximal("W_dec - W_dec^t", ", as --mu-enc")
    nu_dec: float | str = proximal("b_dec - b_dec^t", ", as --mu-enc")
    inner_steps: int | str = option("auto", f"Encoder steps per batch. auto: about {DEFAULT_STEPS} in all of training, "
                                            f"at most {MOST_INNER_STEPS} per batch; with --steps, 1.",
                                    choices=("auto",), minimum=1)
    decoder_every: int | str = option("epoch", "When to solve for the decoder. epoch: after each epoch, by a pass over "
                                               "all rows. N: also every N batches, from recent codes.",
                                      choices=("epoch",), minimum=1, metavar="epoch|N")
    decoder_first: bool = option(False, "Solve for the decoder before the encoder steps of each epoch, not after them, "
                                        "as in the paper's code for language models.", **PAPER)
    solve: str = option("auto", "How to solve for the decoder: direct, by factorising a d_sae x d_sae matrix; "
                                "iterative, without that matrix, to a residual of 1e-4. auto: direct where the matrix "
                                "fits in memory.", choices=("auto", "direct", "iterative"), advanced=True)
    revive: bool = option(True, "Re-aim dead latents at the rows reconstructed worst, where there are at least "
                                f"{REVIVAL_ROWS} rows per latent.", advanced=True)

    @property
    def steps_per_batch(self) -> int:
        return self.inner_steps

    def resolved(self, batches: int | None) -> "PamSgd":
        """The same with `inner_steps` a number: with few batches, more steps on each."""
        if self.inner_steps != "auto":
            return self
        if OPTIMIZERS[self.optimizer].to_tolerance:
            return replace(self, inner_steps=1)
        wanted = round(DEFAULT_STEPS / batches) if batches else 1
        return replace(self, inner_steps=min(max(wanted, 1), MOST_INNER_STEPS))

    def check(self, rows: int, batch_size: int, lr: float | str, smoothing: float | str) -> None:
        """Refuse training settings that cannot work with the optimiser, and options that contradict each other, by a
        ConfigError."""
        super().check(rows, batch_size, lr, smoothing)
        if OPTIMIZERS[self.optimizer].to_tolerance and self.inner_steps not in ("auto", 1):
            raise ConfigError("inner_steps", "{given} does nothing with {optimizer} {name}, whose one step solves for "
                                             "the encoder to tolerance", "leave it out", given=self.inner_steps,
                              name=self.optimizer)
        if self.bias == "after" and self.alpha == "auto":
            raise ConfigError("bias", "after cannot be used with {alpha} auto, which chooses for the bias that is "
                                      "joint with W_dec", "give a number, such as {alpha} 1, or use {bias} joint")
        if self.decoder_first and self.decoder_every != "epoch":
            raise ConfigError("decoder_first", "cannot be used with {decoder_every}, which adds decoder steps after "
                                               "encoder steps", "use one of them")

    def default_smoothing(self, rows: int, d_in: int, d_sae: int) -> float:
        """Wider with more latents per row (see `smoothing.py`)."""
        return 0.0 if OPTIMIZERS[self.optimizer].to_tolerance else default_width(rows, d_in, d_sae)

    def build(self, initial: SAE, task: Task, communicator: Communicator = ALONE) -> "PamSgdSolver":
        return PamSgdSolver(initial, task, self, communicator)

    def memory(self, rows: int, batch_size: int, d_in: int, d_sae: int) -> int:
        """The decoder step's memory, solved in the way that takes least, and `beside`."""
        ways = (self.solve,) if self.solve != "auto" else ("direct", "iterative")
        return min(plan(rows, d_sae, d_in, solve=way).bytes for way in ways) + self.beside(rows, batch_size, d_in,
                                                                                          d_sae)

    def beside(self, rows: int, batch_size: int, d_in: int, d_sae: int) -> int:
        """Bytes besides the decoder step's: the sample on which alpha is chosen, the encoder's weights and optimiser,
        and the window in which inner steps mix rows."""
        choosing = 4 * 4 * min(rows, SAMPLED_ROWS) * (d_sae + d_in)
        weights = 4 * (4 + OPTIMIZERS[self.optimizer].vectors) * d_in * d_sae
        window = 0 if self.inner_steps == 1 else 3 * 4 * min(rows, WINDOW * batch_size) * d_in  # apart, joined, mixed
        return choosing + weights + window


class PamSgdSolver(Solver):
    """The alternation: encoder steps, and the decoder steps between them."""

    def __init__(self, initial: SAE, task: Task, config: PamSgd, communicator: Communicator = ALONE) -> None:
        start, c = initial.sae(), 1.0 if config.decoder == "residual" else 0.0
        Delta = start.W_dec.detach() - c * start.W_enc.detach().T
        dictionary = Coupled(start, c, Delta)
        self._every = math.inf if config.decoder_every == "epoch" else config.decoder_every  # batches
        outers = outer_iterations(math.ceil(task.steps / config.inner_steps), task.batches, self._every)
        super().__init__(dictionary, ("Delta", "b_dec"), task, config, outers, communicator)
        nan = math.nan
        self.decoder = DecoderState(c, dictionary.Delta.detach(), dictionary.b_dec.detach(),
                                    nan if config.alpha == "auto" else config.alpha, nan, False, nan, nan, nan)
        self.raised = 0.0
        self.revived = 0
        self._size = dictionary.W_enc.norm().item()
        self._running: Running | None = None
        self._window: list[Batch] = []
        self._due: int | None = None
        self._last = self._silenced = False
        d_in, d_sae, batch_size = initial.d_in, initial.d_sae, math.ceil(task.rows / task.batches)
        self._memory = task.memory - config.beside(task.rows, batch_size, d_in, d_sae)

    @property
    def due(self) -> int | None:
        """Number of rows that the due decoder step has to observe: 0 if it uses the codes of encoder steps."""
        return self._due

    def begin_epoch(self) -> None:
        """Begin a pass: with a decoder step, if `decoder_first`."""
        super().begin_epoch()
        self._running = None  # free the old one first: two Gram matrices need not fit in memory
        self._running = self._running_sums()
        if self.config.decoder_first:
            self._due = self.task.rows

    def step(self, batch: Batch) -> list[StepReport]:
        """Collect a batch, and take encoder steps once there is a window of them."""
        if self.finished:
            return []
        self._batches += 1
        self._window.append(batch)
        solves = self._batches % self._every == 0
        if not solves and len(self._window) < (1 if self.config.inner_steps == 1 else WINDOW):
            return []
        reports = self._inner_steps()
        if solves and self._batches < self.task.batches and not self.finished:
            self._due = 0 if self._running is not None else self.task.rows
        return reports

    def end_epoch(self) -> list[StepReport]:
        """Take steps on the batches collected, and ask for the epoch's decoder step."""
        reports = self._inner_steps()
        if self.config.decoder_first:
            if self.finished:
                self.calibrate()
            return reports
        self._last, self._silenced = self.finished, False
        if self._running is None:
            self._due = self.task.rows
        elif not self._last:
            self._due = 0
        elif self.task.steps <= self.task.batches * self.config.inner_steps:  # rows are read once
            self._due = min(self.task.rows, LAST_ROWS * self.dictionary.d_sae)
        else:
            self._due = self.task.rows
        return reports

    def _plan(self, rows: int) -> Plan:
        return plan(rows, self.dictionary.d_sae, self.dictionary.d_in, self._memory, self.config.solve)

    def _running_sums(self) -> Running | None:
        """The sums over encoder steps' codes, if there are decoder steps within epochs, enough rows, and memory for a
        Gram matrix; else None."""
        window = RUNNING_ROWS * self.dictionary.d_sae
        if self._every == math.inf or self.task.rows <= window or self._plan(self.task.rows).kind == "iterative":
            return None
        return Running(self.dictionary, self.task.sparsity, window, self.communicator)

    def _inner_steps(self) -> list[StepReport]:
        """`inner_steps` rounds over the batches collected, their rows shuffled in each: consecutive steps on one batch
        would overfit the encoder to it, and drift while the decoder is fixed."""
        batches, self._window = self._window, []
        if not batches:
            return []
        inner, size, reports = self.config.inner_steps, batches[0].size, []
        whole = Batch.joined(batches) if inner > 1 else None
        near = self._running is not None and self._batches_left(len(batches)) * size < self._running.window
        rounds = min(inner, math.ceil((self.task.steps - self.steps) / len(batches)))
        for round_ in range(rounds):
            if whole is not None:
                order = torch.randperm(whole.size, generator=self.draws(self.steps, MIXING))
                batches = mixed(whole, order, size)
            for batch in batches:
                if self.finished:
                    break
                report, smoothed, codes = self.descend(batch)
                reports.append(report)
                if near and round_ == rounds - 1:  # each row once
                    self._running.add(codes, smoothed)
        return reports

    def _batches_left(self, waiting: int) -> float:
        """The number of batches before the next decoder step, those collected left out."""
        steps_left = (self.task.steps - self.steps) / self.config.inner_steps - waiting
        return min(-self._batches % self._every, self.task.batches - self._batches, steps_left)

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

        system = self._plan(self._due).system(self.dictionary.decoder().detach(), codes_again) if self._due else None
        self._pass = None if system is None else DecoderPass(system, self.dictionary, self.task.sparsity, self._due)

    @torch.no_grad()
    def observe(self, batch: Batch) -> None:
        """Encode a batch and add it to the decoder step's sums."""
        self._pass.add(*self._encoded(batch, self._drawn))

    def _encoded(self, batch: Batch, drawn: torch.Generator) -> tuple[Codes, Batch]:
        batch = batch if self._last else batch.with_rows(self.smoothing(batch, drawn))
        return self.dictionary.codes(batch.x), batch

    @torch.no_grad()
    def end_pass(self) -> None:
        """Solve for the decoder, revive dead latents, and take the result as the reference of proximal terms.

        If a penalty has silenced latents before the last decoder step, another pass is due.
        """
        observed = self._running.observed() if self._pass is None else self._pass.finish(self.communicator)
        self._pass = None
        if silence(self.dictionary, observed.norm_weights, observed.rows) and self._last and not self._silenced:
            self._silenced = True
            return
        self._due = None
        self._apply(self._solved(observed))
        self.outer += 1
        enough = observed.rows >= REVIVAL_ROWS * self.dictionary.d_sae
        if self.config.revive and enough and self.steps < REVIVAL * self.task.steps:
            self._revive(observed)
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
                pulled = bool(observed.norm_weights.any()) and self.task.sparsity_weight > 0
                new_problem = math.isnan(alpha) or (self._last and pulled)
                settled = self._last and self.smoothing.moves
                if new_problem or ((is_choosing_step(self.outer) or self._last) and not settled):
                    before = None if new_problem else fraction * alpha
                    factorisation = choose_alpha(observed.system, terms, observed.z, observed.y, before)
            z = None
            if self._last or self.outer + 1 == self._outers:
                whole = len(observed.z) == observed.rows
                z = observed.z if whole else observed.z[:: math.ceil(len(observed.z) / DOF_ROWS)]
            found = solve(observed.system, replace(terms, alpha=fraction * alpha), factorisation, z)
            state = replace(found, alpha=found.alpha / fraction, Delta=found.Delta.to(dtype), b=found.b.to(dtype))
        return broadcast(state, self.dictionary.Delta, self.dictionary.b_dec, self.communicator)

    def _terms(self, observed: Observed, fraction: float) -> Terms:
        """The decoder step's terms, scaled to a fraction of all rows, with alpha left at 0."""
        direction = self.dictionary.W_enc.detach().T if self.config.decoder == "residual" else None
        W_dec = self.dictionary.decoder().detach()
        weights = self.task.penalty_weight(self.steps - 1) * (not self._last) * observed.norm_weights
        decay = penalty_decay(W_dec, weights, self._size)
        return Terms(0.0, fraction * self.config.beta, fraction * self.weight("mu_dec"),
                     fraction * self.weight("nu_dec"), direction, W_dec, self.dictionary.b_dec.detach(), decay,
                     self.config.bias == "joint")

    def _apply(self, state: DecoderState) -> None:
        """Put a solved decoder into the dictionary."""
        if math.isnan(state.dof):
            state = replace(state, dof=self.decoder.dof)
        if state.raised:
            self.raised = max(self.raised, state.ridge)
        self.decoder = state
        self.dictionary.c = state.c
        self.dictionary.Delta.data, self.dictionary.b_dec.data = state.Delta, state.b

    def _revive(self, observed: Observed) -> None:
        """Re-aim latents that never fired at the rows reconstructed worst."""
        dead = ~observed.fired
        count = int(dead.sum())
        if not 0 < count < len(dead):
            return
        W_dec = self.dictionary.decoder()
        directions = W_dec.new_empty(count, W_dec.shape[1])
        if self.communicator.is_main:  # which has the rows
            residuals = observed.y - observed.z @ W_dec - self.dictionary.b_dec
            directions.copy_(directions_of_worst(residuals, count, self.draws(self.outer, REVIVING)))
        revive(self.dictionary, dead, self.communicator.broadcast(directions))
        self._apply(replace(self.decoder, Delta=self.decoder.Delta.masked_fill(dead[:, None], 0)))
        self.optimizer.forget(dead, self.dictionary.latent_dimension)
        self.revived += count

    def _balance(self) -> None:
        """Give encoder and decoder one norm, unless alpha is fixed, which determines their ratio."""
        if self.config.alpha == "auto" and (factor := balance(self.dictionary, self._size)):
            state = self.decoder
            self._apply(replace(state, c=state.c / factor**2, Delta=state.Delta / factor,
                                alpha=state.alpha * factor**2))
            self.optimizer.rescale(factor)
            if self._running is not None:
                self._running.rescale(factor)

    def record(self) -> dict[str, float]:
        """The decoder step's alpha, relative to a sum over normalised rows; its condition estimate; the number of
        revivals; its residual, if solved by iteration; and at the end the effective degrees of freedom."""
        state = self.decoder
        known = {name: value for name, value in (("residual", state.residual), ("dof", state.dof))
                 if not math.isnan(value)}
        return {"alpha": state.alpha, "condition": state.condition, "revived": self.revived} | known

    def notes(self) -> list[str]:
        """Sentences on the last decoder step; see `notes_on`."""
        return notes_on(self.decoder, self.config.alpha == "auto", self.task.rows, self.dictionary.d_sae, self.raised)

    def state(self) -> dict[str, Tensor]:
        return super().state() | {f"decoder.{name}": torch.tensor(value, dtype=torch.float64)
                                  for name, value in self._numbers().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume from the tensors of `state`, taken after a decoder step."""
        super().restore(state)
        numbers = {name: state[f"decoder.{name}"].item() for name in self._numbers()}
        self.raised, self.revived = numbers.pop("most_raised"), int(numbers.pop("revived"))
        self.decoder = replace(self.decoder, **numbers, Delta=self.dictionary.Delta.detach(),
                               b=self.dictionary.b_dec.detach())
        self.dictionary.c = self.decoder.c

    def _numbers(self) -> dict[str, float]:
        """The decoder's numbers in a checkpoint, beside its tensors."""
        own = {name: getattr(self.decoder, name) for name in ("c", "alpha", "ridge", "condition", "residual", "dof")}
        return own | {"most_raised": self.raised, "revived": self.revived}
