from typing import Annotated, Literal

import typer

from ..base.errors import ConfigError
from .options import Device, Json, Layer, Model, Module, Run, Site, start


def command(
    ctx: typer.Context,
    latent: Annotated[
        list[int], typer.Option(help="Change this latent, from 0; repeat for several.")
    ],
    prompt: Annotated[list[str], typer.Option(help="Continue this text; repeat for several.")],
    run: Run = None,
    method: Annotated[
        Literal["add", "clamp", "ablate"],
        typer.Option(help="Change the code. add: by --scale; clamp: to --scale; ablate: to 0."),
    ] = "add",
    scale: Annotated[
        list[float] | None,
        typer.Option(
            help="Change in units of the code; give one for all latents, or one for each.",
            show_default="each latent's largest code on the run's store",
        ),
    ] = None,
    model: Model = None,
    layer: Layer = None,
    site: Site = None,
    module: Module = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Generate at most this number of tokens.")
    ] = 40,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sample at this temperature; 0: the likeliest token.")
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(min=0, help="With --temperature, seed the sampling of both texts.")
    ] = 0,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Generate text with SAE latents steered, next to unsteered text.

    Adds the change of each code times its decoder vector to the activations at every token but the first and special
    ones (BOS); the reconstruction error stays. A transcoder changes the activations that it predicts, a crosscoder
    those at one hook point, chosen by --model, --layer and --site.

    To choose --scale, see the table: the norms of activations and decoder vectors, and each latent's largest codes on
    the prompts and on the run's store. In a notebook, `with saecli.steering(model, "first", 12, scale=8):` steers
    model.generate.

    Example: sae steer first --latent 12 --prompt "Once upon a time"
    """
    from ..measure.steer import steer
    from ..show.measures import steering_tables

    session = start(ctx)
    if "seed" in session.given and not temperature:
        raise ConfigError(
            "--seed does nothing without --temperature; leave it out, or sample at a temperature above 0"
        )
    document = session.call(steer, sae=run, latents=latent, prompts=prompt)
    session.console.print_result(document, *steering_tables(document))
