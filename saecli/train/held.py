"""Rows kept on the device that trains on them, from which batches are gathered.

Legend: N rows of the stores, B rows of a batch, D = d_in, E the width of targets beside the rows; 0 without.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..base.devices import carried, moved
from ..store.joined import JoinedRows
from ..store.rows import Rows as StoredRows

READ_BYTES = 64 << 20  # of rows at a time, on their way to the device


class HeldRows:
    """Rows whose stores lie on a device as they are stored; their batches are those of the rows, and lie there too.

    Args:
        rows: the rows.
        device: where they are kept.

    Raises:
        StoreError: a shard is missing or damaged.

    Cost: `held_bytes` of the device's memory, and one pass over the stores, when the first batch is wanted.
    """

    def __init__(self, rows: StoredRows | JoinedRows, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self._held: Tensor | None = None
        self.rows, self.d_in, self.d_target = rows.rows, rows.d_in, rows.d_target

    def batches(self, batch_size: int, *, seed: int, epoch: int) -> Iterator[Tensor]:
        """One epoch of shuffled batches, (B, D + E), in the stores' dtype; see `store.Rows.batches`."""
        return self._gathered(self._rows.order(batch_size, seed=seed, epoch=epoch))

    def sequential(self, batch_size: int) -> Iterator[Tensor]:
        """The rows in stored order, (B, D + E)."""
        return self._gathered(self._rows.numbers(batch_size))

    def _gathered(self, numbers: Iterator[np.ndarray]) -> Iterator[Tensor]:
        if self._held is None:
            self._held = self._read()
        for batch in numbers:
            yield self._held[moved(torch.from_numpy(batch), self._device)]

    def _read(self) -> Tensor:
        """All rows of the stores, (N, D + E)."""
        whole = self._rows.whole().as_stored()
        row_bytes = held_bytes(self._rows) // whole.rows
        held, begin = None, 0
        for batch in carried(whole.sequential(max(1, READ_BYTES // row_bytes)), self._device):
            if held is None:
                held = batch.new_empty(whole.rows, batch.shape[1])
            held[begin : begin + len(batch)] = batch
            begin += len(batch)
        assert held is not None  # stores have rows
        return held


def held_bytes(rows: StoredRows | JoinedRows) -> int:
    """Bytes that the rows' stores take as they are stored."""
    return sum(store.stored_bytes for store in (rows.stores.all if isinstance(rows, JoinedRows) else [rows.store]))
