"""One pass over rows for `sae geometry`: margins, local complexity, ranks, degenerate latents.

    margin:             distance of x to the boundary of its cell, see `cells.py`
    local complexity:   boundary hyperplanes within a radius of x
    on a cell:          x_hat = x A_S + a_S        A_S = W_enc[:, S] W_dec[S, :]        rank A_S <= min(|S|, D)

Source: the paper on SAEs as piecewise affine splines and on the half-spaces that bound a cell; Humayun et al.,
"SplineCam: Exact visualization and characterization of deep network geometry and decision boundaries" (2023), for
local complexity. Shapes: B rows, D = d_in, F = d_sae.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..sae.activations import Thresholded
from ..sae.dictionary import SAE
from .agreement import agreement, cell_agreement
from .cells import Cells
from .census import KEY_BYTES, Census, Reservoir, describe, spread_out, support_keys
from .power_diagram import kth_order_diagram


def rank(sae: SAE, support: Tensor) -> int:
    """The rank of the SAE's affine map on a cell, at most the latents that it keeps.

    Args:
        sae: the autoencoder, float64.
        support: the latents of S, (|S|,).

    Cost: O(D |S|^2) for two QR factorisations; the product of the triangles has the map's singular values.
    """
    if not len(support):
        return 0
    left, right = sae.W_enc[:, support], sae.W_dec[support]
    if len(support) >= sae.d_in:
        return int(torch.linalg.matrix_rank(left @ right))
    inner = torch.linalg.qr(left, mode="r").R @ torch.linalg.qr(right.T, mode="r").R.T
    return int(torch.linalg.matrix_rank(inner))


def ranks(sae: SAE, supports: Iterable[Tensor]) -> list[tuple[int, int]]:
    """For each of some supports, (F,) bool: how many latents it keeps, and the rank of its map."""
    sae = sae.copy_to(torch.float64)
    return [(int(support.sum()), rank(sae, support.nonzero()[:, 0])) for support in supports]


@dataclass(frozen=True)
class Degenerate:
    """How many latents bound no cell of their own, or add no direction.

    Args:
        zero_encoder: latents whose encoder weights are all zero: on whatever the row, or never.
        equal_encoder: latents whose encoder weights, bias and threshold are also another's: where either is kept is
            a tie.
        zero_decoder: latents whose dictionary vector is zero.
        equal_decoder: latents whose dictionary vector is also another's, zeros left out.
    """

    zero_encoder: int
    equal_encoder: int
    zero_decoder: int
    equal_decoder: int

    @classmethod
    def of(cls, sae: SAE) -> "Degenerate":
        """Count them.

        Cost: O(D F).
        """
        encoder = torch.cat([sae.W_enc, sae.b_enc[None]])
        if isinstance(sae.activation, Thresholded):
            thresholds = sae.activation.thresholds(sae.activation_parameters, sae.d_sae)
            encoder = torch.cat([encoder, thresholds.to(encoder)[None]])
        zero = (sae.W_dec == 0).all(1)
        return cls(int((sae.W_enc == 0).all(0).sum()), _in_groups(encoder.T), int(zero.sum()),
                   _in_groups(sae.W_dec[~zero]))


def _in_groups(rows: Tensor) -> int:
    """Number of rows, (F, any), that equal another."""
    # Adding 0.0 turns -0.0 into 0.0.
    counts = Counter(blake2b(row, digest_size=16).digest() for row in (rows + 0.0).contiguous().numpy())
    return sum(count for count in counts.values() if count > 1)


COMPLEXITY_ROWS = 1000  # rows whose local complexity is counted
HELD_OUT_ROWS = 10_000  # held-out rows whose margins are compared with training rows'
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
    """The radius of the local complexity: a fraction of the median distance of rows, (B, D), to their mean."""
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


MARGINS = 200_000  # margins kept for quantiles
SAMPLE_ROWS = 50_000  # rows kept for the references
SAMPLE_BYTES = 2**28  # their size in float32 at most, 256 MiB
AGREEMENT_WORK = 2 * 10**10  # rows n D of true distances at most, some ten seconds on two cores
CELL_ROWS = 2000  # rows compared with the own sites, nu_S and beta_S, of the cells that they visit
RANK_ROWS = 100  # rows whose cells' maps have their rank found


def sample_capacity(d_in: int, rows: int = SAMPLE_ROWS) -> int:
    """Rows of a sample: `rows`, or fewer to stay within 256 MiB."""
    return max(1, min(rows, SAMPLE_BYTES // (4 * d_in)))


@dataclass
class Survey:
    """The results of a pass over rows so far, in constant memory.

    Args:
        cells: the partition.
        census: the cells visited.
        margins: a sample of (margin, margin / ||x||), (B, 2).
        sample: a sample of the rows, (B, D), float32.
        sample_keys: the keys of their cells, (B,).
    """

    cells: Cells
    sample: Reservoir
    sample_keys: Reservoir
    census: Census = field(default_factory=Census)
    margins: Reservoir = field(default_factory=lambda: Reservoir(MARGINS))

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Count some rows, (B, D)."""
        supports, keys, margins = visit(self.cells, x)
        self.census.add(keys, np.count_nonzero(supports.numpy()))
        self.margins.add(margins)
        # Two reservoirs of one seed and size keep the same rows.
        self.sample.add(x.float().numpy())
        self.sample_keys.add(np.frombuffer(b"".join(keys), f"V{KEY_BYTES}"))

    @torch.no_grad()
    def rank_measures(self) -> dict[str, Any]:
        """The rank of the SAE's affine map on the cells of at most 100 rows of the sample, each cell once: its
        distribution, and the fraction of cells where it is as large as S and D allow."""
        some = torch.from_numpy(spread_out(self.sample.rows, RANK_ROWS))
        supports = torch.unique(self.cells.supports(self.cells.pre_activations(some)), dim=0)
        found = np.array(ranks(self.cells.sae, supports))  # (C, 2)
        full = found[:, 1] == np.minimum(found[:, 0], self.cells.sae.d_in)
        return {"cells": len(found), "full": float(full.mean()), **describe(found[:, 1].astype(float))}

    @torch.no_grad()
    def agreement_measures(self, sae: SAE) -> dict[str, Any] | None:
        """The agreement of nearest power cells and supports on the sample, within `AGREEMENT_WORK`; None for an
        activation without a power diagram."""
        affordable = max(16, AGREEMENT_WORK // (2 * sae.d_sae * sae.d_in))
        some = torch.from_numpy(spread_out(self.sample.rows, affordable))
        of_sites, of_cells = agreement(sae, some.split(64)), cell_agreement(sae, some[:CELL_ROWS])
        order = kth_order_diagram(sae)
        if of_sites is None or of_cells is None or order is None:
            return None
        own, cells = of_cells
        return {"agreement": of_sites.fraction, "ties": of_sites.ties, "rows": of_sites.rows,
                "sites": len(order.diagram.weights), "order": order.k,
                "own_sites": {"agreement": own.fraction, "ties": own.ties, "rows": own.rows, "cells": cells}}


def gather(cells: Cells, batches: Iterable[Tensor]) -> Survey:
    """Survey all rows of some batches, each (B, D)."""
    capacity = sample_capacity(cells.sae.d_in)
    survey = Survey(cells, Reservoir(capacity), Reservoir(capacity))
    for x in batches:
        survey.add(x)
    return survey
