"""A picture of probes on latents, beside probes on the activations."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from .style import COLOURS, GREY, MARKERS, figure, legend_below, line_style, short


class ProbedRun(NamedTuple):
    """The AUCs of an SAE's probes.

    Args:
        counts: numbers of latents, ascending.
        aucs: mean over sets with each number, and the ends of its interval.
        dense: of the dense probe at the SAE's place, likewise.
        dense_by_set: of the dense probe, one per set.
        by_set: of the probe with most latents, one per set.
    """

    counts: Sequence[int]
    aucs: Sequence[tuple[float, float, float]]
    dense: tuple[float, float, float]
    dense_by_set: Sequence[float]
    by_set: Sequence[float]


def probes(path: Path, runs: Mapping[str, ProbedRun]) -> None:
    """Draw the AUC against the number of latents, and set by set against the dense probe's.

    Dense probes at several places are dotted in the colours of their runs; where there is one, it is grey.

    Args:
        path: PNG, PDF or SVG by its ending.
        runs: by name; their counts are the same.

    Raises:
        ConfigError: the ending is another.
    """
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
