"""One pass over rows that gathers what `sae geometry` reports, and the measures of its samples.

Shapes: B rows, D = d_in.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..dictionary import SAE
from .affine_maps import ranks
from .agreement import agreement, cell_agreement
from .cells import Cells
from .census import KEY_BYTES, Census, Reservoir, describe, spread_out
from .margins import visit
from .power_diagram import kth_order_diagram

MARGINS = 200_000  # margins kept for quantiles
SAMPLE_ROWS = 50_000  # rows kept for the references
SAMPLE_BYTES = 2**28  # their size in float32 at most, 256 MiB
AGREEMENT_WORK = 2 * 10**10  # rows n D of true distances at most, some ten seconds on two cores
CELL_ROWS = 2000  # rows compared with the own sites, nu_S and beta_S, of the cells that they visit
RANK_ROWS = 100  # rows whose cells' maps have their rank found


def sample_capacity(d_in: int, rows: int = SAMPLE_ROWS) -> int:
    """Rows that a sample holds: so many, fewer where they would fill more than 256 MiB."""
    return max(1, min(rows, SAMPLE_BYTES // (4 * d_in)))


@dataclass
class Survey:
    """What a pass over rows has gathered so far, in constant memory.

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
        distribution, and the share of cells where it is as large as S and D allow."""
        some = torch.from_numpy(spread_out(self.sample.rows, RANK_ROWS))
        supports = torch.unique(self.cells.supports(self.cells.pre_activations(some)), dim=0)
        found = np.array(ranks(self.cells.sae, supports))  # (C, 2)
        full = found[:, 1] == np.minimum(found[:, 0], self.cells.sae.d_in)
        return {"cells": len(found), "full": float(full.mean()), **describe(found[:, 1].astype(float))}

    @torch.no_grad()
    def agreement_measures(self, sae: SAE) -> dict[str, Any] | None:
        """How far nearest power cells and supports agree on the sample, on as many rows as `AGREEMENT_WORK` allows;
        None for an activation without a power diagram."""
        affordable = max(16, AGREEMENT_WORK // (2 * sae.d_sae * sae.d_in))
        some = torch.from_numpy(spread_out(self.sample.rows, affordable))
        of_sites, of_cells = agreement(sae, some.split(64)), cell_agreement(sae, some[:CELL_ROWS])
        order = kth_order_diagram(sae)
        if of_sites is None or of_cells is None or order is None:
            return None
        own, cells = of_cells
        return {"agreement": of_sites.share, "ties": of_sites.ties, "rows": of_sites.rows,
                "sites": len(order.diagram.weights), "order": order.k,
                "own_sites": {"agreement": own.share, "ties": own.ties, "rows": own.rows, "cells": cells}}


def gather(cells: Cells, batches: Iterable[Tensor]) -> Survey:
    """Survey all rows of some batches, each (B, D)."""
    capacity = sample_capacity(cells.sae.d_in)
    survey = Survey(cells, Reservoir(capacity), Reservoir(capacity))
    for x in batches:
        survey.add(x)
    return survey
