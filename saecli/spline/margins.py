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
from .census import describe, spread_out, support_keys

COMPLEXITY_ROWS = 1000  # rows whose local complexity is counted
HELD_OUT_ROWS = 10_000  # held-out rows whose margins are set against those of training rows
BATCH_CODES = 2**23  # codes at a time, 64 MiB in float64


def batch_size(d_sae: int) -> int:
    """Rows that a pass takes at a time."""
    return max(16, min(1024, BATCH_CODES // d_sae))


def with_relative(margins: Tensor, x: Tensor) -> NDArray[np.float64]:
    """(margin, margin / ||x||) of rows, (B, D), given their margins, (B,): (B, 2)."""
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


def visit(cells: Cells, x: Tensor) -> tuple[Tensor, list[bytes], NDArray[np.float64]]:
    """Supports, (B, F), the keys of these cells, and (margin, margin / ||x||), (B, 2), of rows, (B, D)."""
    supports, margins = cells.look(x)
    return supports, support_keys(supports), with_relative(margins, x)


@torch.no_grad()
def visits(cells: Cells, rows: NDArray) -> tuple[list[bytes], NDArray[np.float64]]:
    """The key of each row's cell, and (margin, margin / ||x||), (B, 2), of rows in memory, (B, D)."""
    keys: list[bytes] = []
    margins = []
    for x in torch.from_numpy(rows).split(batch_size(cells.sae.d_sae)):
        _, some, distances = visit(cells, x)
        keys += some
        margins.append(distances)
    return keys, np.concatenate(margins)
