"""Pictures of geometry: cells on a plane, margins, local complexity, growth, the bridge; and of several SAEs."""

import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from ..base.errors import counted, number
from ..geometry.cells import cells_of
from ..geometry.geometry import Found
from ..geometry.plane import Plane, PlaneCells, Window, keys_at, plane_cells, window_of
from ..geometry.survey import describe, spread_out
from .style import COLOURS, GREY, figure, legend_below, log_scale, say_empty, short

# Lightness falls steadily, so that it reads alike in grey and for the colour-blind.
SCALE = ListedColormap(matplotlib.colormaps["YlGnBu"](np.linspace(0.15, 0.8, 256)))
EMPTY = np.array(to_rgb("white"))
NEUTRAL = np.array(to_rgb("#eeeeee"))
LINE = "#333333"
DARKEST, FAINTEST = 0.7, 0.25  # lines between cells
POINTS = 1000  # most rows drawn
ARROWS = 200  # rows whose reconstructions are drawn
ROUNDING = 1e-12  # a lower FVU is shown as zero
HEADING = {"fontsize": 10.5, "fontweight": "bold"}
BRIDGE = {
    "kmeans_fvu": ("k-means", COLOURS[1]),
    "sae_fvu": ("SAE", COLOURS[0]),
    "local_pca_fvu": ("local PCA", COLOURS[2]),
}
# How margins and complexity are drawn: of the split measured, and of the other.
SPLIT_STYLES: tuple[dict[str, Any], ...] = (
    {"color": COLOURS[0], "alpha": 0.75},
    {"histtype": "step", "color": COLOURS[1], "linewidth": 1.3},
)


def fill(axes: Axes, cells: PlaneCells, colours: NDArray[np.float64]) -> None:
    """Draw the cells of a window, whose limits become the panel's; colours are RGB for each cell, (C, 3), in [0, 1]."""
    axes.grid(False)
    axes.imshow(
        cell_image(cells, colours), extent=cells.window, origin="lower", interpolation="nearest"
    )
    axes.set(xlim=cells.window[:2], ylim=cells.window[2:], aspect="equal")
    for side in axes.spines.values():
        side.set(visible=True, linewidth=0.8, color=LINE)


def cell_image(cells: PlaneCells, colours: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cells as an image with dark lines between them, (P, P, 3) in [0, 1]; arguments as in `fill`."""
    labels = cells.labels
    image = colours[labels]
    edge = np.zeros(labels.shape, bool)
    edge[1:] |= labels[1:] != labels[:-1]
    edge[:, 1:] |= labels[:, 1:] != labels[:, :-1]
    # Full lines would hide cells of a few pixels; if all cells have one colour, only the lines show them.
    least = FAINTEST if (colours == colours[0]).all() else 0.0
    image[edge] *= 1 - np.clip(0.75 - 2.5 * edge.mean(), least, DARKEST)
    return image


def fill_by_size(axes: Axes, cells: PlaneCells) -> None:
    """Draw the cells, coloured by the number of latents they keep; neutral if that is the same for all."""
    if cells.kept.min() == cells.kept.max():
        fill(axes, cells, np.tile(NEUTRAL, (len(cells.kept), 1)))
        return
    scale = Normalize(cells.kept.min(), cells.kept.max())
    fill(axes, cells, SCALE(scale(cells.kept))[:, :3])
    bar = axes.figure.colorbar(
        ScalarMappable(scale, SCALE), ax=axes, shrink=0.75, pad=0.02, label="latents kept"
    )
    bar.locator = MaxNLocator(6, integer=True)


def fill_by_occupancy(
    axes: Axes, cells: PlaneCells, occupancy: NDArray[np.int64], label: str
) -> None:
    """Draw the cells, coloured by their numbers of rows, (C,), white for none."""
    most = max(2, int(occupancy.max(initial=0)))
    scale = LogNorm(1, most)
    colours = np.where(
        (occupancy > 0)[:, None], SCALE(scale(np.maximum(occupancy, 1)))[:, :3], EMPTY
    )
    fill(axes, cells, colours)
    bar = axes.figure.colorbar(
        ScalarMappable(scale, SCALE), ax=axes, shrink=0.75, pad=0.02, label=f"{label}; white: none"
    )
    ticks = [
        step * 10.0**power for power in range(7) for step in (1, 2, 5) if step * 10**power <= most
    ]
    bar.set_ticks(ticks if most <= 200 else [tick for tick in ticks if str(tick)[0] == "1"])
    bar.ax.minorticks_off()
    bar.ax.yaxis.set_major_formatter("{x:,.0f}")


def scatter(axes: Axes, points: NDArray, marks: Mapping[int, NDArray]) -> int:
    """Draw rows on a plane, (M, 2), marked ones, (2,), larger with their numbers; returns the number of rows drawn."""
    points = spread_out(points, POINTS)
    axes.scatter(
        points[:, 0], points[:, 1], s=7, c="#222222", linewidths=0.3, edgecolors="white", zorder=2
    )
    for row, (x, y) in marks.items():
        axes.scatter(x, y, s=60, c=COLOURS[1], edgecolors="white", linewidths=1, zorder=3)
        axes.annotate(
            str(row),
            (x, y),
            xytext=(6, 6),
            textcoords="offset points",
            weight="bold",
            zorder=4,
            bbox={
                "boxstyle": "round,pad=0.15",
                "facecolor": "white",
                "edgecolor": "none",
                "alpha": 0.7,
            },
        )
    return len(points)


def arrows(axes: Axes, starts: NDArray, ends: NDArray, colour: str) -> None:
    """Draw rows, (M, 2), as open dots, with lines to their reconstructions, (M, 2), as full dots."""
    axes.grid(False)
    axes.plot(
        *np.stack([starts, ends], 1).transpose(2, 1, 0),
        color=colour,
        linewidth=0.7,
        alpha=0.8,
        zorder=2,
    )
    axes.scatter(
        starts[:, 0],
        starts[:, 1],
        s=9,
        facecolors="white",
        edgecolors=GREY,
        linewidths=0.6,
        zorder=3,
    )
    axes.scatter(ends[:, 0], ends[:, 1], s=8, c=colour, linewidths=0, zorder=4)


@torch.no_grad()
def geometry(path: Path | None, found: Found, marked: Mapping[int, Tensor]) -> Figure:
    """Draw the geometry of an SAE in nine panels, on the plane through the `marked` rows, (D,) each, by number, or on
    the plane of the first two principal components."""
    document, sample, D = found.document, found.survey.sample.rows, found.one.sae.d_in
    plane = Plane.through(torch.stack([*marked.values()])) if marked else Plane.principal(sample)
    near = document["complexity"]
    with figure(path, 12, 13) as drawn:
        parts: Any = drawn.subfigures(3, 1, height_ratios=[2, 1.15, 1.4])
        above, middle, below = parts
        drawn.suptitle(short(f"{document['run']} on {document['data']}"), fontsize=12)
        size, occupancy = above.subplots(1, 2)
        window = _draw_plane(size, occupancy, found, plane, marked)
        shown, whole = (
            (", projected onto the plane", f", in all {D:,} dimensions") if D > 2 else ("", "")
        )
        middle.suptitle(f"Cells and margins of the rows{whole}", **HEADING)
        margins, complexity, growth, sizes = middle.subplots(1, 4)
        _draw_margins(margins, {split: some[:, 0] for split, some in found.margins.items()})
        _draw_complexity(
            complexity, found.complexity, f"{near['boundary']} within {number(near['radius'])}"
        )
        _draw_growth(growth, found.survey.census.growth)
        _draw_sizes(sizes, found.survey.census.sizes())
        rows = spread_out(sample, ARROWS)
        below.suptitle(
            f"{counted(len(rows), 'row')} (open) and their reconstructions (full){shown}; FVU of all "
            f"rows{whole}",
            **HEADING,
        )
        _draw_bridge(
            list(below.subplots(1, 3, sharex=True, sharey=True)), found, plane, rows, window
        )
    return drawn


def _draw_plane(
    size: Axes, occupancy: Axes, found: Found, plane: Plane, marked: Mapping[int, Tensor]
) -> Window:
    sae, x = found.one.sae, torch.from_numpy(found.survey.sample.rows)
    points, marks = (
        plane.coordinates(x),
        {row: plane.coordinates(at[None]) for row, at in marked.items()},
    )
    section = cells_of(plane.section(sae))
    window = window_of(points, torch.cat([points[:0], *marks.values()]))
    cells, keys = plane_cells(section, window), keys_at(section, points)
    projected = sae.d_in > 2
    caption = (
        f"on the plane through rows {', '.join(map(str, marked))}"
        if marked
        else "on the plane of principal components 1 and 2"
        if projected
        else "in the space of the rows"
    )
    fill_by_size(size, cells)
    dots = counted(
        scatter(size, points.numpy(), {row: at[0].numpy() for row, at in marks.items()}), "row"
    )
    same = (
        f"{counted(int(cells.kept[0]), 'latent')} kept in each"
        if cells.kept.min() == cells.kept.max()
        else "colour: latents kept"
    )
    size.set_title(
        f"{counted(len(cells.keys), 'cell')} {caption}\n{same}; dots: {dots}"
        f"{' projected onto it' if projected else ''}"
    )
    rows = counted(len(points), "row")
    inside = "rows projected onto the cell" if projected else "rows in the cell"
    fill_by_occupancy(occupancy, cells, cells.occupancy(keys), inside)
    own = sum(map(operator.eq, keys, found.survey.sample_keys.rows.tolist()))
    occupancy.set_title(
        f"{rows} projected onto the cells, {own:,} really inside\nmedian distance to the plane: "
        f"{float(plane.distances(x).median()):.3g}"
        if projected
        else f"{rows} in the cells"
    )
    for axes in (size, occupancy):
        axes.set_xlabel("first axis, in units of the rows")
    size.set_ylabel("second axis, in units of the rows")
    return window


def _draw_splits(
    axes: Axes,
    title: str,
    every: Mapping[str, NDArray],
    drawn: Mapping[str, NDArray],
    bins: list[float],
) -> None:
    """Histograms by split; the title has the median of the first one, which is the one measured."""
    for (name, some), style in zip(drawn.items(), SPLIT_STYLES, strict=False):
        axes.hist(
            some,
            bins,
            weights=np.full(len(some), 1 / max(1, len(some))),
            label=f"{name} rows",
            **style,
        )
    axes.set(
        ylabel="fraction of rows",
        title=f"{title}, median {describe(next(iter(every.values())))['median']:.3g}",
    )
    if len(drawn) > 1:
        axes.legend(loc="best", fontsize=8)


def _draw_margins(axes: Axes, margins: Mapping[str, NDArray]) -> None:
    drawn = {
        name: kept
        for name, some in margins.items()
        if len(kept := some[np.isfinite(some) & (some > 0)])
    }
    axes.set(xlabel="distance to the boundary", ylabel="fraction of rows", title="margin")
    if not drawn:
        say_empty(axes, "no row has\na boundary near")
        return
    every = np.concatenate(list(drawn.values()))
    low, high = np.log10(every.min()) - 0.05, np.log10(every.max()) + 0.05
    short_by = max(0.0, 1 - (high - low)) / 2  # ticks need a decade
    bins = np.logspace(low - short_by, high + short_by, 41).tolist()
    _draw_splits(axes, "margin", margins, drawn, bins)
    log_scale(axes, "x")


def _draw_complexity(axes: Axes, complexity: Mapping[str, NDArray], near: str) -> None:
    most = max((int(some.max(initial=0)) for some in complexity.values()), default=0)
    step = max(1, -(-(most + 1) // 30))
    bins = (np.arange(0, most + step + 1, step) - 0.5).tolist()
    _draw_splits(axes, "local complexity", complexity, complexity, bins)
    axes.set_xlabel(near)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _draw_growth(axes: Axes, growth: Sequence[tuple[int, int]]) -> None:
    rows, cells = np.array(growth).T
    axes.plot(rows, rows, color=GREY, linewidth=1, linestyle="--")
    axes.plot(rows, cells, color=COLOURS[0], marker="o")
    middle = rows[len(rows) // 2]
    axes.annotate(
        "one cell per row",
        (middle, middle),
        xytext=(-4, 4),
        color=GREY,
        fontsize=8,
        textcoords="offset points",
        ha="right",
    )
    axes.set(
        xlabel="rows",
        ylabel="cells visited",
        title=f"{counted(int(cells[-1]), 'cell')} visited by {counted(int(rows[-1]), 'row')}",
    )
    log_scale(axes, "x", whole=True)
    log_scale(axes, "y", whole=True)


def _draw_sizes(axes: Axes, sizes: NDArray) -> None:
    ranks = np.arange(1, len(sizes) + 1)
    steps = np.unique(
        np.r_[0, np.flatnonzero(np.diff(sizes)), np.flatnonzero(np.diff(sizes)) + 1, len(sizes) - 1]
    )
    axes.plot(ranks[steps], sizes[steps], color=COLOURS[0], marker="o", markersize=2.5)
    axes.set(
        xlabel="cell, the fullest first",
        ylabel="rows that lie in it",
        title=f"{counted(int((sizes == 1).sum()), 'cell')} with one row",
    )
    log_scale(axes, "x", whole=True)
    axes.set_ylim(0.8, max(10, sizes.max() * 1.5))
    log_scale(axes, "y", whole=True)


def _draw_bridge(
    panels: Sequence[Axes], found: Found, plane: Plane, rows: NDArray, window: Window
) -> None:
    starts, ends = (
        plane.coordinates(torch.from_numpy(rows)).numpy(),
        found.bridge.reconstructions(rows),
    )
    for axes, (key, (name, colour)) in zip(panels, BRIDGE.items(), strict=True):
        arrows(
            axes,
            starts,
            plane.coordinates(torch.from_numpy(np.asarray(ends[name]))).numpy(),
            colour,
        )
        fvu = found.document["references"][key]
        shown = (
            "not defined, rows all equal"
            if math.isnan(fvu)
            else f"FVU {fvu if abs(fvu) > ROUNDING else 0:.3g}"
        )
        axes.set(
            title=f"{name}: {shown}",
            aspect="equal",
            xlim=window[:2],
            ylim=window[2:],
            xlabel="first axis",
        )
    panels[0].set_ylabel("second axis")


def geometries(path: Path | None, runs: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw margins, local complexity, cells and the bridge of several SAEs, documents of `sae geometry`."""
    with figure(path, 10.5, 6.6) as drawn:
        (margin, complexity), (visited, bridge) = drawn.subplots(2, 2, sharex=True)
        _band(margin, [run["margin"] for run in runs], "margin", logarithmic=True)
        kinds = {run["complexity"]["boundary"] for run in runs}
        _band(
            complexity,
            [run["complexity"] for run in runs],
            f"{kinds.pop() if len(kinds) == 1 else 'boundaries'} near a row",
        )
        at = np.arange(len(runs))
        visited.plot(
            at, [run["cells_visited"] / run["rows"] for run in runs], color=COLOURS[0], marker="o"
        )
        visited.set(ylabel="cells visited per row", ylim=(0, 1.05))
        lines = []
        for (key, (name, colour)), marker in zip(BRIDGE.items(), "sod", strict=True):
            lines += bridge.plot(
                at,
                [run["references"][key] for run in runs],
                color=colour,
                marker=marker,
                label=name,
            )
        bridge.set_ylabel("fraction of variance\nunexplained (FVU)")
        if all(np.nan_to_num(line.get_ydata(), nan=1.0).min() > 0 for line in lines):
            log_scale(bridge, "y")
        for axes in (margin, complexity, visited, bridge):
            axes.set_xticks(at, [short(run["run"], 18) for run in runs], rotation=30, ha="right")
        legend_below(drawn, lines, [name for name, _ in BRIDGE.values()])
    return drawn


def _band(
    axes: Axes, measures: Sequence[Mapping[str, float]], label: str, logarithmic: bool = False
) -> None:
    """Draw medians, with bands for the middle half and nine tenths of the rows."""
    places = np.arange(len(measures))
    for low, high, alpha in (("p5", "p95", 0.18), ("p25", "p75", 0.32)):
        axes.fill_between(
            places,
            [some[low] for some in measures],
            [some[high] for some in measures],
            color=COLOURS[0],
            alpha=alpha,
            linewidth=0,
        )
    axes.plot(places, [some["median"] for some in measures], color=COLOURS[0], marker="o")
    axes.set(ylabel=label, title="median, middle half, middle nine tenths of the rows")
    if logarithmic and all(some["p5"] > 0 and np.isfinite(some["p95"]) for some in measures):
        log_scale(axes, "y")
