"""The rows of an array, to train on.

Shapes: N rows, B rows of a batch, D = d_in, E the width of targets beside the rows.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing
from torch import Tensor

from ..base.errors import ConfigError
from ..store.statistics import Spread

ArrayLike = Tensor | numpy.typing.ArrayLike
CHECKED_ROWS = 65_536  # at a time, so that no second copy of all rows is made


class ArrayRows:
    """The rows of an array, with the interface of `store.Rows` that training uses.

    Args:
        rows: (N, D) numbers, floating or whole; a tensor of float32 or an array is not copied.
        targets: what is predicted from them, (N, E), likewise; None for the rows themselves.

    Raises:
        ConfigError: it is anything else, is empty, or holds a NaN or infinity; or there are other numbers of rows and
            targets.
    """

    def __init__(self, rows: ArrayLike, targets: ArrayLike | None = None) -> None:
        self._targets = None if targets is None else ArrayRows(targets)
        if isinstance(rows, Tensor):
            rows = rows.detach().cpu()
            rows = rows.float() if rows.is_floating_point() and rows.itemsize < 4 else rows  # numpy has no bfloat16
        rows = np.asarray(rows)
        if rows.ndim != 2 or not rows.size or rows.dtype.kind not in "fiu":
            raise ConfigError(f"--rows must be numbers in an array (rows, d_in), got one of {rows.dtype} and shape "
                              f"{tuple(rows.shape)}", option="rows")
        if self._targets is not None and self._targets.rows != len(rows):
            raise ConfigError(f"--target must have as many rows as there are, {len(rows)}, got {self._targets.rows}",
                              option="target")
        self._rows = rows
        # Narrower dtypes are widened; float64 is kept for training in float64.
        self._dtype = np.float64 if rows.dtype == np.float64 else np.float32
        bad = sum(int((~np.isfinite(batch).all(1)).sum()) for batch in self.sequential(CHECKED_ROWS))
        if bad:
            raise ConfigError(f"--rows must be finite, got {bad} of {len(rows)} with a NaN or infinity; leave those "
                              "out", option="rows")

    widths: tuple[int, ...] = ()  # this and the next: see `JoinedRows`
    places: tuple[int, ...] = ()

    @property
    def d_target(self) -> int:
        """Width of the targets; 0 without."""
        return 0 if self._targets is None else self._targets.d_in

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self._rows.shape[0]

    @property
    def d_in(self) -> int:
        """Width of the rows."""
        return self._rows.shape[1]

    def batches(self, batch_size: int, *, seed: int, epoch: int) -> Iterator[np.ndarray]:
        """One epoch of batches (B, D + E), shuffled uniformly; a pure function of seed and epoch."""
        order = np.random.default_rng((seed, epoch)).permutation(self.rows)
        for begin in range(0, self.rows, batch_size):
            yield self._with_targets(order[begin : begin + batch_size])

    def sequential(self, batch_size: int) -> Iterator[np.ndarray]:
        """The rows in order, with their targets beside them, in batches (B, D + E)."""
        for begin in range(0, self.rows, batch_size):
            yield self._with_targets(slice(begin, begin + batch_size))

    def _with_targets(self, chosen: np.ndarray | slice) -> np.ndarray:
        rows = self._rows[chosen].astype(self._dtype)
        if self._targets is None:
            return rows
        return np.concatenate([rows, self._targets._with_targets(chosen)], axis=1)

    def spread(self) -> Spread:
        """Their mean and scatter, in one pass."""
        return Spread.measured(self.sequential(CHECKED_ROWS), self.d_in + self.d_target)
