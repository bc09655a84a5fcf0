"""The solver of `sae finetune`: descent through the language model that an SAE acts in.

    loss = KL(clean || spliced) + w FVU        or, with `--objective ce`, the spliced model's cross-entropy + w FVU

per row. The clean pass gives the activations that the SAE encodes; the spliced one has its
predictions in their place, and a gradient from the hook point up: blocks below keep no activations for it. The SAE acts
on rows normalised as in training, so that one learning rate fits all models. L0 is held where it starts: by one factor
on all thresholds, or with relu by the weight of an L1 penalty and a shift of the biases; with topk it is fixed.

Source: Karvonen, "Revisiting End-To-End Sparse Autoencoder Training: A Short Finetune Is All You Need" (2025).

Shapes: n rows of a forward pass, D = d_in, E = d_out, F = d_sae, L prefixes.
"""

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..base.errors import ModelError
from ..base.machine import is_out_of_memory
from ..base.processes import ALONE, Communicator
from ..extract.effects import CleanPass, effects
from ..extract.forward import pass_tokens
from ..extract.passes import Passes
from ..extract.splice import Hooked, StoredWindow, in_batches, stored_activations
from ..sae.activations import Relu, Thresholded
from ..sae.codes import Codes
from ..sae.dictionary import SAE, Batch
from ..sae.metrics import reconstruction
from .options import Finetune
from .plan import Plan
from .rows import ArrayRows, Normalisation, TrainingRows, raw_batches
from .solver import Solver, StepReport, Task

STEP_TOKENS = 3072  # of a step, about: 24 windows of 128
EPOCH = 50  # steps between checkpoints, each with measures on held-out windows
THRESHOLD_RATE, WEIGHT_RATE = (
    0.05,
    0.5,
)  # change per step, of the logarithm, over the relative excess of L0


@dataclass(frozen=True, eq=False)
class Through:
    """A language model, where an SAE acts in it, and windows: to train on, and to compare before and after on."""

    passes: Passes
    hooked: Hooked
    train: Sequence[StoredWindow]
    test: Sequence[StoredWindow]

    @cached_property
    def rows(self) -> np.ndarray:
        """Rows per training window."""
        return np.array([window.replaced.sum() for window in self.train])

    @cached_property
    def per_step(self) -> int:
        """Windows of a step."""
        return max(1, round(STEP_TOKENS / self.rows.mean()))

    @property
    def most(self) -> int:
        """Tokens of one forward pass."""
        return pass_tokens(self.passes.model.device)

    def clean(self, windows: Sequence[StoredWindow]) -> CleanPass:
        return CleanPass.of(self.passes, windows, self.hooked.reads, self.hooked.writes)

    def step(self, number: int, seed: int) -> np.ndarray:
        """The windows of a step, out of passes over all of them, each in an order of its own."""
        wanted = np.arange(number * self.per_step, (number + 1) * self.per_step)
        passes, places = np.divmod(wanted, len(self.train))
        order = {
            one: np.random.default_rng((seed, one)).permutation(len(self.train))
            for one in {*passes.tolist()}
        }
        return np.array(
            [order[one][place] for one, place in zip(passes.tolist(), places.tolist(), strict=True)]
        )

    def activations(
        self, windows: Sequence[StoredWindow], tokens: int
    ) -> tuple[Tensor, Tensor | None]:
        """Those of about the first `tokens` rows, and a transcoder's targets."""
        reads, writes = self.hooked.reads, self.hooked.writes
        points, parts, left = list(dict.fromkeys((*reads, *writes))), [], tokens
        for found in stored_activations(self.passes.model, windows, points, self.most):
            parts.append([part.float().cpu() for part in found])
            left -= len(found[0])
            if left <= 0:
                break
        at = dict(zip(points, (torch.cat(part) for part in zip(*parts, strict=True)), strict=True))
        x, y = (torch.cat([at[point] for point in ends], 1) for ends in (reads, writes))
        return x, None if reads == writes else y


@dataclass(frozen=True, eq=False)
class StepWindows:
    """A step's windows in this process; `size` counts the rows in all processes."""

    through: Through
    normalisation: Normalisation
    windows: list[StoredWindow]
    size: int


class Sampled(ArrayRows):
    """Activations of some windows: the rows that training is normalised by, or held-out ones."""

    def __init__(self, through: Through, rows: tuple[Tensor, Tensor | None]) -> None:
        super().__init__(*rows)
        self.through = through
        self.widths = self.places = through.hooked.sae.widths


class WindowRows(TrainingRows):
    """As batches the windows, `EPOCH` steps an epoch."""

    def shuffled(self, epoch: int, first: int = 0) -> Generator[Any, None, None]:
        assert isinstance(self.stored, Sampled)
        through, communicator = self.stored.through, self.communicator
        for number in range(epoch * EPOCH + first, (epoch + 1) * EPOCH):
            windows = through.step(number, self.seed)
            own = [
                through.train[window]
                for window in windows[communicator.rank :: communicator.world_size]
            ]
            yield StepWindows(through, self.normalisation, own, int(through.rows[windows].sum()))

    def some(self, count: int, number: int) -> Iterator[Batch]:
        """The first rows of the sample."""
        left = count
        for batch in self._sequential():
            if left:
                part = batch.first(left)
                left -= part.size
                yield part


class ThroughModel(Solver):
    """Descent on windows of tokens, through the language model."""

    def __init__(
        self, initial: SAE, task: Task, config: Finetune, communicator: Communicator = ALONE
    ) -> None:
        codes_stay = (
            ("W_enc", "b_enc", *initial.activation_parameters) if config.only == "decoder" else ()
        )
        super().__init__(initial.sae(), ("threshold", *codes_stay), task, config, communicator)
        self.options, self.codes_stay, self.most = config, bool(codes_stay), math.inf
        with torch.no_grad():
            codes = self.dictionary.codes(task.sample.x)
            self.target = (codes.count().double() / len(task.sample.x)).clamp(min=1e-6)  # L0
            self.weight = self._stationary_weight(codes)

    def _stationary_weight(self, codes: Codes) -> Tensor:
        """The weight of L1 at which the sample's codes are about stationary: over active latents, the mean of
        `2 (y - y_hat) . W_dec_i / ||W_dec_i||`; 0 for activations that need no penalty."""
        batch, dictionary = self.task.sample, self.dictionary
        if self.codes_stay or not isinstance(dictionary.activation, Relu):
            return self.target.new_zeros(())
        W_dec = dictionary.decoder()
        residuals = batch.y - dictionary.predicted(batch.x, codes)[:, -1]
        slopes = 2 * residuals @ (W_dec / dictionary.weighed(W_dec).norm(dim=1, keepdim=True)).T
        active = codes.dense() > 0
        return ((slopes * active).sum() / active.sum().clamp(min=1)).clamp(min=1e-6).double()

    @property
    def revives(self) -> bool:
        return False

    def remember(self, batch: Any) -> None:
        """Nothing: no latent is re-aimed."""

    def step(self, batch: Any) -> StepReport:
        report = self._step(batch)
        if self.finished:
            self.calibrate()
        return report

    def _step(self, batch: StepWindows) -> StepReport:
        if self.options.windows != "auto":
            self.most = min(
                self.most,
                int(self.options.windows) * max((one.length for one in batch.windows), default=1),
            )
        sums = None
        while sums is None:
            self.optimizer.zero_grad()
            try:
                sums = torch.zeros(3, dtype=torch.float64, device=batch.through.passes.model.device)
                for windows in in_batches(batch.windows, int(min(self.most, batch.through.most))):
                    sums += self._part(batch, windows)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                sums = None
            if (
                sums is None
            ):  # outside of the except clause, where the error has released its tensors
                self._halve(batch)
        self.optimizer.step(self.task.learning_rate(self.steps))
        self.steps += 1
        loss, squared_error, active = sums.unbind()
        self._hold_l0(self.communicator.all_reduce(active.clone()) / batch.size)
        return StepReport(self.steps, batch.size, loss, squared_error, active / batch.size)

    def _part(self, batch: StepWindows, windows: list[StoredWindow]) -> Tensor:
        """Add the gradient of some of a step's windows; returns their parts of the loss, squared error and L0."""
        dictionary, options, normalisation = self.dictionary, self.options, batch.normalisation
        mean, scale, target_mean, target_scale = normalisation.of_sae()
        clean = batch.through.clean(windows)
        x = (clean.x.to(mean) - mean) / scale
        y = x if clean.y is clean.x else (clean.y.to(mean) - target_mean) / target_scale
        pre = dictionary.pre_activations(x)
        codes = dictionary.activated(pre)
        y_hat = dictionary.predicted(x, codes)  # (n, L, E)
        spliced = clean.spliced(y_hat[:, -1] * target_scale + target_mean)
        objective, slope = clean.descent(spliced.detach(), options.objective)
        errors = (y_hat - y[:, None]).square().sum(-1).sum(0).double()  # (L,)
        rest = options.fvu_weight * errors.mean() / normalisation.variance
        if self.weight:
            norms = (
                dictionary.weighed(dictionary.decoder()).norm(dim=1).detach()
            )  # or it would shrink what is exact
            penalty = self.weight * codes.times(norms[:, None]).sum()
            rest = rest + max(options.fvu_weight, 1.0) * penalty / normalisation.variance
        torch.autograd.backward([spliced, rest / batch.size], [slope / batch.size, None])
        return (
            torch.stack(
                [
                    objective + rest.detach(),
                    errors[-1].detach(),
                    codes.count().double() * batch.size,
                ]
            )
            / batch.size
        )

    def _halve(self, batch: StepWindows) -> None:
        longest = max(window.length for window in batch.windows)
        most = int(min(self.most, batch.through.most, longest * len(batch.windows)))
        if most <= longest:
            raise ModelError(
                f"a window of {longest:,} tokens does not fit in the memory of "
                f"{batch.through.passes.model.device} with its gradient; lower --context, or use "
                "--model-dtype bfloat16"
            )
        self.most = most // 2
        if batch.through.passes.model.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def _hold_l0(self, l0: Tensor) -> None:
        """Move the thresholds, or the penalty's weight, against an excess of L0."""
        excess = (l0 / self.target - 1).clamp(max=1.0)
        if self.weight:
            self.weight *= (WEIGHT_RATE * excess).exp()
            self.calibrate()  # the weight takes hundreds of steps to find its value
        elif (
            not self.codes_stay
            and (threshold := self.dictionary.activation_parameters.get("threshold")) is not None
        ):
            threshold *= (THRESHOLD_RATE * excess).exp()

    @torch.no_grad()
    def calibrate(self) -> None:
        """Give the sample the L0 that it had at the start: scale the thresholds; with relu shift the biases, by one
        amount in units of the codes' contributions, `z_i ||W_dec_i||`."""
        dictionary, parameters = self.dictionary, self.dictionary.activation_parameters
        activation = dictionary.activation
        shifts = isinstance(activation, Relu)
        if self.codes_stay or not (shifts or "threshold" in parameters):
            return
        pre = dictionary.pre_activations(self.task.sample.x)
        kept = round(self.target.item() * len(pre))
        if not 0 < kept < pre.numel():
            return
        tiny = torch.finfo(pre.dtype).tiny
        if shifts:
            norms = dictionary.weighed(dictionary.decoder()).norm(dim=1).clamp(min=tiny)
            dictionary.b_enc -= _between(pre * norms, kept) / norms
        elif isinstance(activation, Thresholded):
            thresholds = activation.thresholds(parameters, pre.shape[1]).clamp(min=tiny)
            parameters["threshold"] *= _between(pre / thresholds, kept).clamp(min=0)

    def notes(self) -> list[str]:
        lacking = math.isfinite(self.most) and self.options.windows == "auto"
        return [f"for lack of memory, forward passes took at most {self.most:,} tokens"] * lacking

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"target": self.target, "weight": self.weight}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self.target, self.weight = state["target"].to(self.target), state["weight"].to(self.weight)


def _between(values: Tensor, count: int) -> Tensor:
    """A number that `count` of the values are above."""
    return values.flatten().topk(count + 1).values[-2:].mean()


@dataclass(frozen=True)
class FinetunePlan(Plan):
    """Its training rows are the sample that gives the normalisation."""

    in_batches: ClassVar[type[TrainingRows]] = WindowRows

    through: Through = field(kw_only=True)

    @cached_property
    def batches(self) -> int:
        return EPOCH

    @property
    def rows_trained(self) -> int:
        return int(self.through.rows.sum())

    def compared(self, saes: Sequence[SAE]) -> list[dict[str, Any]]:
        """On the windows kept out of training FVU, L0, CE and KL, and as `loss` the objective."""
        assert self.test_rows is not None and isinstance(self.solver, Finetune)
        through, solver = self.through, self.solver
        found = [
            one
            for (one,) in effects(
                [through.passes],
                through.test,
                through.hooked.reads,
                [through.hooked.writes],
                saes,
                lambda tokens: None,
            )
        ]
        measured = [
            reconstruction(one, raw_batches(self.test_rows)) | effect
            for one, effect in zip(saes, found, strict=True)
        ]
        name = "kl" if solver.objective == "kl" else "ce_spliced"
        return [one | {"loss": one[name] + solver.fvu_weight * one["fvu"]} for one in measured]
