"""`sae controls`."""

from pathlib import Path
from typing import Annotated

import typer

from ...base.files import write_csv
from ...measure.controls import SEEDS, controlled
from ...measure.evaluate import TOKENS
from ...show.measures import controls_table
from ..options import Device, Json, run_names, start
from .eval import given

Run = Annotated[str | None, typer.Argument(metavar="RUN", help="Name of a finished run of sae train.",
                                           show_default="the newest run", autocompletion=run_names)]
Model = Annotated[str | None, typer.Option(
    "--model", help="Hub id or folder of the language model that the rows came from, for the control with random "
                    "weights, and to splice into it what acts on its own rows.",
    show_default="none, which leaves both out")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="Trainings of the run and of each control, from the run's "
                                                           "own seed on, which is measured; 1 leaves stability out.")]

Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Number of held-out tokens to splice into --model on.")]
Csv = Annotated[Path | None, typer.Option("--csv", dir_okay=False, help="Write the measures here too, one training per "
                                                                        "line, with every digit.")]


def command(ctx: typer.Context, run: Run = None, model: Model = None, tokens: Tokens = TOKENS, seeds: Seeds = SEEDS,
            device: Device = "auto", csv: Csv = None, json: Json = False) -> None:
    """Train a run's controls, to see how much of it is the SAE's.

    RUN is a finished run of sae train, an SAE or a transcoder from random directions. A control is the same training
    without what the result is credited to: with a fixed encoder, random as at the start, while biases, thresholds and
    decoder are trained; with a fixed decoder; on shuffled rows, each dimension permuted by itself; and with --model on
    the same tokens' activations in that model with random weights.

    The table has them beside the run, each on the held-out rows of its kind: FVU, L0 and dead latents; of known
    features mcc and F1; with --model CE recovered and KL; and stability, the PW-MCC of decoder vectors between seeds.
    What a control reaches too is no evidence for the SAE. A fixed decoder's stability is that of random directions;
    that of shuffled rows may be high, where every seed finds their independent dimensions.

    Cost: with --model up to nine trainings like the run's, one after another, without it seven; with --seeds 1, four
    and three. Shuffled rows and a random model's are held in memory, 4 bytes per number, and left out if they take more
    than half of what is free. No run is saved.

    Example: sae controls first --model google/gemma-2-2b
    """
    session = start(ctx, json, csv=csv)
    document = controlled(session.home, run, model, given(ctx, "tokens"), seeds, device, session.console)
    for note in document["notes"]:
        session.console.note(note)
    if csv is not None:
        write_csv(csv, document["controls"])
        session.console.note(f"wrote {csv}")
    session.console.result(document, controls_table(document))
