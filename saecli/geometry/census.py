"""Statistics of a stream of rows in constant memory: the cells visited, and uniform samples.

Shapes: B rows, F = d_sae.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

KEY_BYTES = 16  # two of a billion cells share a key with probability 1e-21
QUANTILES = {"p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95}


def support_keys(supports: Tensor) -> list[bytes]:
    """A short key for each row's support, (B, F) bool, equal for equal supports."""
    packed = np.packbits(supports.numpy(), axis=1)
    return [blake2b(row, digest_size=KEY_BYTES).digest() for row in packed]


def _milestones() -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, ...: the row counts at which the growth of the visited cells is noted."""
    decade = 1
    while True:
        yield from (decade, 2 * decade, 5 * decade)
        decade *= 10


@dataclass
class Census:
    """Counts the rows in each cell; memory grows with the cells visited, not with the rows."""

    rows: int = 0
    active: int = 0
    counts: Counter[bytes] = field(default_factory=Counter)
    _growth: list[tuple[int, int]] = field(default_factory=list)
    _marks: Iterator[int] = field(default_factory=_milestones)
    _next: int = 0

    def add(self, keys: list[bytes], active: int) -> None:
        """Count the cells of some rows, by `support_keys`, and the latents that they keep, together."""
        self.active += active
        while keys:
            if self._next <= self.rows:
                self._next = next(self._marks)
            now, keys = keys[:self._next - self.rows], keys[self._next - self.rows:]
            self.counts.update(now)
            self.rows += len(now)
            if self.rows == self._next:
                self._growth.append((self.rows, len(self.counts)))

    @property
    def visited(self) -> int:
        """Cells that hold a row."""
        return len(self.counts)

    @property
    def l0(self) -> float:
        """Latents kept, mean over the rows."""
        return self.active / self.rows

    @property
    def growth(self) -> list[tuple[int, int]]:
        """(rows, cells visited by them) at 1, 2, 5, 10, ... rows and at the last."""
        last = (self.rows, self.visited)
        return self._growth if self._growth[-1:] == [last] else [*self._growth, last]

    def sizes(self) -> NDArray[np.int64]:
        """Rows in each visited cell, the fullest first."""
        sizes = np.fromiter(self.counts.values(), np.int64, len(self.counts))
        return np.sort(sizes)[::-1]

    def occupancy(self) -> dict[str, Any]:
        """How the rows spread over the cells.

        Returns:
            `mean` and `max` rows in a visited cell, `singletons` (cells with one row), `entropy` of the
            distribution of rows over cells in nats, `effective` = exp(entropy) the number of equally filled
            cells of that entropy, and `growth`.
        """
        sizes = self.sizes()
        entropy = float(np.log(self.rows) - sizes / self.rows @ np.log(sizes))
        return {"mean": self.rows / self.visited, "max": int(sizes[0]), "singletons": int((sizes == 1).sum()),
                "entropy": entropy, "effective": float(np.exp(entropy)),
                "growth": [{"rows": rows, "cells": cells} for rows, cells in self.growth]}


class Reservoir:
    """A uniform sample of a stream, without replacement, in constant memory.

    Args:
        capacity: rows kept; a shorter stream is kept whole and in order.
        seed: of the choice.

    Source: Vitter, "Random sampling with a reservoir" (1985), algorithm R.
    """

    def __init__(self, capacity: int, seed: int = 0) -> None:
        self.capacity, self.seen = capacity, 0
        self._random = np.random.default_rng(seed)
        self._kept: NDArray | None = None

    def add(self, rows: NDArray) -> None:
        """Offer rows, (B, ...)."""
        if self._kept is None:
            self._kept = np.empty((self.capacity, *rows.shape[1:]), rows.dtype)  # takes no memory until written
        slots = np.arange(self.seen, self.seen + len(rows))
        late = slots >= self.capacity
        slots[late] = self._random.integers(0, slots[late] + 1)
        taken = slots < self.capacity
        self._kept[slots[taken]] = rows[taken]  # of two rows for one slot numpy keeps the later, as it should
        self.seen += len(rows)

    @property
    def rows(self) -> NDArray:
        """The sample, (min(capacity, rows seen), ...)."""
        return np.empty(0) if self._kept is None else self._kept[:self.seen]


def describe(values: NDArray) -> dict[str, float]:
    """Mean, extremes and quantiles of some numbers, (B,), all finite or infinite, B > 0."""
    order = np.sort(values)
    # The nearest rank, since interpolating between infinities gives no number.
    at = {name: float(order[round(q * (len(order) - 1))]) for name, q in QUANTILES.items()}
    return {"mean": float(values.mean()), "min": float(order[0]), **at, "max": float(order[-1])}


def spread_out(rows: NDArray, count: int) -> NDArray:
    """At most `count` of the rows, evenly spaced."""
    return rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int)] if len(rows) else rows
