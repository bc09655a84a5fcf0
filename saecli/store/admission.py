"""Which rows of a producer's blocks are stored.

Legend: R rows, D = d_in.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .dtypes import DTYPES
from .schema import StoreMeta
from .sparse_rows import SparseRows
from .statistics import Dropped, row_norms

NONFINITE = "nonfinite"
HIGH_NORM = "high_norm"
MAX_NORM_HELP = ("Drop and count rows whose norm exceeds this multiple of the median norm of the first block (up to "
                 "about 10,000 rows, or 16 MiB of an imported file), which the store records; dictionary_learning's "
                 "max_activation_norm_multiple; default: no limit.")

Columns = Mapping[str, np.ndarray | SparseRows]


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

    def __call__(self, activations: np.ndarray, columns: Columns,
                 dropped: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Columns, Dropped]:
        """The rows and columns of a block to store, and the rows dropped.

        Args:
            activations: (R, D) float, or uint16 bits where the store is bfloat16; R may be 0.
            columns: (R,) integers for each of the store's columns, and true codes if it has them.
            dropped: norms of the rows of this block that the producer itself dropped, by reason; NaN where unknown.

        Raises:
            ValueError: shapes or types do not fit the store.
        """
        rows, out = self._checked(activations, columns), Dropped.of(dropped)
        rows, columns, out = self._without(NONFINITE, ~DTYPES[self._meta.dtype].keeps(rows), rows, columns, out)
        if self._meta.max_norm_multiple is not None and len(rows):
            norms = self._row_norms(rows)
            self.median = float(np.median(norms)) if self.median is None else self.median
            high = norms > self._meta.max_norm_multiple * self.median
            rows, columns, out = self._without(HIGH_NORM, high, rows, columns, out)
        return rows, columns, out

    def _checked(self, activations: np.ndarray, columns: Columns) -> np.ndarray:
        meta = self._meta
        if activations.ndim != 2 or activations.shape[1] != meta.d_in:
            raise ValueError(f"a block does not fit {self._path}: expected shape (rows, {meta.d_in}), "
                             f"got {activations.shape}")
        if columns.keys() != set(meta.beside):
            raise ValueError(f"a block does not fit {self._path}: expected columns {list(meta.beside)}, "
                             f"got {list(columns)}")
        for name, column in columns.items():
            if isinstance(column, SparseRows):
                continue
            if column.shape != (len(activations),) or column.dtype.kind not in "iu":
                raise ValueError(f"column {name} does not fit {self._path}: expected {len(activations)} integers, "
                                 f"got {column.dtype} of shape {column.shape}")
        if activations.dtype == DTYPES[meta.dtype].storage:
            return activations
        if activations.dtype.kind != "f":
            raise ValueError(f"a block does not fit {self._path}: expected floats, got {activations.dtype}")
        with np.errstate(over="ignore"):  # overflow gives infinities, which are dropped
            return activations.astype(np.float32, copy=False)

    def _without(self, reason: str, unwanted: np.ndarray, rows: np.ndarray, columns: Columns,
                 out: Dropped) -> tuple[np.ndarray, Columns, Dropped]:
        """Drop and count the unwanted rows."""
        if not unwanted.any():
            return rows, columns, out
        out += Dropped.of({reason: self._row_norms(rows[unwanted])})
        return rows[~unwanted], {name: columns[name][~unwanted] for name in self._meta.beside}, out

    def _row_norms(self, rows: np.ndarray) -> np.ndarray:
        """Norms, (R,), of undecoded rows; infinite for rows with a NaN or infinity in the stored type."""
        if rows.dtype.kind == "f":
            return row_norms(rows)
        decoded = np.empty(rows.shape, np.float32)
        DTYPES[self._meta.dtype].decode_rows(rows, decoded)
        return row_norms(decoded)
