from typing import Annotated

import typer

from .options import Data, Device, Json, Run, SplicedModel, Target, Tokens, start


def command(
    ctx: typer.Context,
    run: Run = None,
    data: Data = None,
    target: Target = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Save the new run under this name.", show_default="refit- and the name of RUN"
        ),
    ] = None,
    model: SplicedModel = None,
    tokens: Tokens = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Solve for the decoder of an SAE that is optimal on a store's rows.

    Adapts an SAE that was published, or trained on other rows, to the rows of --data. The encoder is unchanged, so the
    same latents fire. One pass over the training rows gives decoder and bias in closed form. A ridge, chosen by
    leave-one-out error, penalises the distance to the rescaled old decoder, or on the rows of its own training to the
    rescaled encoder. Prints FVU, cosine and L0 on held-out rows before and after; with --model also CE recovered and
    KL.

    All is in the metric of its training, if its file has it. Saves a run, unless FVU on held-out rows has risen there.

    Example: sae refit google/gemma-scope-2b-pt-res/layer_12/width_16k/average_l0_82 --data notes
    """
    from ..derive.refit import refit_run
    from ..measure.evaluate import check_tokens
    from ..measure.measured import ChosenRows
    from ..show.measures import refit_table

    session = start(ctx)
    check_tokens(tokens, model)
    chosen_rows = ChosenRows(session.home, data, "test", device, session.console, target)
    document = refit_run(run, chosen_rows, name=name, model=model, tokens=tokens)
    session.print_result_and_notes(document, refit_table(document), f"saved in {document['path']}")
