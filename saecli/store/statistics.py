"""Mean, scatter and norms of rows, in float64 per chunk and merged; and counts of rows dropped.

Legend: R rows, D = d_in.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np


@dataclass(frozen=True)
class Norms:
    rows: int
    mean: float
    max: float

    @classmethod
    def of(cls, norms: np.ndarray) -> Self:
        """Summary of the finite norms, (R,) (at least one)."""
        finite = norms[np.isfinite(norms)]
        return cls(len(finite), float(finite.mean()), float(finite.max()))

    def __add__(self, other: "Norms") -> "Norms":
        rows = self.rows + other.rows
        return Norms(rows, self.mean + (other.mean - self.mean) * (other.rows / rows), max(self.max, other.max))


@dataclass(frozen=True)
class Dropped:
    """Rows dropped: their number by reason, and their norms for each reason with a finite one."""

    counts: Mapping[str, int] = field(default_factory=dict)
    norms: Mapping[str, Norms] = field(default_factory=dict)

    @classmethod
    def of(cls, norms: Mapping[str, np.ndarray]) -> Self:
        """Count rows by their norms, (R,) for each reason; NaN or infinity for a row without one."""
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
    """Euclidean norms, (R,) float64, of float rows, (R, D); NaN or infinite where the row is."""
    with np.errstate(invalid="ignore"):
        return np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))


# Bin 0 is for norms of 0; bin i for norms in [2^((i - 1) / 40 - 149), 2^(i / 40 - 149)). The least float32 above 0 is
# 2^-149, and no norm in 2^42 dimensions reaches 2^149.
BINS_PER_DOUBLING, LEAST_EXPONENT = 40, -149
BINS = 1 + BINS_PER_DOUBLING * 2 * -LEAST_EXPONENT
QUANTILE_ERROR = 2 ** (0.5 / BINS_PER_DOUBLING) - 1  # relative, half a bin: 0.87%
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Spread:
    """Mean and scatter, `sum_i (x_i - mean)^2`, of rows, per dimension: (D,) float64 each."""

    rows: int
    mean: np.ndarray
    scatter: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray) -> Self:
        """Measure rows in memory, (R, D) float64, R at least 1, overwriting them; two passes avoid cancellation."""
        mean = np.add.reduce(rows, axis=0) / len(rows)
        rows -= mean
        np.multiply(rows, rows, out=rows)
        return cls(len(rows), mean, np.add.reduce(rows, axis=0))

    @classmethod
    def measured(cls, batches: Iterable[np.ndarray], d_in: int) -> Self:
        """Measure batches of rows, (R, D) each, in one pass."""
        total = cls(0, np.zeros(d_in), np.zeros(d_in))
        for batch in batches:
            total += cls.of(batch.astype(np.float64))
        return total

    @property
    def variance(self) -> np.ndarray:
        """(D,) mean squared deviation from the mean."""
        return self.scatter / self.rows

    def __add__(self, other: "Spread") -> Self:
        """The union of both sets of rows: with d the difference of their means,

            mean = mean_a + d n_b / n      scatter = scatter_a + scatter_b + d^2 n_a n_b / n

        Source: Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample
        variances".
        """
        rows, shift = self.rows + other.rows, other.mean - self.mean
        weight = other.rows / rows
        return type(self)(rows, self.mean + shift * weight,
                          self.scatter + other.scatter + shift * shift * (self.rows * weight))

    def __sub__(self, part: "Spread") -> Self:
        """The rows outside `part`; a scatter much smaller than the whole's keeps few digits."""
        rows, shift = self.rows - part.rows, self.mean - part.mean
        weight = part.rows / rows
        return type(self)(rows, self.mean + shift * weight,
                          self.scatter - part.scatter - shift * shift * (self.rows * weight))


@dataclass(frozen=True)
class Statistics:
    """Statistics of the rows of a shard or a store; `norm_counts`, (BINS,) int64, is a histogram of their norms."""

    spread: Spread
    norms: Norms
    norm_counts: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray) -> Self:
        """Measure rows in memory, (R, D) float64, finite, R at least 1, overwriting them."""
        norms = row_norms(rows)
        return cls(Spread.of(rows), Norms.of(norms), np.bincount(_bins(norms), minlength=BINS))

    def __add__(self, other: "Statistics") -> Self:
        return type(self)(self.spread + other.spread, self.norms + other.norms, self.norm_counts + other.norm_counts)

    def norm_quantile(self, fraction: float) -> float:
        """The quantile of the norms, for a fraction in (0, 1], to a relative `QUANTILE_ERROR`."""
        wanted = max(1, int(np.ceil(fraction * self.norms.rows)))
        index = int(np.searchsorted(np.cumsum(self.norm_counts), wanted))
        middle = 2.0 ** ((index - 0.5) / BINS_PER_DOUBLING + LEAST_EXPONENT) if index else 0.0
        return min(middle, self.norms.max)


def norm_fields(statistics: Statistics | None) -> dict[str, Any]:
    """The fields of `store.json` on the norms of the rows stored; none without statistics."""
    if statistics is None:
        return {}
    return {"norms": statistics.norms,
            "norm_quantiles": {f"{fraction:g}": statistics.norm_quantile(fraction) for fraction in QUANTILES}}


def _bins(norms: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        above = np.floor(BINS_PER_DOUBLING * (np.log2(norms) - LEAST_EXPONENT))
    return np.where(norms > 0, above + 1, 0).astype(np.int64)
