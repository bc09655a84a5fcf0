"""How the geometry moves from one SAE to the next, as along a training run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from .style import COLOURS, figure, legend_below, log_scale, short


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
        visited.set(ylabel="cells visited a row", ylim=(0, 1.05))
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
    """Medians, and the middle half and nine tenths of the rows about them."""
    places = np.arange(len(measures))
    for low, high, alpha in (("p5", "p95", 0.18), ("p25", "p75", 0.32)):
        axes.fill_between(places, [some[low] for some in measures], [some[high] for some in measures],
                          color=COLOURS[0], alpha=alpha, linewidth=0)
    axes.plot(places, [some["median"] for some in measures], color=COLOURS[0], marker="o")
    axes.set(ylabel=label, title="median, middle half, middle nine tenths of the rows")
    if logarithmic and all(some["p5"] > 0 and np.isfinite(some["p95"]) for some in measures):
        log_scale(axes, "y")
