"""The best autoencoder that is affine on each cell of a partition: local PCA, with fixed or variable rank; and k-means.

    x_hat = m_c + (x - m_c) V_c V_c'        m_c the mean of the cell's rows, V_c their first K_c principal directions

minimises `sum ||x - x_hat||^2` over all maps that are affine of rank K_c on cell c; with K_c = 0 for every c it is the
k-means autoencoder. Where rank costs lambda per row, `sum (||x - x_hat||^2 + lambda K_c)` is least with

    lambda_{K_c} > lambda >= lambda_{K_c + 1}       lambda_1 >= lambda_2 >= ... eigenvalues of the cell's covariance

Source: the paper's theorem on the optimal piecewise affine autoencoder, in the form for fixed and for variable rank.
Shapes: N training rows, M rows measured, D = d_in, C cells, r directions.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

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
    """`count` cells, or fewer if three passes over rows, (N, D), would exceed `MINIBATCH_WORK`."""
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


def principal_directions(rows: Rows, rank: int) -> Rows:
    """The orthonormal directions along which rows about zero vary most.

    Args:
        rows: rows with mean zero, (N, D).
        rank: how many directions; fewer where the rows span fewer.

    Returns:
        Directions, (D, r), float64, r = min(rank, N - 1, D).

    Cost: O(N D min(N, D)).
    """
    return principal_components(rows)[0][:, :max(0, rank)]


def principal_components(rows: Rows) -> tuple[Rows, Rows]:
    """All principal directions of rows about zero, (N, D), and the variance along each.

    Returns:
        Directions (D, r) and variances (r,), the greatest first, float64, r = min(N - 1, D); variances are over N.

    Cost: O(N D min(N, D)).
    """
    r = max(0, min(len(rows) - 1, rows.shape[1]))
    if r == 0:
        return np.zeros((rows.shape[1], 0)), np.zeros(0)
    if len(rows) <= rows.shape[1]:
        _, sizes, directions = np.linalg.svd(rows, full_matrices=False)
        return directions[:r].T, np.square(sizes[:r]) / len(rows)
    return _components_of(rows.T @ rows / len(rows), r)


def _components_of(covariance: Rows, r: int) -> tuple[Rows, Rows]:
    """The first r principal directions (D, r) and variances (r,) of a covariance, (D, D)."""
    variances, directions = np.linalg.eigh(covariance)
    return directions[:, ::-1][:, :r], variances[::-1][:r].clip(0)


@dataclass(frozen=True)
class Spectrum:
    """What local PCA leaves unexplained of some rows, for every choice of ranks.

    Args:
        rows: training rows in each cell, (C,).
        variances: lambda_1 >= lambda_2 >= ... of each cell's training rows, C arrays.
        explained: sum over the rows measured of the squared coordinate along each of these directions, C arrays.
        total: `sum ||x - m_c||^2` over the rows measured in each cell, (C,).
    """

    rows: NDArray[np.int64]
    variances: list[Rows]
    explained: list[Rows]
    total: Rows

    def ranks(self, penalty: float) -> NDArray[np.int64]:
        """K_c of the theorem, (C,): how many of the cell's eigenvalues exceed lambda."""
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
        """`sum ||x - x_hat||^2` over the rows measured, given K_c, (C,); a cell of N_c training rows has at most
        N_c - 1 directions."""
        kept = [float(own[:rank].sum()) for own, rank in zip(self.explained, ranks, strict=True)]
        return max(0.0, float(self.total.sum()) - sum(kept))


class PiecewisePCA(ABC):
    """Local PCA on the cells of a partition, fitted on training rows, wherever these are."""

    @property
    @abstractmethod
    def counts(self) -> NDArray[np.int64]:
        """Training rows in each cell, (C,)."""

    @abstractmethod
    def mean(self, cell: int) -> Rows:
        """Mean of a cell's training rows, (D,), float64; a stand-in where it has none."""

    @abstractmethod
    def components(self, cell: int) -> tuple[Rows, Rows]:
        """Directions (D, r) and variances (r,) of a cell's training rows, as `principal_components` has them."""

    def spectrum(self, rows: Rows, cells: Labels) -> Spectrum:
        """Measure rows, (M, D), of those cells, (M,).

        Cost: one SVD per cell, O(N D min(N / C, D)) in all.
        """
        variances, explained, total = [], [], np.zeros(len(self.counts))
        for cell, measured in enumerate(members(cells, len(self.counts))):
            directions, own = self.components(cell)
            offset = rows[measured] - self.mean(cell)
            variances.append(own)
            explained.append(np.square(offset @ directions).sum(0))
            total[cell] = np.square(offset).sum()
        return Spectrum(self.counts, variances, explained, total)

    def means_residual(self, rows: Rows, cells: Labels) -> float:
        """`sum ||x - m_c||^2` over rows, (M, D), of those cells, (M,): the spectrum's at rank 0, without an SVD."""
        return sum(float(np.square(rows[measured] - self.mean(cell)).sum())
                   for cell, measured in enumerate(members(cells, len(self.counts))) if len(measured))

    def reconstruct(self, rows: Rows, cells: Labels, ranks: NDArray[np.int64]) -> Rows:
        """`x_hat`, (M, D), of rows, (M, D), of those cells, (M,), given K_c, (C,)."""
        result = np.empty(rows.shape)
        for cell, measured in enumerate(members(cells, len(self.counts))):
            if len(measured):
                mean = self.mean(cell)
                kept = self.components(cell)[0][:, :ranks[cell]] if ranks[cell] else np.zeros((len(mean), 0))
                result[measured] = mean + ((rows[measured] - mean) @ kept) @ kept.T
        return result


@dataclass(frozen=True)
class LocalPCA(PiecewisePCA):
    """Local PCA fitted on training rows in memory.

    Args:
        train: training rows, (N, D).
        cells: the cell of each, (N,).
        centres: stand in for the mean of a cell without training rows, (C, D).
    """

    train: Rows
    cells: Labels
    centres: Rows

    @cached_property
    def _members(self) -> list[NDArray[np.int64]]:
        """Numbers of the training rows in each cell, C arrays."""
        return members(self.cells, len(self.centres))

    @property
    def counts(self) -> NDArray[np.int64]:
        return np.array([len(inside) for inside in self._members])

    def mean(self, cell: int) -> Rows:
        inside = self._members[cell]
        return self.train[inside].mean(0, dtype=np.float64) if len(inside) else self.centres[cell].astype(np.float64)

    def components(self, cell: int) -> tuple[Rows, Rows]:
        """Directions (D, r) and variances (r,) by the cell's rows themselves."""
        return principal_components(self.train[self._members[cell]].astype(np.float64) - self.mean(cell))


@dataclass(frozen=True)
class StreamedPCA(PiecewisePCA):
    """Local PCA fitted on a stream of training rows, from sums about each cell's centre.

    Args:
        rows: training rows in each cell, (C,).
        centres: a point near each cell's mean, (C, D), float64, against rounding.
        sums: `sum (x - centre)`, (C, D), float64.
        products: `sum (x - centre)' (x - centre)`, (C, D, D), float64; (C, 0, 0) where no direction is asked for.
    """

    rows: NDArray[np.int64]
    centres: Rows
    sums: Rows
    products: Rows

    @classmethod
    def over(cls, centres: Rows, directions: bool) -> Self:
        """Sums over no rows yet, about centres (C, D); of cells that are to have directions, which takes 8 C D^2 bytes.
        """
        (C, D), width = centres.shape, centres.shape[1] if directions else 0
        return cls(np.zeros(C, np.int64), centres.astype(np.float64), np.zeros((C, D)), np.zeros((C, width, width)))

    def add(self, rows: Rows, cells: Labels) -> None:
        """Add training rows, (B, D), of those cells, (B,)."""
        for cell in np.unique(cells):
            offset = rows[cells == cell] - self.centres[cell]
            self.rows[cell] += len(offset)
            self.sums[cell] += offset.sum(0)
            if self.products.size:
                self.products[cell] += offset.T @ offset

    @property
    def counts(self) -> NDArray[np.int64]:
        return self.rows

    def mean(self, cell: int) -> Rows:
        return self.centres[cell] + self.sums[cell] / max(1, self.rows[cell])

    def components(self, cell: int) -> tuple[Rows, Rows]:
        """Directions (D, r) and variances (r,) of `products / n - m m'`, m the mean about the centre."""
        mean = self.sums[cell] / max(1, self.rows[cell])
        covariance = self.products[cell] / max(1, self.rows[cell]) - np.outer(mean, mean)
        return _components_of(covariance, int(np.clip(self.rows[cell] - 1, 0, len(mean))))


def members(cells: Labels, count: int) -> list[NDArray[np.int64]]:
    """The numbers of the rows in each of `count` cells, given the cell of each row."""
    order = np.argsort(cells, kind="stable")
    return np.split(order, np.searchsorted(cells[order], np.arange(1, count)))
