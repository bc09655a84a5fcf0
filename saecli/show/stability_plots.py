"""A picture of several runs' latents: how alike their counterparts in other runs are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from ..base.wording import counted
from .style import GREY, figure, legend_below, line_style, log_scale, say_empty, short

BINS = 40
GROUPS = 10  # of latents of like frequency


def stability(path: Path, document: Mapping[str, Any]) -> None:
    """Draw what `saecli.stability` returned for runs with rows: how alike latents are to their counterparts, and that
    against how often they fire.

    On the right a point is about a tenth of a run's latents that fire and have a counterpart, of similar frequency: the
    median of their frequencies, and the mean of their `|cosine|`.
    """
    threshold = document["match_threshold"]
    with figure(path, 9, 3.6) as drawn:
        left, right = drawn.subplots(1, 2)
        handles, labels = [], []
        for index, run in enumerate(document["runs"]):
            cosine, frequency = (np.asarray(run[name], dtype=float) for name in ("cosine", "frequency"))
            style = line_style(index)
            counts, edges = np.histogram(cosine[~np.isnan(cosine)], BINS, (0, 1))
            left.stairs(counts / max(len(cosine), 1), edges, **style, linewidth=1.6)
            groups = _groups(np.where(np.isnan(cosine), 0, frequency))
            right.plot([np.median(frequency[group]) for group in groups], [cosine[group].mean() for group in groups],
                       **style, marker="o")
            handles.append(Line2D([], [], **style))
            silent = int((frequency == 0).sum())
            labels.append(f"{short(run['run'])} ({counted(len(cosine), 'latent')}, {silent:,} silent)")
        left.axvline(threshold, color=GREY, linestyle=":", linewidth=1)
        left.text(threshold, 1.0, " matched", transform=left.get_xaxis_transform(), color=GREY, va="bottom", ha="left",
                  fontsize=8)
        left.set(xlabel="|cosine| with its counterparts, mean over other runs", ylabel="fraction of latents",
                 xlim=(0, 1), ylim=(0, None))
        right.set(xlabel="fraction of rows a latent fires on", ylabel="|cosine|, mean", ylim=(-0.02, 1.02))
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
