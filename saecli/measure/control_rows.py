"""Rows with each dimension shuffled for a control, in memory.

Shapes: N rows, D = d_in.
"""

from collections.abc import Sequence

import numpy as np

from ..base.errors import MachineError, size_words
from ..base.machine import available_memory
from ..store.rows import RowSource
from ..train.array_rows import CHECKED_ROWS, ArrayRows

USED = 0.5  # fraction of the free memory that a control's rows may take


def demand_memory(rows: Sequence[RowSource]) -> None:
    """Raise a MachineError if these rows and their targets, in float32, take more than half of the free memory."""
    needed, free = sum(4 * some.rows * (some.d_in + some.d_target) for some in rows), available_memory()
    if needed > USED * free:
        raise MachineError(f"the rows, in memory, take {size_words(needed)}: expected {size_words(USED * free)} at "
                           "most, half of what is free; end other programs, or take a run with a smaller --fraction")


def shuffled(rows: RowSource, seed: int) -> ArrayRows:
    """The rows with each dimension permuted by itself, which keeps every marginal and leaves no other structure.

    Args:
        rows: of a store, without targets.
        seed: of the permutations; the result is a pure function of it and of the rows in stored order.

    Cost: 4 N D bytes, and 7 s per 100 million numbers on one core.
    """
    found, at = np.empty((rows.rows, rows.d_in), np.float32), 0
    for batch in rows.sequential(CHECKED_ROWS):
        found[at : at + len(batch)] = batch
        at += len(batch)
    random = np.random.default_rng(seed)
    return ArrayRows(random.permuted(found, axis=0, out=found))
