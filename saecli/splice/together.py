"""Several SAEs or transcoders in one forward pass, such as a set of transcoders of all layers.

Each encodes what it reads in that pass, where those before it have already replaced activations; so the errors of a
layer reach the next. It replaces the rows of a store's windows, as when an SAE is spliced alone.

Shapes: n rows of a forward pass, D = d_in, E = d_out.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.errors import ConfigError
from ..model.windows import TextWindow, in_batches, pass_tokens
from ..sae.metrics import Reconstruction
from ..store.origin import HookPoint
from .hooked import Hooked, demand_apart
from .passes import NO_NEXT, CleanPass, Passes

Predict = Callable[[int, Tensor, Tensor], Tensor]


def demand_together(acts: Sequence[Hooked]) -> None:
    """Refuse crosscoders, and SAEs that replace activations at one hook point."""
    for at in acts:
        if at.sae.widths:
            raise ConfigError(
                f"--together takes SAEs and transcoders, got {at.name}, a crosscoder: its codes need all its hook "
                "points before the first of them is replaced; leave it out"
            )
    demand_apart(acts)


class TogetherPass(CleanPass):
    """A clean pass that keeps the activations at all hook points of several SAEs, to be spliced at once."""

    def __init__(
        self, passes: Passes, windows: Sequence[TextWindow], acts: Sequence[Hooked]
    ) -> None:
        points = tuple(dict.fromkeys(point for at in acts for point in (at.written, at.read)))
        super().__init__(passes, windows, points, points)
        self.acts = acts
        self.clean_rows = [self.activations[at.written] for at in acts]  # y of each

    def together(self, predict: Predict) -> Tensor:
        """The inputs of the head, (m, d_model), with `predict(number, x, y)`, (n, E), in place of the activations y
        that the SAE of that number replaces, given x, (n, D), that it reads, both of this pass."""
        read: dict[int, Tensor] = {}

        def hook(point: HookPoint, activations: Tensor) -> Tensor:
            for number, at in enumerate(self.acts):
                if at.written != point:
                    continue
                y = self.replaced_rows(activations)
                x = y if at.read == point else read.get(number)
                if x is None:
                    raise ConfigError(
                        f"cannot splice {at.name}: it reads {at.read} after {at.written}, which it predicts; "
                        "leave it out"
                    )
                activations = self.with_rows(activations, predict(number, x, y))
            for number, at in enumerate(self.acts):  # what the one that writes here has left
                if at.read == point and at.written != point:
                    read[number] = self.replaced_rows(activations)
            return activations

        return self.changed(self.writes, hook)


@torch.no_grad()
def effects_together(
    passes: Passes,
    windows: Iterable[TextWindow],
    acts: Sequence[Hooked],
    means: Sequence[Tensor],
    show: Callable[[int], None],
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Splice SAEs into a model at once.

    Args:
        means: of the rows that each SAE predicts, (E,).
        show: called after each batch with the number of tokens done.

    Returns:
        ce_clean, ce_spliced, kl and tokens as of `passes.effects`; ce_zero, with zeros at all hook points that are
        replaced, ce_mean, with means there, and ce_recovered; and of each SAE `fvu_spliced`, the error of its
        predictions of what the model has there in the spliced pass, whose inputs the SAEs before it have changed, and
        `fvu_clean`, the error of the same predictions of what it has without any SAE: what is left there.

    Cost: four forward passes over the tokens.
    """
    device, written = passes.model.device, tuple(at.written for at in acts)
    mean_at = dict(zip(written, means, strict=True))
    errors = [
        tuple(Reconstruction(at.sae.d_out, at.sae.d_sae, device=device) for _ in range(2))
        for at in acts
    ]
    sums = torch.zeros(5, dtype=torch.float64)  # KL, CE of each pass
    tokens = scored = 0
    for batch in in_batches(windows, pass_tokens(device)):
        clean = TogetherPass(passes, batch, acts)

        def predict(number: int, x: Tensor, y: Tensor, clean: TogetherPass = clean) -> Tensor:
            sae = acts[number].sae
            codes = sae.codes(x.to(sae.W_enc))
            y_hat = sae.predicted(x.to(sae.W_enc), codes)[:, -1]
            for error, own in zip(errors[number], (y, clean.clean_rows[number]), strict=True):
                error.update(own.to(y_hat), y_hat, codes)
            return y_hat

        others = [clean.together(predict), clean.zeroed(written), clean.filled(mean_at)]
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
