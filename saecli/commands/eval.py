"""`sae eval`."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..errors import ConfigError
from ..files import write_csv
from ..report import table
from .eval_measures import evaluated
from .options import Device, Json, Plot, Runs, start
from .subjects import Data, SplitName, all_measured

RECONSTRUCTION = ("rows", "mse", "fvu", "explained_variance", "cosine", "l0", "l1", "dead_fraction")
EFFECT = ("tokens", "ce_clean", "ce_spliced", "ce_zero", "ce_recovered", "kl")

Model = Annotated[str | None, typer.Option(
    "--model", help="Hub id or folder of the language model that the store's rows came from, to measure what splicing "
                    "the SAE into it does.", show_default="none, which leaves that out")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="How many of the split's tokens --model is run over.")]
Csv = Annotated[Path | None, typer.Option("--csv", dir_okay=False, help="Write the measures here too: a run a line, "
                                                                        "the best first, with every digit.")]


def command(ctx: typer.Context, runs: Runs = None, data: Data = None, split: SplitName = "test", model: Model = None,
            tokens: Tokens = 16_384, device: Device = "auto", plot: Plot = None, csv: Csv = None,
            json: Json = False) -> None:
    """Measure reconstruction, sparsity and the effect on the model.

    RUN is a run's name, or a folder, here or on the Hugging Face hub, with an SAE that this tool, SAELens, sparsify,
    dictionary_learning or Gemma Scope saved. Several make one table, best first.

    Example: sae eval first second --model google/gemma-2-2b --plot frontier.png
    """
    session = start(ctx, json, plot, csv=csv)
    if model is None and ctx.get_parameter_source("tokens").name != "DEFAULT":
        raise ConfigError("--tokens does nothing without --model; leave it out, or name the language model")
    everything = all_measured(session, list(dict.fromkeys(runs or ())), data, split, device)
    found = evaluated(session, everything, model, tokens)
    ranked = sorted(found, key=lambda run: (math.isnan(run["fvu"]), run["fvu"]))
    if plot is not None:
        from ..plots import frontier  # matplotlib takes a second to import

        kinds = {one.subject.name: one.sae.activation.name for one in everything}
        frontier(plot, {run["run"]: (run["l0"], run["fvu"], kinds[run["run"]]) for run in ranked})
        session.report.note(f"drew {plot}")
    if csv is not None:
        write_csv(csv, ranked)
        session.report.note(f"wrote {csv}")
    shown = [comparison(ranked, ["data", "split", *RECONSTRUCTION], None)]
    if model is not None:
        shown.append(comparison(ranked, list(EFFECT), f"with the SAE's reconstructions in {model}; in nats a token"))
    session.report.result({"runs": found}, *shown)


def comparison(ranked: list[dict[str, Any]], columns: list[str], title: str | None) -> Table:
    """A table that people see: a run a line, the best first and marked where there are several."""
    several = len(ranked) > 1
    rows = [[run["run"] + (" *" if several and not place else ""), *(run[column] for column in columns)]
            for place, run in enumerate(ranked)]
    best = "best (*) first: least variance unexplained (fvu)" if several and title is None else title
    return table(best, ["run", *(column.replace("_", " ") for column in columns)], rows)
