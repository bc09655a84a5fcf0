from typing import Annotated

import typer

from ..base.words import size_words
from .options import (
    Data,
    Device,
    Json,
    Model,
    NoModel,
    Out,
    Run,
    SplitName,
    Target,
    model_or_own,
    start,
)


def command(
    ctx: typer.Context,
    out: Out,
    run: Run = None,
    data: Data = None,
    target: Target = None,
    split: SplitName = "all",
    latent: Annotated[
        list[int] | None,
        typer.Option(
            help="Latent that gets its own page, from 0; repeat for several.", show_default="all"
        ),
    ] = None,
    latents: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="This number of latents get their own page, the most frequent.",
            show_default="4,096",
        ),
    ] = None,
    model: Model = None,
    no_model: NoModel = False,
    examples: Annotated[
        int, typer.Option(min=1, max=100, help="Texts per latent, strongest activation first.")
    ] = 12,
    neuronpedia: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL/SOURCE",
            help="Neuronpedia's name of the SAE, such as "
            "gemma-2-2b/20-gemmascope-res-16k, to link each latent to its page there.",
            show_default="none",
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace a folder that holds an index.html, such as an earlier report.",
        ),
    ] = False,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Write HTML pages of latents, to be opened from disk.

    index.html shows measures, firing frequencies, and a table of all latents to search and sort. Each chosen latent has
    a page with the texts in which it fires strongest and others by strength or at random, a histogram of its
    activations, the nearest latents, those that fire with it and, if the language model is on this machine, the tokens
    that it promotes. FVU, L0 and cosine are as in `sae eval`. The folder needs no network, and can be moved; it appears
    whole or not at all.

    Example: sae report first --out pages
    """
    from ..show.report import report

    session = start(ctx)
    wanted = model_or_own(model, no_model)
    document = session.call(report, sae=run, latents=latent, count=latents, model=wanted)
    session.print_result_and_notes(
        document,
        f"wrote {document['index']}, with pages of {document['pages']:,} of "
        f"{document['latents']:,} latents, {size_words(document['bytes'])} in all; open it in a "
        "browser",
    )
