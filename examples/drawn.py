"""Figures that several sections have: curves, errors by fraction of the rows, and ablations."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from measured import WAYS, Errors, Run, by_rows, errors, means, runs_of, select, with_base
from verdicts import Ratio, ratios

from saecli.show.style import COLOURS, MARKERS, figure, legend_below, log_scale

KINDS = {
    "decay": ("weight decay", 0.0),
    "proximal": ("mu and nu, encoder", 0.0),
}  # by group: name of the value, and its value in `base`
ABLATED = {"sgd": "SGD at {:g}", "paper": "PAM-SGD at {:g}"}
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
    every = [fvu for by_value in found.values() for seeds in by_value.values() for fvu in seeds]
    if every and not apart:
        log_scale(axes, "x")
    if every and max(every) > NARROW * min(every):
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
            if axes.lines:
                log_scale(axes, "y")
        legend_below(drawn, *panels[0].get_legend_handles_labels())


def sizes(out: Path, runs: list[Run], acts: Mapping[str, str]) -> dict[str, dict[str, Errors]]:
    """Draw the test error against the training rows into `sizes.png`.

    Returns:
        The errors, by activation and way.
    """
    found = {act: {way: by_rows(select(runs, act=act, way=way)) for way in WAYS} for act in acts}
    with figure(out / "sizes.png", 9, 3.4) as drawn:
        panels = drawn.subplots(1, len(acts))
        for axes, (act, title) in zip(panels, acts.items(), strict=True):
            plot_errors(axes, found[act], "training rows")
            axes.set(title=title, ylabel="test FVU")
        legend_below(drawn, *panels[0].get_legend_handles_labels())
    return found


def by_solver(to: Path, folders: Mapping[str, Path]) -> None:
    """Draw the test error of TopK against training rows, by solver, from sections' folders, a panel each."""
    with figure(to, 9, 3.4) as drawn:
        panels = drawn.subplots(1, len(folders))
        for axes, (title, folder) in zip(panels, folders.items(), strict=True):
            some = [run for run in runs_of(folder) if run.act == "topk"]
            found = {way: by_rows(select(some, way=way)) for way in WAYS}
            plot_errors(axes, found, "training rows")
            axes.set(title=title, ylabel="test FVU")
        legend_below(drawn, *panels[0].get_legend_handles_labels())


def varied(
    runs: list[Run], kinds: Mapping[str, tuple[str, float]] = KINDS
) -> dict[str, dict[str, Errors]]:
    """Test errors of the ablations that there are, by group and way; what they vary from included."""
    found: dict[str, dict[str, Errors]] = {}
    for group, (_, base) in kinds.items():
        of_ways = {way: select(runs, act="topk", way=way) for way in ABLATED}
        found[group] = {
            way: errors(with_base(some, group, base))
            for way, some in of_ways.items()
            if select(some, group=group)
        }
    return {group: series for group, series in found.items() if series}


def ablations(
    out: Path, found: Mapping[str, Mapping[str, Errors]], labels: Mapping[str, str]
) -> dict[str, dict[str, Ratio]]:
    """Draw the test error against the value of each ablation into `ablations.png`, a panel a group.

    Returns:
        Errors over those at the least value, by group, and by way and value.
    """
    over: dict[str, dict[str, Ratio]] = {}
    with figure(out / "ablations.png", 1 + 3.5 * max(1, len(found)), 3.2) as drawn:
        panels = drawn.subplots(1, max(1, len(found)), squeeze=False)[0]
        for axes, (group, series) in zip(panels, found.items(), strict=False):
            plot_errors(axes, series, labels[group], apart=True)
            over[group] = {}
            for way, by_value in series.items():
                least = min(by_value)
                more = {value: seeds for value, seeds in by_value.items() if value != least}
                over[group] |= ratios(more, dict.fromkeys(more, by_value[least]), ABLATED[way])
        panels[0].set_ylabel("test FVU, TopK")
        legend_below(drawn, *panels[0].get_legend_handles_labels())
    return over
