"""A picture of several runs' latents: how alike their counterparts in other runs are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike, NDArray

from ..base.wording import counted
from .style import GREY, figure, legend_below, line_style, log_scale, say_empty, short

BINS = 40
GROUPS = 10  # of latents of like frequency


def draw_stability(path: Path, document: Mapping[str, Any]) -> Path:
    """Draw what `saecli.stability` returned for runs with rows, next to the picture of that path; returns where."""
    own = path.with_stem(f"{path.stem}-stability")
    stability(own, {run["run"]: (run["cosine"], run["match_fraction"], run["frequency"]) for run in document["runs"]},
              document["match_threshold"])
    return own


def stability(path: Path, runs: Mapping[str, tuple[ArrayLike, ArrayLike, ArrayLike]], threshold: float) -> None:
    """Draw how alike latents are to their counterparts, and in how many runs they are matched against how often they
    fire.

    On the right a point is about a tenth of a run's latents that fire, those of like frequency: the median of their
    frequencies, and the mean of their match fractions.

    Args:
        path: PNG, PDF or SVG by its ending.
        runs: by name, of each latent the mean `|cosine|` with its counterparts, None for no counterpart; the fraction
            of the other runs in which it is matched; and the fraction of rows that it fires on; each (F,), in [0, 1].
        threshold: the `|cosine|` above which it is matched.

    Raises:
        ConfigError: the ending is another.
    """
    with figure(path, 9, 3.6) as drawn:
        left, right = drawn.subplots(1, 2)
        handles, labels = [], []
        for index, (name, columns) in enumerate(runs.items()):
            cosine, matched, frequency = (np.asarray(column, dtype=float) for column in columns)
            style = line_style(index)
            counts, edges = np.histogram(cosine[~np.isnan(cosine)], BINS, (0, 1))
            left.stairs(counts / max(len(cosine), 1), edges, **style, linewidth=1.6)
            groups = _groups(frequency)
            right.plot([np.median(frequency[group]) for group in groups], [matched[group].mean() for group in groups],
                       **style, marker="o")
            handles.append(Line2D([], [], **style))
            silent = int((frequency == 0).sum())
            labels.append(f"{short(name)} ({counted(len(cosine), 'latent')}, {silent:,} silent)")
        left.axvline(threshold, color=GREY, linestyle=":", linewidth=1)
        left.text(threshold, 1.0, " matched", transform=left.get_xaxis_transform(), color=GREY, va="bottom", ha="left",
                  fontsize=8)
        left.set(xlabel="|cosine| with its counterparts, mean over other runs", ylabel="fraction of latents",
                 xlim=(0, 1), ylim=(0, None))
        right.set(xlabel="fraction of rows a latent fires on", ylabel="fraction of other runs matched in",
                  ylim=(-0.02, 1.02))
        if any(len(line.get_xdata()) for line in right.lines):
            log_scale(right, "x")
        else:
            say_empty(right, "no latent fires")
        legend_below(drawn, handles, labels)


def _groups(frequency: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """The latents that fire, in at most `GROUPS` groups between quantiles of their frequencies, equal ones together."""
    fires = np.flatnonzero(frequency > 0)
    if not len(fires):
        return []
    edges = np.unique(np.quantile(frequency[fires], np.linspace(0, 1, GROUPS + 1)))
    group = np.digitize(frequency[fires], edges[1:-1])
    return [fires[group == number] for number in np.unique(group)]
