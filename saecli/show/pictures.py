"""Pictures of runs: loss curves, how often latents fire, activation patterns, the frontier; and of latents: probes,
stability, hook points of a crosscoder."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator
from numpy.typing import ArrayLike, NDArray

from ..base.words import counted
from ..measure.hook_points import DECOUPLED, EXCLUSIVE, SHRUNK
from ..measure.stability import SIMILARITIES
from ..sae.metrics import DENSE_FREQUENCY, Firing
from .measures import MATCH_WORDS, curve, frequency_edges, l0_bins, labelled, probes_of
from .style import (
    GREY,
    colour,
    figure,
    legend_below,
    line_style,
    log_scale,
    marker,
    numbered,
    say_empty,
    short,
)
from .tables import JsonObject

PICTURE_BINS = 40
NAMED_LATENTS = 10  # of a contrast
DOSE_CURVES, DOSE_COLUMNS = 12, 4  # latents at most, and in a row
FREQUENCY_GROUPS = 10  # of latents of like frequency
NAMED = 40  # characters of a run's name in a file name, since a whole path may be too long
PATTERN_ROWS, PATTERN_COLUMNS = 400, 1500  # of a pattern picture, about its pixels
L0_LABEL = "active latents per row (L0)"
FVU_LABEL = "fraction of variance unexplained (FVU)"
FREQUENCY_LABEL = "fraction of rows a latent fires on"


def draw_losses(path: Path | None, name: str, lines: Sequence[JsonObject]) -> Figure:
    """Draw FVU and L0 of training batches and held-out rows by step, given a run's `metrics.jsonl`."""
    style = line_style(0)
    panels = {"fvu": FVU_LABEL, "l0": L0_LABEL}
    curves = {  # steps and values, (2, any number), of batches and of held-out rows
        measure: [
            np.array(curve(lines, f"{of}_{measure}"), float).reshape(-1, 2).T
            for of in ("batch", "test")
        ]
        for measure in panels
    }
    title, every_l0 = short(name), np.concatenate([values for _, values in curves["l0"]])
    if len(every_l0) and np.ptp(every_l0) <= 1e-6 * every_l0.max():
        del panels["l0"]
        title += f", L0 {every_l0[0]:.4g} at every step"
    with figure(path, 4.5 * len(panels) + 1, 3.6) as drawn:
        every_axes = drawn.subplots(1, len(panels), squeeze=False)[0]
        for axes, (measure, label) in zip(every_axes, panels.items(), strict=True):
            batches, rows = curves[measure]
            dot = "o" if batches.shape[1] == 1 else ""
            axes.plot(*batches, **style, alpha=0.45, linewidth=1, marker=dot)
            axes.plot(*rows, **style, marker="o", markevery=max(1, rows.shape[1] // 20))
            axes.set(xlabel="step", ylabel=label)
            values = np.concatenate([batches[1], rows[1]])
            if not len(values):
                say_empty(axes)
            elif measure == "l0":  # with room above, for a curve that is flat at the top
                axes.set_ylim(0, 1.04 * axes.get_ylim()[1])
            elif (values > 0).any():
                log_scale(axes, "y")
        drawn.suptitle(title, fontsize=10)
        of_batches = Line2D([], [], **style, alpha=0.6, linewidth=1)
        of_rows = Line2D([], [], **style, marker="o")
        legend_below(drawn, [of_batches, of_rows], ["training batches, averaged", "held-out rows"])
    return drawn


def _draw_threshold(axes: Axes, x: float, words: str) -> None:
    axes.axvline(x, color=GREY, linestyle=":", linewidth=1)
    above = axes.get_xaxis_transform()
    axes.text(x, 1.0, f" {words}", transform=above, color=GREY, va="bottom", fontsize=8)


def draw_firing(path: Path | None, runs: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> Figure:
    """Draw the distributions of L0 over rows and of frequency over latents, given by name the rows on which 0, 1, ...,
    F latents fire, (F + 1,), and frequencies, (F,)."""
    l0s = {name: np.asarray(l0) for name, (l0, _) in runs.items()}
    frequencies = {name: np.asarray(frequency) for name, (_, frequency) in runs.items()}
    constant = bool(l0s) and all(np.count_nonzero(l0) == 1 for l0 in l0s.values())
    styles = {name: line_style(number) for name, number in numbered(runs).items()}
    with figure(path, 5.5 if constant else 9, 3.6) as drawn:
        *left, right = drawn.subplots(1, 1 if constant else 2, squeeze=False)[0]
        for axes in left:
            for name, l0 in l0s.items():
                rows, edges = l0_bins(l0, PICTURE_BINS)
                axes.stairs(rows / max(l0.sum(), 1), edges, **styles[name], linewidth=1.6)
            axes.set(xlabel=L0_LABEL, ylabel="fraction of rows", ylim=(0, None))
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        edges = frequency_edges(*frequencies.values())
        handles, labels = [], []
        for name, frequency in frequencies.items():
            latents = np.histogram(frequency[frequency > 0], edges)[0]
            right.stairs(latents, edges, **styles[name], linewidth=1.6)
            silent = f"{(frequency == 0).sum():,} of {len(frequency):,} silent"
            l0_words = f"L0 {l0s[name].argmax()}, " if constant else ""
            rows_counted = counted(int(l0s[name].sum()), "row")
            handles.append(Line2D([], [], **styles[name]))
            labels.append(f"{short(name)} ({l0_words}{silent} on these {rows_counted})")
        if not any((frequency > 0).any() for frequency in frequencies.values()):
            say_empty(right, "no latent fires")
        _draw_threshold(right, DENSE_FREQUENCY, "dense")
        right.set(xlabel=FREQUENCY_LABEL, ylabel="latents", xscale="log", ylim=(0, None))
        right.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        legend_below(drawn, handles, labels)
    return drawn


def draw_patterns(path: Path | None, codes: ArrayLike, title: str) -> Figure:
    """Draw the first 400 rows of codes, (rows, F), as an image, the most frequent latents first."""
    size = np.abs(np.asarray(codes)[:PATTERN_ROWS])
    rows, d_sae = size.shape
    frequency = (size > 0).sum(0)
    order = np.argsort(-frequency, kind="stable")[: (frequency > 0).sum()]
    with figure(path, 8, 4) as drawn:
        axes = drawn.subplots()
        axes.grid(False)
        axes.set(
            xlabel="latents, the most frequent first",
            ylabel="rows",
            title=f"{short(title)}: {len(order):,} of {d_sae:,} latents fire on these {rows:,} rows",
        )
        if not len(order):
            say_empty(axes, "no latent fires")
            return drawn
        step = -(-len(order) // PATTERN_COLUMNS)
        image = np.maximum.reduceat(size[:, order], np.arange(0, len(order), step), axis=1)
        # A few codes are far larger than the others; the square root keeps small ones visible.
        largest = float(np.quantile(image[image > 0], 0.99))
        shown = axes.imshow(
            image,
            cmap="Greys",
            norm=PowerNorm(0.5, 0, largest, clip=True),
            aspect="auto",
            interpolation="nearest",
            extent=(0, len(order), rows, 0),
        )
        ticks = [fraction * largest for fraction in (0, 0.1, 0.25, 0.5, 1)]
        bar = drawn.colorbar(shown, ax=axes, pad=0.02, extend="max", ticks=ticks, format="{x:.2g}")
        bar.set_label("size of the code")
    return drawn


def draw_sparsity(
    path: Path | None, tallies: Sequence[Firing], runs: Sequence[JsonObject]
) -> list[tuple[Path | None, Figure]]:
    """Draw L0 and frequencies to `path`; each run's codes, and a crosscoder's latents by hook point, to names that
    begin with its stem."""
    histograms = {
        run["run"]: (tally.l0_histogram, tally.frequency)
        for run, tally in zip(runs, tallies, strict=True)
    }
    drawn = [(path, draw_firing(path, histograms))]

    def path_of(kind: str, name: str) -> Path | None:
        if path is None:
            return None
        suffix = "-" + re.sub(r"[^\w.-]+", "-", name)[-NAMED:] if len(runs) > 1 else ""
        chosen = path.with_stem(f"{path.stem}-{kind}{suffix}")
        if any(chosen == other for other, _ in drawn):
            chosen = chosen.with_stem(f"{chosen.stem}-{len(drawn)}")
        return chosen

    for run, tally in zip(runs, tallies, strict=True):
        name = run["run"]
        chosen = path_of("patterns", name)
        drawn.append((chosen, draw_patterns(chosen, tally.patterns, name)))
        if "places" in run:
            chosen = path_of("places", name)
            drawn.append((chosen, draw_hook_points(chosen, run)))
    return drawn


def draw_frontier(
    path: Path | None, runs: Sequence[JsonObject], families: Mapping[str, str]
) -> Figure:
    """Draw runs by L0 and FVU, numbered in order, a family (by the run's name) with one marker and joined; without runs
    whose measures are not finite."""
    numbers = numbered(run["run"] for run in runs)
    runs = [run for run in runs if math.isfinite(run["l0"]) and math.isfinite(run["fvu"])]
    members: dict[str, list[JsonObject]] = {}
    for run in runs:
        members.setdefault(families[run["run"]], []).append(run)
    markers = {family: marker(index) for index, family in enumerate(members)}
    with figure(path, 6.5, 4.5) as drawn:
        axes = drawn.subplots()
        for alike in members.values():
            points = sorted((run["l0"], run["fvu"]) for run in alike)
            axes.plot(*zip(*points, strict=True), color=GREY, linewidth=0.8, alpha=0.5)
        handles, labels = [], []
        for number, run in enumerate(runs, 1):
            family, index = families[run["run"]], numbers[run["run"]]
            handles += axes.plot(
                run["l0"],
                run["fvu"],
                linestyle="none",
                color=colour(index),
                markersize=7,
                marker=markers[family],
                clip_on=False,
            )
            if len(runs) == 1:
                labels.append(short(run["run"]))
                continue
            labels.append(f"{number} {short(run['run'])} ({family})")
            # On alternating sides, since consecutive runs may lie close.
            below = {"xytext": (-4, -4), "ha": "right", "va": "top"}
            axes.annotate(
                str(number),
                (run["l0"], run["fvu"]),
                textcoords="offset points",
                color=colour(index),
                fontsize=8,
                **(below if number % 2 else {"xytext": (5, 4)}),
            )
        axes.set(xlabel=L0_LABEL, ylabel=FVU_LABEL)
        for which, measure in (("x", "l0"), ("y", "fvu")):
            values = [run[measure] for run in runs] or [1.0]
            low, high = min(values), max(values)
            if low > 0 and high >= 10 * low:
                log_scale(axes, which)
                continue
            near = len(runs) > 1 and high < 2 * low
            margin = max(0.15 * (high - low), 0.02 * high)
            limits = (low - margin, high + margin) if near else (0, high * 1.15 or 1)
            axes.set(**{f"{which}lim": limits})
        if not runs:
            say_empty(axes)
        legend_below(drawn, handles, labels)
    return drawn


def draw_errors(path: Path | None, errors: Mapping[str, Mapping[float, float]]) -> Figure:
    """Draw held-out FVU by fraction of the training rows, a line per solver."""
    with figure(path, 5, 3.5) as drawn:
        axes = drawn.subplots()
        for index, (solver, by_share) in enumerate(errors.items()):
            style = line_style(index) | {"marker": marker(index), "label": solver}
            axes.plot([*by_share], [*by_share.values()], **style)
        axes.set(xlabel="fraction of the training rows", ylabel="held-out FVU")
        log_scale(axes, "x")
        axes.legend()
    return drawn


def draw_probes(path: Path | None, document: JsonObject) -> Figure:
    """Draw the AUC against the number of latents, and set by set against the dense probe's, which is dotted."""
    runs = document["runs"]
    of_run = [[line for line in document["probes"] if line["run"] == run["run"]] for run in runs]
    counts = [line["k"] for line in of_run[0]]
    is_one_place = len({(run["layer"], run["site"]) for run in runs}) == 1
    numbers = numbered(run["run"] for run in runs)
    lowest = min([0.5, *(line["auc"] for line in document["by_set"])]) - 0.02
    with figure(path, 9, 4) as drawn:
        left, right = drawn.subplots(1, 2)
        for run in runs[:1] if is_one_place else runs:
            (mean,), (low,), (high,) = _auc_ends(probes_of(document["probes"], run, None))
            dense_colour = GREY if is_one_place else colour(numbers[run["run"]])
            left.axhspan(low, high, color=dense_colour, alpha=0.12, linewidth=0)
            left.axhline(mean, color=dense_colour, linestyle=":")
        handles = []
        for run, lines in zip(runs, of_run, strict=True):
            index = numbers[run["run"]]
            mean, low, high = _auc_ends(lines)
            # Side by side, so that intervals do not hide each other.
            x = np.array(counts) * 1.04 ** (index - (len(runs) - 1) / 2)
            errors = [mean - low, high - mean]
            style = line_style(index) | {"marker": marker(index)}
            left.errorbar(x, mean, errors, **style)
            handles.append(Line2D([], [], **style))
            dense, sparse = (
                [line["auc"] for line in probes_of(document["by_set"], run, k)]
                for k in (None, counts[-1])
            )
            right.plot(dense, sparse, **(style | {"linestyle": "none"}), alpha=0.6)
        left.set(xscale="log", xlabel="latents of a probe (k)", ylabel="AUC, mean over sets")
        left.set_xticks(counts, [str(count) for count in counts])
        left.xaxis.set_minor_locator(NullLocator())
        right.plot([lowest, 1], [lowest, 1], color=GREY, linewidth=1)
        right.set(
            xlabel="AUC of the dense probe, by set",
            ylabel=f"AUC with k = {counts[-1]}, by set",
            xlim=(lowest, 1.02),
            ylim=(lowest, 1.02),
        )
        handles.append(Line2D([], [], color=GREY, linestyle=":"))
        labels = [short(run["run"]) for run in runs]
        legend_below(drawn, handles, [*labels, "dense probe on the activations"])
    return drawn


def _auc_ends(lines: Sequence[JsonObject]) -> NDArray[np.float64]:
    """AUCs and the ends of their intervals, (3, any number); without an interval, the AUC."""
    ends = [
        [line["auc"] if line[name] is None else line[name] for line in lines]
        for name in ("auc", "auc_low", "auc_high")
    ]
    return np.array(ends)


def draw_contrast(path: Path | None, document: JsonObject) -> Figure:
    """Draw p against AUC, of latents, the first ones named, and with labels shuffled; and document length's AUC."""
    (a, b), latents, level = document["sides"], document["latents"], document["fdr"]
    shuffled = [np.ravel([each[name] for each in document["shuffled"]]) for name in ("auc", "p")]
    with figure(path, 7.5, 4.5) as drawn:
        axes = drawn.subplots()
        handles = axes.plot(*shuffled, "x", color=GREY, markersize=3, alpha=0.4)
        for is_found, fill in ((False, "none"), (True, "full")):
            lines = [line for line in latents if (line["q"] <= level) == is_found]
            points = [[line[name] for line in lines] for name in ("auc", "p")]
            handles += axes.plot(*points, "o", color=colour(0), fillstyle=fill)
        _draw_threshold(axes, document["length"]["auc"], "document length")
        # Between the two arms, each name in a line of its own, so that the lines to the points cross little.
        named = sorted(latents[:NAMED_LATENTS], key=lambda line: abs(line["auc"] - 0.5))
        for place, line in enumerate(named):
            x, align, edge = (0.68, "right", 1) if line["auc"] > 0.5 else (0.32, "left", 0)
            axes.annotate(
                short(labelled(line["latent"], line["label"])),
                (line["auc"], line["p"]),
                (x, 0.94 - 0.05 * place),
                textcoords="axes fraction",
                ha=align,
                va="center",
                fontsize=8,
                arrowprops={
                    "arrowstyle": "-",
                    "color": GREY,
                    "linewidth": 0.5,
                    "relpos": (edge, 0.5),
                },
            )
        sides = f"1: more on {short(a['side'])}, 0: more on {short(b['side'])}"
        axes.set(xlabel=f"AUC ({sides})", ylabel="p", xlim=(-0.03, 1.03), yscale="log")
        axes.invert_yaxis()
        labels = ["labels shuffled", f"q above {level:g}", f"q up to {level:g}"]
        legend_below(drawn, handles, labels)
    return drawn


def draw_doses(path: Path | None, document: JsonObject) -> Figure:
    """Draw the effect of adding each of the first latents by dose, and of other changes of the norm of dose 1."""
    latents = document["latents"][:DOSE_CURVES]
    columns = min(len(latents), DOSE_COLUMNS)
    rows = -(-len(latents) // columns)
    with figure(path, 2.4 * columns + 1, 2.4 * rows + 0.4) as drawn:
        every_axes = drawn.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for axes in every_axes.flat[len(latents) :]:
            axes.set_visible(False)
        for axes, line in zip(every_axes.flat, latents, strict=False):
            added = line["added"]
            doses = [each["dose"] for each in added["doses"]]
            low, kl, high = (
                np.array([each[name] for each in added["doses"]])
                for name in ("kl_low", "kl", "kl_high")
            )
            axes.errorbar(doses, kl, [kl - low, high - kl], color=colour(0), marker="o")
            handles, labels = [Line2D([], [], color=colour(0), marker="o")], ["latent"]
            for number, (name, floor) in enumerate(added["floors"].items(), 1):
                beside = 1.08**number  # so that they do not hide each other
                style = {"color": colour(number), "marker": marker(number), "linestyle": "none"}
                handles += axes.plot(beside, floor["kl"], **style)
                labels.append(name)
            axes.set(xscale="log", yscale="log", xlabel="dose, mean codes")
            axes.set_title(short(labelled(line["latent"], line["label"])))
            axes.set_xticks(doses, [f"{dose:g}" for dose in doses])
            axes.xaxis.set_minor_locator(NullLocator())
        drawn.supylabel("KL of the next token, nats", fontsize=10)
        legend_below(drawn, handles, labels)
    return drawn


def draw_stability(path: Path | None, document: JsonObject) -> Figure:
    """Draw the similarity of latents to their counterparts, and the fraction of runs they are matched in by frequency,
    a point for each tenth of a run's firing latents."""
    with figure(path, 9, 3.6) as drawn:
        left, right = drawn.subplots(1, 2)
        handles, labels = [], []
        numbers = numbered(run["run"] for run in document["runs"])
        for run in document["runs"]:
            style = line_style(numbers[run["run"]])
            names = (SIMILARITIES[document["match_by"]], "match_fraction", "frequency")
            similarity, matched, frequency = (np.array(run[name], float) for name in names)
            counts, edges = np.histogram(similarity[~np.isnan(similarity)], PICTURE_BINS, (0, 1))
            fractions = counts / max(len(similarity), 1)
            left.stairs(fractions, edges, **style, linewidth=1.6)
            groups = _groups(frequency)
            right.plot(
                [np.median(frequency[group]) for group in groups],
                [matched[group].mean() for group in groups],
                **style,
                marker="o",
            )
            handles.append(Line2D([], [], **style))
            silent = (frequency == 0).sum()
            labels.append(
                f"{short(run['run'])} ({counted(len(similarity), 'latent')}, {silent:,} silent)"
            )
        _draw_threshold(left, document["match_threshold"], "matched")
        left.set(
            xlabel=f"{MATCH_WORDS[document['match_by']]}, mean over other runs",
            ylabel="fraction of latents",
            xlim=(0, 1),
            ylim=(0, None),
        )
        right.set(
            xlabel=FREQUENCY_LABEL, ylabel="fraction of other runs matched in", ylim=(-0.02, 1.02)
        )
        if any(len(line.get_xdata()) for line in right.lines):
            log_scale(right, "x")
        else:
            say_empty(right, "no latent fires")
        legend_below(drawn, handles, labels)
    return drawn


def _groups(frequency: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """The latents that fire, in at most `FREQUENCY_GROUPS` quantile groups by frequency."""
    fires = np.flatnonzero(frequency > 0)
    if not len(fires):
        return []
    edges = np.unique(np.quantile(frequency[fires], np.linspace(0, 1, FREQUENCY_GROUPS + 1)))
    group = np.digitize(frequency[fires], edges[1:-1])
    return [fires[group == number] for number in np.unique(group)]


def draw_hook_points(path: Path | None, run: JsonObject) -> Figure:
    """Draw a crosscoder's latents: the fraction of decoder norm by hook point, and at the largest nu^epsilon elsewhere;
    hollow where other latents carry it (nu^r)."""
    fraction = np.array(run["share"], float)
    largest = fraction.argmax(1)
    nu, carried = (np.array(run[name], float) for name in ("nu_error", "nu_reconstruction"))
    with figure(path, 9, 3.6) as drawn:
        left, right = drawn.subplots(1, 2)
        for index, place in enumerate(run["places"]):
            latents, edges = np.histogram(fraction[:, index], PICTURE_BINS, (0, 1))
            label = short(place["name"])
            left.stairs(latents, edges, color=colour(index), linewidth=1.6, label=label)
            here = (largest == index) & np.isfinite(nu)
            faces = np.where(carried[here] > DECOUPLED, "none", colour(index)).tolist()
            shape = {"s": 14, "linewidths": 0.8, "edgecolors": colour(index)}
            right.scatter(fraction[here, index], nu[here], facecolors=faces, **shape)
        left.set(xlabel="fraction of a latent's decoder norm", ylabel="latents", xlim=(0, 1))
        left.legend(fontsize=8)
        if np.isfinite(nu).any():
            right.axhline(SHRUNK, color=GREY, linewidth=0.8)
            right.axvline(EXCLUSIVE, color=GREY, linewidth=0.8)
            # The lowest are the ones looked for.
            low, high = np.clip([np.nanmin(nu), np.nanmax(nu)], -1, 2)
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
