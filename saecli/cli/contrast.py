"""Find the latents that tell two sides apart, on documents that did not choose them.

A and B are two stores; two sources or chat roles of one store (--data); two values in a column of its dataset (--by);
or the texts of --pairs, read through the language model. Pairs, roles and stores of the same text are compared document
by document.

Half of the documents choose the latents whose mean code has the AUC furthest from 0.5 (1: A above B). The table is of
the other half: intervals by bootstrap over documents, p by permuting labels, q by Benjamini and Hochberg. Its floor
is the same with labels shuffled; document length alone is beside it.

--replicate tests the nearest latents of a run of another seed, by decoder vector and by correlation of codes.

Example: sae contrast first code news --plot contrast.png
"""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ..measure.claims import contrast
from .options import Json, Plot, Run, configured, start


@configured(contrast)
def command(
    ctx: typer.Context,
    options: Mapping[str, Any],
    run: Run = None,
    a: Annotated[
        str | None, typer.Argument(metavar="A", help="Store; source, role or value.")
    ] = None,
    b: Annotated[str | None, typer.Argument(metavar="B", help="What to compare A with.")] = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    from ..show.measures import contrast_tables

    session = start(ctx)
    document = session.call(contrast, sae=run, a=a, b=b, **options)
    if plot is not None:
        from ..show.pictures import draw_contrast  # matplotlib takes a second to import

        draw_contrast(plot, document)
        session.console.note(f"drew {plot}")
    session.print_result_and_notes(document, *contrast_tables(document))
