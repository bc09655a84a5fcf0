"""Margins and local complexity of rows: how far the nearest boundary is, and how many are near.

    margin:             distance of x to the boundary of its cell, see `cells.py`
    local complexity:   boundary hyperplanes within a radius of x

Source: the paper on the half-spaces that bound a cell; Humayun et al., "SplineCam: Exact visualization and
characterization of deep network geometry and decision boundaries" (2023), for local complexity.
Shapes: B rows, D = d_in, F = d_sae.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .cells import Cells
from .census import describe, spread_out

COMPLEXITY_ROWS = 1000  # rows whose local complexity is counted
ELSEWHERE_ROWS = 10_000  # rows of the other split whose margins are measured
BATCH_CODES = 2**22  # float64 codes at a time, 32 MiB


def batch_size(d_sae: int) -> int:
    """Rows that a pass takes at a time."""
    return max(16, min(1024, BATCH_CODES // d_sae))


def margins_of(cells: Cells, x: Tensor, pre: Tensor) -> NDArray[np.float64]:
    """(margin, margin / ||x||) of rows, (B, D), given their pre-activations, (B, F): (B, 2)."""
    margins = cells.margins(pre)
    # A row at the origin is infinitely far from its boundary in units of its own norm.
    relative = margins / x.double().norm(dim=1)
    return torch.stack([margins, relative.nan_to_num(0.0, torch.inf)], 1).numpy()


def margin_measures(margins: NDArray[np.float64]) -> dict[str, Any]:
    """The distribution of margins, the first of two columns, in units of the rows, and as `relative` of the second,
    in units of each row's norm."""
    margin, relative = margins.T
    return {**describe(margin), "relative": describe(relative)}


def radius_of(rows: NDArray, fraction: float) -> float:
    """The radius of the local complexity: a share of the median distance of rows, (B, D), to their mean."""
    return fraction * float(np.median(np.linalg.norm(rows - rows.mean(0, dtype=np.float64), axis=1)))


@torch.no_grad()
def local_complexity(cells: Cells, rows: NDArray, radius: float) -> NDArray[np.int64]:
    """Boundary hyperplanes within the radius of each of at most 1000 of the rows, (B, D)."""
    some = torch.from_numpy(spread_out(rows, COMPLEXITY_ROWS))
    return cells.crossings(cells.pre_activations(some), radius).numpy()


@torch.no_grad()
def margins_and_complexity(cells: Cells, rows: NDArray, radius: float) -> tuple[NDArray, NDArray]:
    """(margin, margin / ||x||), (B, 2), of at most 10,000 of some rows, and the local complexity of at most 1000."""
    some = torch.from_numpy(spread_out(rows, ELSEWHERE_ROWS))
    margins = np.concatenate([margins_of(cells, x, cells.pre_activations(x))
                              for x in some.split(batch_size(cells.sae.d_sae))])
    return margins, local_complexity(cells, rows, radius)
