"""The solver of `sae finetune`: descent through the language model that an SAE acts in.

    loss = KL(clean || spliced) + w FVU        or, with `--objective ce`, the spliced model's cross-entropy + w FVU

per row. The SAE encodes the clean pass' activations; the spliced pass has its predictions in their place. Rows are
centred and divided by one number per hook point, so that one learning rate fits all models; FVU is raw, since KL weighs
dimensions as the model does. L0 is held: by one factor on all thresholds, or with relu by the weight of an L1 penalty
and a shift of the biases.

Source: Karvonen, "Revisiting End-To-End Sparse Autoencoder Training: A Short Finetune Is All You Need" (2025).

n rows of a forward pass, D = d_in, E = d_out, F = d_sae, L prefixes.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..base.errors import ModelError
from ..base.machine import is_out_of_memory
from ..base.processes import ALONE, Communicator
from ..model.windows import in_batches, pass_tokens, stored_activations
from ..sae.activations import THRESHOLD_RATE, Relu
from ..sae.activations.base import between, scaled_to
from ..sae.codes import Codes
from ..sae.dictionary import SAE, Dictionary
from ..sae.metrics import reconstruction
from ..splice.effects import effects
from ..splice.passes import CleanPass, Passes
from ..splice.placement import Placement
from ..store.values import TextWindow
from .descent import Descent, StepReport, Task
from .options import Finetune
from .plan import Plan
from .rows import ArrayRows, Normalisation, TrainingRows, raw_batches
from .start import Comparison

STEP_TOKENS = 3072  # of a step, about: 24 windows of 128
EPOCH = 50  # steps between checkpoints, each with measures on held-out windows
# Relative change of the penalty's weight per step, over the relative excess of L0.
WEIGHT_RATE = 0.5
HOLD_EVERY = 8  # steps between shifts of the biases, each a sort of the sample's pre-activations


@lru_cache(maxsize=2)  # the windows of a step are of two passes at most, unless there are few
def _order(seed: int, number: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, number)).permutation(count)


@dataclass(frozen=True, eq=False)
class SplicedText:
    """Windows of tokens, to train and to compare on, of the model in which an SAE acts."""

    passes: Passes
    placement: Placement
    train: Sequence[TextWindow]
    test: Sequence[TextWindow]

    @cached_property
    def rows(self) -> np.ndarray:
        return np.array([window.is_row.sum() for window in self.train])

    @cached_property
    def windows_per_step(self) -> int:
        return max(1, round(STEP_TOKENS / self.rows.mean()))

    @property
    def pass_tokens(self) -> int:
        return pass_tokens(self.passes.model.device)

    def windows_of_step(self, step: int, seed: int) -> list[int]:
        """The numbers of a step's windows; each pass over all has its own order."""
        numbers = []
        for position in range(step * self.windows_per_step, (step + 1) * self.windows_per_step):
            pass_number, place = divmod(position, len(self.train))
            numbers.append(int(_order(seed, pass_number, len(self.train))[place]))
        return numbers

    def activations(self, windows: Sequence[TextWindow], tokens: int) -> ArrayRows:
        """Activations, with a transcoder's targets, of about the first `tokens` rows; fewer at many hook points, for
        at most 2 GiB."""
        model, at = self.passes.model, self.placement
        points = list(dict.fromkeys((*at.reads, *at.writes)))
        blocks: list[list[Tensor]] = []
        left = min(tokens, 2**31 // (4 * len(points) * model.source.d_model))
        for block in stored_activations(model, windows, points, self.pass_tokens):
            blocks.append([part.float().cpu() for part in block])
            left -= len(block[0])
            if left <= 0:
                break
        at_points = dict(zip(points, map(torch.cat, zip(*blocks, strict=True)), strict=True))
        x = torch.cat([at_points[point] for point in at.reads], 1)
        y = None
        if at.reads != at.writes:
            y = torch.cat([at_points[point] for point in at.writes], 1)
        rows = ArrayRows(x, y)
        rows.widths = rows.places = at.sae.widths
        return rows


@dataclass(frozen=True, eq=False)
class StepWindows:
    """A step's windows in this process; `size` counts the rows in all processes."""

    text: SplicedText
    normalisation: Normalisation
    windows: list[TextWindow]
    size: int


class ThroughModel(Descent):
    config: Finetune

    def __init__(
        self, initial: SAE, task: Task, config: Finetune, communicator: Communicator = ALONE
    ) -> None:
        self.codes_stay = config.only == "decoder"
        # Else L1 holds L0, of this weight.
        self.uses_l1 = isinstance(initial.activation, Relu) and not self.codes_stay
        fixed = ["threshold"]
        if self.codes_stay:
            fixed += ["W_enc", "b_enc", *initial.activation_parameters]
        super().__init__(initial.sae(), fixed, task, config, communicator)
        self.most_tokens: int | None = None  # per forward pass, once memory has run out
        with torch.no_grad():
            codes = self.dictionary.codes(task.sample.x)
            self.target = (codes.count().double() / len(task.sample.x)).clamp(min=1e-6)  # L0
            self.weight = self._stationary_weight(codes)

    def _stationary_weight(self, codes: Codes) -> Tensor:
        """The weight of L1 at which the sample's codes are about stationary: the mean over active latents of
        `2 (y - y_hat) . W_dec_i / ||W_dec_i||`; 0 without L1."""
        batch, dictionary = self.task.sample, self.dictionary
        if not self.uses_l1:
            return self.target.new_zeros(())
        W_dec = dictionary.decoder()
        residuals = batch.y - dictionary.predicted(batch.x, codes)[:, -1]
        slopes = 2 * residuals @ (W_dec / dictionary.weighed(W_dec).norm(dim=1, keepdim=True)).T
        active = codes.dense() > 0
        return ((slopes * active).sum() / active.sum().clamp(min=1)).clamp(min=1e-6).double()

    def train(self, batches: Iterable[StepWindows], rows: TrainingRows) -> Iterator[StepReport]:
        for batch in batches:
            yield self.step(batch)
        self.match_l0()

    def step(self, batch: StepWindows) -> StepReport:
        loss, squared_error, l0 = self._set_gradient(batch).unbind()
        self.move()
        self._hold_l0(self.communicator.all_reduce(l0.clone()))
        return StepReport(self.steps, batch.size, loss, squared_error, l0)

    def _set_gradient(self, batch: StepWindows) -> Tensor:
        """Returns loss, squared error and L0. Out of memory, again in smaller passes."""
        while True:
            self.optimizer.zero_grad()
            sums = torch.zeros(3, dtype=torch.float64, device=batch.text.passes.model.device)
            try:
                for windows in in_batches(
                    batch.windows, self.most_tokens or batch.text.pass_tokens
                ):
                    sums += self._descend_part(batch, windows)
                return sums
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            # Outside of the except clause, where the error has released its tensors.
            self._halve_passes(batch)

    def _descend_part(self, batch: StepWindows, windows: list[TextWindow]) -> Tensor:
        """Add the gradient of some windows; returns their part of the measures."""
        placement, dictionary = batch.text.placement, self.dictionary
        mean, scale, target_mean, target_scale = batch.normalisation.of_sae()
        clean = CleanPass(batch.text.passes, windows, placement.reads, placement.writes)
        rows = (clean.x.to(mean) - mean) / scale
        codes = dictionary.activated(dictionary.pre_activations(rows))
        y_hat = dictionary.predicted(rows, codes)  # (n, L, E)
        spliced = clean.spliced(y_hat[:, -1] * target_scale + target_mean)
        objective, slope = clean.descent(spliced.detach(), self.config.objective)
        rest, squared_error = self._rest(clean.y, codes, y_hat, batch.normalisation)
        torch.autograd.backward([spliced, rest / batch.size], [slope / batch.size, None])
        loss = objective + rest.detach()
        return torch.stack([loss, squared_error, codes.count().double()]) / batch.size

    def _rest(
        self, y: Tensor, codes: Codes, y_hat: Tensor, normalisation: Normalisation
    ) -> tuple[Tensor, Tensor]:
        """Sums over rows of raw targets, (n, E): the loss without the objective, and the squared error."""
        dictionary, fvu_weight = self.dictionary, self.config.fvu_weight
        _, _, target_mean, target_scale = normalisation.of_sae()
        targets = (y.to(target_mean) - target_mean) / target_scale
        errors = (y_hat - targets[:, None]).square().sum(-1).sum(0).double()  # (L,)
        rest = fvu_weight * errors.mean() / normalisation.variance
        if self.uses_l1:
            # Detached, or the penalty would shrink exact reconstructions.
            norms = dictionary.weighed(dictionary.decoder()).norm(dim=1).detach()
            penalty = self.weight * codes.times(norms[:, None]).sum()
            rest = rest + max(fvu_weight, 1.0) * penalty / normalisation.variance
        return rest, errors[-1].detach()

    def _halve_passes(self, batch: StepWindows) -> None:
        """Halve the tokens of a forward pass; ModelError if one window does not fit."""
        longest = max(window.length for window in batch.windows)
        whole_step = longest * len(batch.windows)
        most = min(self.most_tokens or batch.text.pass_tokens, whole_step)
        device = batch.text.passes.model.device
        if most <= longest:
            raise ModelError(
                f"a window of {longest:,} tokens does not fit in the memory of {device} with its gradient; use "
                "--model-dtype bfloat16, or a lower --context, with --dataset or of `sae extract`"
            )
        self.most_tokens = most // 2
        if device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def _hold_l0(self, l0: Tensor) -> None:
        """Move thresholds, or the penalty's weight, against an excess of L0."""
        excess = (l0 / self.target - 1).clamp(max=1.0)
        if self.uses_l1:
            self.weight *= (WEIGHT_RATE * excess).exp()
            if self.steps % HOLD_EVERY == 0:  # the weight takes hundreds of steps to find its value
                self.match_l0()
        elif not self.codes_stay and "threshold" in self.dictionary.activation_parameters:
            threshold = self.dictionary.activation_parameters["threshold"]
            threshold *= (THRESHOLD_RATE * excess).exp()

    @torch.no_grad()
    def match_l0(self) -> None:
        """Give the sample the L0 of the start: scale the thresholds; with relu shift the biases, by one amount in units
        of `z_i ||W_dec_i||`."""
        dictionary, parameters = self.dictionary, self.dictionary.activation_parameters
        if self.codes_stay or not (self.uses_l1 or "threshold" in parameters):
            return
        pre = dictionary.pre_activations(self.task.sample.x)
        kept = round(self.target.item() * len(pre))
        if not 0 < kept < pre.numel():
            return
        if self.uses_l1:
            norms = dictionary.weighed(dictionary.decoder()).norm(dim=1)
            norms = norms.clamp(min=torch.finfo(pre.dtype).tiny)
            dictionary.b_enc -= between(pre * norms, kept) / norms
        else:
            threshold = parameters["threshold"]
            threshold.copy_(scaled_to(kept, pre, threshold.clamp(min=0)))

    def notes(self) -> list[str]:
        if self.most_tokens is None:
            return []
        return [f"for lack of memory, forward passes took at most {self.most_tokens:,} tokens"]

    def state(self) -> dict[str, Tensor]:
        most_tokens = torch.tensor(self.most_tokens or 0)
        own = {"target": self.target, "weight": self.weight, "most_tokens": most_tokens}
        return super().state() | own

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self.target, self.weight = state["target"].to(self.target), state["weight"].to(self.weight)
        self.most_tokens = int(state["most_tokens"]) or None


def steps_of(
    text: SplicedText, plan: Plan, rows: TrainingRows, first: int
) -> Generator[StepWindows, None, None]:
    """This process' windows of each step from `first` on."""
    communicator = rows.communicator
    for step in range(first, plan.steps):
        numbers = text.windows_of_step(step, plan.training.shuffle_seed)
        own = numbers[communicator.rank :: communicator.world_size]
        windows = [text.train[number] for number in own]
        yield StepWindows(text, rows.normalisation, windows, int(text.rows[numbers].sum()))


def compared(
    comparison: Comparison, after: Dictionary, text: SplicedText, plan: Plan
) -> list[dict[str, Any]]:
    """Measures of both SAEs on the windows kept out of training, with their `loss`."""
    saes, at, solver = comparison.saes(after), text.placement, plan.solver
    assert plan.test_rows is not None and isinstance(solver, Finetune)
    of_saes = effects([text.passes], text.test, at.reads, [at.writes], saes, lambda tokens: None)
    measures = []
    for sae, (losses,) in zip(saes, of_saes, strict=True):
        measured = reconstruction(sae, raw_batches(plan.test_rows)) | losses
        objective = losses["kl" if solver.objective == "kl" else "ce_spliced"]
        measured["loss"] = objective + solver.fvu_weight * measured["fvu"]
        measures.append(measured)
    return measures
