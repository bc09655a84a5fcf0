"""The memory that a decoder step takes, and the way of solving it that fits.

Shapes: N rows in all, F = d_sae, E targets.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from ..codes import Codes
from .dual import HeldRows
from .iterative import COLUMNS, StreamedCodes
from .sums import Sums

KEPT_FRACTION = 0.8  # of the memory that is left, for codes that an iteration keeps
MATRICES = 6  # F x E matrices of float64 that a solution takes


@dataclass(frozen=True)
class Plan:
    """How a decoder step is solved.

    Args:
        kind: "direct" by the sums over the rows, "dual" by the rows themselves, "iterative" by products with codes.
        bytes: of memory at the peak; for an iteration without any code that it keeps, the least that it works with.
        budget: bytes that an iteration's kept codes may take.
    """

    kind: str
    bytes: int
    budget: float = 0.0

    def system(self, start: Tensor, again: Callable[[], Iterator[Codes]]) -> Sums | HeldRows | StreamedCodes:
        """Empty normal equations, of the sizes and device of the decoder before the step, (F, E); `again` gives the
        codes of all blocks again, for an iteration that could not keep them."""
        if self.kind == "direct":
            return Sums(*start.shape, start.device)
        return HeldRows() if self.kind == "dual" else StreamedCodes(start, again, self.budget)


def plan(rows: int, d_sae: int, d_out: int, memory: float = math.inf, solve: str = "auto") -> Plan:
    """The way to solve a decoder step: by a factorisation where that fits, else by iteration.

    Args:
        rows: N.
        d_sae: F.
        d_out: E.
        memory: bytes that are free for it. What a plan takes may be more, where no way fits.
        solve: "direct" for a factorisation in any case, "iterative" for none, or "auto".
    """
    if rows < d_sae:
        # Codes, their centred and weighted copies, targets, and products of N x N.
        factorised = Plan("dual", 8 * (rows * (5 * d_sae + d_out) + rows * (rows + 1) + MATRICES * d_sae * d_out))
    else:
        # The Gram matrix, whose factor shares its array.
        factorised = Plan("direct", 8 * d_sae * (d_sae + 1 + MATRICES * d_out))
    streaming, keeping = (8 * d_sae * (MATRICES * d_out + 6 * columns)  # vectors of the iteration, for each column
                          for columns in (d_out, min(COLUMNS, d_out)))
    if solve == "direct" or (solve == "auto" and factorised.bytes <= max(memory, streaming)):
        return factorised
    return Plan("iterative", streaming, KEPT_FRACTION * max(memory - keeping, 0))
