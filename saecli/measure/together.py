"""What is left of a model when several SAEs or transcoders are spliced into it at once; see `extract.together`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.console import Listener
from ..base.errors import ConfigError
from ..extract.splice import hooked, stored_windows
from ..sae.metrics import Reconstruction
from ..store.opening import Joined
from .evaluate import TOKENS, check_model
from .measured import Measured

if TYPE_CHECKING:
    from ..extract.model_source import ModelSource

EFFECT = ("ce_recovered", "kl", "ce_clean", "ce_spliced", "ce_zero", "ce_mean", "tokens")


def together(
    measured_saes: Sequence[Measured],
    model: str | Sequence[str],
    tokens: int | None,
    listener: Listener,
) -> dict[str, Any]:
    """Splice SAEs into a model, all at once, on tokens of the first one's rows; every store must hold the same tokens.

    Returns:
        `model`; `ce_clean`, `ce_spliced`, `ce_recovered`, `kl` and `tokens` as of `extract.passes.effects`; `ce_zero`
        with zeros at all hook points that are replaced, and `ce_mean` with the mean of the rows there; and `runs`, for
        each SAE `fvu_spliced`, the error of its predictions of what the model has there in the spliced pass, whose
        inputs the SAEs before it have changed, and `fvu_clean`, that of the same predictions of what it has without any
        SAE: the error left there.

    Cost: four forward passes over the tokens.
    """
    from ..extract.forward import pass_tokens
    from ..extract.language_model import LanguageModel  # transformers takes seconds to import
    from ..extract.passes import NO_NEXT, Passes
    from ..extract.splice import in_batches
    from ..extract.together import TogetherPass, demand_together

    acts = [hooked((each.subject, each.saved), None, None) for each in measured_saes]
    demand_together(acts)
    source = _demand_same_tokens(measured_saes, model)
    for at in acts:
        at.check(source.d_model, source.layers, source.name)
    device = measured_saes[0].sae.W_enc.device
    passes = Passes(LanguageModel(source, device, head=True))
    errors = [
        tuple(Reconstruction(at.sae.d_out, at.sae.d_sae, device=device) for _ in range(2))
        for at in acts
    ]
    written = tuple(at.written for at in acts)
    means = torch.cat([_mean(each) for each in measured_saes]).to(device)
    sums = torch.zeros(5, dtype=torch.float64)  # clean, spliced, zero, mean, KL
    done = scored = 0
    wanted = min(tokens or TOKENS, measured_saes[0].of_store.rows)
    windows = stored_windows(measured_saes[0].of_store, wanted)
    with torch.no_grad(), listener.progress("splicing all at once", wanted, "tokens") as show:
        for batch in in_batches(windows, pass_tokens(device)):
            clean = TogetherPass(passes, batch, acts)

            def predict(number: int, x: Tensor, y: Tensor, clean: TogetherPass = clean) -> Tensor:
                sae = acts[number].sae
                codes = sae.codes(x.to(sae.W_enc))
                y_hat = sae.predicted(x.to(sae.W_enc), codes)[:, -1]
                for error, own in zip(errors[number], (y, clean.rows_of[number][1]), strict=True):
                    error.update(own.to(y_hat), y_hat, codes)
                return y_hat

            spliced = clean.together(predict)
            ablated = [
                clean.zeroed(written),
                clean.spliced(means.expand(len(clean.states), -1), written),
            ]
            losses, ce, kl = clean.compared([spliced, *ablated])
            sums += torch.stack([losses.sum(dtype=torch.float64), *ce, kl[0]]).cpu()
            done += len(clean.states)
            scored += int((clean.next_tokens != NO_NEXT).sum())
            show(done)
    ce_clean, ce_spliced, ce_zero, ce_mean = (sums[:4] / max(scored, 1)).tolist()
    rise = ce_zero - ce_clean
    return {
        "model": source.spec,
        "ce_clean": ce_clean,
        "ce_spliced": ce_spliced,
        "ce_zero": ce_zero,
        "ce_mean": ce_mean,
        "ce_recovered": (ce_zero - ce_spliced) / rise if rise > 0 else None,
        "kl": float(sums[4]) / max(done, 1),
        "tokens": done,
        "runs": [
            {"run": at.name, **at.origin}
            | dict(zip(("fvu_spliced", "fvu_clean"), (e.result()["fvu"] for e in own), strict=True))
            for at, own in zip(acts, errors, strict=True)
        ],
    }


def _demand_same_tokens(
    measured_saes: Sequence[Measured], model: str | Sequence[str]
) -> "ModelSource":
    """The model that all rows came from; ConfigError unless they are the same tokens, and the same held-out ones."""
    sources = [check_model(each, model)[0][1] for each in measured_saes]
    stores = [own.store for each in measured_saes for own in each.rows.inputs]
    Joined(tuple({store.path: store for store in stores}.values())).demand_alike()
    splits = {(each.split, each.of_store.split.seed) for each in measured_saes}
    if len(splits) > 1:
        raise ConfigError(
            "--together needs the same held-out rows of all runs, got runs of several split seeds; give runs of "
            "one, or --split all"
        )
    return sources[0]


def _mean(measured: Measured) -> Tensor:
    """The mean of the rows that are predicted, (E,)."""
    mean = torch.from_numpy(measured.rows.spread().mean)
    return mean[-measured.sae.d_out :].to(torch.float32)
