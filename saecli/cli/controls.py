from typing import Annotated

import typer

from .options import TOKENS, Csv, Device, Json, OwnRun, SplicedModel, Tokens, given, start

Seeds = Annotated[int, typer.Option("--seeds", min=1, help="Seeds per training; the first is evaluated. 1: no "
                                                           "stability.")]


def command(ctx: typer.Context, run: OwnRun = None, model: SplicedModel = None, tokens: Tokens = TOKENS,
            seeds: Seeds = 2, device: Device = "auto", csv: Csv = None, json: Json = False) -> None:
    """Train baselines for a run: random encoder or decoder, shuffled rows, random model.

    A control repeats the training of RUN (an SAE or transcoder from random directions) with one ingredient removed: a
    fixed random encoder; a fixed random decoder; shuffled rows, each dimension permuted by itself; with --model that
    model's activations with random weights, on the same tokens.

    The table compares them with the run on held-out rows: FVU, L0, dead latents; for known features MCC and F1; with
    --model CE recovered and KL; stability, the PW-MCC of decoder vectors between seeds. What a control reaches too is
    no evidence for the SAE. No run is saved.

    Cost: seven trainings, with --model nine; with --seeds 1, three and four. Shuffled rows and a random model's are
    held in memory, 4 bytes per number, and left out if they need over half of what is free.

    Example: sae controls first --model google/gemma-2-2b
    """
    from ..measure.controls import controls
    from ..show.measures import controls_table

    session = start(ctx, json, csv=csv)
    document = controls(run=run, model=model, tokens=given(ctx, "tokens"), seeds=seeds, device=device,
                        home=session.home, progress=session.console)
    session.write(csv, document["controls"])
    session.result(document, controls_table(document))
