"""The options of `sae finetune`: its own, some of training, and some of extraction, for a text instead of a store.

Imports no torch, so that help pages are fast.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ..base.options import Count, NonNegative, Seed, Shown, options_from, options_of
from ..extract.options import ExtractConfig
from ..extract.readers import STDLIB_DOCS, TEXT_FILES
from ..model.names import ModelDtype
from .options import SolverConfig, TrainingConfig

TEXT = (
    "dataset",
    "mix",
    "dataset_config",
    "dataset_split",
    "dataset_revision",
    "text_column",
    "context",
)


@dataclass(frozen=True)
class Finetune(SolverConfig):
    name: ClassVar[str] = "finetune"
    command: ClassVar[str] = "finetune"
    implementation: ClassVar[str] = "through:ThroughModel"

    model: Annotated[
        str | None,
        Shown(
            "Language model: hub id, folder or GGUF file. Default: the one that RUN names.",
            once=True,
        ),
    ] = None
    model_revision: Annotated[
        str | None,
        Shown("Branch, tag or commit of a hub model. Default: the one that RUN names.", once=True),
    ] = None
    model_dtype: Annotated[
        ModelDtype,
        Shown("Precision of the language model, as of `sae extract`.", once=True, advanced=True),
    ] = "auto"
    layer: Annotated[
        Seed | None, Shown("Block where RUN acts, if it does not say.", once=True, advanced=True)
    ] = None
    site: Annotated[
        str | None, Shown("Hook point in the block, if RUN does not say.", once=True, advanced=True)
    ] = None
    module: Annotated[
        str | None,
        Shown("Or the module where RUN acts, if it does not say.", once=True, advanced=True),
    ] = None
    tokens: Annotated[
        Count, Shown("Tokens to train on; shorter text is passed over again.", once=True)
    ] = 500_000
    objective: Annotated[
        Literal["kl", "ce"],
        Shown(
            "What the spliced model's predictions are trained for: kl, the model's own "
            "predictions; ce, the next token."
        ),
    ] = "kl"
    fvu_weight: Annotated[
        NonNegative, Shown("Weight of FVU next to the objective, in nats per token.")
    ] = 5.0
    only: Annotated[
        Literal["decoder"] | None,
        Shown("Train the decoder alone, so that codes stay. Default: encoder and decoder."),
    ] = None


_HELP = {
    "lr": "Peak learning rate, falling to 0. auto: a quarter of `sae train --solver sgd`'s.",
    "seed": "Seed of the order of the windows.",
    "dataset": f"Stream this text instead of a store's tokens: a hub dataset id; a {TEXT_FILES}; or "
    f"{STDLIB_DOCS}.",
}


FINETUNED = (
    *options_from(Finetune, options_of(Finetune), {}, panel="Training"),
    *options_from(TrainingConfig, ("lr", "seed", "log_to", "device"), _HELP, panel="Training"),
    *options_from(
        ExtractConfig, TEXT, _HELP, panel="Text without a store", once=True, advanced=True
    ),
)
