"""Write HTML pages of latents, to be opened from disk.

index.html shows measures, firing frequencies, and a table of all latents to search and sort. Each chosen latent has
a page with texts in which it fires strongest, by strength and at random, a histogram of its activations, its nearest
latents, those that fire with it and, if the language model is on this machine, the tokens that it promotes. FVU, L0
and cosine are as in `sae eval`. The folder needs no network, and can be moved; it appears whole or not at all.

Example: sae report first --out pages
"""

from collections.abc import Mapping
from typing import Any

import typer

from ..base.words import size_words
from ..show.functions import report
from .options import Json, NoModel, Run, configured, model_or_own, start


@configured(report)
def command(
    ctx: typer.Context,
    options: Mapping[str, Any],
    run: Run = None,
    no_model: NoModel = False,
    json: Json = False,
) -> None:
    session = start(ctx)
    model = model_or_own(options.get("model"), no_model)
    document = session.call(report, sae=run, **{**options, "model": model})
    session.print_result_and_notes(
        document,
        f"wrote {document['index']}, with pages of {document['pages']:,} of {document['latents']:,} latents, "
        f"{size_words(document['bytes'])} in all; open it in a browser",
    )
