"""Tables of finished runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from ..base.tables import table
from ..base.wording import counted

RESULTS = {"run": "run", "data": "data", "d_sae": "d_sae", "test_fvu": "FVU", "test_l0": "L0", "dead": "dead latents"}
NO_VARIANCE = 1e9  # of a ridge over the mean diagonal: larger beside codes that do not vary
FIGURES = {  # of a run, below its results, what a user can act on first; a solver's own go by their names
    "train_fvu": ("FVU on training rows", "if far below the held-out one, more rows would help"),
    "revived": ("latents re-aimed", "dead ones that were given new directions"),
    "lr": ("peak learning rate", "--lr changes it"),
    "test_mse": ("held-out MSE", "mean over rows and dimensions"),
    "relative_alpha": ("ridge of the decoder step", "over the Gram matrix's mean diagonal; --alpha changes it"),
    "condition": ("condition of the decoder step", "the solve loses its log10 of float64's 15 digits"),
    "dof": ("effective degrees of freedom", "decoder vectors that the rows determine, of d_sae"),
    "released": ("decoder released", "descends beside the encoder in the second half; --release"),
    "residual": ("residual of the decoder step", "of its iterative solve, relative")}


def results_table(documents: Sequence[Mapping[str, Any]], varied: Sequence[str] = ()) -> RenderableType:
    """The results of runs on the same rows, a line each.

    Args:
        documents: as `sae train --json` prints them.
        varied: the options in which the runs differ.
    """
    first = documents[0] if documents else None
    title = first and (f"FVU and L0 on {counted(first['rows_test'], 'held-out row')}, dead latents on "
                       f"{counted(first['rows_counted'], 'training row')}")
    options = [name for name in varied if name not in RESULTS]
    rows = [[document["run"], *(document["varied"][name] for name in options),
             *(_result(name, document) for name in RESULTS if name != "run")] for document in documents]
    return table(title, ["run", *(name.replace("_", " ") for name in options), *[*RESULTS.values()][1:]], rows)


def _result(name: str, document: Mapping[str, Any]) -> Any:
    if name == "dead":
        return round(document["final"]["dead_fraction"] * document["d_sae"])
    return document[name] if name in document else document["final"][name]


def figures_table(documents: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Runs' other measures, and their solvers' figures, a column each; of a single run with their meanings."""
    names = {name for document in documents for name in document["final"]} - {*RESULTS, "dead_fraction", "alpha"}
    shown = [(name, *FIGURES.get(name, (name.replace("_", " "), "")))
             for name in sorted(names, key=lambda name: ([*FIGURES, name].index(name), name))]
    if len(documents) > 1:
        return table(None, ["figure", *(each["run"] for each in documents)], [
            ["steps", *(each["steps"] for each in documents)],
            ["seconds", *(round(each["seconds"]) for each in documents)],
            *([label, *(_figure(name, each) for each in documents)] for name, label, _ in shown)])
    (one,) = documents
    return table(f"{one['solver']}: {counted(one['epochs'], 'epoch')}, {counted(one['steps'], 'step')} in "
                 f"{one['seconds']:.0f} s", ["figure", "value", "meaning"],
                 [[label, _figure(name, one), meaning] for name, label, meaning in shown])


def _figure(name: str, document: Mapping[str, Any]) -> Any:
    """A cell: a ridge beside codes without variance has no size."""
    value = document["final"].get(name)
    if name == "released" and value is not None:
        return "yes" if value else "no"
    return None if name == "relative_alpha" and value is not None and value > NO_VARIANCE else value
