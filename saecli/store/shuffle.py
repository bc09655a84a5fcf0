"""The order of a shuffled epoch: which rows are in one window, and in which order they leave it.

A store is written document by document, so neighbouring rows must not share a batch. Rows are dealt to windows in
units, short runs of neighbours, each window's from all over the store. A window of units of n rows is ordered in n
turns: every unit gives one row to each turn, at the same position in all of them. Two rows of a unit are then at least
a turn's length apart, and never in one batch of fewer rows than a turn has. So a batch holds no more pairs of rows of
one document than under a uniform shuffle, however small the window, and the disk is still read in runs.

Legend: R rows, U units.
"""

from collections.abc import Callable

import numpy as np

LARGEST_TABLE = 1 << 20
ROUNDS = 6


class Permutation:
    """A random permutation of `range(count)`, in memory of order `sqrt(count)`.

    Up to 2^20 numbers it is a table. Beyond, it is a Feistel network, which makes a bijection of all b-bit numbers from
    random functions of b/2 bits (Luby and Rackoff 1988), applied again to images outside the range.

    Args:
        count: how many numbers.
        rng: draws the permutation.
        largest_table: the count up to which it is a table.
    """

    def __init__(self, count: int, rng: np.random.Generator, largest_table: int = LARGEST_TABLE) -> None:
        self.count = count
        self._table = rng.permutation(count) if count <= largest_table else None
        bits = max(2, (count - 1).bit_length())
        self._low = bits // 2
        sizes = (1 << self._low, 1 << (bits - self._low))
        self._functions = [] if count <= largest_table else [
            rng.integers(sizes[1 - turn % 2], size=sizes[turn % 2]) for turn in range(ROUNDS)]

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """The images of (R,) int64 numbers below `count`."""
        if self._table is not None:
            return self._table[numbers]
        images = self._network(numbers)
        while len(outside := np.flatnonzero(images >= self.count)):
            images[outside] = self._network(images[outside])
        return images

    def _network(self, numbers: np.ndarray) -> np.ndarray:
        high, low = numbers >> self._low, numbers & ((1 << self._low) - 1)
        for of_low, of_high in zip(self._functions[::2], self._functions[1::2], strict=True):
            high = high ^ of_low[low]
            low = low ^ of_high[high]
        return (high << self._low) | low


class Deal:
    """Deals the wanted rows of a store to the windows of an epoch.

    Args:
        stored: rows in the store.
        wanted: number of wanted rows.
        keeps: (R,) ascending row numbers -> (R,) bool, whether each is wanted; None for all.
        seed: determines the order.
        window_rows: approximate number of wanted rows in a window, which holds whole units.
        unit_rows: most stored rows in a unit.
        batch_size: units are short enough that a turn has at least twice this number of rows.
    """

    def __init__(self, stored: int, wanted: int, keeps: Callable[[np.ndarray], np.ndarray | None],
                 seed: tuple[int, ...], window_rows: int, unit_rows: int, batch_size: int) -> None:
        self._stored, self._keeps, self._seed = stored, keeps, seed
        self.windows = -(-wanted // max(window_rows, batch_size))
        self._unit = max(1, min(unit_rows, window_rows // (2 * batch_size))) if self.windows > 1 else 1
        self._permutation = Permutation(-(-stored // self._unit), np.random.default_rng(seed))
        self._units = -(-self._permutation.count // self.windows)

    def window(self, number: int) -> np.ndarray:
        """The rows of a window, (R,) int64 numbers within the store, in the order in which they leave it. Cost: about
        30 ns per stored row, plus `keeps`."""
        first = number * self._units
        units = self._permutation(np.arange(first, min(first + self._units, self._permutation.count)))
        units.sort()  # so that `keeps` goes forward
        rows = (units[:, None] * self._unit + np.arange(self._unit)).ravel()
        kept = rows < self._stored  # the last unit may be short
        if (wanted := self._keeps(np.minimum(rows, self._stored - 1))) is not None:
            kept &= wanted
        order = self._order(number, len(units))
        return rows[order[kept[order]]]

    def _order(self, number: int, units: int) -> np.ndarray:
        """The order in which the rows of a window's units leave it, turn by turn."""
        rng = np.random.default_rng((*self._seed, 1 + number))  # NumPy ignores a trailing 0
        order = rng.permutation(units)
        if self._unit == 1:
            return order
        turns = np.tile(np.arange(self._unit, dtype=np.int32), (units, 1))
        offsets = rng.permuted(turns, axis=1, out=turns)[order]  # (U, turns)
        return (order * self._unit + offsets.T).ravel()
