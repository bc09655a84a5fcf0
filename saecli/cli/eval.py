"""Measure reconstruction, sparsity and the effect on the model.

RUN is a run's name, or a folder, here or on the Hugging Face hub, with an SAE of this tool or another library.
Several runs make one table, sparsest first.

For CE and KL a single run is spliced into the language model that its store's rows came from, if that is on this
machine; several into --model.

Silent latents fire on none of the rows measured; dead ones fired on none of the training rows, known only for SAEs
trained here.

--together splices all runs into --model at once. It shows CE and KL of the whole set, next to CE with zeros and with
mean rows at all its hook points, and each run's error there, with the others spliced in and without.

--stability matches the latents of each pair of runs one to one by |cosine| of decoder vectors, in the metric of their
training if it is one, or by correlation of codes (--match-by codes). PW-MCC is the mean; a latent is matched if its
own is above 0.7. If some are silent, both are repeated for those that fire. With --plot it draws a second picture,
NAME-stability.

Example: sae eval first second --model google/gemma-2-2b --plot frontier.png
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..base.console import Console
from ..base.errors import ConfigError
from ..base.options import all_arguments
from ..measure.functions import evaluate
from .options import Json, NoModel, Plot, Runs, configured, model_or_own, start


@configured(evaluate)
def command(
    ctx: typer.Context,
    options: Mapping[str, Any],
    runs: Runs = None,
    no_model: NoModel = False,
    at_once: Annotated[
        bool,
        typer.Option(
            "--together",
            help="Splice all runs into --model at once, such as a set of transcoders, instead of each alone.",
        ),
    ] = False,
    stable: Annotated[
        bool,
        typer.Option(
            "--stability",
            help="Match latents between runs that differ in seed: PW-MCC and the fraction matched.",
        ),
    ] = False,
    match_by: Annotated[
        Literal["decoder", "codes"],
        typer.Option(
            metavar="<choice>",
            help="With --stability, match by cosine of decoder vectors, or correlation of codes; decoder or codes.",
        ),
    ] = "decoder",
    plot: Plot = None,
    json: Json = False,
) -> None:
    from ..measure.evaluate import check_tokens, compare_measured, stored_models, together
    from ..measure.measured import ChosenRows
    from ..measure.stability import check_comparable, demand_several, stability_of
    from ..show import measures

    session, arguments = start(ctx), all_arguments(evaluate, options)
    console, names = session.console, runs or []
    model, tokens = arguments.pop("model"), arguments.pop("tokens")
    wanted = model_or_own(model, no_model)
    if len(names) > 1 and not model:
        wanted = None
    check_tokens(tokens, wanted)
    if at_once and model is None:
        raise ConfigError("--together does nothing without --model; name the language model")
    if "match_by" in session.given and not stable:
        raise ConfigError("--match-by does nothing without --stability; add it, or leave this out")
    if stable:
        demand_several(len(names))
    chosen_rows = ChosenRows(session.home, **arguments, listener=console)
    everything = chosen_rows.with_all(names, of_set=at_once)
    if stable:
        check_comparable([(measured.subject, measured.sae) for measured in everything])
    effect: dict[str, Any] = {}
    if at_once:  # first, since it may refuse the runs
        effect = together(everything, model, tokens, console)
    runs_measured = compare_measured(everything, None if at_once else wanted, tokens, console)
    ranked = measures.sparsest_first(runs_measured)
    document: dict[str, Any] = {"runs": runs_measured}
    tables = measures.evaluation_tables(ranked, model or stored_models(everything[0]))
    if at_once:
        document["together"] = effect
        tables = measures.together_tables(runs_measured, effect)
    if stable:
        document["stability"] = stability_of(everything, console, match_by=match_by)
        tables.append(measures.stability_table(document["stability"]))
    if plot is not None:
        families = {measured.subject.name: measured.family for measured in everything}
        _draw(plot, ranked, families, document.get("stability"), console)
    console.print_result(document, *tables)


def _draw(
    plot: Path,
    ranked: Sequence[Mapping[str, Any]],
    families: Mapping[str, str],
    stability: dict[str, Any] | None,
    console: Console,
) -> None:
    from ..show import pictures  # matplotlib takes a second to import

    pictures.draw_frontier(plot, ranked, families)
    console.note(f"drew {plot}")
    if stability is not None:
        second = plot.with_stem(f"{plot.stem}-stability")
        pictures.draw_stability(second, stability)
        console.note(f"drew {second}")
