"""Pictures of an SAE's geometry (cells on a plane, margins, local complexity, growth, the bridge), and of how it
changes over several SAEs.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from ..base.wording import counted, number
from ..geometry.census import describe, spread_out
from ..geometry.measures import Found
from ..geometry.partition import cells_of
from ..geometry.plane_cells import Plane, PlaneCells, keys_at, plane_cells, window_of
from .cell_plots import arrows, fill_by_occupancy, fill_by_size, scatter
from .style import COLOURS, GREY, figure, legend_below, log_scale, say_empty, short

ARROWS = 200  # rows whose reconstructions are drawn
ROUNDING = 1e-12  # a lower FVU is shown as zero
HEADING = {"fontsize": 10.5, "fontweight": "bold"}
BRIDGE_COLOURS = (COLOURS[1], COLOURS[0], COLOURS[2])
# How margins and complexity are drawn: of the split measured, and of the other.
SPLIT_STYLES = ({"color": COLOURS[0], "alpha": 0.75}, {"histtype": "step", "color": COLOURS[1], "linewidth": 1.3})


@dataclass(frozen=True)
class GeometryPicture:
    """The data that `geometry` draws.

    Args:
        title: the heading.
        caption: where the cells are: "on the plane through rows 1, 2, 3".
        d_in: D; up to 2 the plane is the space of the rows, and nothing is projected.
        cells: the cells on the plane.
        occupancy: number of rows projected onto each cell, (C,).
        points: rows projected onto the plane, (M, 2).
        distance: median distance of these rows to the plane.
        at_home: how many of them lie in the cell that they are projected onto.
        marks: number -> coordinates, (2,), of the rows through which the plane goes.
        margins: split -> distances of its rows to their cells' boundaries, (B,), in units of the rows.
        complexity: split -> number of boundaries near its rows, (B,).
        near: kind of these boundaries, and how near: "swaps within 0.3".
        growth: (rows, cells visited by them), the last for all rows.
        sizes: rows in each visited cell, descending, (C,).
        rows: rows of the bridge on the plane, (M, 2).
        bridge: reference's name -> its reconstructions of these rows, (M, 2), and its FVU.
    """

    title: str
    caption: str
    d_in: int
    cells: PlaneCells
    occupancy: NDArray[np.int64]
    points: NDArray
    distance: float
    at_home: int
    marks: Mapping[int, NDArray]
    margins: Mapping[str, NDArray]
    complexity: Mapping[str, NDArray]
    near: str
    growth: Sequence[tuple[int, int]]
    sizes: NDArray
    rows: NDArray
    bridge: Mapping[str, tuple[NDArray, float]]


@torch.no_grad()
def draw_geometry(path: Path, found: Found, marked: Mapping[int, Tensor]) -> None:
    """Draw the measures of an SAE on the plane through the `marked` rows, (D,) each, by number; on the plane of the
    first two principal components where there are none."""
    one, document, sample = found.one, found.document, found.survey.sample.rows
    corners = [*marked.values()]
    plane = Plane.through(torch.stack(corners)) if corners else Plane.principal(sample)
    x = torch.from_numpy(sample)
    points = plane.coordinates(x)
    marks = plane.coordinates(torch.stack(corners)) if corners else points[:0]
    caption = (f"on the plane through rows {', '.join(map(str, marked))}" if marked
               else "on the plane of principal components 1 and 2" if one.sae.d_in > 2 else "in the space of the rows")
    section = cells_of(plane.section(one.sae))
    cells, fallen_on = plane_cells(section, window_of(points, marks)), keys_at(section, points)
    own = found.survey.sample_keys.rows.tolist()
    rows, near = spread_out(sample, ARROWS), document["complexity"]
    compared = document["references"]
    fvus = {"k-means": compared["kmeans_fvu"], "SAE": compared["sae_fvu"], "local PCA": compared["local_pca_fvu"]}
    ends = found.bridge.reconstructions(rows)
    geometry(path, GeometryPicture(
        title=f"{document['run']} on {document['data']}", caption=caption, d_in=one.sae.d_in, cells=cells,
        occupancy=cells.occupancy(fallen_on), points=points.numpy(), distance=float(plane.distances(x).median()),
        at_home=sum(map(operator.eq, fallen_on, own)),
        marks=dict(zip(marked, marks.numpy(), strict=True)),
        margins={split: some[:, 0] for split, some in found.margins.items()}, complexity=found.complexity,
        near=f"{near['boundary']} within {number(near['radius'])}", growth=found.survey.census.growth,
        sizes=found.survey.census.sizes(), rows=plane.coordinates(torch.from_numpy(rows)).numpy(),
        bridge={name: (plane.coordinates(torch.from_numpy(np.asarray(ends[name]))).numpy(), fvu)
                for name, fvu in fvus.items()}))


def geometry(path: Path, picture: GeometryPicture) -> None:
    """Draw the geometry of an SAE in nine panels.

    Args:
        path: PNG, PDF or SVG by its ending.
        picture: what to draw.

    Raises:
        ConfigError: the ending is another.
    """
    with figure(path, 12, 13) as drawn:
        above, middle, below = drawn.subfigures(3, 1, height_ratios=[2, 1.15, 1.4])
        drawn.suptitle(short(picture.title), fontsize=12)
        size, occupancy = above.subplots(1, 2)
        _draw_plane(size, occupancy, picture)
        shown, whole = ((", projected onto the plane", f", in all {picture.d_in:,} dimensions")
                        if _projected(picture) else ("", ""))
        middle.suptitle(f"Cells and margins of the rows{whole}", **HEADING)
        margins, complexity, growth, sizes = middle.subplots(1, 4)
        _draw_margins(margins, picture.margins)
        _draw_complexity(complexity, picture.complexity, picture.near)
        _draw_growth(growth, picture.growth)
        _draw_sizes(sizes, picture.sizes)
        below.suptitle(f"{counted(len(picture.rows), 'row')} (open) and where they are reconstructed (full){shown}; "
                       f"FVU of all rows{whole}", **HEADING)
        _draw_bridge(list(below.subplots(1, 3, sharex=True, sharey=True)), picture)


def _fvu(value: float) -> str:
    if math.isnan(value):
        return "not defined, rows all equal"
    return f"FVU {value if abs(value) > ROUNDING else 0:.3g}"


def _projected(picture: GeometryPicture) -> bool:
    return picture.d_in > 2


def _draw_plane(size: Axes, occupancy: Axes, picture: GeometryPicture) -> None:
    fill_by_size(size, picture.cells)
    dots = counted(scatter(size, picture.points, picture.marks), "row")
    kept, rows = picture.cells.kept, counted(len(picture.points), "row")
    same = f"{counted(int(kept[0]), 'latent')} kept in each" if kept.min() == kept.max() else "colour: latents kept"
    size.set_title(f"{counted(picture.cells.count, 'cell')} {picture.caption}\n"
                   f"{same}; dots: {dots}{' projected onto it' if _projected(picture) else ''}")
    if _projected(picture):
        fill_by_occupancy(occupancy, picture.cells, picture.occupancy, "rows projected onto the cell")
        occupancy.set_title(f"how many of {rows} are projected onto each cell\n"
                            f"really in that cell: {picture.at_home:,}; median distance to the plane: "
                            f"{picture.distance:.3g}")
    else:
        fill_by_occupancy(occupancy, picture.cells, picture.occupancy, "rows in the cell")
        occupancy.set_title(f"how many of {rows} lie in each cell")
    for axes in (size, occupancy):
        axes.set_xlabel("first axis, in units of the rows")
    size.set_ylabel("second axis, in units of the rows")


def _legend(axes: Axes, shown: int) -> None:
    if shown > 1:
        axes.legend(loc="best", fontsize=8)


def _median(values: Mapping[str, NDArray]) -> str:
    """The median of the first split, the one measured, as in the command's table."""
    return f"median {describe(next(iter(values.values())))['median']:.3g}"


def _draw_margins(axes: Axes, margins: Mapping[str, NDArray]) -> None:
    drawn = {name: some[np.isfinite(some) & (some > 0)] for name, some in margins.items()}
    drawn = {name: some for name, some in drawn.items() if len(some)}
    axes.set(xlabel="distance to the boundary", ylabel="fraction of rows", title="margin")
    if not drawn:
        say_empty(axes, "no row has\na boundary near")
        return
    every = np.concatenate(list(drawn.values()))
    low, high = np.log10(every.min()) - 0.05, np.log10(every.max()) + 0.05
    short_by = max(0.0, 1 - (high - low)) / 2  # ticks need a decade
    bins = np.logspace(low - short_by, high + short_by, 41)
    for (name, some), style in zip(drawn.items(), SPLIT_STYLES, strict=False):
        axes.hist(some, bins, weights=np.full(len(some), 1 / len(some)), label=f"{name} rows", **style)
    log_scale(axes, "x")
    _legend(axes, len(drawn))
    axes.set_title(f"margin, {_median(margins)}")


def _draw_complexity(axes: Axes, complexity: Mapping[str, NDArray], near: str) -> None:
    most = max((int(some.max(initial=0)) for some in complexity.values()), default=0)
    step = max(1, -(-(most + 1) // 30))
    bins = np.arange(0, most + step + 1, step) - 0.5
    for (name, some), style in zip(complexity.items(), SPLIT_STYLES, strict=False):
        axes.hist(some, bins, weights=np.full(len(some), 1 / max(1, len(some))), label=f"{name} rows", **style)
    axes.set(xlabel=near, ylabel="fraction of rows",
             title=f"local complexity, {_median(complexity)}")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    _legend(axes, len(complexity))


def _draw_growth(axes: Axes, growth: Sequence[tuple[int, int]]) -> None:
    rows, cells = np.array(growth).T
    axes.plot(rows, rows, color=GREY, linewidth=1, linestyle="--")
    axes.plot(rows, cells, color=COLOURS[0], marker="o")
    axes.annotate("one cell per row", (rows[len(rows) // 2], rows[len(rows) // 2]), xytext=(-4, 4), color=GREY,
                  fontsize=8, textcoords="offset points", ha="right")
    axes.set(xlabel="rows", ylabel="cells visited",
             title=f"{counted(int(cells[-1]), 'cell')} visited by {counted(int(rows[-1]), 'row')}")
    log_scale(axes, "x", whole=True)
    log_scale(axes, "y", whole=True)


def _draw_sizes(axes: Axes, sizes: NDArray) -> None:
    ranks = np.arange(1, len(sizes) + 1)
    steps = np.unique(np.r_[0, np.flatnonzero(np.diff(sizes)), np.flatnonzero(np.diff(sizes)) + 1, len(sizes) - 1])
    axes.plot(ranks[steps], sizes[steps], color=COLOURS[0], marker="o", markersize=2.5)
    axes.set(xlabel="cell, the fullest first", ylabel="rows that lie in it",
             title=f"{counted(int((sizes == 1).sum()), 'cell')} with one row")
    log_scale(axes, "x", whole=True)
    axes.set_ylim(0.8, max(10, sizes.max() * 1.5))
    log_scale(axes, "y", whole=True)


def _draw_bridge(panels: Sequence[Axes], picture: GeometryPicture) -> None:
    left, right, bottom, top = picture.cells.window
    for axes, colour, (name, (ends, fvu)) in zip(panels, BRIDGE_COLOURS, picture.bridge.items(), strict=True):
        arrows(axes, picture.rows, ends, colour)
        axes.set(title=f"{name}: {_fvu(fvu)}", aspect="equal", xlim=(left, right),
                 ylim=(bottom, top), xlabel="first axis")
    panels[0].set_ylabel("second axis")


def geometry_runs(path: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    """Draw margins, local complexity, cells and the bridge of several SAEs, side by side in the order given.

    Args:
        path: PNG, PDF or SVG by its ending.
        runs: documents of `sae geometry`, with `run`, `margin`, `complexity`, `cells_visited`, `rows`, `references`.

    Raises:
        ConfigError: the ending is another.
    """
    with figure(path, 10.5, 6.6) as drawn:
        (margin, complexity), (visited, bridge) = drawn.subplots(2, 2, sharex=True)
        _band(margin, [run["margin"] for run in runs], "margin", logarithmic=True)
        kinds = {run["complexity"]["boundary"] for run in runs}
        _band(complexity, [run["complexity"] for run in runs],
              f"{kinds.pop() if len(kinds) == 1 else 'boundaries'} near a row")
        places = np.arange(len(runs))
        visited.plot(places, [run["cells_visited"] / run["rows"] for run in runs], color=COLOURS[0], marker="o")
        visited.set(ylabel="cells visited per row", ylim=(0, 1.05))
        names = {"kmeans_fvu": "k-means", "sae_fvu": "SAE", "local_pca_fvu": "local PCA"}
        lines = []
        for (key, name), colour, marker in zip(names.items(), (COLOURS[1], COLOURS[0], COLOURS[2]), "sod", strict=True):
            values = [run["references"][key] for run in runs]
            lines += bridge.plot(places, values, color=colour, marker=marker, label=name)
        bridge.set_ylabel("fraction of variance\nunexplained (FVU)")
        if all(np.nan_to_num(line.get_ydata(), nan=1.0).min() > 0 for line in lines):
            log_scale(bridge, "y")
        for axes in (margin, complexity, visited, bridge):
            axes.set_xticks(places, [short(run["run"], 18) for run in runs], rotation=30, ha="right")
        legend_below(drawn, lines, list(names.values()))


def _band(axes: Axes, measures: Sequence[Mapping[str, float]], label: str, logarithmic: bool = False) -> None:
    """Draw medians, with bands for the middle half and nine tenths of the rows."""
    places = np.arange(len(measures))
    for low, high, alpha in (("p5", "p95", 0.18), ("p25", "p75", 0.32)):
        axes.fill_between(places, [some[low] for some in measures], [some[high] for some in measures],
                          color=COLOURS[0], alpha=alpha, linewidth=0)
    axes.plot(places, [some["median"] for some in measures], color=COLOURS[0], marker="o")
    axes.set(ylabel=label, title="median, middle half, middle nine tenths of the rows")
    if logarithmic and all(some["p5"] > 0 and np.isfinite(some["p95"]) for some in measures):
        log_scale(axes, "y")
