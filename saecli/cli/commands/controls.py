"""`sae controls`."""

from pathlib import Path
from typing import Annotated

import typer

from ...base.files import write_csv
from ...measure.controls import SEEDS, controls
from ...measure.evaluate import TOKENS
from ...show.measures import controls_table
from ..options import Device, Json, run_names, start
from .eval import given

Run = Annotated[str | None, typer.Argument(metavar="RUN", help="Name of a finished run of sae train.",
                                           show_default="the newest run", autocompletion=run_names)]
Model = Annotated[str | None, typer.Option(
    "--model", help="Language model that the rows came from, hub id or folder: adds the random-model baseline, CE, KL.",
    show_default="none, which leaves both out")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="Seeds per training; the first is evaluated. 1: no "
                                                           "stability.")]

Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Held-out tokens to run --model on.")]
Csv = Annotated[Path | None, typer.Option("--csv", dir_okay=False, help="Also write the measures here, one training "
                                                                        "per line, with every digit.")]


def command(ctx: typer.Context, run: Run = None, model: Model = None, tokens: Tokens = TOKENS, seeds: Seeds = SEEDS,
            device: Device = "auto", csv: Csv = None, json: Json = False) -> None:
    """Train baselines for a run (random encoder or decoder, shuffled rows, random model).

    RUN is a finished run of sae train, an SAE or a transcoder from random directions. A control is the same training
    with one ingredient removed: a fixed random encoder, while biases, thresholds and decoder are trained; a fixed
    random decoder; shuffled rows, each dimension permuted by itself; and with --model the same tokens' activations in
    that model with random weights.

    The table compares them with the run, each on the held-out rows of its kind: FVU, L0 and dead latents; for known
    features mcc and F1; with --model CE recovered and KL; and stability, the PW-MCC of decoder vectors between seeds.
    A value that a control reaches too is no evidence for the SAE. A fixed decoder has the stability of random
    directions; shuffled rows may have a high one, since every seed finds their independent dimensions.

    Cost: seven trainings like the run's, one after another, nine with --model; with --seeds 1, three and four. Shuffled
    rows and a random model's are in memory, 4 bytes per number; a control whose rows take more than half of the free
    memory is left out. No run is saved.

    Example: sae controls first --model google/gemma-2-2b
    """
    session = start(ctx, json, csv=csv)
    document = controls(run, model=model, tokens=given(ctx, "tokens"), seeds=seeds, device=device,
                        home=session.home, progress=session.console)
    for note in document["notes"]:
        session.console.note(note)
    if csv is not None:
        write_csv(csv, document["controls"])
        session.console.note(f"wrote {csv}")
    session.console.result(document, controls_table(document))
