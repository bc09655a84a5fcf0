"""`sae sparsity`."""

import re
from pathlib import Path
from typing import Any

import typer

from ..console import Console
from ..metrics import DENSE_FREQUENCY, Firing, firing
from ..tables import table
from ..wording import counted
from .options import Device, Json, Plot, Runs, start
from .subjects import Data, SplitName, all_measured

COLUMNS = ("l0", "l0_std", "density", "silent", "dense", "dead_fraction", "rows", "split", "data")
PICTURED_ROWS = 200
NAMED = 40  # letters of a run's name in that of its picture: a folder's whole path may be too long for a file's name
LISTED = 12  # latents that a list names before it says how many more there are


def command(ctx: typer.Context, runs: Runs = None, data: Data = None, split: SplitName = "test",
            device: Device = "auto", plot: Plot = None, json: Json = False) -> None:
    """Show how often latents fire, which are silent and which dense.

    A latent is silent if it fires on none of the rows measured, dense if on more than a tenth of them; dead if on none
    of the training rows, which training has counted and other libraries have not. --plot saves histograms of L0 and of
    the latents' frequencies, and beside them, one a run, the first rows' codes as a picture.

    Example: sae sparsity first second --plot sparsity.png
    """
    session = start(ctx, json, plot)
    everything = all_measured(session, list(dict.fromkeys(runs or ())), data, split, device)
    tallies = [firing(one.sae, one.batches(session), PICTURED_ROWS if plot else 0) for one in everything]
    found = [one.heading | counts.result() | {"dead_fraction": one.subject.dead_fraction}
             for one, counts in zip(everything, tallies, strict=True)]
    if plot is not None:
        _draw(session.console, plot, {run["run"]: counts for run, counts in zip(found, tallies, strict=True)})
    rows = [[run["run"], *(run[column] for column in COLUMNS)] for run in found]
    columns = ["run", *(column.replace("_", " ") for column in COLUMNS)]
    session.console.result({"runs": found}, table(None, columns, rows), *(extremes(run) for run in found))


def extremes(run: dict[str, Any]) -> str:
    """Two lines that name a run's dense and silent latents, the most frequent and the first of them."""
    frequency = run["frequency"]
    dense = sorted((i for i, f in enumerate(frequency) if f > DENSE_FREQUENCY), key=lambda i: -frequency[i])
    silent = [i for i, f in enumerate(frequency) if f == 0]
    rows = f"on these {counted(run['rows'], 'row')}"
    return (f"{run['run']}: dense {rows}: {_listed([f'{i} ({frequency[i]:.0%})' for i in dense])}\n"
            f"{run['run']}: silent {rows}: {_listed([str(i) for i in silent])}")


def _listed(words: list[str]) -> str:
    if not words:
        return "none"
    more = f" and {len(words) - LISTED:,} more" if len(words) > LISTED else ""
    return ", ".join(words[:LISTED]) + more


def _draw(console: Console, path: Path, tallies: dict[str, Firing]) -> None:
    from ..plots import firing as histograms
    from ..plots import patterns

    histograms(path, {name: (one.l0_histogram, one.frequency) for name, one in tallies.items()})
    drawn = [path]
    for name, one in tallies.items():
        which = "-" + re.sub(r"[^\w.-]+", "-", name)[-NAMED:] if len(tallies) > 1 else ""
        picture = path.with_stem(f"{path.stem}-patterns{which}")
        drawn.append(path.with_stem(f"{picture.stem}-{len(drawn)}") if picture in drawn else picture)
        patterns(drawn[-1], one.patterns, name)
    console.note(f"drew {', '.join(map(str, drawn))}")
