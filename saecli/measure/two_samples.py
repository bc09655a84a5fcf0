"""Two samples of documents, independent or in pairs: AUC, its permutation test, bootstrap intervals.

    AUC = P(a > b) + P(a = b) / 2 = 1/2 + sum over A of (rank - (N + 1) / 2) / (N_A N_B)

Shapes: N documents of A and B, C measures of each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap, permutation_test, rankdata

SMALL = 40  # documents, up to which labellings may be few enough to take all
LABELLINGS, FEWEST_LABELLINGS = 9_999, 999  # of a test; of many documents fewer
RESAMPLES, FEWEST_RESAMPLES = 1_000, 200  # likewise
LABELLING_SEED, RESAMPLING_SEED = 0, 0
BLOCK, DRAWN = 1 << 22, 1 << 27  # numbers in memory, and in all

Values = NDArray[np.float64]
Labels = NDArray[np.bool_]


def centred_ranks(values: Values) -> Values:
    """Of each column, (N, C), less their mean; equal values share theirs. Multiples of 1/2, so that sums are exact."""
    return rankdata(values, axis=0) - (len(values) + 1) / 2


def auc(a: Values, b: Values, axis: int = -1) -> Values:
    """Over the last axis: 1/2 without a difference, 1 if all of A's are above all of B's."""
    of_a, of_b = a.shape[-1], b.shape[-1]
    ranks = rankdata(np.concatenate([a, b], axis=-1), axis=-1)
    return (ranks[..., :of_a].mean(-1) - (of_a + 1) / 2) / of_b


def mean_difference(a: Values, b: Values, axis: int = -1) -> Values:
    return a.mean(axis) - b.mean(axis)


def _distance(a: Values, b: Values, axis: int = -1) -> Values:
    return np.abs(mean_difference(a, b, axis))


@dataclass(frozen=True, eq=False)
class TwoSamples:
    """Which documents are A's, (N,); if paired, the two of each pair follow each other."""

    is_a: Labels
    paired: bool

    def split(self, values: Values) -> tuple[Values, Values]:
        """A's and B's, (C, N_A) and (C, N_B), given (N, C)."""
        return values[self.is_a].T, values[~self.is_a].T

    def interval(self, statistic: Callable[..., Values], values: Values) -> Any:
        """The ends, `low` and `high`, of 95% intervals of a statistic of A and B, (C,), by resampling documents or
        pairs."""
        resamples = max(FEWEST_RESAMPLES, min(RESAMPLES, DRAWN // values.size))
        options: Any = {"axis": -1, "vectorized": True, "method": "percentile"}
        options |= {
            "random_state": RESAMPLING_SEED,
            "n_resamples": resamples,
            "batch": max(1, BLOCK // values.size),
        }
        resampled: Any = bootstrap(self.split(values), statistic, paired=self.paired, **options)
        return resampled.confidence_interval

    def shuffled(self, count: int, rng: np.random.Generator) -> Labels:
        """Labels exchanged among documents, or within pairs, (count, N)."""
        if self.paired:
            swapped = rng.random((count, len(self.is_a) // 2)) < 0.5
            return self.is_a ^ swapped.repeat(2, axis=1)
        return rng.permuted(np.tile(self.is_a, (count, 1)), axis=1)

    def p_values(self, values: Values) -> Values:
        """The fraction of labellings with an AUC as far from 1/2, (C,): of all if they are few, else of random ones and
        the true one."""
        ranks, documents = centred_ranks(values), len(self.is_a)
        if documents <= SMALL:
            kind = "samples" if self.paired else "independent"
            options: Any = {"axis": -1, "vectorized": True, "random_state": LABELLING_SEED}
            options |= {"permutation_type": kind, "n_resamples": LABELLINGS}
            tested: Any = permutation_test(
                self.split(ranks), _distance, alternative="greater", **options
            )
            return tested.pvalue
        observed, reached = np.abs(self.is_a @ ranks), np.ones(ranks.shape[1])
        count = max(FEWEST_LABELLINGS, min(LABELLINGS, DRAWN // documents))
        step = BLOCK // documents + 1
        rng = np.random.default_rng(LABELLING_SEED)
        for begin in range(0, count, step):
            labels = self.shuffled(min(step, count - begin), rng)
            reached += (np.abs(labels @ ranks) >= observed).sum(0)
        return reached / (count + 1)
