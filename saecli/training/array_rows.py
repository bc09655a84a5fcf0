"""Rows in memory, to train on as on those of a store.

Legend: N rows, D = d_in, B rows of a batch.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing
from torch import Tensor

from ..errors import ConfigError
from ..store import Spread

ArrayLike = Tensor | numpy.typing.ArrayLike
CHECKED_ROWS = 65_536  # at a time, so that no second copy of all rows is made


class ArrayRows:
    """The rows of an array; what training asks of `store.Rows`, it answers.

    Args:
        rows: (N, D) numbers, floating or whole; a tensor of float32 or an array is not copied.

    Raises:
        ConfigError: it is not, is empty, or holds a NaN or infinity.
    """

    def __init__(self, rows: ArrayLike) -> None:
        if isinstance(rows, Tensor):
            rows = rows.detach().cpu()
            rows = rows.float() if rows.is_floating_point() and rows.itemsize < 4 else rows  # numpy has no bfloat16
        rows = np.asarray(rows)
        if rows.ndim != 2 or not rows.size or rows.dtype.kind not in "fiu":
            raise ConfigError("rows", "must be numbers in an array (rows, d_in), got one of {dtype} and shape {shape}",
                              dtype=rows.dtype, shape=tuple(rows.shape))
        self._rows = rows
        # Narrower numbers are widened, wider ones kept: what trains in float64 shall have them.
        self._dtype = np.float64 if rows.dtype == np.float64 else np.float32
        bad = sum(int((~np.isfinite(batch).all(1)).sum()) for batch in self.sequential(CHECKED_ROWS))
        if bad:
            raise ConfigError("rows", "must be finite, got {bad} of {count} with a NaN or infinity", "leave those out",
                              bad=bad, count=len(rows))

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self._rows.shape[0]

    @property
    def d_in(self) -> int:
        """Dimensions of a row."""
        return self._rows.shape[1]

    def batches(self, batch_size: int, *, seed: int, epoch: int) -> Iterator[np.ndarray]:
        """One epoch of batches (B, D), shuffled uniformly; a pure function of seed and epoch."""
        order = np.random.default_rng((seed, epoch)).permutation(self.rows)
        for begin in range(0, self.rows, batch_size):
            yield self._rows[order[begin : begin + batch_size]].astype(self._dtype)

    def sequential(self, batch_size: int) -> Iterator[np.ndarray]:
        """The rows in order, in batches (B, D)."""
        for begin in range(0, self.rows, batch_size):
            yield self._rows[begin : begin + batch_size].astype(self._dtype)

    def spread(self) -> Spread:
        """Their mean and scatter, in one pass."""
        return Spread.measured(self.sequential(CHECKED_ROWS), self.d_in)
