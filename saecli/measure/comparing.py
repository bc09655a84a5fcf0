"""Comparison of SAEs at similar sparsity, and tables of measures."""

import csv
import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from ..base.tables import table
from ..base.wording import counted
from ..sae.metrics import DENSE_FREQUENCY
from .sae_and_rows import Measured, by_rows

LIKE_L0 = 1.05  # an L0 up to this factor times another's counts as no larger
ERRORS = {"fvu": 1, "ce_recovered": -1, "kl": 1}  # compared at similar L0; times its sign, less is better


def marked(found: Sequence[dict[str, Any]], everything: Sequence[Measured]) -> list[dict[str, Any]]:
    """The measures of each SAE with one more, `unbeaten`, among the SAEs on the same rows.

    Args:
        found: the measures of each.
        everything: the SAEs and their rows, in the same order.

    Returns:
        The measures, in the same order; `unbeaten` is None for an SAE alone on its rows.
    """
    marks: list[bool | None] = [None] * len(found)
    for members in by_rows(everything):
        if len(members) > 1:
            for index, mark in zip(members, unbeaten([found[index] for index in members]), strict=True):
                marks[index] = mark
    return [run | {"unbeaten": mark} for run, mark in zip(found, marks, strict=True)]


def unbeaten(runs: Sequence[Mapping[str, Any]]) -> list[bool]:
    """For each of several runs on the same rows, whether no other beats it.

    A run is beaten by one whose L0 is at most `LIKE_L0` times its own, and which is no worse in any of the `ERRORS`
    measured and better in at least one. The condition on errors is a strict partial order, so runs never beat each
    other in a circle, although L0s are compared with a tolerance: at least one is unbeaten.

    Args:
        runs: the measures of each, among them `l0`.

    Returns:
        One bool per run. A run with an error that is not finite beats none, and is not unbeaten.
    """
    errors = [tuple(sign * run[name] for name, sign in ERRORS.items() if name in run) for run in runs]
    finite = [all(map(math.isfinite, error)) for error in errors]

    def beats(other: int, run: int) -> bool:
        return (finite[other] and runs[other]["l0"] <= LIKE_L0 * runs[run]["l0"] and errors[other] != errors[run]
                and all(map(operator.le, errors[other], errors[run])))

    return [finite[run] and not any(beats(other, run) for other in range(len(runs))) for run in range(len(runs))]


def meaning(run: Mapping[str, Any]) -> str:
    """The meaning of the mark of an unbeaten run, in a sentence, given the measures of a run."""
    *others, last = [name.replace("_", " ") for name in ERRORS if name in run]
    errors = f"{', '.join(others)} or {last}" if others else last
    return f"unbeaten (*): every other run on the same rows with at most {LIKE_L0:g} times its l0 is worse in {errors}"


# The most important first: a narrow terminal moves the last ones below.
RECONSTRUCTION = ("l0", "fvu", "explained_variance", "mse", "cosine", "l1", "silent_fraction", "dead_fraction", "rows",
                  "split", "data")
EFFECT = ("ce_recovered", "kl", "ce_clean", "ce_spliced", "ce_zero", "tokens")
FEATURES = ("mcc", "f1", "precision", "recall", "uniqueness", "true_l0")
SPARSITY = ("l0", "l0_std", "density", "silent", "dense", "dead_fraction", "rows", "split", "data")
LISTED = 12  # latents that a list names before it says how many more there are


def sparsest_first(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measures of runs by L0, of equal ones by FVU."""
    return sorted(runs, key=lambda run: (run["l0"], math.isnan(run["fvu"]), run["fvu"]))


def evaluation_tables(ranked: Sequence[dict[str, Any]], model: str | None) -> list[RenderableType]:
    """The tables of `sae eval` from measures, sparsest first: one of reconstruction, one of the known features
    found, where rows are made of such, and one of the effect on the language model, unless that is None."""
    order = "sparsest first" if len(ranked) > 1 else None
    compared = any(run["unbeaten"] is not None for run in ranked)
    shown = [comparison(ranked, RECONSTRUCTION, f"{order}; {meaning(ranked[0])}" if compared else order)]
    if nested := [[run["run"], prefix["latents"], prefix["l0"], prefix["fvu"]]
                  for run in ranked for prefix in run.get("prefixes", ())]:
        shown.append(table("by the first latents alone", ["run", "latents", "l0", "fvu"], nested))
    if of_worlds := [run for run in ranked if "mcc" in run]:
        shown.append(comparison(of_worlds, FEATURES, "known features: f1, precision and recall of latents as detectors "
                                                     "of the feature nearest to each"))
    if model is not None:
        shown.append(comparison(ranked, EFFECT, f"with the SAE's reconstructions in {model}; in nats a token"))
    return shown


def comparison(runs: Sequence[dict[str, Any]], columns: Sequence[str], title: str | None) -> RenderableType:
    """A table with some of the runs' measures as columns; one line per run in the order given, unbeaten ones marked."""
    rows = [[run["run"] + " *" * bool(run["unbeaten"]), *(run[column] for column in columns)] for run in runs]
    return table(title, ["run", *(column.replace("_", " ") for column in columns)], rows)


def draw_frontier(path: Path, ranked: Sequence[dict[str, Any]], everything: Sequence[Measured]) -> None:
    """Draw FVU against L0, of SAEs in this order, coloured by activation."""
    from ..show.run_plots import frontier  # matplotlib takes a second to import

    kinds = {one.subject.name: one.sae.activation.name for one in everything}
    frontier(path, {run["run"]: (run["l0"], run["fvu"], kinds[run["run"]], run["unbeaten"]) for run in ranked})


def flat(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run's measures as a line of a table: those of a prefix of latents as `l0_first_N` and `fvu_first_N`."""
    line = dict(run)
    for prefix in line.pop("prefixes", ()):
        line |= {f"{name}_first_{prefix['latents']}": prefix[name] for name in ("l0", "fvu")}
    return line


def read_measures(path: Path) -> list[dict[str, Any]]:
    """The file that `sae eval --csv` wrote, a mapping per run: names as text, `unbeaten` as bool, all else as float."""
    kinds = {"run": str, "data": str, "split": str, "unbeaten": "True".__eq__}
    with path.open(encoding="utf-8", newline="") as file:
        return [{name: kinds.get(name, lambda word: float(word or "nan"))(word) for name, word in line.items()}
                for line in csv.DictReader(file)]


def sparsity_table(runs: Sequence[dict[str, Any]]) -> RenderableType:
    """The table of `sae sparsity`, one line per run."""
    rows = [[run["run"], *(run[column] for column in SPARSITY)] for run in runs]
    return table(None, ["run", *(column.replace("_", " ") for column in SPARSITY)], rows)


def extremes(run: dict[str, Any]) -> str:
    """Two lines that list a run's dense latents, the most frequent first, and its silent ones."""
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
