"""`sae eval`."""

from typing import Annotated

import typer

from ...base.files import write_csv
from ..options import (
    TOKENS,
    Csv,
    Data,
    Device,
    Json,
    Model,
    Plot,
    Runs,
    SplitName,
    Target,
    Tokens,
    given,
    start,
)

Stability = Annotated[bool, typer.Option(
    "--stability", help="Match latents between runs that differ in seed: PW-MCC, and the fraction of latents matched.")]
MatchThreshold = Annotated[float, typer.Option(
    "--match-threshold", help="With --stability: |cosine| of decoder vectors, in [0, 1), above which a latent is "
                              "matched.")]


def command(ctx: typer.Context, runs: Runs = None, data: Data = None, target: Target = None,
            split: SplitName = "test", model: Model = None, tokens: Tokens = TOKENS, stability: Stability = False,
            match_threshold: MatchThreshold = 0.7, device: Device = "auto", plot: Plot = None,
            csv: Csv = None, json: Json = False) -> None:
    """Measure reconstruction, sparsity and the effect on the model.

    RUN is a run's name, or a folder, here or on the Hugging Face hub, with an SAE that this tool, SAELens, sparsify,
    dictionary_learning or Gemma Scope saved. Several make one table, sparsest first. A run is marked * (unbeaten in
    --csv and --json) if every other run on the same rows with at most 1.05 times its L0 is worse in FVU, or with
    --model in CE recovered or KL.

    Silent latents fire on none of the rows measured; dead latents on none of the training rows, which only SAEs trained
    here have counted.

    --stability matches the latents of each two runs one to one by |cosine| of their decoder vectors. PW-MCC is its
    mean; a latent is matched if it is above --match-threshold, and shared if the encoder vectors' cosine is too. If
    some latents are silent, the same is given for firing latents. --plot draws a second picture, named -stability.

    Example: sae eval first second --model google/gemma-2-2b --plot frontier.png
    """
    from ...measure.evaluate import check_tokens_of_model, evaluated, marked, warnings
    from ...measure.measured import all_measured
    from ...measure.stability import check_comparable, check_stability, measured_stability
    from ...show.measures import evaluation_tables, flat, meaning, sparsest_first, stability_tables

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
