"""Counts and norms of the rows that a store leaves out, by reason.

Legend: R rows, D = d_in.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np


@dataclass(frozen=True)
class Norms:
    """Norms of some rows, in brief.

    Args:
        rows: how many rows were measured.
        mean: the mean of their norms.
        max: the largest of them.
    """

    rows: int
    mean: float
    max: float

    @classmethod
    def of(cls, norms: np.ndarray) -> Self:
        """The finite ones of some norms, (R,), at least one."""
        finite = norms[np.isfinite(norms)]
        return cls(len(finite), float(finite.mean()), float(finite.max()))

    def __add__(self, other: "Norms") -> "Norms":
        rows = self.rows + other.rows
        return Norms(rows, self.mean + (other.mean - self.mean) * (other.rows / rows), max(self.max, other.max))


@dataclass(frozen=True)
class Dropped:
    """Rows left out.

    Args:
        counts: how many, by reason.
        norms: their norms, by reason; of reasons whose rows have no finite norm there are none.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    norms: Mapping[str, Norms] = field(default_factory=dict)

    @classmethod
    def of(cls, norms: Mapping[str, np.ndarray]) -> Self:
        """Rows counted by their norms, (R,) for each reason; NaN or infinity where a row has none."""
        return cls({reason: len(values) for reason, values in norms.items() if len(values)},
                   {reason: Norms.of(values) for reason, values in norms.items() if np.isfinite(values).any()})

    def __add__(self, other: "Dropped") -> "Dropped":
        counts, norms = dict(self.counts), dict(self.norms)
        for reason, count in other.counts.items():
            counts[reason] = counts.get(reason, 0) + count
        for reason, more in other.norms.items():
            norms[reason] = norms[reason] + more if reason in norms else more
        return Dropped(counts, norms)


def row_norms(rows: np.ndarray) -> np.ndarray:
    """Euclidean norms.

    Args:
        rows: (R, D) float.

    Returns:
        (R,) float64; NaN or infinite where the row is not finite.
    """
    with np.errstate(invalid="ignore"):
        return np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
