"""Train baselines for a run: random encoder or decoder, shuffled rows, random model.

Each repeats the training of RUN with one ingredient removed: encoder or decoder stays random, each dimension of the
rows is shuffled by itself, or, with --model, rows come from that model with random weights, on the same tokens. RUN
must be trained without --init; a crosscoder of several models takes no --model.

Compares FVU, L0 and dead latents on held-out rows; for known features MCC and F1; with --model CE recovered and KL.
A score that a control reaches too is no evidence for the SAE.

Cost: trains 3 SAEs (4 with --model). Rows that are shuffled or from a random model are held in memory as float32:
for a store larger than memory, take a run with a smaller --fraction. Saves no run.

Example: sae controls first --model google/gemma-2-2b
"""

from collections.abc import Mapping
from typing import Any

import typer

from ..measure.functions import controls
from .options import FinishedRun, Json, configured, start


@configured(controls)
def command(
    ctx: typer.Context, options: Mapping[str, Any], run: FinishedRun = None, json: Json = False
) -> None:
    from ..show.measures import controls_table

    session = start(ctx)
    document = session.call(controls, run=run, **options)
    session.print_result_and_notes(document, controls_table(document))
