"""Effects of SAEs on a language model's predictions: one at a time, or several in one forward pass, such as transcoders
of all layers, each of which encodes what those before it leave.

Tokens that are no rows (special ones, BOS) keep their activations, and predictions from them are in no mean; but zero
ablation applies to all tokens, as in SAELens' evaluation. A crosscoder is encoded from the clean activations at all its
hook points, of all its models, and replaces all of a model's at once, or one alone: after the last of several residual
streams replaced, the model does not see the earlier ones.

Shapes: n rows of a forward pass, m of them scored, D = d_in, E = d_out.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.errors import ConfigError
from ..model.windows import in_batches, pass_tokens
from ..sae.dictionary import SAE
from ..sae.metrics import Reconstruction
from ..store.origin import HookPoint
from ..store.values import TextWindow
from .passes import NO_NEXT, CleanPass, Passes
from .placement import Placement, check_distinct

ZERO_TOKENS = 4096  # about, that the zeroed model is run over
CLEARLY = 5  # standard errors above 0


@torch.no_grad()
def effects(
    models: Sequence[Passes],
    windows: Iterable[TextWindow],
    reads: tuple[HookPoint, ...],
    parts: Sequence[tuple[HookPoint, ...]],
    saes: Sequence[SAE],
    show: Callable[[int], None],
    zeroed: float = 1.0,
) -> list[list[dict[str, Any]]]:
    """Splice SAEs, transcoders or crosscoders into a model, or crosscoders into each of several, one at a time.

    Args:
        models: with one tokenizer; numbered by a hook point's `model`.
        reads: the hook points whose activations are encoded.
        parts: hook points of one model that are replaced at once: those read, some of them, or a transcoder's.
        show: called with the number of tokens done.
        zeroed: fraction of the tokens, about, that the zeroed model is run over.

    Returns:
        For each SAE and each part: `tokens`, the number scored; ce_clean, ce_spliced and ce_zero, the next token's mean
        cross-entropy in nats, of the model itself, with the SAE's predictions, and with zeros at the hook points
        written (ce_clean plus the mean rise where measured); ce_recovered,
        `(ce_zero - ce_spliced) / (ce_zero - ce_clean)`, None unless that rise is `CLEARLY` above 0; kl, the mean
        KL(clean || spliced) in nats. A masked model is scored on its `hidden_tokens`.

    Cost: a forward pass; for each part and SAE the blocks from the hook points on, and the head; for zeros the same on
    the fraction.
    """
    sums = _EffectSums(models, reads, parts, saes, zeroed)
    for batch in in_batches(windows, pass_tokens(models[0].model.device)):
        sums.add(batch)
        show(sums.tokens)
    return [[sums.measures(part, sae) for part in range(len(parts))] for sae in range(len(saes))]


class _EffectSums:
    """Sums over batches; arguments of `effects`."""

    def __init__(
        self,
        models: Sequence[Passes],
        reads: tuple[HookPoint, ...],
        parts: Sequence[tuple[HookPoint, ...]],
        saes: Sequence[SAE],
        zeroed: float,
    ) -> None:
        self.models, self.reads, self.parts, self.saes = models, reads, parts, saes
        self.zeroed = zeroed
        self.writes = reads if len(parts) > 1 or parts[0] == reads else parts[0]
        self.clean = torch.zeros(len(models), dtype=torch.float64)  # cross-entropy
        # Cross-entropy and KL of the spliced models, (2, parts, SAEs).
        self.spliced = torch.zeros(2, len(parts), len(saes), dtype=torch.float64)
        # The rise of a token's loss by zeros, and its square, (2, parts).
        self.rises = torch.zeros(2, len(parts), dtype=torch.float64)
        self.tokens = self.tokens_zeroed = 0  # rows, and those that the zeroed model was run over
        self.predictions = self.predictions_zeroed = 0  # of these, tokens with a next one
        self.counted = 0  # all rows, or those that are masked

    def add(self, windows: Sequence[TextWindow]) -> None:
        clean_passes: list[CleanPass] = []
        activations: dict[HookPoint, Tensor] = {}
        for model, passes in enumerate(self.models):
            points = tuple(point for point in self.reads if point.model == model)
            parts = [part for part in self.parts if part[0].model == model]
            clean = CleanPass(passes, windows, points, points, parts)
            clean_passes.append(clean)
            activations |= clean.activations
        x = torch.cat([activations[point] for point in self.reads], 1)
        predicted: list[dict[HookPoint, Tensor]] = []
        for sae in self.saes:
            y_hat = sae(x.to(sae.W_enc))
            columns = zip(self.writes, sae.hook_columns, strict=True)
            predicted.append({point: y_hat[:, place] for point, place in columns})
        zero_too = self.tokens_zeroed <= self.zeroed * self.tokens
        for model, clean in enumerate(clean_passes):
            self._add_pass(model, clean, predicted, zero_too)
        predictions = int((clean_passes[0].next_tokens != NO_NEXT).sum())
        self.tokens += len(x)
        self.predictions += predictions
        self.counted += len(clean_passes[0].states)
        if zero_too:
            self.tokens_zeroed += len(x)
            self.predictions_zeroed += predictions

    def _add_pass(
        self, model: int, clean: CleanPass, predicted: list[dict[HookPoint, Tensor]], zero_too: bool
    ) -> None:
        own_parts = [index for index, part in enumerate(self.parts) if part[0].model == model]
        spliced = [
            clean.filled({point: y_hat[point] for point in self.parts[index]})
            for index in own_parts
            for y_hat in predicted
        ]
        losses, *sums = clean.compared(spliced)
        self.clean[model] += losses.sum(dtype=torch.float64).cpu()
        shape = 2, len(own_parts), len(self.saes)
        self.spliced[:, own_parts] += torch.stack(sums).view(shape).cpu()
        if zero_too:
            for index in own_parts:
                rise = (clean.losses(clean.zeroed(self.parts[index])) - losses).double()
                self.rises[:, index] += torch.stack([rise.sum(), rise.square().sum()]).cpu()

    def measures(self, part: int, sae: int) -> dict[str, Any]:
        """Of a part and an SAE, by their numbers; see `effects`."""
        ce_clean = _ratio(self.clean[self.parts[part][0].model], self.predictions)
        ce, kl = self.spliced[:, part, sae]
        ce_spliced = _ratio(ce, self.predictions)
        rise, square = (_ratio(total, self.predictions_zeroed) for total in self.rises[:, part])
        error = math.sqrt(max(0.0, square - rise**2) / max(1, self.predictions_zeroed))
        recovered = 1 - (ce_spliced - ce_clean) / rise if rise > CLEARLY * error else None
        return {
            "ce_clean": ce_clean,
            "ce_spliced": ce_spliced,
            "ce_zero": ce_clean + rise,
            "ce_recovered": recovered,
            "kl": _ratio(kl, self.counted),
            "tokens": self.counted,
        }


def _ratio(total: Tensor, count: int) -> float:
    return float(total) / count if count else math.nan


def check_together(acts: Sequence[Placement]) -> None:
    """Refuse crosscoders, and SAEs that replace activations at one hook point."""
    for at in acts:
        if at.sae.widths:
            raise ConfigError(
                f"--together takes SAEs and transcoders, got {at.name}, a crosscoder: its codes need all its hook "
                "points before the first of them is replaced; leave it out"
            )
    check_distinct(acts)


@torch.no_grad()
def effects_together(
    passes: Passes,
    windows: Iterable[TextWindow],
    acts: Sequence[Placement],
    means: Sequence[Tensor],
    show: Callable[[int], None],
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Splice SAEs into a model at once.

    Args:
        means: of the rows that each SAE predicts, (E,).
        show: called with the number of tokens done.

    Returns:
        ce_clean, ce_spliced, kl and tokens as of `effects`; ce_zero and ce_mean, with zeros or means at all hook points
        written, and ce_recovered; and of each SAE in the spliced pass the error of its predictions, as `fvu_spliced` of
        what the model has there, as `fvu_clean` of what it has without any SAE.

    Cost: four forward passes over the tokens.
    """
    device, written = passes.model.device, tuple(at.written for at in acts)
    points = tuple(dict.fromkeys(point for at in acts for point in (at.written, at.read)))
    mean_at = dict(zip(written, means, strict=True))
    errors = [
        tuple(Reconstruction(at.sae.d_out, at.sae.d_sae, device=device) for _ in range(2))
        for at in acts
    ]
    sums = torch.zeros(5, dtype=torch.float64)  # KL, CE of each pass
    tokens = scored = 0
    for batch in in_batches(windows, pass_tokens(device)):
        clean = CleanPass(passes, batch, points, points)

        def predict(number: int, x: Tensor, y: Tensor, clean: CleanPass = clean) -> Tensor:
            sae = acts[number].sae
            codes = sae.codes(x.to(sae.W_enc))
            y_hat = sae.predicted(x.to(sae.W_enc), codes)[:, -1]
            spliced_error, clean_error = errors[number]
            spliced_error.update(y.to(y_hat), y_hat, codes)
            clean_error.update(clean.activations[acts[number].written].to(y_hat), y_hat, codes)
            return y_hat

        spliced = _spliced_together(clean, acts, predict)
        others = [spliced, clean.zeroed(written), clean.filled(mean_at)]
        losses, ce, kl = clean.compared(others)
        sums += torch.stack([kl[0], losses.sum(dtype=torch.float64), *ce]).cpu()
        tokens += len(clean.states)
        scored += int((clean.next_tokens != NO_NEXT).sum())
        show(tokens)
    ce_clean, ce_spliced, ce_zero, ce_mean = (sums[1:] / max(scored, 1)).tolist()
    rise = ce_zero - ce_clean
    measures = {
        "ce_clean": ce_clean,
        "ce_spliced": ce_spliced,
        "ce_zero": ce_zero,
        "ce_mean": ce_mean,
        "ce_recovered": (ce_zero - ce_spliced) / rise if rise > 0 else None,
        "kl": float(sums[0]) / max(tokens, 1),
        "tokens": tokens,
    }
    return measures, [
        {"fvu_spliced": spliced.result()["fvu"], "fvu_clean": left.result()["fvu"]}
        for spliced, left in errors
    ]


def _spliced_together(
    clean: CleanPass, acts: Sequence[Placement], predict: Callable[[int, Tensor, Tensor], Tensor]
) -> Tensor:
    """The inputs of the head, (m, d_model), with `predict(number, x, y)`, (n, E), in place of y: the numbered SAE reads
    x, (n, D), and replaces y, both of this pass."""
    read: dict[int, Tensor] = {}

    def hook(point: HookPoint, activations: Tensor) -> Tensor:
        for number, at in enumerate(acts):
            if at.written != point:
                continue
            y = clean.replaced_rows(activations)
            x = y if at.read == point else read.get(number)
            if x is None:
                raise ConfigError(
                    f"cannot splice {at.name}: it reads {at.read} after {at.written}, which it predicts; leave it out"
                )
            activations = clean.with_rows(activations, predict(number, x, y))
        for number, at in enumerate(acts):  # what the one that writes here has left
            if at.read == point and at.written != point:
                read[number] = clean.replaced_rows(activations)
        return activations

    return clean.changed(clean.writes, hook)
