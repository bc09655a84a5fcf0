"""Tables of finished runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from ..tables import table
from ..wording import counted, number

RESULTS = {"run": "run", "data": "data", "d_sae": "d_sae", "test_fvu": "FVU", "test_l0": "L0", "dead": "dead latents"}
FIGURES = {  # of a run, below its results; a solver's own that have no words here go by their names
    "train_fvu": "train FVU {}", "test_mse": "held-out MSE {}", "lr": "peak learning rate {}",
    "revived": "latents re-aimed {}", "alpha": "decoder ridge alpha {}",
    "relative_alpha": "{} of the Gram matrix's mean diagonal", "condition": "condition {}",
    "released": "decoder released {}", "residual": "residual of the solve {}", "dof": "effective degrees of freedom {}"}


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


def figures(document: Mapping[str, Any]) -> str:
    """A run's other measures, and its solver's figures, in a line."""
    words = [FIGURES.get(name, f"{name.replace('_', ' ')} {{}}").format(
                 number(value) if name != "released" else "yes" if value else "no")
             for name, value in document["final"].items() if name not in (*RESULTS, "dead_fraction")]
    return (f"{document['solver']}: {counted(document['epochs'], 'epoch')}, {counted(document['steps'], 'step')} in "
            f"{document['seconds']:.0f} s; {', '.join(words)}")
