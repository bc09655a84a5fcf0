"""The solver benchmark as a picture: test FVU against training rows, and with relu-l1 the frontiers of L0 and FVU."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator
from solver_grid import RELU_L1, Outcome
from solver_report import Comparison, frontier, fvu, mean_points

from saecli.plots.style import COLOURS, GREY, figure, log_scale

PANEL = (3.6, 2.7)  # inches
PAM: dict[str, Any] = {"linestyle": "-", "marker": "o"}
SGD: dict[str, Any] = {"linestyle": "--", "marker": "s", "markerfacecolor": "white"}
SOLVERS = {"PAM-SGD": PAM, "best SGD": SGD}

Panels = dict[str, dict[str, list[Comparison]]]  # row of panels, data -> cells


def draw(path: Path, found: Sequence[Comparison]) -> None:
    """Draw all cells, a column of panels for each data, a row for each activation, with relu-l1 also for each width.

    Args:
        path: PNG, PDF or SVG by its ending.
        found: the cells.
    """
    data = list(dict.fromkeys(one.measured.cell.data for one in found))
    errors, sparse = _panels(found, sparse=False), _panels(found, sparse=True)
    heights = [PANEL[1] * len(rows) + 0.4 for rows in (errors, sparse) if rows]
    with figure(path, max(6, PANEL[0] * len(data)), sum(heights)) as drawn:
        parts = iter(drawn.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
        if errors:
            _block(next(parts), errors, data, _errors, "training rows (dotted: N = d_sae)", "test FVU",
                   lambda one: one.measured.cell.width, "d_sae = {} d_in")
        if sparse:
            _block(next(parts), sparse, data, _frontiers, "active latents a row (L0)", "test FVU",
                   lambda one: one.measured.cell.fraction, "{:.0%} of the rows")


def _panels(found: Sequence[Comparison], sparse: bool) -> Panels:
    panels: Panels = {}
    for one in found:
        cell = one.measured.cell
        if (cell.act == RELU_L1) is sparse:
            title = f"{cell.act}, d_sae = {cell.width} d_in" if sparse else cell.act
            panels.setdefault(title, {}).setdefault(cell.data, []).append(one)
    return panels


def _block(part: SubFigure, panels: Panels, data: Sequence[str], panel: Callable[[Axes, list[Comparison], str], None],
           x: str, y: str, by: Callable[[Comparison], float], label: str) -> None:
    """Draw panels that share a legend: a colour for each value of `by`, a dash for each solver."""
    values = sorted({by(one) for row in panels.values() for cells in row.values() for one in cells})
    colours = {value: COLOURS[index % len(COLOURS)] for index, value in enumerate(values)}
    grid = part.subplots(len(panels), len(data), squeeze=False)
    for axes_row, (title, row) in zip(grid, panels.items(), strict=True):
        for axes, name in zip(axes_row, data, strict=True):
            axes.set(title=f"{name}, {title}")
            for value in values:
                if cells := [one for one in row.get(name, []) if by(one) == value]:
                    panel(axes, cells, colours[value])
            if axes.has_data():
                log_scale(axes, "x")
                log_scale(axes, "y")
                _spare_labels(axes)
            else:
                axes.set_visible(False)
        axes_row[0].set_ylabel(y)
    for axes in grid[-1]:
        axes.set_xlabel(x)
    handles = [Line2D([], [], color=colour, linewidth=4) for colour in colours.values()]
    handles += [Line2D([], [], color=GREY, **style) for style in SOLVERS.values()]
    labels = [*map(label.format, colours), *SOLVERS]
    part.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 2 * len(data) + 1))


def _spare_labels(axes: Axes) -> None:
    """Fewer and shorter numbers below a panel that spans two decades or three, for which it is too narrow."""
    low, high = axes.get_xlim()
    if 100 * low < high < 1000 * low:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x >= 10_000 else f"{x:g}")


def _errors(axes: Axes, cells: list[Comparison], colour: str) -> None:
    """Test FVU against the training rows: the mean over the seeds, in a band from the least to the largest."""
    cells = sorted(cells, key=lambda one: one.measured.cell.rows)
    rows = [one.measured.cell.rows for one in cells]
    for style, ways in ((PAM, [one.pam for one in cells]), (SGD, [one.sgd for one in cells])):
        axes.plot(rows, list(map(fvu, ways)), color=colour, **style)
        low, high = ([pick(_errors_of(way)) for way in ways] for pick in (min, max))
        axes.fill_between(rows, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.axvline(cells[0].measured.cell.d_sae, color=colour, linestyle=":", linewidth=1)


def _errors_of(way: Sequence[Outcome]) -> list[float]:
    return [outcome.fvu for outcome in way]


def _frontiers(axes: Axes, cells: list[Comparison], colour: str) -> None:
    """The frontiers of both solvers, of the means over the seeds."""
    for one in cells:
        for style, ways in ((PAM, one.measured.pam), (SGD, one.measured.sgd)):
            front = frontier(mean_points(ways.values()))
            axes.plot([l0 for _, l0 in front], [error for error, _ in front], color=colour, **style)
