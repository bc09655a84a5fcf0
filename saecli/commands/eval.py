"""`sae eval`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from ..errors import ConfigError
from ..files import write_csv
from ..metrics import doubts
from ..tables import table
from ..wording import counted
from .eval_measures import evaluated, marked, meaning
from .options import Device, Json, Plot, Runs, start
from .subjects import Data, SplitName, all_measured

# In the order of what is asked most: what a narrow terminal has no room for stands below.
RECONSTRUCTION = ("l0", "fvu", "explained_variance", "mse", "cosine", "l1", "silent_fraction", "dead_fraction", "rows",
                  "split", "data")
EFFECT = ("ce_recovered", "kl", "ce_clean", "ce_spliced", "ce_zero", "tokens")

Model = Annotated[str | None, typer.Option(
    "--model", help="Hub id or folder of the language model that the store's rows came from, to measure what splicing "
                    "the SAE into it does.", show_default="none, which leaves that out")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="How many of the split's tokens --model is run over.")]
Csv = Annotated[Path | None, typer.Option("--csv", dir_okay=False, help="Write the measures here too: a run a line, "
                                                                        "with every digit, sparsest first.")]


def command(ctx: typer.Context, runs: Runs = None, data: Data = None, split: SplitName = "test", model: Model = None,
            tokens: Tokens = 16_384, device: Device = "auto", plot: Plot = None, csv: Csv = None,
            json: Json = False) -> None:
    """Measure reconstruction, sparsity and the effect on the model.

    RUN is a run's name, or a folder, here or on the Hugging Face hub, with an SAE that this tool, SAELens, sparsify,
    dictionary_learning or Gemma Scope saved. Several make one table, sparsest first. Marked *, or unbeaten in --csv and
    --json, is a run where every other on the same rows with at most 1.05 times its L0 is worse in FVU, or with --model
    in CE recovered or KL.

    The silent fraction is of latents that fire on none of the rows measured; the dead fraction, which training has
    counted and other libraries have not, of those that fire on none of the training rows.

    Example: sae eval first second --model google/gemma-2-2b --plot frontier.png
    """
    session = start(ctx, json, plot, csv=csv)
    if model is None and ctx.get_parameter_source("tokens").name != "DEFAULT":
        raise ConfigError("--tokens does nothing without --model; leave it out, or name the language model")
    everything = all_measured(session, list(dict.fromkeys(runs or ())), data, split, device)
    found = marked(evaluated(session, everything, model, tokens), everything)
    for one, run in zip(everything, found, strict=True):
        if words := doubts(run, one.sae.d_in, one.sae.d_sae):
            session.console.note(f"{run['run']}: warning: on these {counted(run['rows'], 'row')} "
                                f"{', and '.join(words.values())}")
    ranked = sorted(found, key=lambda run: (run["l0"], math.isnan(run["fvu"]), run["fvu"]))
    if plot is not None:
        from ..plots import frontier  # matplotlib takes a second to import

        kinds = {one.subject.name: one.sae.activation.name for one in everything}
        frontier(plot, {run["run"]: (run["l0"], run["fvu"], kinds[run["run"]], run["unbeaten"]) for run in ranked})
        session.console.note(f"drew {plot}")
    if csv is not None:
        write_csv(csv, ranked)
        session.console.note(f"wrote {csv}")
    order = "sparsest first" if len(found) > 1 else None
    means = meaning(found[0])
    compared = any(run["unbeaten"] is not None for run in found)
    shown = [comparison(ranked, RECONSTRUCTION, f"{order}; {means}" if compared else order)]
    if model is not None:
        shown.append(comparison(ranked, EFFECT, f"with the SAE's reconstructions in {model}; in nats a token"))
    session.console.result({"runs": found, "unbeaten_means": means}, *shown)


def comparison(runs: Sequence[dict[str, Any]], columns: Sequence[str], title: str | None) -> RenderableType:
    """A table that people see: a run a line in the order given, those that are unbeaten marked.

    Args:
        runs: measures by name; `run` and `unbeaten` among them.
        columns: the measures to show.
        title: the line above; None for none.
    """
    rows = [[run["run"] + " *" * bool(run["unbeaten"]), *(run[column] for column in columns)] for run in runs]
    return table(title, ["run", *(column.replace("_", " ") for column in columns)], rows)
