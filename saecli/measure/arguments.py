"""Arguments that public functions and their commands share. Imports neither NumPy nor torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ForwardRef, Literal

from annotated_types import Ge

from ..base.console import Listener
from ..base.home import Home
from ..base.options import Count, Shown
from ..store.origin import Site as SiteName

if TYPE_CHECKING:
    from ..model.choice import ModelLike as ModelLike
    from ..sae.dictionary import SAE as SAE
    from ..sae.library import SAELike as SAELike
    from ..train.rows import ArrayLike as ArrayLike
    from .measured import RowsLike as RowsLike
else:  # of modules that are slow to import: `typing.get_type_hints` finds them there
    ModelLike = ForwardRef("ModelLike", module="saecli.model.choice")
    SAE = ForwardRef("SAE", module="saecli.sae.dictionary")
    SAELike = ForwardRef("SAELike", module="saecli.sae.library")
    ArrayLike = ForwardRef("ArrayLike", module="saecli.train.rows")
    RowsLike = ForwardRef("RowsLike", module="saecli.measure.measured")

NAMES, NUMBERS = tuple[str, ...] | None, tuple[int, ...] | None  # of options that can be repeated
PATH: dict[str, Any] = {"metavar": "<path>"}
_SPLICED = "Splice the SAE into this language model, of the store's rows: hub id, also ID@REVISION, folder or GGUF file"

Latents = int | Sequence[int] | None


def latents_shown(words: str, default_words: str) -> Shown:
    """`--latent`, which can be repeated."""
    return Shown(
        f"{words}, from 0; repeat for several.",
        name="latent",
        kind=NUMBERS,
        default_words=default_words,
    )


Data = Annotated[
    RowsLike,
    Shown(
        "Activation store, by name or folder; for a crosscoder several, in order.",
        kind=NAMES,
        default_words="the one that the run was trained on, else the newest",
    ),
]
Target = Annotated[
    ArrayLike | str | None,
    Shown(
        "Store of a transcoder's targets.",
        kind=str | None,
        default_words="the one that the run was trained on",
    ),
]
Split = Annotated[
    Literal["test", "train", "all"],
    Shown("Rows to measure on: test, held out; train, trained on; or all."),
]
SplicedModel = Annotated[str | None, Shown(f"{_SPLICED}.", default_words="none")]
SplicedModels = Annotated[
    ModelLike | Sequence[ModelLike] | bool | None,
    Shown(
        f"{_SPLICED}; once for each model of a crosscoder.",
        kind=NAMES,
        default_words="the one that the store of a single run names",
    ),
]
Tokens = Annotated[
    Count | None,
    Shown("Tokens of the split to run --model on.", default_words="16,384; less for several SAEs"),
]
_MODEL = Shown(
    "Language model: hub id, also ID@REVISION, folder or GGUF file.",
    kind=str | None,
    default_words="the one that the run's store came from",
)
Model = Annotated[ModelLike | None, _MODEL]
ModelOrNot = Annotated[ModelLike | bool | None, _MODEL]
Why = Annotated[
    str | None,
    Shown("List the latents that made the model say this token after the text.", "<token>"),
]
Against = Annotated[str | None, Shown("With --why: rather than this token.", "<token>")]
Steps = Annotated[
    Count,
    Shown("With --why, steps of integrated gradients along the codes; 1: gradient times code."),
]
Also = Annotated[
    Sequence[SAELike],
    Shown(
        "With --why: attribute to the latents of this SAE too, at another hook point; repeat for several.",
        kind=NAMES,
        default_words="none",
    ),
]
Layer = Annotated[
    Annotated[int, Ge(0)] | None, Shown("Read this block, from 0, if the SAE's file has none.")
]
Site = Annotated[
    str | None, Shown("Read this hook point, if the SAE's file has none.", kind=SiteName | None)
]
Module = Annotated[
    str | None,
    Shown("Or this module of the model, if the SAE's file has no hook point.", "<path[:in|:out]>"),
]
Device = Annotated[str, Shown("Where to compute: cpu, cuda, cuda:1; auto: cuda if available.")]
Out = Annotated[str | Path, Shown("Write into this folder, new or empty.", **PATH)]
Method = Annotated[
    Literal["add", "clamp", "ablate"],
    Shown("Change the code. add: by --scale; clamp: to --scale; ablate: to 0."),
]
Messages = Sequence[Mapping[str, Any]]  # of a chat, each with role and content
HomeLike = str | Path | Home | None
Progress = bool | Listener
