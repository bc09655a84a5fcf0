"""Where the windows of tokens begin that a store's rows come from. Shapes: R rows."""

import numpy as np


def window_starts(documents: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The indices, ascending, of the rows with which a window begins, the first row of all not counted.

    A window of a store is told by its rows: they are of one document, and their positions ascend.

    Args:
        documents: (R,) integers, of rows in stored order.
        positions: (R,) integers, of the same rows.
    """
    return 1 + np.flatnonzero((np.diff(documents) != 0) | (np.diff(positions) <= 0))
