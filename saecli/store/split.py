"""Train and test rows, by a hash of each document: a document belongs to a fraction if its hash is below it.

So held-out rows do not depend on the fraction trained on, smaller fractions are subsets of larger ones, and the rows of
a document stay together. A fraction without a document, as in a small store, takes the one with the lowest hash.

Legend: R rows.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, Self, get_args

import numpy as np

from ..base.errors import ConfigError, StoreError, unknown_choice
from .schema import StoreMeta

Which = Literal["train", "test", "all"]
TEST_FRACTION = 0.1

# Odd constants of splitmix64 (Steele, Lea and Flood 2014).
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_TEST_STREAM, _TRAIN_STREAM = 1, 2


def _splitmix64(values: np.ndarray) -> np.ndarray:
    values = values + _STEP
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


@lru_cache
def _key(seed: int, stream: int) -> np.ndarray:
    return _splitmix64(_splitmix64(np.array([seed % 2**64], np.uint64)) ^ np.uint64(stream))


def _hashes(ids: np.ndarray, seed: int, stream: int) -> np.ndarray:
    """Each id's hash, in the 53 bits of a float64's mantissa."""
    return _splitmix64(_splitmix64(ids.astype(np.uint64)) ^ _key(seed, stream)) >> np.uint64(11)


def _limit(fraction: float) -> int:
    return round(fraction * 2**53)


def _limit_of_lowest(hashes: Iterable[np.ndarray], fraction: float, *, spare_last: bool) -> int:
    """A bound below which only the lowest hash lies; 0 if the fraction has a document, or with `spare_last` if there is
    only one."""
    lowest, highest = 2**53, -1
    for part in hashes:
        if len(part):
            lowest, highest = min(lowest, int(part.min())), max(highest, int(part.max()))
        if lowest < _limit(fraction):
            return 0
    return 0 if highest < 0 or (spare_last and lowest == highest) else lowest + 1


def is_test(ids: np.ndarray, *, seed: int = 0, test_fraction: float = TEST_FRACTION) -> np.ndarray:
    """Which documents are held out, (R,) bool; none in some small stores, where a `Split` takes the lowest hash.

    Args:
        ids: (R,) integers: document numbers, or row numbers if a store has no documents.
    """
    return _hashes(ids, seed, _TEST_STREAM) < np.uint64(_limit(test_fraction))


@dataclass(frozen=True)
class Split:
    """A choice of rows; see `ActivationStore.split`.

    Args:
        least_test: hashes below this number are held out whatever the fraction; see `fitted`.
        least_train: the same for the training rows that are kept.
    """

    which: Which
    fraction: float = 1.0
    seed: int = 0
    test_fraction: float = TEST_FRACTION
    least_test: int = 0
    least_train: int = 0

    def __post_init__(self) -> None:
        if self.which not in get_args(Which):
            raise unknown_choice('split', str(self.which), get_args(Which))
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"--fraction must be above 0 and at most 1, got {self.fraction:g}", option="fraction")
        if not 0 <= self.test_fraction < 1:
            raise ConfigError(f"--test-fraction must be at least 0 and below 1, got {self.test_fraction:g}",
                              option="test_fraction")

    def fitted(self, ids: Callable[[], Iterator[np.ndarray]]) -> Self:
        """This split of a given store, whose row ids `ids` iterates over: a fraction without a document takes the one
        with the lowest hash. A store's only document is not held out.

        Cost: reads up to the first document in the fraction.
        """
        split = self
        if self.which != "all" and self.test_fraction > 0:
            hashes = (_hashes(part, self.seed, _TEST_STREAM) for part in ids())
            split = replace(split, least_test=_limit_of_lowest(hashes, self.test_fraction, spare_last=True))
        if self.which == "train" and self.fraction < 1:
            hashes = (_hashes(part[~split._held_out(part)], self.seed, _TRAIN_STREAM) for part in ids())
            split = replace(split, least_train=_limit_of_lowest(hashes, self.fraction, spare_last=False))
        return split

    def keeps(self, ids: np.ndarray) -> np.ndarray:
        """Whether rows belong to it, (R,) bool, by their ids, (R,) integers."""
        if self.which == "all":
            return np.ones(len(ids), bool)
        held_out = self._held_out(ids)
        if self.which == "test":
            return held_out
        if self.fraction == 1:
            return ~held_out
        limit = max(_limit(self.fraction), self.least_train)
        return ~held_out & (_hashes(ids, self.seed, _TRAIN_STREAM) < np.uint64(limit))

    def _held_out(self, ids: np.ndarray) -> np.ndarray:
        limit = max(_limit(self.test_fraction), self.least_test)
        return _hashes(ids, self.seed, _TEST_STREAM) < np.uint64(limit)

    def empty(self, path: Path, meta: StoreMeta) -> StoreError:
        if not meta.rows:
            return StoreError(f"{path} holds no whole shard yet; run the command that makes it again")
        unit, remedy = (("documents", "make a store of more documents (blank lines separate them in a .txt file)")
                        if "document" in meta.columns else ("rows", "import more rows"))
        return StoreError(f"the {self.which} split of {path} is empty: of its {meta.rows} rows, chosen by a hash of "
                          f"their {unit}, none belongs to it; {remedy}, or use another --split-seed")


def window_starts(documents: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The indices of the rows that begin a window, a run of one document's rows with ascending positions; not row 0."""
    return 1 + np.flatnonzero((np.diff(documents) != 0) | (np.diff(positions) <= 0))
