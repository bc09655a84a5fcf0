"""Pictures of runs: loss curves, how often latents fire, activation patterns, the frontier; and of latents: probes,
stability, hook points of a crosscoder."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator
from numpy.typing import ArrayLike, NDArray

from ..base.errors import counted
from ..measure.hook_points import DECOUPLED, EXCLUSIVE, SHRUNK
from ..sae.metrics import DENSE_FREQUENCY, Firing
from .measures import curve, frequency_edges, l0_bins, probe_of
from .style import (
    COLOURS,
    GREY,
    MARKERS,
    figure,
    legend_below,
    line_style,
    log_scale,
    say_empty,
    short,
)

BINS = 40
GROUPS = 10  # of latents of like frequency
NAMED = (
    40  # characters of a run's name in a picture's: a whole path may be too long for a file name
)
PATTERN_ROWS, PATTERN_COLUMNS = 400, 1500  # of a pattern picture, about its pixels


def loss_curves(path: Path | None, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Draw FVU and L0 of training batches and held-out rows by step, given for each name its `metrics.jsonl`."""
    # Rounded, since the averages of batches may be 15.999999999999998 for 16.
    counts = [
        {round(value, 1) for key in ("batch_l0", "test_l0") for _, value in curve(rows, key)}
        for rows in runs.values()
    ]
    chosen = all(len(count) == 1 for count in counts)  # as of topk, where the words tell it
    with figure(path, 6.5 if chosen else 9, 3.6) as drawn:
        left, *others = drawn.subplots(1, 1 if chosen else 2, squeeze=False).flat
        panels = [
            (left, "batch_fvu", "test_fvu"),
            *((axes, "batch_l0", "test_l0") for axes in others),
        ]
        for index, rows in enumerate(runs.values()):
            for axes, batches, test in panels:
                style = line_style(index)
                points = curve(rows, batches)
                axes.plot(
                    *_columns(points),
                    **style,
                    alpha=0.45,
                    linewidth=1,
                    marker="o" * (len(points) == 1),
                )
                points = curve(rows, test)
                axes.plot(
                    *_columns(points),
                    **style,
                    linewidth=None if axes is left else _width(index, len(runs)),
                    marker="o",
                    markevery=max(1, len(points) // 20),
                )
        left.set(xlabel="step", ylabel="fraction of variance unexplained (FVU)")
        for axes in others:
            # With room above, for a curve that is flat at the top.
            axes.set(
                xlabel="step",
                ylabel="active latents per row (L0)",
                ylim=(0, 1.04 * axes.get_ylim()[1]),
            )
        for axes in (left, *others):
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            if not any(len(line.get_xdata()) for line in axes.lines):
                say_empty(axes)
        if any((np.asarray(line.get_ydata()) > 0).any() for line in left.lines):
            log_scale(left, "y")
        handles = (
            [Line2D([], [], **line_style(index)) for index in range(len(runs))]
            if len(runs) > 1
            else []
        )
        handles += [
            Line2D([], [], color=GREY, alpha=0.6, linewidth=1),
            Line2D([], [], color=GREY, marker="o"),
        ]
        titles = [
            f"{short(name)}, L0 {min(count):g}" if chosen else short(name)
            for name, count in zip(runs, counts, strict=True)
        ]
        legend_below(
            drawn,
            handles,
            [*titles * (len(runs) > 1), "training batches, averaged", "held-out rows"],
        )
        if len(runs) == 1:
            drawn.suptitle(titles[0], fontsize=10)
    return drawn


def _columns(points: Sequence[tuple[float, float]]) -> NDArray[np.float64]:
    return np.array(points, float).reshape(-1, 2).T


def _width(index: int, count: int) -> float:
    """A line's width in points; of two or three runs, which coincide at equal K, each earlier one is wider."""
    return 1.6 + 2 * (count - 1 - index) if count <= 3 else 1.6


def firing(path: Path | None, runs: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> Figure:
    """Draw the distributions of L0 over rows and of firing frequency over latents, given for each name the number of
    rows on which 0, 1, ..., F latents fire, (F + 1,), and the fraction of rows on which each latent fires, (F,)."""
    tallies = {
        name: (np.asarray(l0), np.asarray(frequency)) for name, (l0, frequency) in runs.items()
    }
    chosen = all(
        np.count_nonzero(l0) == 1 for l0, _ in tallies.values()
    )  # as of topk, where the words tell it
    with figure(path, 6.5 if chosen else 9, 3.6) as drawn:
        *others, right = drawn.subplots(1, 1 if chosen else 2, squeeze=False).flat
        for left in others:
            for index, (l0, _) in enumerate(tallies.values()):
                rows, edges = l0_bins(l0, BINS)
                left.stairs(
                    rows / max(l0.sum(), 1),
                    edges,
                    **line_style(index),
                    linewidth=_width(index, len(tallies)),
                )
            left.set(
                xlabel="active latents per row (L0)", ylabel="fraction of rows", ylim=(0, None)
            )
            left.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        edges = frequency_edges(*(frequency for _, frequency in tallies.values()))
        for index, (_, frequency) in enumerate(tallies.values()):
            right.stairs(
                np.histogram(frequency[frequency > 0], edges)[0],
                edges,
                **line_style(index),
                linewidth=1.6,
            )
        if not any((f > 0).any() for _, f in tallies.values()):
            say_empty(right, "no latent fires")
        right.axvline(DENSE_FREQUENCY, color=GREY, linestyle=":", linewidth=1)
        right.text(
            DENSE_FREQUENCY,
            1.0,
            " dense",
            transform=right.get_xaxis_transform(),
            color=GREY,
            va="bottom",
            ha="left",
            fontsize=8,
        )
        right.set(
            xlabel="fraction of rows a latent fires on",
            ylabel="latents",
            xscale="log",
            ylim=(0, None),
        )
        right.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        labels = [
            f"{short(name)} ({f'L0 {l0.argmax():,}, ' * chosen}{int((f == 0).sum()):,} of {len(f):,} silent on "
            f"these {counted(int(l0.sum()), 'row')})"
            for name, (l0, f) in tallies.items()
        ]
        legend_below(
            drawn, [Line2D([], [], **line_style(index)) for index in range(len(tallies))], labels
        )
    return drawn


def patterns(path: Path | None, codes: ArrayLike, title: str) -> Figure:
    """Draw the first 400 rows of codes, (rows, F), as an image, the most frequent latents first."""
    size = np.abs(np.asarray(codes)[:PATTERN_ROWS])
    frequency = (size > 0).sum(0)
    order = np.argsort(-frequency, kind="stable")[: (frequency > 0).sum()]
    with figure(path, 8, 4) as drawn:
        axes = drawn.subplots()
        axes.grid(False)
        axes.set(
            xlabel="latents, the most frequent first",
            ylabel="rows",
            title=f"{short(title)}: {len(order):,} of "
            f"{size.shape[1]:,} latents fire on these {len(size):,} rows",
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, integer=True))
        if len(order):
            step = -(-len(order) // PATTERN_COLUMNS)
            image = np.maximum.reduceat(size[:, order], np.arange(0, len(order), step), axis=1)
            # A few codes are far larger than the others; the square root keeps small ones visible.
            largest = float(np.quantile(image[image > 0], 0.99))
            norm = PowerNorm(0.5, 0, largest, clip=True)
            shown = axes.imshow(
                image,
                cmap="Greys",
                norm=norm,
                aspect="auto",
                interpolation="nearest",
                extent=(0, len(order), len(size), 0),
            )
            drawn.colorbar(
                shown,
                ax=axes,
                label="size of the code",
                pad=0.02,
                extend="max",
                ticks=[fraction * largest for fraction in (0, 0.1, 0.25, 0.5, 1)],
                format="{x:.2g}",
            )
        else:
            say_empty(axes, "no latent fires")
    return drawn


def sparsity(
    path: Path | None, tallies: Sequence[Firing], runs: Sequence[Mapping[str, Any]]
) -> list[tuple[Path | None, Figure]]:
    """Draw histograms of L0 and of frequencies to `path`, for each run the codes of its first rows, and for each
    crosscoder its latents by hook point, to names that begin with the stem of `path`."""
    drawn = [
        (
            path,
            firing(
                path,
                {
                    run["run"]: (one.l0_histogram, one.frequency)
                    for run, one in zip(runs, tallies, strict=True)
                },
            ),
        )
    ]

    def another(kind: str, name: str) -> Path | None:
        which = "-" + re.sub(r"[^\w.-]+", "-", name)[-NAMED:] if len(runs) > 1 else ""
        picture = path and path.with_stem(f"{path.stem}-{kind}{which}")
        taken = picture and any(picture == other for other, _ in drawn)
        return picture.with_stem(f"{picture.stem}-{len(drawn)}") if picture and taken else picture

    for run, one in zip(runs, tallies, strict=True):
        name = run["run"]
        own = another("patterns", name)
        drawn.append((own, patterns(own, one.patterns, name)))
        if "places" in run:
            own = another("places", name)
            drawn.append((own, places(own, run)))
    return drawn


def frontier(
    path: Path | None, points: Mapping[str, tuple[float, float, str, bool | None]]
) -> Figure:
    """Draw runs by L0 and FVU, numbered in the order given, joined by family; those that another run beats are hollow.

    A point is L0, FVU, family, and whether the run is unbeaten (None: not compared); others than finite are left out.
    """
    finite = {name: point for name, point in points.items() if all(map(math.isfinite, point[:2]))}
    families = list(dict.fromkeys(family for _, _, family, _ in finite.values()))
    with figure(path, 6.5, 4.5) as drawn:
        axes = drawn.subplots()
        for index, family in enumerate(families):
            joined = sorted(point[:2] for point in finite.values() if point[2] == family)
            axes.plot(*zip(*joined, strict=True), **line_style(index), linewidth=0.8, alpha=0.5)
        handles = []
        for number, (l0, fvu, family, unbeaten) in enumerate(finite.values(), 1):
            index = families.index(family)
            colour = COLOURS[index % len(COLOURS)]
            handles += axes.plot(
                l0,
                fvu,
                linestyle="none",
                color=colour,
                markersize=7,
                markeredgewidth=1.4,
                marker=MARKERS[index % len(MARKERS)],
                clip_on=False,
                fillstyle="none" if unbeaten is False else "full",
            )
            if len(finite) > 1:  # on alternating sides, since consecutive runs may lie close
                place = (
                    {"xytext": (-4, -4), "ha": "right", "va": "top"}
                    if number % 2
                    else {"xytext": (5, 4)}
                )
                axes.annotate(
                    str(number),
                    (l0, fvu),
                    textcoords="offset points",
                    color=colour,
                    fontsize=8,
                    **place,
                )
        axes.set(
            xlabel="active latents per row (L0)", ylabel="fraction of variance unexplained (FVU)"
        )
        for which, values in zip("xy", list(zip(*finite.values(), strict=True))[:2], strict=False):
            if min(values) > 0 and max(values) >= 10 * min(values):
                log_scale(axes, which)
            else:
                axes.set(**{f"{which}lim": (0, max(values) * 1.15 or 1)})
        if not finite:
            say_empty(axes)
        labels = [short(name) for name in finite]
        if len(finite) > 1:
            labels = [
                f"{number} {label} ({family})"
                for number, (label, (_, _, family, _)) in enumerate(
                    zip(labels, finite.values(), strict=True), 1
                )
            ]
        if any(point[3] is False for point in finite.values()):
            handles.append(
                Line2D([], [], color=GREY, linestyle="none", marker="o", fillstyle="none")
            )
            labels.append("hollow: beaten by another run")
        legend_below(drawn, handles, labels)
    return drawn


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
            left.errorbar(
                x,
                mean,
                [mean - low, high - mean],
                **line_style(index),
                marker=MARKERS[index % len(MARKERS)],
            )
            right.plot(
                run.dense_by_set,
                run.by_set,
                linestyle="none",
                marker=MARKERS[index % len(MARKERS)],
                color=COLOURS[index % len(COLOURS)],
                alpha=0.6,
            )
        left.set(xscale="log", xlabel="latents of a probe (k)", ylabel="AUC, mean over sets")
        left.set_xticks(counts, [str(count) for count in counts])
        left.xaxis.set_minor_locator(NullLocator())
        lowest = (
            min(
                [
                    0.5,
                    *(value for run in runs.values() for value in (*run.dense_by_set, *run.by_set)),
                ]
            )
            - 0.02
        )
        right.plot([lowest, 1], [lowest, 1], color=GREY, linewidth=1)
        right.set(
            xlabel="AUC of the dense probe, by set",
            ylabel=f"AUC with k = {counts[-1]}, by set",
            xlim=(lowest, 1.02),
            ylim=(lowest, 1.02),
        )
        handles = [
            Line2D([], [], **line_style(index), marker=MARKERS[index % len(MARKERS)])
            for index in range(len(runs))
        ]
        legend_below(
            drawn,
            [*handles, Line2D([], [], color=GREY, linestyle=":")],
            [*map(short, runs), "dense probe on the activations"],
        )
    return drawn


def _curve(document: Mapping[str, Any], run: Mapping[str, Any]) -> _Curve:
    own = [line for line in document["probes"] if line["run"] == run["run"]]
    by_set = [
        [
            line["auc"]
            for line in document["by_set"]
            if all(line[key] == value for key, value in one.items())
        ]
        for one in ({**run, "run": None}, {**run, "k": own[-1]["k"]})
    ]
    return _Curve(
        [line["k"] for line in own],
        [_ends(line) for line in own],
        _ends(probe_of(document["probes"], run, None)),
        *by_set,
    )


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
            right.plot(
                [np.median(frequency[group]) for group in groups],
                [matched[group].mean() for group in groups],
                **style,
                marker="o",
            )
            handles.append(Line2D([], [], **style))
            labels.append(
                f"{short(run['run'])} ({counted(len(cosine), 'latent')}, {(frequency == 0).sum():,} silent)"
            )
        left.axvline(threshold, color=GREY, linestyle=":", linewidth=1)
        left.text(
            threshold,
            1.0,
            " matched",
            transform=left.get_xaxis_transform(),
            color=GREY,
            va="bottom",
            ha="left",
            fontsize=8,
        )
        left.set(
            xlabel="|cosine| with its counterparts, mean over other runs",
            ylabel="fraction of latents",
            xlim=(0, 1),
            ylim=(0, None),
        )
        right.set(
            xlabel="fraction of rows a latent fires on",
            ylabel="fraction of other runs matched in",
            ylim=(-0.02, 1.02),
        )
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


def places(path: Path | None, run: Mapping[str, Any]) -> Figure:
    """Draw a crosscoder's latents: the fraction of decoder norm at each hook point, and at the one where a latent is
    largest its nu^epsilon elsewhere; hollow where other latents carry it (nu^r)."""
    share = np.array(run["share"], float)
    largest = share.argmax(1)
    nu, carried = (np.array(run[name], float) for name in ("nu_error", "nu_reconstruction"))
    with figure(path, 9, 3.6) as drawn:
        left, right = drawn.subplots(1, 2)
        for place, one in enumerate(run["places"]):
            colour = COLOURS[place % len(COLOURS)]
            left.stairs(
                *np.histogram(share[:, place], BINS, (0, 1)),
                color=colour,
                linewidth=1.6,
                label=short(one["name"]),
            )
            own = (largest == place) & np.isfinite(nu)
            for faces, some in (
                (colour, own & (carried <= DECOUPLED)),
                ("none", own & (carried > DECOUPLED)),
            ):
                right.scatter(
                    share[some, largest[some]],
                    nu[some],
                    s=14,
                    facecolors=faces,
                    edgecolors=colour,
                    linewidths=0.8,
                )
        left.set(xlabel="fraction of a latent's decoder norm", ylabel="latents", xlim=(0, 1))
        left.legend(fontsize=8)
        if np.isfinite(nu).any():
            right.axhline(SHRUNK, color=GREY, linewidth=0.8)
            right.axvline(EXCLUSIVE, color=GREY, linewidth=0.8)
            low, high = np.clip(
                [np.nanmin(nu), np.nanmax(nu)], -1, 2
            )  # the lowest are the ones looked for
            right.set(
                ylim=(min(low, -0.1) - 0.1, max(high, 1.0) + 0.1),
                xlim=(0.98 / len(run["places"]), 1.02),
            )
            for y, words in ((SHRUNK, "complete\nshrinkage"), (0, "only there")):
                right.text(EXCLUSIVE + 0.005, y, words, color=GREY, fontsize=8, va="bottom")
        else:
            say_empty(right)
        right.set(
            xlabel="fraction where it is largest; hollow: latent decoupling",
            ylabel=r"latent scaling elsewhere, $\nu^\varepsilon$",
        )
        drawn.suptitle(short(run["run"]), fontsize=10)
    return drawn
