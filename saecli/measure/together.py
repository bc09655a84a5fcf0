"""What is left of a model when several SAEs or transcoders are spliced into it at once; see `extract.together`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.console import Listener
from ..extract.splice import hooked, stored_windows
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
        `model`, the measures of `extract.together.effects_together`, and `runs`, with the hook points and the errors of
        each.
    """
    from ..extract.language_model import LanguageModel  # transformers takes seconds to import
    from ..extract.passes import Passes
    from ..extract.together import demand_together, effects_together

    acts = [hooked((each.subject, each.saved), None, None) for each in measured_saes]
    demand_together(acts)
    source = _demand_same_tokens(measured_saes, model)
    for at in acts:
        at.check(source.d_model, source.layers, source.name)
    passes = Passes(LanguageModel(source, measured_saes[0].sae.W_enc.device, head=True))
    means = [_mean(each) for each in measured_saes]
    rows = measured_saes[0].of_store
    wanted = min(tokens or TOKENS, rows.rows)
    with listener.progress("splicing all at once", wanted, "tokens") as show:
        windows = stored_windows(rows, wanted)
        measures, errors = effects_together(passes, windows, acts, means, show)
    runs = [{"run": at.name, **at.origin, **own} for at, own in zip(acts, errors, strict=True)]
    return {"model": source.spec, **measures, "runs": runs}


def _demand_same_tokens(
    measured_saes: Sequence[Measured], model: str | Sequence[str]
) -> "ModelSource":
    """The model that all rows came from; ConfigError unless they are the same tokens."""
    sources = [check_model(each, model)[0][1] for each in measured_saes]
    stores = [own.store for each in measured_saes for own in each.rows.inputs]
    Joined(tuple({store.path: store for store in stores}.values())).demand_alike()
    return sources[0]


def _mean(measured: Measured) -> Tensor:
    """The mean of the rows that are predicted, (E,)."""
    mean = torch.from_numpy(measured.rows.spread().mean)
    return mean[-measured.sae.d_out :].to(measured.sae.W_enc)
