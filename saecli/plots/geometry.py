"""The picture of an SAE's geometry: its cells on a plane, margins, occupancy, and the references."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from numpy.typing import NDArray

from ..geometry.planes import CellMap, colouring
from .style import COLOURS, GREY, figure, log_scale, say_empty, short

TINTS = np.array([to_rgb(colour) for colour in COLOURS[:6]]) * 0.45 + 0.55  # pale enough for rows to stand out
ROUNDING = 1e-12  # an FVU below is zero
POINTS = 1000  # rows projected on the plane at most


@dataclass(frozen=True)
class GeometryPicture:
    """What `geometry` draws.

    Args:
        title: what stands above.
        caption: what the plane is, after the number of cells: "on the plane through rows 1, 2, 3".
        map: the cells on the plane.
        points: rows projected on it, (M, 2).
        marks: the rows that the plane goes through, by number, their coordinates (2,).
        margins: distances of rows to their cells' boundaries, (B,), in units of the rows.
        sizes: rows in each visited cell, the fullest first, (C,).
        references: FVU by name.
    """

    title: str
    caption: str
    map: CellMap
    points: NDArray
    marks: Mapping[int, NDArray]
    margins: NDArray
    sizes: NDArray
    references: Mapping[str, float]


def geometry(path: Path, picture: GeometryPicture) -> None:
    """Draw the geometry of an SAE in four panels.

    Args:
        path: PNG, PDF or SVG by its ending.
        picture: what to draw.

    Raises:
        ConfigError: the ending is another.
    """
    with figure(path, 10.5, 6.4) as drawn:
        panels = drawn.subplot_mosaic([["cells", "margins"], ["cells", "sizes"], ["cells", "references"]],
                                      width_ratios=[1.75, 1])
        drawn.suptitle(short(picture.title), fontsize=11)
        _draw_cells(panels["cells"], picture)
        _draw_margins(panels["margins"], picture.margins)
        _draw_sizes(panels["sizes"], picture.sizes)
        _draw_references(panels["references"], picture.references)


def cell_image(labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """Cells as an image: neighbours in different pale colours, a dark line between them.

    Args:
        labels: the cell of each pixel, (P, P).

    Returns:
        Red, green and blue in [0, 1], (P, P, 3).
    """
    image = TINTS[colouring(labels, len(TINTS))][labels]
    edge = np.zeros(labels.shape, bool)
    edge[1:] |= labels[1:] != labels[:-1]
    edge[:, 1:] |= labels[:, 1:] != labels[:, :-1]
    # Where cells are a few pixels wide, full lines would leave nothing but lines.
    image[edge] *= max(0.3, 1 - max(0.0, 0.75 - 2.5 * edge.mean())) if edge.mean() < 0.3 else 1.0
    return image


def _cells(count: int) -> str:
    return f"{count:,} {'cell' if count == 1 else 'cells'}"


def _draw_cells(axes: Axes, picture: GeometryPicture) -> None:
    axes.grid(False)
    axes.imshow(cell_image(picture.map.labels), extent=picture.map.window, origin="lower", interpolation="nearest")
    left, right, bottom, top = picture.map.window
    points = picture.points[::max(1, len(picture.points) // POINTS)]
    axes.scatter(*points.T, s=7, c="#222222", linewidths=0.3, edgecolors="white", zorder=2)
    for number, (x, y) in picture.marks.items():
        axes.scatter(x, y, s=60, c=COLOURS[1], edgecolors="white", linewidths=1, zorder=3)
        axes.annotate(str(number), (x, y), xytext=(6, 6), textcoords="offset points", weight="bold", zorder=4)
    axes.set(xlim=(left, right), ylim=(bottom, top), xlabel="first axis, in units of the rows",
             ylabel="second axis, in units of the rows",
             title=f"{_cells(picture.map.cells)} {picture.caption}")


def _draw_margins(axes: Axes, margins: NDArray) -> None:
    drawn = margins[np.isfinite(margins) & (margins > 0)]
    axes.set(xlabel="distance to the cell's boundary", ylabel="rows")
    if not len(drawn):
        say_empty(axes, "no row has a boundary near")
        return
    low, high = np.log10(drawn.min()), np.log10(drawn.max())
    axes.hist(drawn, bins=np.logspace(low - 0.05, high + 0.05, 41), color=COLOURS[0])
    log_scale(axes, "x")
    axes.axvline(np.median(drawn), color=COLOURS[1], linewidth=1.2)
    axes.text(np.median(drawn), 1.0, "median", transform=axes.get_xaxis_transform(), color=COLOURS[1], fontsize=8,
              ha="center", va="bottom")


def _draw_sizes(axes: Axes, sizes: NDArray) -> None:
    ranks = np.arange(1, len(sizes) + 1)
    steps = np.unique(np.r_[0, np.flatnonzero(np.diff(sizes)), np.flatnonzero(np.diff(sizes)) + 1, len(sizes) - 1])
    axes.plot(ranks[steps], sizes[steps], color=COLOURS[0], marker="o", markersize=2.5)
    axes.set(xlabel="cell, the fullest first", ylabel="rows in it",
             title=f"{_cells(len(sizes))} visited, {(sizes == 1).sum():,} by one row")
    log_scale(axes, "x")
    axes.set_ylim(0.8, max(10, sizes.max() * 1.5))
    log_scale(axes, "y")


def _draw_references(axes: Axes, references: Mapping[str, float]) -> None:
    names = list(references)
    values = np.array([references[name] for name in names])
    shown = np.nan_to_num(values, nan=0.0, posinf=0.0)
    axes.barh(names, shown, color=[COLOURS[5], COLOURS[0], COLOURS[2]][:len(names)], height=0.6)
    for place, (value, length) in enumerate(zip(values, shown, strict=True)):
        axes.text(length, place, f" {value if abs(value) > ROUNDING else 0:.3g}", va="center", color=GREY, fontsize=9)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set(xlabel="fraction of variance unexplained (FVU)", xlim=(0, max(shown.max(initial=0) * 1.2, 1e-6)))
