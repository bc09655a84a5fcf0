"""Cells of a plane, as areas under the rows that fall on them."""

from collections.abc import Mapping

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import ListedColormap, LogNorm, Normalize, to_rgb
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ..spline.census import spread_out
from ..spline.plane_cells import PlaneCells, colouring
from .style import COLOURS, GREY

TINTS = np.array([to_rgb(colour) for colour in COLOURS[:6]]) * 0.45 + 0.55  # pale enough for rows to stand out
# From pale to dark in one hue's order of lightness: read alike in grey and by the colour-blind.
SCALE = ListedColormap(matplotlib.colormaps["YlGnBu"](np.linspace(0.15, 0.8, 256)))
EMPTY = np.array(to_rgb("white"))
NEUTRAL = np.array(to_rgb("#eeeeee"))
LINE = "#333333"
DARKEST, FAINTEST = 0.7, 0.25  # of the lines between cells of pixels
POINTS = 1000  # rows drawn at most


def tints(cells: PlaneCells) -> NDArray[np.float64]:
    """A pale colour for each cell, (C, 3), neighbours' different; which one means nothing."""
    return TINTS[colouring(cells.neighbours, len(TINTS))]


def fill(axes: Axes, cells: PlaneCells, colours: NDArray[np.float64]) -> None:
    """Draw the cells of a window, as vectors where they are polygons, on an empty panel, whose limits become the
    window's; colours are red, green and blue of each cell, (C, 3), in [0, 1]."""
    axes.grid(False)
    left, right, bottom, top = cells.window
    if cells.polygons is not None:
        width = float(np.clip(12 / np.sqrt(len(cells.polygons)), 0.15, 0.8))
        axes.add_collection(PolyCollection(cells.polygons, facecolors=colours, edgecolors=LINE, linewidths=width))
    else:
        axes.imshow(cell_image(cells, colours), extent=cells.window, origin="lower", interpolation="nearest")
    axes.set(xlim=(left, right), ylim=(bottom, top), aspect="equal")
    for side in axes.spines.values():  # a window has four sides
        side.set(visible=True, linewidth=0.8, color=LINE)


def cell_image(cells: PlaneCells, colours: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cells of pixels as an image, dark lines between them: (P, P, 3) in [0, 1]; arguments as of `fill`."""
    labels = cells.labels
    image = colours[labels]
    edge = np.zeros(labels.shape, bool)
    edge[1:] |= labels[1:] != labels[:-1]
    edge[:, 1:] |= labels[:, 1:] != labels[:, :-1]
    # Where cells are a few pixels wide, full lines would leave nothing but lines; where all have one colour, nothing
    # else is there to be seen.
    least = FAINTEST if (colours == colours[0]).all() else 0.0
    image[edge] *= 1 - np.clip(0.75 - 2.5 * edge.mean(), least, DARKEST)
    return image


def fill_by_size(axes: Axes, cells: PlaneCells) -> None:
    """Draw the cells by how many latents they keep, or where all keep as many, in one neutral colour."""
    if cells.kept.min() == cells.kept.max():
        fill(axes, cells, np.tile(NEUTRAL, (len(cells.kept), 1)))
        return
    scale = Normalize(cells.kept.min(), cells.kept.max())
    fill(axes, cells, SCALE(scale(cells.kept))[:, :3])
    bar = axes.figure.colorbar(ScalarMappable(scale, SCALE), ax=axes, shrink=0.75, pad=0.02, label="latents kept")
    bar.locator = MaxNLocator(6, integer=True)


def fill_by_occupancy(axes: Axes, cells: PlaneCells, occupancy: NDArray[np.int64], counted: str) -> None:
    """Draw the cells on an empty panel, coloured by how many rows each has, (C,), which `counted` names as in "rows
    projected onto the cell"; those without any are left white."""
    most = max(2, int(occupancy.max(initial=0)))
    scale = LogNorm(1, most)
    colours = np.where((occupancy > 0)[:, None], SCALE(scale(np.maximum(occupancy, 1)))[:, :3], EMPTY)
    fill(axes, cells, colours)
    bar = axes.figure.colorbar(ScalarMappable(scale, SCALE), ax=axes, shrink=0.75, pad=0.02,
                               label=f"{counted}; white: none")
    ticks = [tick for decade in 10 ** np.arange(7) for tick in (decade, 2 * decade, 5 * decade) if tick <= most]
    bar.set_ticks(ticks if most <= 200 else [tick for tick in ticks if str(tick)[0] == "1"])
    bar.ax.minorticks_off()
    bar.ax.yaxis.set_major_formatter("{x:,.0f}")


def scatter(axes: Axes, points: NDArray, marks: Mapping[int, NDArray]) -> int:
    """Draw rows on a plane, (M, 2), and some by number, (2,) each, larger and named; returns how many rows it drew."""
    points = spread_out(points, POINTS)
    axes.scatter(*points.T, s=7, c="#222222", linewidths=0.3, edgecolors="white", zorder=2)
    for number, (x, y) in marks.items():
        axes.scatter(x, y, s=60, c=COLOURS[1], edgecolors="white", linewidths=1, zorder=3)
        axes.annotate(str(number), (x, y), xytext=(6, 6), textcoords="offset points", weight="bold", zorder=4,
                      bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.7})
    return len(points)


def arrows(axes: Axes, starts: NDArray, ends: NDArray, colour: str) -> None:
    """Draw rows, (M, 2), as open dots, and lines to where they are reconstructed, (M, 2), as full ones."""
    axes.grid(False)
    axes.plot(*np.stack([starts, ends], 1).transpose(2, 1, 0), color=colour, linewidth=0.7, alpha=0.8, zorder=2)
    axes.scatter(*starts.T, s=9, facecolors="white", edgecolors=GREY, linewidths=0.6, zorder=3)
    axes.scatter(*ends.T, s=8, c=colour, linewidths=0, zorder=4)
