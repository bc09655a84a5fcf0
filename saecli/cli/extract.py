"""Run a language model over text and store its activations.

The forward pass stops at the last block read. Special tokens (BOS, EOS) are dropped and counted. A row dropped at
one of several hook points or models is dropped at all. The same command resumes an interrupted extraction, and does
nothing for a finished one.

Example: sae extract --model google/gemma-2-2b --layer 12
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import typer
from annotated_types import Ge

from ..base.errors import ConfigError
from ..base.options import Config, Shown, arguments_of, options_from, options_of
from ..base.processes import communicator
from ..base.words import refuse_idle
from ..extract.options import ExtractConfig
from ..measure.functions import evaluate
from ..store.origin import Site
from .options import Json, configured, start


@dataclass(frozen=True)
class Places(Config):
    model: Annotated[
        tuple[str, ...],
        Shown(
            f"{options_of(ExtractConfig)['model'].help} Several, of one tokenizer, give a store each."
        ),
    ] = (ExtractConfig.model,)
    layer: Annotated[
        tuple[Annotated[int, Ge(0)] | Literal["all"], ...] | None,
        Shown(
            "Block to read, from 0; can be given several times, for one store each; all: every "
            "block. Default: the middle one, 12 of Gemma-2-2B's 26."
        ),
    ] = None
    site: Annotated[
        tuple[Site, ...],
        Shown(
            "Hook point in the block: resid_post, its output (SAELens' blocks.L.hook_resid_post); "
            "resid_pre, its input (hidden_states[L], as in the paper's code); resid_mid, between attention "
            "and the MLP's norm; mlp_in, the MLP's input after its norm; mlp_out or attn_out, the output of MLP "
            "or attention; attn_z, the input of attention's output projection. Can be given several times, for "
            "one store per layer and site, with the same tokens."
        ),
    ] = ("resid_post",)
    module: Annotated[
        tuple[str, ...] | None,
        Shown(
            "Instead of --layer and --site a module by its name, then :in or :out (default), such as "
            "model.layers.3.self_attn.o_proj:in; * is any part of a name, so that model.layers.*.mlp is of all "
            "layers. Can be given several times."
        ),
    ] = None


DEVICE = replace(arguments_of(evaluate)["device"], panel=Places.panel)
_ROWS = [name for name in options_of(ExtractConfig) if name not in options_of(Places)]


@configured(
    Places, more=[*options_from(ExtractConfig, _ROWS, {}, panel=ExtractConfig.panel), DEVICE]
)
def command(
    ctx: typer.Context,
    options: dict[str, Any],
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the store; of several, the prefix of their names.",
            show_default="from model, layer, site and a hash of the options",
        ),
    ] = None,
    list_modules: Annotated[
        bool,
        typer.Option(
            "--list-modules",
            help="List the modules of --model and the sites among them.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    from ..extract.extraction import extract
    from ..show.tables import stored_tables
    from ..store.opening import stores_document

    session = start(ctx)
    if list_modules:
        from ..model.language_model import modules_document
        from ..show.tables import modules_table

        idle = session.given - {"model", "model_revision", "list_modules", "json"}
        refuse_idle(idle, "with --list-modules; leave one of them out")
        models = options.get("model", (ExtractConfig.model,))
        if len(models) > 1:
            raise ConfigError(f"--list-modules takes one --model, got {len(models)}; name one")
        document = modules_document(models[0], options.get("model_revision"))
        session.console.print_result(document, modules_table(document))
        return
    layers = options.pop("layer", ())
    if "model" in options:
        options["model"] = [*options["model"]]
    stores = extract(
        layer="all" if "all" in layers else layers,
        site=options.pop("site", "resid_post"),
        name=name,
        home=session.home.path,
        progress=session.console,
        **options,
    )
    if communicator().is_main:
        document = stores_document(stores)
        session.console.print_result(document, *stored_tables(document))
