"""The picture of `sae geometry`: cells on a plane, margins, local complexity, growth of the cells visited.

Shapes: D = d_in, P pixels per side, C cells.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize, hsv_to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from ..base.words import counted, number
from ..geometry.cells import cells_of
from ..geometry.geometry import Geometry, Plane, PlaneCells, bounds_of, plane_cells
from ..measure.measured import spread_out
from .style import COLOURS, GREY, figure, log_scale, say_empty, short

# Lightness falls steadily, so that it reads alike in grey and for the colour-blind.
SCALE = ListedColormap(matplotlib.colormaps["YlGnBu"](np.linspace(0.15, 0.8, 256)))
LINE = "#333333"
DARKEST = 0.7  # lines between cells
POINTS = 1000  # most rows drawn
FITS = {"kmeans": "k-means", "sae": "the SAE", "local_pca": "local PCA"}
# How margins and complexity are drawn: of the split measured, and of the other.
SPLIT_STYLES: tuple[dict[str, Any], ...] = (
    {"color": COLOURS[0], "alpha": 0.75},
    {"histtype": "step", "color": COLOURS[1], "linewidth": 1.3},
)


def fill_cells(axes: Axes, cells: PlaneCells, colours: NDArray[np.float64]) -> None:
    """Draw cells, in RGB colours, (C, 3), in [0, 1], with dark lines between them."""
    labels = cells.labels
    image = colours[labels]
    edge = np.zeros(labels.shape, bool)
    edge[1:] |= labels[1:] != labels[:-1]
    edge[:, 1:] |= labels[:, 1:] != labels[:, :-1]
    # Full lines would hide cells of a few pixels.
    image[edge] *= 1 - np.clip(0.75 - 2.5 * edge.mean(), 0, DARKEST)
    axes.grid(False)
    axes.imshow(image, extent=cells.bounds, origin="lower", interpolation="nearest")
    axes.set(xlim=cells.bounds[:2], ylim=cells.bounds[2:], aspect="equal")
    for side in axes.spines.values():
        side.set(visible=True, linewidth=0.8, color=LINE)


def tints(count: int) -> NDArray[np.float64]:
    """Pale colours, (count, 3), consecutive ones unlike."""
    return hsv_to_rgb([(0.618 * number % 1, 0.25, 1) for number in range(count)])


def fill_by_size(axes: Axes, cells: PlaneCells) -> None:
    """Draw cells, coloured by the latents kept; if all keep equally many, to tell them apart."""
    if cells.sizes.min() == cells.sizes.max():
        fill_cells(axes, cells, tints(len(cells.sizes)))
        return
    scale = Normalize(cells.sizes.min(), cells.sizes.max())
    fill_cells(axes, cells, SCALE(scale(cells.sizes))[:, :3])
    bar = axes.figure.colorbar(
        ScalarMappable(scale, SCALE), ax=axes, shrink=0.75, pad=0.02, label="latents kept"
    )
    bar.locator = MaxNLocator(6, integer=True)


def scatter(axes: Axes, points: NDArray, marks: Mapping[int, NDArray]) -> int:
    """Draw rows, (M, 2), marked ones, (2,), larger with their numbers; returns the number of rows drawn."""
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


@torch.no_grad()
def draw_geometry(path: Path | None, measured: Geometry, marked: Mapping[int, Tensor]) -> Figure:
    """Draw an SAE's geometry in five panels, cells on the plane through the `marked` rows, (D,) each, by number, or of
    the first two principal components."""
    document, D = measured.document, measured.run.sae.d_in
    fvus = {name: number(document["references"][f"{key}_fvu"]) for key, name in FITS.items()}
    metric = document["references"]["metric"]
    with figure(path, 12, 6.2) as drawn:
        halves: Any = drawn.subfigures(1, 2, width_ratios=[1.2, 1])
        left, right = halves
        drawn.suptitle(
            f"{short(document['run'])} on {short(document['data'])}; FVU ({metric} metric) of "
            + ", ".join(f"{name} {fvu}" for name, fvu in fvus.items()),
            fontsize=12,
        )
        draw_cells(left.subplots(), measured, marked)
        right.suptitle(
            "Cells and margins of the rows" + (f", in all {D:,} dimensions" if D > 2 else ""),
            fontsize=10.5,
            fontweight="bold",
        )
        (margins, complexity), (growth, sizes) = right.subplots(2, 2)
        _draw_margins(margins, measured)
        _draw_complexity(complexity, measured)
        _draw_growth(growth, measured.census.growth)
        _draw_sizes(sizes, measured.census.sizes())
    return drawn


def draw_cells(axes: Axes, measured: Geometry, marked: Mapping[int, Tensor]) -> None:
    sae, x = measured.run.sae, torch.from_numpy(measured.sample)
    plane = Plane.through(torch.stack([*marked.values()])) if marked else Plane.principal(x.numpy())
    points = plane.coordinates(x)
    marks = {row: plane.coordinates(x_row[None]) for row, x_row in marked.items()}
    bounds = bounds_of(points, torch.cat([points[:0], *marks.values()]))
    cells = plane_cells(cells_of(plane.section(sae)), bounds)
    fill_by_size(axes, cells)
    dots = scatter(axes, points.numpy(), {row: at[0].numpy() for row, at in marks.items()})
    if marked:
        place = f"on the plane through rows {', '.join(map(str, marked))}"
    elif sae.d_in > 2:
        place = "on the plane of principal components 1 and 2"
    else:
        place = "in the space of the rows"
    if cells.sizes.min() == cells.sizes.max():
        colour = f"{counted(int(cells.sizes[0]), 'latent')} kept in each"
    else:
        colour = "colour: latents kept"
    onto = " projected onto it" if sae.d_in > 2 else ""
    axes.set(
        title=f"{counted(len(cells.sizes), 'cell')} {place}\n{colour}; dots: {counted(dots, 'row')}{onto}",
        xlabel="first axis, in units of the rows",
        ylabel="second axis, in units of the rows",
    )


def _draw_splits(axes: Axes, values: Mapping[str, NDArray], bins: list[float]) -> None:
    """Histograms by split, the one measured first."""
    for (split, numbers), style in zip(values.items(), SPLIT_STYLES, strict=False):
        weights = np.full(len(numbers), 1 / max(1, len(numbers)))
        axes.hist(numbers, bins, weights=weights, label=f"{split} rows", **style)
    axes.set_ylabel("fraction of rows")
    if len(values) > 1:
        axes.legend(loc="best", fontsize=8)


def _draw_margins(axes: Axes, measured: Geometry) -> None:
    axes.set(
        xlabel="distance to the boundary",
        title=f"margin, median {measured.document['margin']['median']:.3g}",
    )
    values = {}
    for split, margins in measured.margins.items():
        margin = margins[:, 0]
        drawable = margin[np.isfinite(margin) & (margin > 0)]
        if len(drawable):
            values[split] = drawable
    if not values:
        say_empty(axes, "no row has\na boundary near")
        return
    every = np.concatenate(list(values.values()))
    low, high = np.log10(every.min()) - 0.05, np.log10(every.max()) + 0.05
    _draw_splits(axes, values, np.logspace(low, high, 41).tolist())
    log_scale(axes, "x")


def _draw_complexity(axes: Axes, measured: Geometry) -> None:
    complexity = measured.document["complexity"]
    most = max(int(counts.max(initial=0)) for counts in measured.complexity.values())
    step = -(-(most + 1) // 30)
    bins = (np.arange(0, most + step + 1, step) - 0.5).tolist()
    _draw_splits(axes, measured.complexity, bins)
    axes.set(
        xlabel=f"{complexity['boundary']} within {number(complexity['radius'])}",
        title=f"local complexity, median {complexity['median']:.3g}",
    )
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
    log_scale(axes, "x")
    log_scale(axes, "y")


def _draw_sizes(axes: Axes, sizes: NDArray) -> None:
    ranks = np.arange(1, len(sizes) + 1)
    falls = np.flatnonzero(np.diff(sizes))
    steps = np.unique(np.r_[0, falls, falls + 1, len(sizes) - 1])
    axes.plot(ranks[steps], sizes[steps], color=COLOURS[0], marker="o", markersize=2.5)
    axes.set(
        xlabel="cell, the fullest first",
        ylabel="rows that lie in it",
        title=f"{counted(int((sizes == 1).sum()), 'cell')} with one row",
    )
    log_scale(axes, "x")
    axes.set_ylim(0.8, max(10, sizes.max() * 1.5))
    log_scale(axes, "y")
