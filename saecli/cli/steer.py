"""Generate text with SAE latents steered, next to unsteered text.

Adds the change of each code times its decoder vector to the activations at every token but the first and special
ones (BOS); the reconstruction error stays. A transcoder changes the activations that it predicts, a crosscoder
those at one hook point, chosen by --model, --layer and --site.

To choose --scale, see the table: norms of activations and decoder vectors, and each latent's largest codes on the
prompts and the run's store. In a notebook, `with saecli.steering(model, "first", 12, scale=8):` steers
model.generate.

Example: sae steer first --latent 12 --prompt "Once upon a time"
"""

from collections.abc import Mapping
from typing import Any

import typer

from ..base.words import does_nothing
from ..measure.functions import steer
from .options import Json, Run, configured, start


@configured(steer)
def command(
    ctx: typer.Context, options: Mapping[str, Any], run: Run = None, json: Json = False
) -> None:
    from ..show.measures import steering_tables

    session = start(ctx)
    if "seed" in options and not options.get("temperature"):
        raise does_nothing("seed", "without --temperature; leave it out, or sample")
    document = session.call(steer, sae=run, **options)
    session.console.print_result(document, *steering_tables(document))
