"""Serve pages of an SAE that answer while one types.

A text's tokens are shaded by the latents that fire on them; latents have texts, neighbours and labels, which can be
written by hand; answers grow side by side, plain and steered; training curves of the home's runs are live. Every state
is in the address, and can be saved as one HTML file. SAEs of one language model are served together.

Only this machine can open the pages. With another --host, the address has a token that the browser must come with.
Needs `pip install 'saecli[serve]'`.

Example: sae serve first --port 8000
"""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ..base.errors import ConfigError
from ..model import TINY_GEMMA2
from ..show.functions import serve
from .options import Json, Runs, configured, start

DEMO_STORE, DEMO_ROWS = "tiny-gemma2-rows", 20_000


@configured(serve)
def command(
    ctx: typer.Context,
    options: Mapping[str, Any],
    runs: Runs = None,
    demo: Annotated[
        bool,
        typer.Option(
            "--demo", help=f"Serve the bundled SAE of {TINY_GEMMA2}, with {DEMO_ROWS:,} rows."
        ),
    ] = False,
    json: Json = False,
) -> None:
    session = start(ctx)
    if demo and runs:
        raise ConfigError("cannot use both --demo and runs; leave one of them out")

    def ready(document: dict[str, Any]) -> None:
        names = ", ".join(document["runs"])
        session.console.print_result(
            document, f"{names} in {document['model']}: open {document['url']} (Ctrl-C ends it)"
        )

    chosen, data = runs or None, options
    if demo:
        from ..extract.extraction import extract

        chosen, data = [TINY_GEMMA2], {"data": DEMO_STORE, **options}
        session.call(extract, model=TINY_GEMMA2, rows=DEMO_ROWS, layer=2, name=DEMO_STORE)
    session.call(serve, saes=chosen, **data, ready=ready)
