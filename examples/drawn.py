"""Figures that several sections have: curves, errors by fraction of the rows, and ablations."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from measured import WAYS, Errors, Run, errors, means, ratios, select, with_base

from saecli.show.style import COLOURS, MARKERS, figure, legend_below, log_scale

KINDS = {
    "decay": ("weight decay", 0.0),
    "proximal": ("mu and nu, encoder", 0.0),
}  # by group: name of the value, and its value in `base`
NAMES = {"sgd": "SGD at {:g}", "paper": "PAM-SGD at {:g}"}
NARROW = 3  # ratio of values up to which an axis is linear


def plot_errors(
    axes: Axes,
    found: Mapping[str, Errors],
    xlabel: str,
    apart: bool = False,
    labels: Mapping[str, str] = WAYS,
) -> None:
    """Draw the mean over seeds of each way, with a band from the least to the largest.

    Args:
        axes: where.
        found: by way.
        xlabel: the name of the values.
        apart: at equal distances, whatever the values, as where one is 0.
        labels: names of all ways; their order gives colours.
    """
    for way, by_value in found.items():
        values, index = sorted(by_value), list(labels).index(way)
        at = range(len(values)) if apart else values
        axes.plot(
            at,
            [means(by_value)[value] for value in values],
            color=COLOURS[index],
            marker=MARKERS[index],
            label=labels[way],
        )
        axes.fill_between(
            at,
            [min(by_value[value]) for value in values],
            [max(by_value[value]) for value in values],
            color=COLOURS[index],
            alpha=0.2,
            linewidth=0,
        )
        if apart:
            axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
    axes.set(xlabel=xlabel)
    if not apart:
        log_scale(axes, "x")
    every = [fvu for by_value in found.values() for seeds in by_value.values() for fvu in seeds]
    if max(every) > NARROW * min(every):
        log_scale(axes, "y")


def curves(out: Path, runs: list[Run], acts: Mapping[str, str]) -> None:
    """Draw the test error after each epoch into `curves.png`, a panel an activation.

    Args:
        out: the folder.
        runs: the section's.
        acts: titles of activations, by their names in runs.
    """
    with figure(out / "curves.png", 9, 3.4) as drawn:
        panels = drawn.subplots(1, len(acts))
        for axes, (act, title) in zip(panels, acts.items(), strict=True):
            for way, colour in zip(WAYS, COLOURS, strict=False):
                for run in select(runs, group="base", act=act, way=way):
                    axes.plot(
                        *run.curve(),
                        color=colour,
                        alpha=1 if run.seed == 0 else 0.3,
                        label=WAYS[way] if run.seed == 0 else None,
                    )
            axes.set(title=title, xlabel="epoch", ylabel="test FVU")
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            log_scale(axes, "y")
        legend_below(drawn, *panels[0].get_legend_handles_labels())


def sizes(out: Path, runs: list[Run], acts: Mapping[str, str]) -> dict[str, dict[str, Errors]]:
    """Draw the test error against the share of the rows into `sizes.png`.

    Returns:
        The errors, by activation and way.
    """
    found = {
        act: {way: errors(with_base(select(runs, act=act, way=way), "size", 1)) for way in WAYS}
        for act in acts
    }
    with figure(out / "sizes.png", 9, 3.4) as drawn:
        panels = drawn.subplots(1, len(acts))
        for axes, (act, title) in zip(panels, acts.items(), strict=True):
            plot_errors(axes, found[act], "fraction of the training rows")
            axes.set(title=title, ylabel="test FVU")
        legend_below(drawn, *panels[0].get_legend_handles_labels())
    return found


def ablations(
    out: Path,
    runs: list[Run],
    acts: Mapping[str, str],
    kinds: Mapping[str, tuple[str, float]] = KINDS,
) -> dict[str, dict[str, dict[str, float]]]:
    """Draw the test error against weight decay and proximal weight into `ablations.png`.

    Returns:
        Errors over those at the least value, by activation and group, and by way and value.
    """
    acts = {act: title for act, title in acts.items() if select(runs, act=act, group="decay")}
    found: dict[str, dict[str, dict[str, float]]] = {act: {} for act in acts}
    with figure(out / "ablations.png", 10.5, 3.2 * len(acts)) as drawn:
        grid = drawn.subplots(len(acts), len(kinds), squeeze=False)
        for row, (act, title) in zip(grid, acts.items(), strict=True):
            for axes, (group, (label, base)) in zip(row, kinds.items(), strict=True):
                ways = [
                    way for way in ("sgd", "paper") if select(runs, group=group, act=act, way=way)
                ]
                series = {
                    way: errors(with_base(select(runs, act=act, way=way), group, base))
                    for way in ways
                }
                plot_errors(axes, series, label, apart=True)
                least = min(next(iter(series.values())))
                axes.set(ylabel=f"test FVU, {title}" if axes is row[0] else "")
                found[act][group] = {
                    setting: ratio
                    for way, by_value in series.items()
                    for setting, ratio in ratios(
                        {value: seeds for value, seeds in by_value.items() if value != least},
                        dict.fromkeys(by_value, by_value[least]),
                        NAMES[way],
                    ).items()
                }
        legend_below(drawn, *grid[0, 1].get_legend_handles_labels())
    return found
