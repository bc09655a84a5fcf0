"""The memory that a decoder step takes, and the way to solve it within a budget.

Shapes: N rows in all, F = d_sae, E targets.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from ...sae.codes import Codes, Prefixes
from .dual import HeldRows
from .iterative import COLUMNS, StreamedCodes
from .sums import Sums

KEPT_FRACTION = 0.8  # of the remaining memory, for the codes that an iteration keeps
MATRICES = 6  # F x E matrices of float64 that a solution takes


@dataclass(frozen=True)
class Plan:
    """How a decoder step is solved.

    Args:
        kind: "direct" by the sums over the rows, "dual" by the rows themselves, "iterative" by products with codes.
        bytes: peak memory; for an iteration without kept codes, the least that it needs.
        budget: bytes for the codes that an iteration keeps.
        prefixes: of a nested dictionary; none otherwise.
    """

    kind: str
    bytes: int
    budget: float = 0.0
    prefixes: Prefixes = ()

    def system(self, start: Tensor, again: Callable[[], Iterator[Codes]]) -> Sums | HeldRows | StreamedCodes:
        """Empty normal equations, with the shape and device of the decoder before the step, (F, E); `again` gives the
        codes of all blocks once more, for an iteration that could not keep them."""
        if self.kind == "direct":
            return Sums(*start.shape, start.device, self.prefixes)
        return HeldRows() if self.kind == "dual" else StreamedCodes(start, again, self.budget, self.prefixes)


def plan(rows: int, d_sae: int, d_out: int, memory: float = math.inf, solve: str = "auto",
         prefixes: Prefixes = ()) -> Plan:
    """The way to solve a decoder step: by a factorisation if it fits, else by iteration.

    Args:
        rows: N.
        d_sae: F.
        d_out: E.
        memory: free bytes; a plan may need more if none fits.
        solve: "direct" for a factorisation in any case, "iterative" for none, or "auto".
        prefixes: of a nested dictionary, which is not solved in N dimensions: none otherwise.
    """
    if rows < d_sae and not prefixes:
        # Codes, their centred and weighted copies, targets, and products of N x N.
        factorised = Plan("dual", 8 * (rows * (5 * d_sae + d_out) + rows * (rows + 1) + MATRICES * d_sae * d_out))
    else:
        # The Gram matrix, whose factor shares its array.
        factorised = Plan("direct", 8 * d_sae * (d_sae + 1 + MATRICES * d_out), prefixes=prefixes)
    streaming, keeping = (8 * d_sae * (MATRICES * d_out + 6 * columns)  # vectors of the iteration, for each column
                          for columns in (d_out, min(COLUMNS, d_out)))
    if solve == "direct" or (solve == "auto" and factorised.bytes <= max(memory, streaming)):
        return factorised
    return Plan("iterative", streaming, KEPT_FRACTION * max(memory - keeping, 0), prefixes)
