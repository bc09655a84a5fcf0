"""The alternation of PAM-SGD: encoder steps, and the decoder step that follows them. See `pam_sgd.py`."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..distributed import latents_axis, over_latents, rows_axis
from ..ridge import Terms, choose_alpha, effective_dof, solve
from ..ridge.iterative import TOLERANCE
from ..sae import SAE
from .base import Rows, Solver, StepReport, Task
from .gather import Gathered, Iteration, SomeRows, gather
from .portions import Portion, as_portion, joined, mixed, portions_of
from .revival import directions_of_worst
from .running import Running

if TYPE_CHECKING:  # it builds the solver
    from .pam_sgd import PamSgd

LAST_ROWS = 32  # rows a latent that the last decoder step takes where rows are read once
RUNNING_ROWS = 8  # rows a latent, of the latest steps, that a decoder step takes which makes no pass over all rows
WINDOW = 16  # batches among which inner steps mix rows
REVIVAL = 0.9  # share of all steps during which dead latents are revived; the rest is for them to settle
REVIVAL_ROWS = 2  # rows a latent, from which on they are: with fewer, latents stay idle because rows are few
CHOICE_GROWTH = 1.25  # ratio of the outer iterations at which alpha is chosen anew, once there are several
OWN_STATE = ("c", "Delta", "b_dec", "alpha", "condition", "dof", "raised", "revived", "residual")
DECODER_STEP, REVIVING, MIXING = 1, 2, 3  # kinds of draws besides those of encoder steps
DOF_ROWS = 512  # whose leverages stand for those of all rows
THRESHOLD_SHARE = 0.8  # of the rows, above which degrees of freedom are said to be too many
THRESHOLD_RATIO = 2  # of rows and latents, either way, within which
SILENT = 1e-7  # mean size of a latent's contribution, of that of a row, below which a penalty has ended it
LEAST_SIZE = 1e-2  # of the encoder's norm at the start, below which neither it nor the decoder counts as of a size
LEAST_NORM = 1e-3  # of the mean decoder norm, or of the least it counts for: below, a penalty is taken as quadratic


class PamSgdSolver(Solver):
    """The alternation; its own state is the decoder (c, Delta, b_dec), alpha, and the encoder it started from."""

    def __init__(self, initial: SAE, task: Task, config: "PamSgd") -> None:
        super().__init__(initial, task, {}, config, outer_iterations(task, config))
        residual = config.decoder == "residual"
        self.c = torch.tensor(1.0 if residual else 0.0, dtype=initial.W_dec.dtype)
        self.Delta = (initial.W_dec - self.c * initial.W_enc.T).contiguous()
        self.b_dec = initial.b_dec.clone()
        self.alpha = torch.tensor(math.nan if config.alpha == "auto" else config.alpha, dtype=torch.float64)
        self.condition = torch.tensor(math.nan, dtype=torch.float64)
        self.dof = torch.tensor(math.nan, dtype=torch.float64)
        self.raised = torch.tensor(0.0, dtype=torch.float64)
        self.residual = torch.tensor(math.nan, dtype=torch.float64)
        self.revived = torch.tensor(0)
        self._size = latents_axis().norm(initial.W_enc).item()
        self._running: Running | None = None
        self._counting = False
        self._budget = config.budget(task, initial.d_in, initial.d_sae)

    def decoder(self) -> tuple[Tensor, Tensor]:
        """W_dec (F, D), differentiable through c W_enc', and b_dec (D,)."""
        if self.config.decoder == "free":
            return self.Delta, self.b_dec
        return torch.add(self.Delta, self.trained["W_enc"].T, alpha=self.c.item()), self.b_dec

    def epoch(self, rows: Rows, epoch: int) -> Iterator[StepReport]:
        """Encoder steps on every batch, and the decoder step as often as asked: at the end in any case, or first."""
        if self.config.decoder_first:
            self.solve_decoder(rows, last=False)
        every = math.inf if self.config.decoder_every == "epoch" else self.config.decoder_every
        inner = self.config.inner_steps
        self._running = None  # before there are others: two Gram matrices need not fit in memory
        self._running = self._running_sums(every)
        window: list[Portion] = []
        for index, portion in enumerate(portions_of(rows.shuffled(epoch)), 1):
            if self.step >= self.task.steps:
                break
            if index > 1 and (index - 1) % every == 0:
                self.solve_decoder(rows, last=False)
            window.append(portion)
            if len(window) == (1 if inner == 1 else WINDOW) or index % every == 0:
                yield from self._inner_steps(window, self._batches_left(index, every, len(window)))
                window = []
        yield from self._inner_steps(window, 0)
        ended = self.step >= self.task.steps
        if not self.config.decoder_first:
            self.solve_decoder(rows, last=ended)
        elif ended:
            self.calibrate()

    def _running_sums(self, every: float) -> Running | None:
        """What sums up the codes of encoder steps, where decoder steps are made from those: between the ends of epochs,
        with rows enough, and the memory for their Gram matrix."""
        window = RUNNING_ROWS * self.d_sae
        if every == math.inf or self.task.rows <= window or self._budget is not None:
            return None
        return Running(self.sae(), self.task.sparsity, window)

    def _batches_left(self, index: int, every: float, waiting: int) -> float:
        """How many batches come between one, counted from 1 in its epoch, and the next decoder step; before it, some
        are still waiting for their steps."""
        steps_left = (self.task.steps - self.step) / self.config.inner_steps - waiting
        return min(-index % every, self.task.batches - index, steps_left)

    def _inner_steps(self, window: list[Portion], left: float) -> Iterator[StepReport]:
        """`inner_steps` rounds over the batches of a window, their rows mixed anew in each: that many steps in a row on
        one batch would fit the encoder to that batch, and with a decoder that is held fixed they drift. So many batches
        are left before the next decoder step."""
        if not window:
            return
        inner, size, batches = self.config.inner_steps, window[0].size, window
        whole = joined(window) if inner > 1 else None
        near = self._running is not None and left * size < self._running.window
        rounds = min(inner, math.ceil((self.task.steps - self.step) / len(window)))
        for round_ in range(rounds):
            if whole is not None:
                order = torch.randperm(whole.size, generator=self.draws(self.step, MIXING))
                batches = mixed(whole, order, size)
            self._counting = near and round_ == rounds - 1  # each row once
            for batch in batches:
                if self.step >= self.task.steps:
                    return
                yield self.descend(batch)

    def _loss(self, batch: Tensor | Portion) -> tuple[Tensor, Tensor, Tensor]:
        """That of every solver; the batch counts for the next decoder step where that is made from encoder steps."""
        loss, squared_error, z = super()._loss(batch)
        if self._running is not None and self._counting:
            self._running.add(z.detach(), as_portion(batch), self.decoder)
        return loss, squared_error, z

    @torch.no_grad()
    def solve_decoder(self, rows: Rows, last: bool) -> None:
        """The decoder step; the proximal terms then refer to what it leaves.

        It is over one pass of all rows, or over the rows of the latest encoder steps, where the objective's other terms
        count for the share that those are of all. Of processes that share rows the first solves.

        Args:
            rows: the training rows.
            last: whether training ends with it. Before, the step minimises what the encoder steps minimise: over
                smoothed rows, with the sparsity penalty, which grows with the decoder's norms, pulling on them. The
                last step does without either: codes that a penalty has shrunk then reconstruct the rows as they
                are as well as they can. Without a penalty it keeps the alpha that smoothed rows chose, since rows that
                an encoder has fitted exactly would choose too small a one; a penalty keeps them from being that, and
                without it the problem is another one, so that alpha is then sought anew.
        """
        W_dec, b_dec = self.decoder()
        residual = self.config.decoder == "residual"
        if last:
            self.calibrate()
        gathered = self._gather(rows, W_dec, last)
        if self._silence(gathered, W_dec) and last:
            gathered = self._gather(rows, W_dec, last)
        share = gathered.rows / self.task.rows
        terms = Terms(0.0, share * self.config.beta, share * self.weight("mu_dec"), share * self.weight("nu_dec"),
                      self.trained["W_enc"].T if residual else None, W_dec, b_dec,
                      self._decay(W_dec, gathered.norm_weights) * (not last), self.config.bias == "joint")
        choosing = is_choosing_step(int(self.outer))
        self.outer += 1
        gathered.on_first(lambda: self._solve(gathered, terms, share, choosing, last))
        for name in OWN_STATE:
            rows_axis().from_place(getattr(self, name))
        enough = gathered.rows >= REVIVAL_ROWS * self.d_sae
        if self.config.revive and enough and self.step < REVIVAL * self.task.steps:
            self._revive(gathered)
        self._balance()
        self._hold_encoder()

    def _solve(self, gathered: Gathered, terms: Terms, share: float, choosing: bool, last: bool) -> None:
        """Choose alpha, where it is time to, and solve; `share` is that of the rows gathered of all."""
        residual, near = terms.direction is not None, None
        if self.config.alpha == "auto":
            pulled = latents_axis().any(gathered.norm_weights) and self.task.sparsity_weight > 0
            new_problem = bool(self.alpha.isnan()) or (last and pulled)
            settled = last and self.smoothing.moves
            if new_problem or ((choosing or last) and not settled):
                before = None if new_problem else share * self.alpha.item()
                choice = choose_alpha(gathered.system, terms, gathered.z, gathered.x, before)
                self.alpha.fill_(choice.alpha / share)
                near = choice.factored
        terms = replace(terms, alpha=share * self.alpha.item())
        solved = solve(gathered.system, terms, None if last else near)
        if last or self.outer == self._outers:
            whole = len(gathered.z) == gathered.rows
            some = gathered.z if whole else gathered.z[:: math.ceil(len(gathered.z) / DOF_ROWS)]
            self.dof.fill_(effective_dof(gathered.system, terms, some))
        self.c.fill_(solved.c)
        self.Delta.copy_(solved.W - solved.c * self.trained["W_enc"].T.double() if residual else solved.W)
        self.b_dec.copy_(solved.b)
        self.condition.fill_(solved.condition)
        if solved.residual is not None:
            self.residual.fill_(solved.residual)
        if solved.raised:
            self.raised.fill_(max(self.raised.item(), solved.ridge))

    def _decay(self, W_dec: Tensor, norm_weights: Tensor) -> Tensor:
        """The quadratic in each `||W_i||` that touches the penalty from above at the decoder as it is, (F,).

        `a ||W|| <= a (||W||^2 / ||W_t|| + ||W_t||) / 2`, so that a step which lowers the right side lowers the left:
        encoder and decoder step then descend on one objective. A decoder step blind to the penalty would undo what
        the encoder step gained, and the two together drive the codes to nothing.
        """
        norms = W_dec.double().norm(dim=1)
        weight = self.task.penalty_weight(self.step - 1)
        mean = max(latents_axis().mean(norms).item(), LEAST_SIZE * self._size / math.sqrt(self.d_sae))
        return weight * norm_weights / (2 * norms.clamp(min=LEAST_NORM * mean))

    def _gather(self, rows: Rows | SomeRows, W_dec: Tensor, last: bool) -> Gathered:
        """What the decoder step is made from: a pass over the rows, smoothed but for the last; or the codes of encoder
        steps, and at the end a pass over some of the rows, where all have not been read twice either."""
        if self._running is not None and not last:
            return self._running.gathered()
        once = self.task.steps <= self.task.batches * self.config.inner_steps
        if self._running is not None and once:
            rows = SomeRows(rows, LAST_ROWS * self.d_sae)
        iteration = None if self._budget is None else Iteration(W_dec, self._budget)
        return gather(rows, self.sae(), self.task.sparsity, None if last else self.smoothing,
                      lambda: self.draws(int(self.outer), DECODER_STEP), iteration)

    def _silence(self, gathered: Gathered, W_dec: Tensor) -> bool:
        """Turn off latents whose contribution a penalty has driven to nothing, and say whether there are any: left to
        themselves they shrink until nothing can be computed with them, and the last decoder step, which does without
        the penalty, would bring them back."""
        contribution = gathered.norm_weights * W_dec.double().norm(dim=1) / gathered.rows  # (F,)
        gone = (gathered.norm_weights > 0) & (contribution < SILENT * math.sqrt(W_dec.shape[1]))
        self.trained["W_enc"].masked_fill_(gone, 0)
        self.trained["b_enc"].masked_fill_(gone, 0)
        return latents_axis().any(gone)

    def _revive(self, gathered: Gathered) -> None:
        """Re-aim the encoder of latents that never fired at rows reconstructed badly; their decoder is right at the
        next decoder step, and until then is that of a tied latent, or for a free decoder zero."""
        fired, axis = gathered.fired, latents_axis()
        dead = (~fired).nonzero()[:, 0]
        counts = axis.each(len(dead))
        total = sum(counts)
        if not 0 < total < self.d_sae:
            return
        W_dec, b_dec = self.decoder()
        found = W_dec.new_empty(total, W_dec.shape[1])
        if rows_axis().is_first:  # which has the rows
            residuals = gathered.x - over_latents(gathered.z @ W_dec) - b_dec
            found.copy_(directions_of_worst(residuals, total, self.draws(int(self.outer), REVIVING)))
        own = rows_axis().from_place(found).split(counts)[axis.place]
        W_enc = self.trained["W_enc"]

        def mean_of_fired(values: Tensor) -> Tensor:
            return axis.add_up(values.masked_fill(~fired, 0).sum()) / (self.d_sae - total)

        W_enc[:, dead] = mean_of_fired(W_enc.norm(dim=0)) * own.T
        self.Delta[dead] = 0
        for name in ("b_enc", *self._parameter_names):
            latents = self.trained[name]
            if latents.shape == fired.shape:
                latents.masked_fill_(~fired, 0 if name == "b_enc" else mean_of_fired(latents))
        self.optimizer.forget(~fired)
        self.revived += total

    def _balance(self) -> None:
        """Scale codes up and decoder down, or the reverse, so that encoder and decoder are of one size.

        The SAE stays the same. Without it a penalty shrinks the codes a little in each encoder step, the decoder
        step makes up for it, and after some hundred iterations Adam's steps are large against the encoder. An alpha
        that the user fixed decides between the sizes itself, and so does an activation whose codes are of one scale.
        Under a penalty that is too strong for any code this stops at `LEAST_SIZE`, so that biases can end the codes.
        """
        if self.config.alpha != "auto":
            return
        size = latents_axis().norm(self.trained["W_enc"]).item()
        square = (self.c.item() if self.config.decoder == "residual" else
                  latents_axis().norm(self.Delta).item() / max(size, torch.finfo(self.Delta.dtype).tiny))
        if not 0 < square < math.inf or not size:
            return
        factor = max(math.sqrt(square), LEAST_SIZE * self._size / size)
        rescaled = self.activation.rescaled(self._parameters(), factor)
        if rescaled is None:
            return
        for name, tensor in self.trained.items():
            tensor.copy_(rescaled[name] if name in rescaled else tensor * factor)
        self.optimizer.rescale(factor)
        if self._running is not None:
            self._running.rescale(factor)
        self.c /= factor**2
        self.Delta /= factor
        self.alpha *= factor**2

    def record(self) -> dict[str, float]:
        """The decoder step's alpha, beside a sum over the normalised rows, its condition estimate, how often a latent
        was revived, where it was solved by iteration its residual, and at the end the effective degrees of freedom."""
        known = {name: value.item() for name, value in (("residual", self.residual), ("dof", self.dof))
                 if not value.isnan()}
        return {"alpha": self.alpha.item(), "condition": self.condition.item(),
                "revived": int(self.revived)} | known

    def notes(self) -> list[str]:
        """What the last decoder step came to, and what was wrong with it where something was."""
        rows, latents, dof, alpha = self.task.rows, self.d_sae, self.dof.item(), self.alpha.item()
        chosen = self.config.alpha == "auto"
        notes = [f"decoder: alpha {alpha:.3g} {'chosen by leave-one-out' if chosen else 'as given'} leaves {dof:,.0f} "
                 f"effective degrees of freedom of {rows:,} rows ({rows / latents:.2g} rows a latent); "
                 f"condition {self.condition.item():.0e}"]
        if not chosen and dof > THRESHOLD_SHARE * rows and 1 / THRESHOLD_RATIO <= rows / latents <= THRESHOLD_RATIO:
            notes.append(f"--alpha {alpha:.3g} lets the decoder fit nearly every one of {rows:,} rows by itself with "
                         f"{latents:,} latents, which is where the error on other rows peaks; use --alpha auto, or a "
                         "larger --alpha")
        if self.residual > 2 * TOLERANCE:
            notes.append(f"the last decoder step was solved to a residual of {self.residual.item():.1g} only, where "
                         f"{TOLERANCE:g} was wanted; give a larger --alpha, or --solve direct")
        if self.raised:
            advice = ("the codes are degenerate: see `sae sparsity`, and try a lower --lr" if chosen
                      else "give a larger --alpha, or leave the choice to --alpha auto")
            notes.append(f"a decoder step could not be solved with the ridge asked for, and took "
                         f"{self.raised.item():.3g} instead; {advice}")
        return notes

    def state(self) -> dict[str, Tensor]:
        """Everything that training goes on from, by name."""
        own = {name: getattr(self, name) for name in OWN_STATE}
        return super().state() | {f"decoder.{name}": tensor for name, tensor in own.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` returned; it was taken after a decoder step."""
        super().restore(state)
        for name in OWN_STATE:
            getattr(self, name).copy_(state[f"decoder.{name}"])


def is_choosing_step(outer: int) -> bool:
    """Whether alpha is chosen anew at an outer iteration, counted from 0: at the first few, then ever more rarely,
    since it moves ever more slowly and choosing costs about a solve."""
    choice = 0
    while choice < outer:
        choice = max(choice + 1, math.floor(CHOICE_GROWTH * choice))
    return choice == outer


def outer_iterations(task: Task, config: "PamSgd") -> int:
    """How many decoder steps training comes to, the last one of each epoch included."""
    every = task.batches if config.decoder_every == "epoch" else config.decoder_every
    epochs, rest = divmod(math.ceil(task.steps / config.inner_steps), task.batches)
    return epochs * math.ceil(task.batches / every) + math.ceil(rest / every)
