"""True codes beside a store's rows: for each row the features that it was made of.

Shapes: R rows, n entries, G features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CODES = "codes"  # the group of a shard that holds them
OFFSET, INDEX, VALUE = np.dtype("<i8"), np.dtype("<i4"), np.dtype("<f4")


@dataclass(frozen=True, eq=False)
class SparseRows:
    """Rows of a matrix of which few entries are not zero; they are sliced and chosen from as an array's are.

    Args:
        offsets: where each row begins among the entries, and behind the last row their end, (R + 1,), int64 from 0.
        indices: the feature of each entry, (n,), int32, ascending within a row.
        values: the entries, (n,), float32, above 0.
    """

    offsets: np.ndarray
    indices: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> np.ndarray:
        """How many entries each row has, (R,)."""
        return np.diff(self.offsets)

    @property
    def rows(self) -> np.ndarray:
        """The row of each entry, (n,)."""
        return np.repeat(np.arange(len(self)), self.counts)

    @property
    def nbytes(self) -> int:
        """What they take as stored."""
        return self.offsets.nbytes + self.indices.nbytes + self.values.nbytes

    def __getitem__(self, which: slice | np.ndarray) -> "SparseRows":
        """Some rows: those of a slice of step 1, of a mask, (R,), or of ascending numbers."""
        if isinstance(which, slice):
            begin, end, _ = which.indices(len(self))
            offsets = self.offsets[begin : max(begin, end) + 1]
            entries = slice(int(offsets[0]), int(offsets[-1]))
            return SparseRows(offsets - offsets[0], self.indices[entries], self.values[entries])
        kept = np.zeros(len(self), bool)
        kept[which] = True
        entries = kept[self.rows]
        return SparseRows(offsets_of(self.counts[kept]), self.indices[entries], self.values[entries])

    def copy(self) -> "SparseRows":
        """The same in memory of their own, whatever becomes of the file or block that they are a part of."""
        return SparseRows(self.offsets.copy(), self.indices.copy(), self.values.copy())

    def active(self, features: int) -> np.ndarray:
        """Which of so many features each row is made of, a mask, (R, features)."""
        mask = np.zeros((len(self), features), bool)
        mask[self.rows, self.indices] = True
        return mask


def offsets_of(counts: np.ndarray) -> np.ndarray:
    """Where rows with so many entries, (R,), begin, and behind them the end, (R + 1,), int64."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def stacked(parts: Sequence[np.ndarray | SparseRows]) -> np.ndarray | SparseRows:
    """Parts of a column, or of true codes, one below the other; one part or more."""
    first, *others = parts
    if not isinstance(first, SparseRows):
        return np.concatenate(parts)
    assert all(isinstance(part, SparseRows) for part in others)
    return SparseRows(offsets_of(np.concatenate([part.counts for part in parts])),
                      np.concatenate([part.indices for part in parts]),
                      np.concatenate([part.values for part in parts]))
