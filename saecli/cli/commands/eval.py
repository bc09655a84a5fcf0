"""`sae eval`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ...base.files import write_csv
from ...measure.evaluate import TOKENS, check_tokens_of_model, evaluated, marked, warnings
from ...measure.measured import all_measured
from ...measure.stability import (
    MATCH_THRESHOLD,
    check_comparable,
    check_stability,
    measured_stability,
)
from ...show.measures import evaluation_tables, flat, meaning, sparsest_first, stability_tables
from ..options import Device, Json, Plot, Runs, start, store_names

Data = Annotated[list[str] | None, typer.Option(
    "--data", help="Activation store, its name or folder; of a crosscoder several, in order.",
    autocompletion=store_names, show_default="the one that the run was trained on, else the newest",
    callback=lambda names: names or None)]  # without it typer gives an empty list
Target = Annotated[str | None, typer.Option(
    "--target", help="Store of what a transcoder predicts from --data.", autocompletion=store_names,
    show_default="the one that the run was trained on")]
SplitName = Annotated[Literal["test", "train", "all"], typer.Option(
    "--split", help="Rows to measure on: test, held out; train, trained on; or all.")]
Model = Annotated[str | None, typer.Option(
    "--model", help="Hub id or folder of the language model that the store's rows came from, to measure the effect of "
                    "splicing the SAE into it.", show_default="none, which leaves that out")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Number of the split's tokens to run --model on.")]
Csv = Annotated[Path | None, typer.Option("--csv", dir_okay=False, help="Write the measures here too: one run per "
                                                                        "line, with every digit, sparsest first.")]

Stability = Annotated[bool, typer.Option(
    "--stability", help="Match latents between runs that differ in seed: PW-MCC, and the fraction of latents matched.")]
MatchThreshold = Annotated[float, typer.Option(
    "--match-threshold", help="With --stability: the |cosine| of decoder vectors, in [0, 1), above which a latent is "
                              "matched.")]


def given(ctx: typer.Context, name: str) -> Any:
    """An option's value as given by the user; None if it has its default."""
    return None if ctx.get_parameter_source(name).name == "DEFAULT" else ctx.params[name]


def command(ctx: typer.Context, runs: Runs = None, data: Data = None, target: Target = None,
            split: SplitName = "test", model: Model = None, tokens: Tokens = TOKENS, stability: Stability = False,
            match_threshold: MatchThreshold = MATCH_THRESHOLD, device: Device = "auto", plot: Plot = None,
            csv: Csv = None, json: Json = False) -> None:
    """Measure reconstruction, sparsity and the effect on the model.

    RUN is a run's name, or a folder, here or on the Hugging Face hub, with an SAE that this tool, SAELens, sparsify,
    dictionary_learning or Gemma Scope saved. Several make one table, sparsest first. A run is marked * (unbeaten in
    --csv and --json) if every other run on the same rows with at most 1.05 times its L0 is worse in FVU, or with
    --model in CE recovered or KL.

    Silent latents fire on none of the rows measured; dead latents on none of the training rows, which only SAEs trained
    here have counted.

    --stability matches the latents of each two runs one to one by |cosine| of their decoder vectors. PW-MCC is its
    mean; a latent is matched if it is above --match-threshold, and shared if the encoder vectors' cosine is too. Silent
    latents are included; where there are some, the figures of those that fire stand beside. --plot draws a second
    picture, with -stability after its name.

    Example: sae eval first second --model google/gemma-2-2b --plot frontier.png
    """
    session = start(ctx, json, plot, csv=csv)
    check_tokens_of_model(given(ctx, "tokens"), model)
    names = list(dict.fromkeys(runs or ()))
    check_stability(stability, len(names), given(ctx, "match_threshold"))
    everything = all_measured(session.home, names, data, split, device, session.console, target)
    if stability:
        check_comparable([one.subject for one in everything], [one.sae for one in everything])
    found = marked(evaluated(everything, model, tokens, session.console), everything)
    for warning in warnings(found, everything):
        session.console.note(warning)
    ranked = sparsest_first(found)
    document = {"runs": found, "unbeaten_means": meaning(found[0])}
    tables = evaluation_tables(ranked, model)
    if stability:
        document["stability"] = measured_stability(everything, match_threshold, session.console)
        tables += stability_tables(document["stability"])
    if plot is not None:
        from ...show.runs import frontier  # matplotlib takes a second to import

        kinds = {one.subject.name: one.sae.activation.name for one in everything}
        frontier(plot, {run["run"]: (run["l0"], run["fvu"], kinds[run["run"]], run["unbeaten"]) for run in ranked})
        session.console.note(f"drew {plot}")
        if stability:
            from ...show.latents import stability as draw_stability

            own = plot.with_stem(f"{plot.stem}-stability")
            draw_stability(own, document["stability"])
            session.console.note(f"drew {own}")
    if csv is not None:
        write_csv(csv, [flat(run) for run in ranked])
        session.console.note(f"wrote {csv}")
    session.console.result(document, *tables)
