"""`sae steer`."""

from typing import Annotated, Literal

import typer

from ...measure.steer import NEW_TOKENS, steer
from ...show.measures import steering_tables
from ..options import Device, Json, Run, start
from .probe import Layer, Model, Sites

Latents = Annotated[list[int], typer.Option("--latent", help="Number of a latent, from 0; repeatable.")]
Prompts = Annotated[list[str], typer.Option("--prompt", help="Text to continue; repeatable.")]
Method = Annotated[Literal["add", "clamp", "ablate"], typer.Option(
    "--method", help="add --scale times the decoder vector, clamp the code to --scale, or ablate: set the code to 0.")]
Scales = Annotated[list[float] | None, typer.Option(
    "--scale", help="In units of the code, for add and clamp; once, or once for each latent.",
    callback=lambda given: given or None)]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Stop after this number of tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0, help="Of sampling. 0: the likeliest token.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Of sampling, for both texts.", show_default="0")]


def command(ctx: typer.Context, latent: Latents, prompt: Prompts, run: Run = None, method: Method = "add",
            scale: Scales = None, model: Model = None, layer: Layer = None, site: Sites = None,
            max_new_tokens: NewTokens = NEW_TOKENS, temperature: Temperature = 0.0, seed: Seed = None,
            device: Device = "auto", json: Json = False) -> None:
    """Generate text with SAE latents steered, next to unsteered text.

    Latents of RUN, an SAE or a transcoder, are changed at every token but special ones (BOS); the reconstruction error
    stays. To choose --scale by, the table has the norms of activations and decoder vectors, and each latent's largest
    code on the prompts. In Python: `with saecli.steering(model, "first", 12, scale=8): model.generate(...)`.

    Example: sae steer first --latent 12 --scale 8 --prompt "Once upon a time"
    """
    session, site_name = start(ctx, json), site and site.value
    document = steer(run, latent, prompt, method=method, scale=scale, model=model, layer=layer, site=site_name,
                     max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, device=device,
                     home=session.home, progress=session.console)
    session.console.result(document, *steering_tables(document))
