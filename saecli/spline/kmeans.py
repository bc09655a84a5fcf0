"""The k-means autoencoder's cells. Shapes: N training rows, D = d_in, C cells."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

CAREFUL_WORK = 3 * 10**8  # N C D up to which k-means starts from k-means++ and converges, which beyond takes minutes
MINIBATCH_WORK = 10**12  # N C D of all passes of mini-batches at most, some twenty seconds on two cores
PASSES = 3  # over the rows in mini-batches
BATCH = 4096

Rows = NDArray[np.floating]
Labels = NDArray[np.integer]


class Partition(Protocol):
    """A fitted clustering of scikit-learn's."""

    cluster_centers_: Rows

    def predict(self, X: Rows) -> Labels: ...


@dataclass(frozen=True)
class Stream:
    """Training rows that are read as often as needed.

    Args:
        rows: how many, N.
        batches: reads them all, in the same random order each time, in batches (B, D); the larger, the less often each
            cell's sums are gone through.
    """

    rows: int
    batches: Callable[[], Iterable[Rows]]


def kmeans(train: Rows, count: int, seed: int) -> Partition:
    """Cut training rows into cells by k-means.

    Args:
        train: rows, (N, D).
        count: cells wanted, at most N; fewer where three passes would exceed `MINIBATCH_WORK`.
        seed: of the initial centres.

    Returns:
        scikit-learn's KMeans, fitted from k-means++ until it converges, or above `CAREFUL_WORK` its MiniBatchKMeans,
        from random rows in three passes.

    Source: Sculley, "Web-scale k-means clustering" (2010), for the mini-batches.
    """
    from sklearn.cluster import KMeans, MiniBatchKMeans  # half a second that only this needs
    from sklearn.exceptions import ConvergenceWarning

    estimator: KMeans | MiniBatchKMeans
    if train.size * count <= CAREFUL_WORK:
        estimator = KMeans(count, n_init=1, random_state=seed)
    else:
        count = affordable(train, count)
        estimator = MiniBatchKMeans(count, n_init=1, random_state=seed, init="random", max_iter=PASSES,
                                    batch_size=BATCH, max_no_improvement=None, compute_labels=False)
    with warnings.catch_warnings():
        # Rows that repeat leave fewer distinct ones than cells, which costs nothing but empty cells.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(train)


def affordable(train: Rows, count: int) -> int:
    """So many cells, or fewer where three passes over rows, (N, D), would exceed `MINIBATCH_WORK`."""
    return max(1, min(count, MINIBATCH_WORK // (PASSES * train.size)))


def streamed_kmeans(sample: Rows, stream: Stream, counts: Sequence[int], seed: int) -> list[Partition]:
    """Cut streamed training rows into cells by k-means, for each of several numbers of cells, in one pass.

    Args:
        sample: some of the rows, (B, D), which the first centres are taken from.
        stream: the rows.
        counts: cells wanted, each at most B.
        seed: of the first centres.

    Returns:
        scikit-learn's MiniBatchKMeans, one for each of `counts`.

    Cost: N C D multiplications for each of C cells.
    """
    from sklearn.cluster import MiniBatchKMeans  # half a second that only this needs

    fitted = [MiniBatchKMeans(count, n_init=1, random_state=seed, init="random").partial_fit(sample)
              for count in counts]
    for rows in stream.batches():
        for batch in np.split(rows, range(BATCH, len(rows), BATCH)):
            for one in fitted:
                one.partial_fit(batch)
    return fitted
