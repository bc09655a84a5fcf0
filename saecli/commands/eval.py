"""`sae eval`."""

import math
from typing import Any

import typer

from ..metrics import reconstruction
from ..report import table
from .options import Json, Plot, Runs, start
from .subjects import Data, Device, SplitName, all_measured

COLUMNS = ("rows", "mse", "fvu", "explained_variance", "cosine", "l0", "l1", "dead_fraction")


def command(ctx: typer.Context, runs: Runs = None, data: Data = None, split: SplitName = "test",
            device: Device = "auto", plot: Plot = None, json: Json = False) -> None:
    """Measure reconstruction, sparsity and the effect on the model.

    RUN is a run's name, or a folder with an SAE that this tool, SAELens, sparsify, dictionary_learning or Gemma
    Scope saved. Several make one table, best first.

    Example: sae eval first second --plot frontier.png
    """
    session = start(ctx, json)
    found = [one.heading | reconstruction(one.sae, one.batches(session))
             for one in all_measured(session, runs, data, split, device)]
    ranked = sorted(found, key=lambda run: (math.isnan(run["fvu"]), run["fvu"]))
    if plot is not None:
        from ..plots import frontier  # matplotlib takes a second to import

        frontier(plot, {run["run"]: (run["l0"], run["fvu"]) for run in ranked})
        session.report.note(f"drew {plot}")
    session.report.result({"runs": found}, comparison(ranked))


def comparison(ranked: list[dict[str, Any]]) -> Any:
    """The table that people see: a run a line, the best first and marked where there are several."""
    several = len(ranked) > 1
    rows = [[run["run"] + (" *" if several and not place else ""), run["data"], run["split"],
             *(run[column] for column in COLUMNS)] for place, run in enumerate(ranked)]
    return table("best (*) first: least variance unexplained (fvu)" if several else None,
                 ["run", "data", "split", *(column.replace("_", " ") for column in COLUMNS)], rows)
