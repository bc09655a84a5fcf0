"""A picture of probes on latents, beside probes on the activations."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from .measures import probe_of
from .style import COLOURS, GREY, MARKERS, figure, legend_below, line_style, short


class _Curve(NamedTuple):
    """The AUCs of an SAE's probes: means over sets and the ends of their intervals, and by set."""

    counts: list[int]
    aucs: list[tuple[float, float, float]]
    dense: tuple[float, float, float]
    dense_by_set: list[float]
    by_set: list[float]  # of the probe with most latents


def probes(path: Path, document: Mapping[str, Any]) -> None:
    """Draw what `saecli.probe` returned: the AUC against the number of latents, and set by set against the dense
    probe's. Dense probes at several places are dotted in the colours of their runs; where there is one, it is grey."""
    runs = {run["run"]: _curve(document, run) for run in document["runs"]}
    with figure(path, 9, 4) as drawn:
        left, right = drawn.subplots(1, 2)
        counts = next(iter(runs.values())).counts
        one_place = len({run.dense for run in runs.values()}) == 1
        for index, run in enumerate(list(runs.values())[:1] if one_place else runs.values()):
            mean, low, high = run.dense
            colour = GREY if one_place else COLOURS[index % len(COLOURS)]
            left.axhspan(low, high, color=colour, alpha=0.12, linewidth=0)
            left.axhline(mean, color=colour, linestyle=":")
        for index, run in enumerate(runs.values()):
            mean, low, high = np.array(run.aucs).T
            # Side by side, so that intervals do not hide each other.
            x = np.array(counts) * 1.04 ** (index - (len(runs) - 1) / 2)
            left.errorbar(x, mean, [mean - low, high - mean], **line_style(index), marker=MARKERS[index % len(MARKERS)])
            right.plot(run.dense_by_set, run.by_set, linestyle="none", marker=MARKERS[index % len(MARKERS)],
                       color=COLOURS[index % len(COLOURS)], alpha=0.6)
        left.set(xscale="log", xlabel="latents of a probe (k)", ylabel="AUC, mean over sets")
        left.set_xticks(counts, [str(count) for count in counts])
        left.xaxis.set_minor_locator(NullLocator())
        lowest = min([0.5, *(value for run in runs.values() for value in (*run.dense_by_set, *run.by_set))]) - 0.02
        right.plot([lowest, 1], [lowest, 1], color=GREY, linewidth=1)
        right.set(xlabel="AUC of the dense probe, by set", ylabel=f"AUC with k = {counts[-1]}, by set",
                  xlim=(lowest, 1.02), ylim=(lowest, 1.02))
        handles = [Line2D([], [], **line_style(index), marker=MARKERS[index % len(MARKERS)])
                   for index in range(len(runs))]
        legend_below(drawn, [*handles, Line2D([], [], color=GREY, linestyle=":")],
                     [*map(short, runs), "dense probe on the activations"])


def _curve(document: Mapping[str, Any], run: Mapping[str, Any]) -> _Curve:
    own = [line for line in document["probes"] if line["run"] == run["run"]]
    by_set = [[line["auc"] for line in document["by_set"] if all(line[key] == value for key, value in one.items())]
              for one in (run | {"run": None}, run | {"k": own[-1]["k"]})]
    return _Curve([line["k"] for line in own], [_ends(line) for line in own],
                  _ends(probe_of(document["probes"], run, None)), *by_set)


def _ends(line: Mapping[str, Any]) -> tuple[float, float, float]:
    """The AUC and the ends of its interval, which are itself where it has none."""
    low, high = (line["auc"] if end is None else end for end in (line["auc_low"], line["auc_high"]))
    return line["auc"], low, high
