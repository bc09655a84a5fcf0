"""Which rows are held out, and which are trained on: a hash of each document decides, nothing is stored.

A document's hash is compared with the share that is asked for. So the held-out rows are the same whatever the
fraction trained on, the rows of a smaller fraction are among those of a larger one, and the rows of a
document stay together.

Legend: R rows.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from ..errors import ConfigError

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


def _within(ids: np.ndarray, seed: int, stream: int, share: float) -> np.ndarray:
    """Whether each id's hash, as a number in [0, 1), is below a share."""
    hashes = _splitmix64(_splitmix64(ids.astype(np.uint64)) ^ _key(seed, stream))
    return (hashes >> np.uint64(11)) < np.uint64(round(share * 2**53))


def is_test(ids: np.ndarray, *, seed: int = 0, test_fraction: float = TEST_FRACTION) -> np.ndarray:
    """Which documents are held out.

    Args:
        ids: (R,) integers: document numbers, or row numbers where a store has no documents.
        seed: another seed holds out other documents.
        test_fraction: share of the documents held out, in [0, 1].

    Returns:
        (R,) bool.
    """
    return _within(ids, seed, _TEST_STREAM, test_fraction)


@dataclass(frozen=True)
class Split:
    """A choice of rows.

    Args:
        which: "train", "test" (the held-out rows) or "all".
        fraction: share of the training rows to keep, in (0, 1]; "test" and "all" have no use for it.
        seed: as of `is_test`.
        test_fraction: as of `is_test`, in [0, 1).
    """

    which: Which
    fraction: float = 1.0
    seed: int = 0
    test_fraction: float = TEST_FRACTION

    def __post_init__(self) -> None:
        if self.which not in ("train", "test", "all"):
            raise ConfigError(f"split must be one of train, test, all, got {self.which!r}")
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"--fraction must be above 0 and at most 1, got {self.fraction:g}")
        if not 0 <= self.test_fraction < 1:
            raise ConfigError(f"the test fraction must be at least 0 and below 1, got {self.test_fraction:g}")

    def keeps(self, ids: np.ndarray) -> np.ndarray:
        """Which rows belong to it.

        Args:
            ids: (R,) integers, as of `is_test`.

        Returns:
            (R,) bool.
        """
        if self.which == "all":
            return np.ones(len(ids), bool)
        held_out = is_test(ids, seed=self.seed, test_fraction=self.test_fraction)
        if self.which == "test":
            return held_out
        if self.fraction == 1:
            return ~held_out
        return ~held_out & _within(ids, self.seed, _TRAIN_STREAM, self.fraction)
