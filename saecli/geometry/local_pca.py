"""k-means, and local PCA: the best autoencoder that is affine on each cell of a partition, of fixed or variable rank.

    x_hat = m_c + (x - m_c) V_c V_c'        m_c the mean of the cell's rows, V_c their first K_c principal directions

minimises `sum ||x - x_hat||^2` over all maps that are affine of rank K_c on cell c; with K_c = 0 for every c it is the
k-means autoencoder. Where rank costs lambda per row, `sum (||x - x_hat||^2 + lambda K_c)` is least with

    lambda_{K_c} > lambda >= lambda_{K_c + 1}       lambda_1 >= lambda_2 >= ... eigenvalues of the cell's covariance

Source: the paper's theorem on the optimal piecewise affine autoencoder, in the form for fixed and for variable rank.
Shapes: N training rows, M rows measured, D = d_in, C cells, r directions.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

CAREFUL_WORK = (
    3 * 10**8
)  # N C D up to which k-means starts from k-means++ and converges, which beyond takes minutes
MINIBATCH_WORK = (
    10**12
)  # N C D of all passes of mini-batches at most, some twenty seconds on two cores
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
    """N training rows: `batches` reads them all, (B, D) each, in the same random order each time."""

    rows: int
    batches: Callable[[], Iterable[Rows]]


def kmeans(train: Rows, count: int, seed: int) -> Partition:
    """Cut training rows, (N, D), into at most `count` <= N cells by k-means.

    scikit-learn's KMeans from k-means++ until it converges; above `CAREFUL_WORK` its MiniBatchKMeans, from random rows
    in three passes, with fewer cells where these would exceed `MINIBATCH_WORK`.

    Source: Sculley, "Web-scale k-means clustering" (2010), for the mini-batches.
    """
    from sklearn.cluster import KMeans, MiniBatchKMeans  # half a second that only this needs
    from sklearn.exceptions import ConvergenceWarning

    estimator: KMeans | MiniBatchKMeans
    if train.size * count <= CAREFUL_WORK:
        estimator = KMeans(count, n_init=1, random_state=seed)
    else:
        estimator = MiniBatchKMeans(
            affordable(train, count),
            n_init=1,
            random_state=seed,
            init="random",
            max_iter=PASSES,
            batch_size=BATCH,
            max_no_improvement=None,
            compute_labels=False,
        )
    with warnings.catch_warnings():
        # Rows that repeat leave fewer distinct ones than cells, which costs nothing but empty cells.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(train)


def affordable(train: Rows, count: int) -> int:
    """`count` cells, or fewer if three passes over rows, (N, D), would exceed `MINIBATCH_WORK`."""
    return max(1, min(count, MINIBATCH_WORK // (PASSES * train.size)))


def streamed_kmeans(
    sample: Rows, stream: Stream, counts: Sequence[int], seed: int
) -> list[Partition]:
    """MiniBatchKMeans of streamed rows for each of several numbers of cells, in one pass, from centres in a sample of
    at least as many rows."""
    from sklearn.cluster import MiniBatchKMeans  # half a second that only this needs

    fitted = [
        MiniBatchKMeans(count, n_init=1, random_state=seed, init="random").partial_fit(sample)
        for count in counts
    ]
    for rows in stream.batches():
        for batch in np.split(rows, range(BATCH, len(rows), BATCH)):
            for one in fitted:
                one.partial_fit(batch)
    return fitted


def principal_components(rows: Rows) -> tuple[Rows, Rows]:
    """All principal directions of rows about zero, (N, D), orthonormal, (D, r), and the variances along them, (r,),
    over N, descending; float64, r = min(N - 1, D). Cost: O(N D min(N, D))."""
    r = max(0, min(len(rows) - 1, rows.shape[1]))
    if r == 0:
        return np.zeros((rows.shape[1], 0)), np.zeros(0)
    if len(rows) <= rows.shape[1]:
        _, sizes, directions = np.linalg.svd(rows, full_matrices=False)
        return directions[:r].T, np.square(sizes[:r]) / len(rows)
    return _components_of(rows.T @ rows / len(rows), r)


def _components_of(covariance: Rows, r: int) -> tuple[Rows, Rows]:
    variances, directions = np.linalg.eigh(covariance)
    return directions[:, ::-1][:, :r], variances[::-1][:r].clip(0)


@dataclass(frozen=True)
class Spectrum:
    """The error of local PCA on some rows for every choice of ranks."""

    rows: NDArray[np.int64]  # training rows in each cell, (C,)
    variances: list[Rows]  # lambda_1 >= lambda_2 >= ... of each cell, C arrays
    explained: list[
        Rows
    ]  # squared coordinates of the rows measured along each of these directions, summed, C arrays
    total: Rows  # `sum ||x - m_c||^2` over the rows measured in each cell, (C,)

    def ranks(self, penalty: float) -> NDArray[np.int64]:
        """K_c of the theorem, (C,)."""
        return np.array([int((own > penalty).sum()) for own in self.variances], np.int64)

    def penalty_for(self, rank: float) -> float:
        """The lambda at which `ranks` are just at most `rank` in the mean over the training rows."""
        every = np.concatenate([np.zeros(0), *self.variances])
        weights = np.repeat(self.rows, [len(own) for own in self.variances]) / self.rows.sum()
        order = np.argsort(-every, kind="stable")
        taken = np.cumsum(weights[order])
        # Slightly above, since the sum of many weights may exceed the rank asked for by a rounding error.
        affordable = int(np.searchsorted(taken, rank * (1 + 1e-12), side="right"))
        return float(every[order[affordable]]) if affordable < len(every) else 0.0

    def mean_rank(self, ranks: NDArray[np.int64]) -> float:
        """Mean over the training rows of their cells' number of directions, at most `ranks`, (C,)."""
        had = np.minimum(ranks, [len(own) for own in self.variances])
        return float(had @ self.rows / self.rows.sum())

    def residual(self, ranks: NDArray[np.int64]) -> float:
        """`sum ||x - x_hat||^2` over the rows measured, given K_c, (C,)."""
        kept = [float(own[:rank].sum()) for own, rank in zip(self.explained, ranks, strict=True)]
        return max(0.0, float(self.total.sum()) - sum(kept))


class LocalPCA:
    """Local PCA fitted on training rows in memory, (N, D), with the cell of each, (N,); centres, (C, D), stand in for
    the mean of a cell without training rows."""

    def __init__(self, train: Rows, cells: Labels, centres: Rows) -> None:
        self._train, self._members = train, members(cells, len(centres))
        self.centres = centres.astype(np.float64)
        self.counts = np.array(
            [len(inside) for inside in self._members]
        )  # training rows in each cell, (C,)

    def mean(self, cell: int) -> Rows:
        """Mean of a cell's training rows, (D,), float64."""
        inside = self._members[cell]
        return self._train[inside].mean(0, dtype=np.float64) if len(inside) else self.centres[cell]

    def components(self, cell: int) -> tuple[Rows, Rows]:
        """`principal_components` of a cell's training rows."""
        return principal_components(
            self._train[self._members[cell]].astype(np.float64) - self.mean(cell)
        )

    def spectrum(self, rows: Rows, cells: Labels) -> Spectrum:
        """Measure rows, (M, D), of those cells, (M,). Cost: one SVD per cell, O(N D min(N / C, D)) in all."""
        variances, explained, total = [], [], np.zeros(len(self.counts))
        for cell, measured in enumerate(members(cells, len(self.counts))):
            directions, own = self.components(cell)
            offset = rows[measured] - self.mean(cell)
            variances.append(own)
            explained.append(np.square(offset @ directions).sum(0))
            total[cell] = np.square(offset).sum()
        return Spectrum(self.counts, variances, explained, total)

    def means_residual(self, rows: Rows, cells: Labels) -> float:
        """`sum ||x - m_c||^2` over rows, (M, D), of those cells, (M,): the residual at rank 0, without an SVD."""
        return sum(
            float(np.square(rows[measured] - self.mean(cell)).sum())
            for cell, measured in enumerate(members(cells, len(self.counts)))
            if len(measured)
        )

    def reconstruct(self, rows: Rows, cells: Labels, ranks: NDArray[np.int64]) -> Rows:
        """`x_hat`, (M, D), of rows, (M, D), of those cells, (M,), given K_c, (C,)."""
        result = np.empty(rows.shape)
        for cell, measured in enumerate(members(cells, len(self.counts))):
            if len(measured):
                result[measured] = mean = self.mean(cell)
                if ranks[cell]:
                    kept = self.components(cell)[0][:, : ranks[cell]]
                    result[measured] += ((rows[measured] - mean) @ kept) @ kept.T
        return result


class StreamedPCA(LocalPCA):
    """Local PCA fitted on a stream, from exact sums about centres, (C, D), near the cells' means, against rounding.

    scikit-learn's IncrementalPCA takes 4.5 times as long for 64 of 768 directions, and has no others. `directions`:
    whether `components` is wanted, for 8 C D^2 bytes.
    """

    def __init__(self, centres: Rows, directions: bool) -> None:
        (C, D), width = centres.shape, centres.shape[1] if directions else 0
        self.centres, self.counts = centres.astype(np.float64), np.zeros(C, np.int64)
        self._sums, self._products = np.zeros((C, D)), np.zeros((C, width, width))

    def add(self, rows: Rows, cells: Labels) -> None:
        """Add training rows, (B, D), of those cells, (B,)."""
        for cell in np.unique(cells):
            offset = rows[cells == cell] - self.centres[cell]
            self.counts[cell] += len(offset)
            self._sums[cell] += offset.sum(0)
            if self._products.size:
                self._products[cell] += offset.T @ offset

    def mean(self, cell: int) -> Rows:
        return self.centres[cell] + self._sums[cell] / max(1, self.counts[cell])

    def components(self, cell: int) -> tuple[Rows, Rows]:
        """Those of `products / n - m m'`, m the mean about the centre."""
        rows = max(1, int(self.counts[cell]))
        mean = self._sums[cell] / rows
        return _components_of(
            self._products[cell] / rows - np.outer(mean, mean), min(rows - 1, len(mean))
        )


def members(cells: Labels, count: int) -> list[NDArray[np.int64]]:
    """The rows in each of `count` cells, given the cell of each row."""
    order = np.argsort(cells, kind="stable")
    return np.split(order, np.searchsorted(cells[order], np.arange(1, count)))
