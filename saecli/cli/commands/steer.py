"""`sae steer`."""

from enum import Enum
from typing import Annotated, Literal

import typer

from ...extract.options import SITES
from ..options import Device, Json, Run, start

Latents = Annotated[list[int], typer.Option("--latent", help="Number of a latent, from 0; can be given several times.")]
Prompts = Annotated[list[str], typer.Option("--prompt", help="Text to continue; can be given several times.")]
Method = Annotated[Literal["add", "clamp", "ablate"], typer.Option(
    "--method", help="add: --scale times the decoder vector; clamp: set the code to --scale; ablate: set it to 0.")]
Scales = Annotated[list[float] | None, typer.Option(
    "--scale", help="In units of the latent's code, for add and clamp; once for all latents, or once for each.",
    callback=lambda given: given or None)]
Model = Annotated[str | None, typer.Option("--model", help="Hub id or folder of the language model.",
                                           show_default="the one that the run's store came from")]
Layer = Annotated[int | None, typer.Option("--layer", help="Block that the SAE reads, from 0, if its file does not "
                                                           "say.")]
Site = Enum("Site", [(site, site) for site in SITES], type=str)  # type: ignore[misc]  # names from a table
Sites = Annotated[Site | None, typer.Option("--site", help="Hook point in the block, if its file does not say.")]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0, help="Sampling temperature; 0: greedy.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of sampling, the same for both texts.",
                                          show_default="0")]


def command(ctx: typer.Context, latent: Latents, prompt: Prompts, run: Run = None, method: Method = "add",
            scale: Scales = None, model: Model = None, layer: Layer = None, site: Sites = None,
            max_new_tokens: NewTokens = 40, temperature: Temperature = 0.0, seed: Seed = None,
            device: Device = "auto", json: Json = False) -> None:
    """Generate text with SAE latents steered, next to unsteered text.

    RUN is an SAE or a transcoder. Latents are changed at every token of prompt and continuation but special tokens
    (BOS). The SAE's reconstruction error is kept: the decoder vectors times the change of the codes are added to the
    activations, for a transcoder to those that it predicts.

    To choose --scale, the table has the norms of activations and decoder vectors, and each latent's largest code on the
    prompts. In a notebook, `with saecli.steering(model, "first", 12, scale=8):` does the same to model.generate.

    Example: sae steer first --latent 12 --scale 8 --prompt "Once upon a time"
    """
    from ...measure.steer import steer
    from ...show.measures import steering_tables

    session = start(ctx, json)
    document = steer(run, latent, prompt, method=method, scale=scale, model=model, layer=layer,
                     site=site and site.value, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed,
                     device=device, home=session.home, progress=session.console)
    session.console.result(document, *steering_tables(document))
