"""`sae refit`."""

from typing import Annotated

import typer

from ...measure.evaluate import TOKENS
from ...measure.refit import refitted_run
from ...show.measures import refit_table
from ..options import Device, Json, Run, start
from .eval import Data, Model, Target, Tokens, given

Name = Annotated[str | None, typer.Option("--name", help="Name of the new run.",
                                          show_default="refit- and the name of RUN")]


def command(ctx: typer.Context, run: Run = None, data: Data = None, target: Target = None, name: Name = None,
            model: Model = None, tokens: Tokens = TOKENS, device: Device = "auto", json: Json = False) -> None:
    """Give an SAE the exact decoder for a store's rows.

    Adapts an SAE that was published, or trained on other rows. The encoder stays. In one pass over the store's training
    rows, the decoder and its bias are solved in closed form, with a ridge towards a multiple of the SAE's own decoder;
    its weight is chosen by leave-one-out. FVU, cosine and L0 on held-out rows are printed before and after, with
    --model also CE recovered and KL.

    Writes a run into the home, which other commands take like a trained one; it appears whole or not at all.

    Example: sae refit google/gemma-scope-2b-pt-res/layer_12/width_16k/average_l0_82 --data notes
    """
    session = start(ctx, json)
    document = refitted_run(run, data, target=target, name=name, model=model, tokens=given(ctx, "tokens"),
                            device=device, home=session.home, progress=session.console)
    for note in document["notes"]:
        session.console.note(note)
    session.console.result(document, refit_table(document), f"saved in {document['path']}")
