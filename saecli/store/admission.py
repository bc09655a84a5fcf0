"""Which rows of a producer's blocks are stored.

A verdict on a block is an array (R,) of uint8: for each row `ADMITTED`, or a key of `REASONS`.

Legend: R rows, D = d_in.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from .dtypes import DTYPES
from .schema import StoreMeta
from .sparse_rows import SparseRows
from .statistics import Dropped, row_norms

ADMITTED, NONFINITE, HIGH_NORM, BESIDE = range(4)
REASONS = {NONFINITE: "nonfinite", HIGH_NORM: "high_norm", BESIDE: "beside"}

Columns = Mapping[str, np.ndarray | SparseRows]
Key = TypeVar("Key")


def jointly(verdicts: Mapping[Key, np.ndarray]) -> dict[Key, np.ndarray]:
    """The verdicts on a block of stores that are to hold the same rows, given each store's own: a row that one drops is
    dropped from all, with the reason `BESIDE` where it could have been stored."""
    dropped = np.logical_or.reduce([verdict != ADMITTED for verdict in verdicts.values()])
    return {key: np.where((verdict == ADMITTED) & dropped, np.uint8(BESIDE), verdict)
            for key, verdict in verdicts.items()}


class Admission:
    """Drops and counts rows that are not finite in the stored type, or too large.

    A row is too large if its norm exceeds `max_norm_multiple` times the median norm of the first block that has a
    finite row.

    Args:
        path: the store's folder.
        meta: what it holds.

    Attributes:
        median: that median; None before such a block, and without a `max_norm_multiple`.
    """

    def __init__(self, path: Path, meta: StoreMeta) -> None:
        self._path, self._meta = path, meta
        self.median = meta.median_norm

    @property
    def waits(self) -> bool:
        """Whether the median is needed and not yet known."""
        return self._meta.max_norm_multiple is not None and self.median is None

    def judge(self, activations: np.ndarray) -> np.ndarray:
        """The store's own verdict on a block, (R,); arguments and errors as in `__call__`."""
        return self._judged(self._as_rows(activations))

    def __call__(self, activations: np.ndarray, columns: Columns, dropped: Mapping[str, np.ndarray],
                 verdict: np.ndarray | None = None) -> tuple[np.ndarray, Columns, Dropped]:
        """The rows and columns of a block to store, and the rows dropped.

        Args:
            activations: (R, D) float, or uint16 bits where the store is bfloat16; R may be 0.
            columns: (R,) integers for each of the store's columns, and true codes if it has them.
            dropped: norms of the rows of this block that the producer itself dropped, by reason; NaN where unknown.
            verdict: on the rows, (R,), dropping at least those that `judge` would; None for that.

        Raises:
            ValueError: shapes or types do not fit the store.
        """
        rows, out = self._as_rows(activations), Dropped.of(dropped)
        self._check_columns(columns, len(rows))
        verdict = self._judged(rows) if verdict is None else verdict
        if not verdict.any():
            return rows, columns, out
        out += Dropped.of({name: self._row_norms(rows[verdict == reason]) for reason, name in REASONS.items()})
        kept = verdict == ADMITTED
        return rows[kept], {name: columns[name][kept] for name in self._meta.row_values}, out

    def _as_rows(self, activations: np.ndarray) -> np.ndarray:
        """A block's activations in the storage type, or float32."""
        meta = self._meta
        if activations.ndim != 2 or activations.shape[1] != meta.d_in:
            raise ValueError(f"a block does not fit {self._path}: expected shape (rows, {meta.d_in}), "
                             f"got {activations.shape}")
        if activations.dtype == DTYPES[meta.dtype].storage:
            return activations
        if activations.dtype.kind != "f":
            raise ValueError(f"a block does not fit {self._path}: expected floats, got {activations.dtype}")
        with np.errstate(over="ignore"):  # overflow gives infinities, which are dropped
            return activations.astype(np.float32, copy=False)

    def _check_columns(self, columns: Columns, rows: int) -> None:
        if columns.keys() != set(self._meta.row_values):
            raise ValueError(f"a block does not fit {self._path}: expected columns {list(self._meta.row_values)}, "
                             f"got {list(columns)}")
        for name, column in columns.items():
            if isinstance(column, SparseRows):
                continue
            if column.shape != (rows,) or column.dtype.kind not in "iu":
                raise ValueError(f"column {name} does not fit {self._path}: expected {rows} integers, "
                                 f"got {column.dtype} of shape {column.shape}")

    def _judged(self, rows: np.ndarray) -> np.ndarray:
        """The verdict on undecoded rows; sets the median if it is needed and not yet known."""
        keeps = DTYPES[self._meta.dtype].keeps(rows)
        verdict = np.where(keeps, np.uint8(ADMITTED), np.uint8(NONFINITE))
        if self._meta.max_norm_multiple is not None and keeps.any():
            norms = self._row_norms(rows if keeps.all() else rows[keeps])
            self.median = float(np.median(norms)) if self.median is None else self.median
            verdict[np.flatnonzero(keeps)[norms > self._meta.max_norm_multiple * self.median]] = HIGH_NORM
        return verdict

    def _row_norms(self, rows: np.ndarray) -> np.ndarray:
        """Norms, (R,), of undecoded rows; infinite for rows with a NaN or infinity in the stored type."""
        if rows.dtype.kind == "f":
            return row_norms(rows)
        decoded = np.empty(rows.shape, np.float32)
        DTYPES[self._meta.dtype].decode_rows(rows, decoded)
        return row_norms(decoded)
