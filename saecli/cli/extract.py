from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Annotated, Any

import typer

from ..base.options import Option, options_of
from ..base.processes import communicator
from ..extract.options import SITES, ExtractConfig
from .options import Device, Json, configured, start, word_or_number

_MODEL = options_of(ExtractConfig)["model"]
MODELS = replace(
    _MODEL,
    several=True,
    panel=ExtractConfig.panel,
    help=f"{_MODEL.help} Several with one tokenizer give one store each, of the same tokens.",
)
Layers = Annotated[
    list[Any] | None,
    typer.Option(
        "--layer",
        help="Block to read, from 0; can be given several times, for one store each; all: every block.",
        parser=partial(word_or_number, Option("", choices=("all",)), int),
        metavar="all|INTEGER",
        show_default="the middle one, 12 of Gemma-2-2B's 26",
        rich_help_panel=ExtractConfig.panel,
    ),
]
Site = Enum("Site", [(site, site) for site in SITES], type=str)  # type: ignore[misc]  # Typer takes no list of Literal
Sites = Annotated[
    list[Site] | None,
    typer.Option(
        "--site",
        help="Hook point in the block: resid_post, its output (SAELens' blocks.L.hook_resid_post); resid_pre, "
        "its input (hidden_states[L], as in the paper's code); mlp_in, the MLP's input after its norm; "
        "mlp_out or attn_out, the output of MLP or attention. Can be given several times, for one store per "
        "layer and site, with the same tokens.",
        show_default="resid_post",
        rich_help_panel=ExtractConfig.panel,
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        "--name",
        help="Name of the store; of several, the prefix of their names.",
        show_default="from model, layer, site and a hash of the options",
    ),
]


@configured(ExtractConfig, more=(MODELS,))
def command(
    ctx: typer.Context,
    options: dict[str, Any],
    layer: Layers = None,
    site: Sites = None,
    name: Name = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Run a language model over text and store its activations.

    The forward pass stops at the last block read. Special tokens (BOS, EOS) are dropped and counted. A row dropped at
    one of several hook points or models is dropped at all. The same command again resumes an interrupted extraction,
    and does nothing for a finished one.

    Example: sae extract --model google/gemma-2-2b --layer 12
    """
    from ..extract.extraction import extract
    from ..show.tables import stored_tables
    from ..store.opening import stored

    session = start(ctx, json)
    stores = extract(
        layer="all" if "all" in (layer or []) else layer or [],
        site=[one.value for one in site or []] or ["resid_post"],
        name=name,
        home=session.home.path,
        device=device,
        progress=session.console,
        **options,
    )
    if communicator().is_main:
        document = stored(stores)
        session.console.result(document, *stored_tables(document))
