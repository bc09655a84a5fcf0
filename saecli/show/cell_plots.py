"""Pictures of the cells of a plane, and of rows on it."""

from collections.abc import Mapping

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import ListedColormap, LogNorm, Normalize, to_rgb
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ..geometry.survey import spread_out
from ..geometry.plane import PlaneCells, colouring
from .style import COLOURS, GREY

TINTS = np.array([to_rgb(colour) for colour in COLOURS[:6]]) * 0.45 + 0.55  # pale enough for rows to stand out
# Lightness falls steadily, so that it reads alike in grey and for the colour-blind.
SCALE = ListedColormap(matplotlib.colormaps["YlGnBu"](np.linspace(0.15, 0.8, 256)))
EMPTY = np.array(to_rgb("white"))
NEUTRAL = np.array(to_rgb("#eeeeee"))
LINE = "#333333"
DARKEST, FAINTEST = 0.7, 0.25  # lines between cells of pixels
POINTS = 1000  # most rows drawn


def tints(cells: PlaneCells) -> NDArray[np.float64]:
    """An arbitrary pale colour for each cell, (C, 3), different from its neighbours'."""
    return TINTS[colouring(cells.neighbours, len(TINTS))]


def fill(axes: Axes, cells: PlaneCells, colours: NDArray[np.float64]) -> None:
    """Draw the cells of a window on an empty panel, whose limits become the window's; polygons are drawn as vectors.
    Colours are RGB for each cell, (C, 3), in [0, 1]."""
    axes.grid(False)
    left, right, bottom, top = cells.window
    if cells.polygons is not None:
        width = float(np.clip(12 / np.sqrt(len(cells.polygons)), 0.15, 0.8))
        axes.add_collection(PolyCollection(cells.polygons, facecolors=colours, edgecolors=LINE, linewidths=width))
    else:
        axes.imshow(cell_image(cells, colours), extent=cells.window, origin="lower", interpolation="nearest")
    axes.set(xlim=(left, right), ylim=(bottom, top), aspect="equal")
    for side in axes.spines.values():
        side.set(visible=True, linewidth=0.8, color=LINE)


def cell_image(cells: PlaneCells, colours: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cells of pixels as an image with dark lines between them, (P, P, 3) in [0, 1]; arguments as in `fill`."""
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
    bar = axes.figure.colorbar(ScalarMappable(scale, SCALE), ax=axes, shrink=0.75, pad=0.02, label="latents kept")
    bar.locator = MaxNLocator(6, integer=True)


def fill_by_occupancy(axes: Axes, cells: PlaneCells, occupancy: NDArray[np.int64], counted: str) -> None:
    """Draw the cells on an empty panel, coloured by their numbers of rows, (C,), white for none; `counted` labels the
    numbers, as in "rows projected onto the cell"."""
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
    """Draw rows on a plane, (M, 2), and marked rows, number -> (2,), larger and labelled; returns the number of rows
    drawn."""
    points = spread_out(points, POINTS)
    axes.scatter(*points.T, s=7, c="#222222", linewidths=0.3, edgecolors="white", zorder=2)
    for number, (x, y) in marks.items():
        axes.scatter(x, y, s=60, c=COLOURS[1], edgecolors="white", linewidths=1, zorder=3)
        axes.annotate(str(number), (x, y), xytext=(6, 6), textcoords="offset points", weight="bold", zorder=4,
                      bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.7})
    return len(points)


def arrows(axes: Axes, starts: NDArray, ends: NDArray, colour: str) -> None:
    """Draw rows, (M, 2), as open dots, with lines to their reconstructions, (M, 2), as full dots."""
    axes.grid(False)
    axes.plot(*np.stack([starts, ends], 1).transpose(2, 1, 0), color=colour, linewidth=0.7, alpha=0.8, zorder=2)
    axes.scatter(*starts.T, s=9, facecolors="white", edgecolors=GREY, linewidths=0.6, zorder=3)
    axes.scatter(*ends.T, s=8, c=colour, linewidths=0, zorder=4)
