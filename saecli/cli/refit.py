"""Solve for the decoder of an SAE that is optimal on a store's rows.

Adapts an SAE that was published, or trained on other rows, to the rows of --data. The encoder stays, so the same
latents fire. One pass over the training rows gives decoder and bias in closed form. A ridge, chosen by leave-one-out
error, penalises the distance to the rescaled old decoder, or on the rows of its own training to the rescaled
encoder. Prints FVU, cosine and L0 on held-out rows before and after; with --model also CE recovered and KL.

Works in the metric of its training, if its file has it. Saves a run, unless held-out FVU has risen in it.

Example: sae refit google/gemma-scope-2b-pt-res/layer_12/width_16k/average_l0_82 --data notes
"""

from collections.abc import Mapping
from typing import Any

import typer

from ..derive.functions import refit_run
from .options import Json, Run, configured, start


@configured(refit_run)
def command(
    ctx: typer.Context, options: Mapping[str, Any], run: Run = None, json: Json = False
) -> None:
    from ..show.measures import refit_table

    session = start(ctx)
    document = session.call(refit_run, sae=run, **options)
    session.print_result_and_notes(document, refit_table(document), f"saved in {document['path']}")
