"""Pictures of a crosscoder: its latents by place."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from .style import COLOURS, GREY, figure, say_empty, short

BINS = 40


def places(path: Path, title: str, names: Sequence[str], share: ArrayLike, scaling: ArrayLike) -> None:
    """Draw each latent's share of decoder norm at the places, and against it the multiple of it that serves the others.

    Args:
        path: PNG, PDF or SVG by its ending.
        title: the run's name.
        names: of the places.
        share: (F, P), in [0, 1]; see `measure/places.py`.
        scaling: (F, P), NaN where unknown.

    Raises:
        ConfigError: the ending is another.
    """
    share, scaling = np.asarray(share, float), np.asarray(scaling, float)
    largest = share.argmax(1)
    scaling[np.arange(len(share)), largest] = np.nan  # 1, or nearly
    with figure(path, 9, 3.6) as drawn:
        left, right = drawn.subplots(1, 2)
        for place, name in enumerate(names):
            colour = COLOURS[place % len(COLOURS)]
            counts, edges = np.histogram(share[:, place], BINS, (0, 1))
            left.stairs(counts, edges, color=colour, linewidth=1.6, label=short(name))
            own = np.isfinite(scaling) & (largest == place)[:, None]
            rows, others = np.nonzero(own)
            right.scatter(share[rows, place], scaling[rows, others], s=8, color=colour, linewidths=0)
        left.set(xlabel="share of a latent's decoder norm", ylabel="latents", xlim=(0, 1))
        left.legend(fontsize=8)
        if np.isfinite(scaling).any():
            for level in (0, 1):
                right.axhline(level, color=GREY, linewidth=0.8)
            low, high = np.nanquantile(scaling, [0.005, 0.995])
            right.set(ylim=(min(low, -0.1) - 0.1, max(high, 1.0) + 0.1))
        else:
            say_empty(right)
        right.set(xlabel="share at the place where it is largest", ylabel="latent scaling at another place")
        drawn.suptitle(short(title), fontsize=10)
