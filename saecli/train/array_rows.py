"""Rows of an array, and rows kept on the device that trains on them.

Shapes: N rows, B rows of a batch, D = d_in, E the width of targets next to the rows; 0 without.
"""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing
import torch
from torch import Tensor

from ..base.devices import carried, moved
from ..base.errors import ConfigError
from ..store.joined import JoinedRows
from ..store.reader import RowSource
from ..store.stream import WHOLE, Part
from ..store.values import Spread

ArrayLike = Tensor | numpy.typing.ArrayLike
CHECKED_ROWS = 65_536  # rows per block, to avoid a second copy of all
READ_BYTES = 64 << 20  # of rows per block, on their way to the device


class ArrayRows:
    """The rows of an array, a `RowSource`.

    Args:
        rows: (N, D), any real dtype; float32 tensors and arrays are not copied.
        targets: (N, E), likewise; None for the rows themselves.

    Raises:
        ConfigError: an empty array, another shape or dtype, a NaN or infinity, or unequal numbers of rows and targets.
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

    widths: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    inputs = ()
    target = None
    name = "these rows"
    passes = math.inf
    warnings: tuple[str, ...] = ()

    def as_stored(self) -> "ArrayRows":
        return self

    @property
    def d_target(self) -> int:
        return 0 if self._targets is None else self._targets.d_in

    @property
    def rows(self) -> int:
        return self._rows.shape[0]

    ready = rows

    @property
    def d_in(self) -> int:
        return self._rows.shape[1]

    def batches(self, batch_size: int, *, seed: int, epoch: int, part: Part = WHOLE) -> Iterator[np.ndarray]:
        """One epoch of batches (B, D + E), shuffled uniformly; a pure function of seed and epoch."""
        order = np.random.default_rng((seed, epoch)).permutation(self.rows)
        for begin in range(0, self.rows, batch_size):
            numbers = order[begin : begin + batch_size]
            first, stop = part.of(len(numbers))
            if stop > first:
                yield self._with_targets(numbers[first:stop])

    def sequential(self, batch_size: int, part: Part = WHOLE) -> Iterator[np.ndarray]:
        """The rows in order, (B, D + E)."""
        first, stop = part.of(math.ceil(self.rows / batch_size))
        for block in range(first, stop):
            yield self._with_targets(slice(block * batch_size, (block + 1) * batch_size))

    def _with_targets(self, chosen: np.ndarray | slice) -> np.ndarray:
        rows = self._rows[chosen].astype(self._dtype)
        if self._targets is None:
            return rows
        return np.concatenate([rows, self._targets._with_targets(chosen)], axis=1)

    def spread(self) -> Spread:
        return Spread.measured(self.sequential(CHECKED_ROWS), self.d_in + self.d_target)


class HeldRows:
    """Rows of stores kept on the GPU in their storage dtype; batches are those of the rows.

    Cost: `held_bytes` of the device's memory, and one pass over the stores before the first batch.
    """

    def __init__(self, rows: RowSource, device: torch.device) -> None:
        self._rows, self._device = JoinedRows(rows.inputs, rows.target), device
        self._held: Tensor | None = None
        self.rows, self.d_in, self.d_target = rows.rows, rows.d_in, rows.d_target

    def batches(self, batch_size: int, *, seed: int, epoch: int, part: Part = WHOLE) -> Iterator[Tensor]:
        """One epoch of shuffled batches, (B, D + E)."""
        assert part == WHOLE, "several processes read their parts from the stores"
        return self._gathered(self._rows.order(batch_size, seed=seed, epoch=epoch))

    def sequential(self, batch_size: int, part: Part = WHOLE) -> Iterator[Tensor]:
        """The rows in stored order, (B, D + E)."""
        assert part == WHOLE, "several processes read their parts from the stores"
        return self._gathered(self._rows.numbers(batch_size))

    def _gathered(self, numbers: Iterator[np.ndarray]) -> Iterator[Tensor]:
        if self._held is None:
            self._held = self._read()
        for batch in numbers:
            yield self._held[moved(torch.from_numpy(batch), self._device)]

    def _read(self) -> Tensor:
        """All rows of the stores, (N, D + E)."""
        whole = self._rows.whole().as_stored()
        size = max(1, READ_BYTES * whole.rows // held_bytes(self._rows))
        held, begin = torch.empty(0), 0
        for batch in carried(whole.sequential(size), self._device):
            if not begin:
                held = batch.new_empty(whole.rows, batch.shape[1])
            held[begin : begin + len(batch)] = batch
            begin += len(batch)
        return held


def held_bytes(rows: RowSource) -> int:
    """Bytes that the rows' stores take as stored; 0 without stores."""
    return sum(one.store.rows * one.store.meta.row_bytes for one in (*rows.inputs, rows.target) if one)
