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

    The encoder stays as it is, and with it which latents fire. In one pass over the store's training rows, the decoder
    and its bias are solved for in closed form, pulled by a ridge towards a multiple of the SAE's own decoder: by as
    much as predicts rows left out best. FVU, cosine and L0 are printed of the held-out rows before and after, with
    --model CE recovered and KL too. An SAE that was published, or trained on other rows, is so adapted to these.

    Writes a folder into runs/ of the home, which the other commands take like that of a trained SAE; it appears whole
    or not at all.

    Example: sae refit google/gemma-scope-2b-pt-res/layer_12/width_16k/average_l0_82 --data notes
    """
    session = start(ctx, json)
    document = refitted_run(session.home, run, data, target, name, model, given(ctx, "tokens"), device,
                            session.console)
    for note in document["notes"]:
        session.console.note(note)
    session.console.result(document, refit_table(document), f"saved in {document['path']}")
