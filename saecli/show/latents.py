"""Pictures of latents: probes on them, their stability over runs, and a crosscoder's by hook point."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator
from numpy.typing import ArrayLike, NDArray

from ..base.errors import counted
from .measures import probe_of
from .style import COLOURS, GREY, MARKERS, figure, legend_below, line_style, log_scale, say_empty, short

BINS = 40
GROUPS = 10  # of latents of like frequency


class _Curve(NamedTuple):
    counts: list[int]
    aucs: list[tuple[float, float, float]]  # means over sets with the ends of their intervals
    dense: tuple[float, float, float]
    dense_by_set: list[float]
    by_set: list[float]


def probes(path: Path | None, document: Mapping[str, Any]) -> Figure:
    """Draw the document of `saecli.probe`: the AUC against the number of latents, and set by set against the dense
    probe's, which is dotted: grey, or in the colours of runs at several hook points."""
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
    return drawn


def _curve(document: Mapping[str, Any], run: Mapping[str, Any]) -> _Curve:
    own = [line for line in document["probes"] if line["run"] == run["run"]]
    by_set = [[line["auc"] for line in document["by_set"] if all(line[key] == value for key, value in one.items())]
              for one in ({**run, "run": None}, {**run, "k": own[-1]["k"]})]
    return _Curve([line["k"] for line in own], [_ends(line) for line in own],
                  _ends(probe_of(document["probes"], run, None)), *by_set)


def _ends(line: Mapping[str, Any]) -> tuple[float, float, float]:
    """The AUC and the ends of its interval, which are itself where it has none."""
    low, high = (line["auc"] if end is None else end for end in (line["auc_low"], line["auc_high"]))
    return line["auc"], low, high


def stability(path: Path | None, document: Mapping[str, Any]) -> Figure:
    """Draw the document of `saecli.stability`, of runs with rows: |cosine| of latents with their counterparts in other
    runs, and the fraction of runs they are matched in against their frequency: a point is the median frequency and mean
    match fraction of about a tenth of a run's firing latents."""
    threshold = document["match_threshold"]
    with figure(path, 9, 3.6) as drawn:
        left, right = drawn.subplots(1, 2)
        handles, labels = [], []
        for index, run in enumerate(document["runs"]):
            names = ("cosine", "match_fraction", "frequency")
            cosine, matched, frequency = (np.array(run[name], float) for name in names)
            style = line_style(index)
            counts, edges = np.histogram(cosine[~np.isnan(cosine)], BINS, (0, 1))
            left.stairs(counts / max(len(cosine), 1), edges, **style, linewidth=1.6)
            groups = _groups(frequency)
            right.plot([np.median(frequency[group]) for group in groups], [matched[group].mean() for group in groups],
                       **style, marker="o")
            handles.append(Line2D([], [], **style))
            labels.append(f"{short(run['run'])} ({counted(len(cosine), 'latent')}, {(frequency == 0).sum():,} silent)")
        left.axvline(threshold, color=GREY, linestyle=":", linewidth=1)
        left.text(threshold, 1.0, " matched", transform=left.get_xaxis_transform(), color=GREY, va="bottom", ha="left",
                  fontsize=8)
        left.set(xlabel="|cosine| with its counterparts, mean over other runs", ylabel="fraction of latents",
                 xlim=(0, 1), ylim=(0, None))
        right.set(xlabel="fraction of rows a latent fires on", ylabel="fraction of other runs matched in",
                  ylim=(-0.02, 1.02))
        if any(len(line.get_xdata()) for line in right.lines):
            log_scale(right, "x")
        else:
            say_empty(right, "no latent fires")
        legend_below(drawn, handles, labels)
    return drawn


def _groups(frequency: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """The latents that fire, in at most `GROUPS` quantile groups by frequency."""
    fires = np.flatnonzero(frequency > 0)
    if not len(fires):
        return []
    edges = np.unique(np.quantile(frequency[fires], np.linspace(0, 1, GROUPS + 1)))
    group = np.digitize(frequency[fires], edges[1:-1])
    return [fires[group == number] for number in np.unique(group)]


def places(path: Path | None, title: str, names: Sequence[str], share: ArrayLike, scaling: ArrayLike) -> Figure:
    """Draw a crosscoder's latents: the fraction of decoder norm at each hook point, (F, P), and against it the multiple
    that serves the other hook points best, (F, P), NaN where unknown."""
    share, scaling = np.asarray(share, float), np.asarray(scaling, float)
    largest = share.argmax(1)
    scaling[np.arange(len(share)), largest] = np.nan  # 1, or nearly
    with figure(path, 9, 3.6) as drawn:
        left, right = drawn.subplots(1, 2)
        for place, name in enumerate(names):
            colour = COLOURS[place % len(COLOURS)]
            left.stairs(*np.histogram(share[:, place], BINS, (0, 1)), color=colour, linewidth=1.6, label=short(name))
            rows, others = np.nonzero(np.isfinite(scaling) & (largest == place)[:, None])
            right.scatter(share[rows, place], scaling[rows, others], s=8, color=colour, linewidths=0)
        left.set(xlabel="fraction of a latent's decoder norm", ylabel="latents", xlim=(0, 1))
        left.legend(fontsize=8)
        if np.isfinite(scaling).any():
            for level in (0, 1):
                right.axhline(level, color=GREY, linewidth=0.8)
            low, high = np.nanquantile(scaling, [0.005, 0.995])
            right.set(ylim=(min(low, -0.1) - 0.1, max(high, 1.0) + 0.1))
        else:
            say_empty(right)
        right.set(xlabel="fraction at the hook point where it is largest", ylabel="latent scaling at another one")
        drawn.suptitle(short(title), fontsize=10)
    return drawn
