"""`sae sparsity`."""

import typer

from ...measure.evaluate import sparsity_document, tallied
from ...measure.measured import all_measured
from ...show.measures import extremes, places_table, sparsity_table
from ..options import Device, Json, Plot, Runs, start
from .eval import Data, SplitName, Target


def command(ctx: typer.Context, runs: Runs = None, data: Data = None, target: Target = None, split: SplitName = "test",
            device: Device = "auto", plot: Plot = None, json: Json = False) -> None:
    """Show how often latents fire, which are silent and which dense.

    A latent is silent if it fires on none of the rows measured, dense if on more than a tenth of them, and dead if on
    none of the training rows, which only SAEs trained here have counted. --plot saves histograms of L0 and of the
    latents' frequencies, and beside them a picture of the first rows' codes for each run.

    Of a crosscoder, latents by place too: how many are shared, and how many one place has alone, by decoder norms and
    by latent scaling.

    Example: sae sparsity first second --plot sparsity.png
    """
    session = start(ctx, json, plot)
    names = list(dict.fromkeys(runs or ()))
    everything = all_measured(session.home, names, data, split, device, session.console, target)
    tallies = tallied(everything, plot is not None, session.console)
    found = [sparsity_document(one, counts, session.console) for one, counts in zip(everything, tallies, strict=True)]
    if plot is not None:
        from ...show.runs import sparsity  # matplotlib takes a second to import

        session.console.note(f"drew {', '.join(str(path) for path, _ in sparsity(plot, tallies, found))}")
    session.console.result({"runs": found}, sparsity_table(found), *(extremes(run) for run in found),
                           *(places_table(run) for run in found if "places" in run))
