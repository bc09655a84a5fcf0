"""What an SAE lies between: k-means below it, the best affine map of each cell above it, on the same rows.

    k-means autoencoder:  x_hat = m_c                              c the cell of x, m_c the mean of its training rows
    local PCA:            x_hat = m_c + (x - m_c) V_c V_c'         V_c the cell's first r principal directions
    FVU:                  sum ||x - x_hat||^2 / sum ||x - mean||^2   over the rows measured

Local PCA is the best autoencoder that is affine of rank r on each cell of a given partition; k-means is its case
r = 0. Source: the paper on k-means autoencoders and on the optimal piecewise affine autoencoder.
Shapes: N training rows, M rows measured, D = d_in, r = rank, C cells.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..sae import SAE

KMEANS_ROWS = 4  # training rows that a cell of the k-means autoencoder holds on average, at least
LOCAL_PCA_ROWS = 4  # the same for a cell of local PCA, in units of its rank, or its directions are the rows' noise
LLOYD_WORK = 5 * 10**10  # N C D of one iteration of k-means at most, some two seconds on two cores
CAREFUL_WORK = 10**9  # N C D up to which k-means chooses its first centres well, which beyond takes minutes
BLOCK = 4096  # rows an SAE reconstructs at a time

Rows = NDArray[np.floating]
Labels = NDArray[np.integer]


class Partition(Protocol):
    """A fitted clustering of scikit-learn's."""

    cluster_centers_: Rows

    def predict(self, X: Rows) -> Labels: ...


def kmeans(train: Rows, count: int, seed: int) -> Partition:
    """Cut training rows into cells by k-means.

    Args:
        train: rows, (N, D).
        count: cells wanted, at most N; fewer where an iteration would pass `LLOYD_WORK`.
        seed: of the initial centres.

    Returns:
        scikit-learn's KMeans, fitted: by k-means++ until it converges, or above `CAREFUL_WORK` from random rows in
        20 iterations, which came within a thousandth of the same error in an eighth of the time.
    """
    from sklearn.cluster import KMeans  # half a second that only this needs
    from sklearn.exceptions import ConvergenceWarning

    count = max(1, min(count, LLOYD_WORK // train.size))
    if train.size * count <= CAREFUL_WORK:
        estimator = KMeans(count, n_init=1, random_state=seed)
    else:
        estimator = KMeans(count, n_init=1, random_state=seed, init="random", max_iter=20)
    with warnings.catch_warnings():
        # Rows that repeat leave fewer distinct ones than cells, which costs nothing but empty cells.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(train)


def principal_directions(rows: Rows, rank: int) -> Rows:
    """The orthonormal directions along which rows about zero vary most.

    Args:
        rows: rows with mean zero, (N, D).
        rank: how many directions; fewer where the rows span fewer.

    Returns:
        Directions, (D, r), float64, r = min(rank, N - 1, D).

    Cost: O(N D min(N, D)).
    """
    rank = max(0, min(rank, len(rows) - 1, rows.shape[1]))
    if rank == 0:
        return np.zeros((rows.shape[1], 0))
    if len(rows) <= rows.shape[1]:
        return np.linalg.svd(rows, full_matrices=False)[2][:rank].T
    return np.linalg.eigh(rows.T @ rows)[1][:, ::-1][:, :rank]


def affine_residual(train: Rows, train_cells: Labels, rows: Rows, cells: Labels, centres: Rows, rank: int) -> float:
    """The squared error of local PCA, fitted on training rows.

    Args:
        train: training rows, (N, D).
        train_cells: the cell of each, (N,).
        rows: rows measured, (M, D).
        cells: the cell of each, (M,).
        centres: stand in for the mean of a cell without training rows, (C, D).
        rank: principal directions kept in each cell, 0 for the k-means autoencoder; a cell of N_c training rows
            has at most N_c - 1.

    Returns:
        `sum ||x - x_hat||^2` over the rows measured.
    """
    total = 0.0
    train_order, order = np.argsort(train_cells, kind="stable"), np.argsort(cells, kind="stable")
    edges = np.arange(len(centres) + 1)
    train_ends, ends = np.searchsorted(train_cells[train_order], edges), np.searchsorted(cells[order], edges)
    for c, centre in enumerate(centres):
        measured = rows[order[ends[c]:ends[c + 1]]].astype(np.float64)
        if not len(measured):
            continue
        fitted = train[train_order[train_ends[c]:train_ends[c + 1]]].astype(np.float64)
        mean = fitted.mean(0) if len(fitted) else centre
        directions = principal_directions(fitted - mean, rank)
        offset = measured - mean
        total += float(np.square(offset - (offset @ directions) @ directions.T).sum())
    return total


def sae_residual(sae: SAE, rows: Rows) -> float:
    """The squared error of an SAE, `sum ||x - x_hat||^2`, over rows, (M, D), in the SAE's own dtype."""
    total = 0.0
    for start in range(0, len(rows), BLOCK):
        x = torch.from_numpy(rows[start:start + BLOCK]).to(sae.W_enc.dtype)
        total += float((sae(x) - x).double().square().sum())
    return total


@dataclass(frozen=True)
class References:
    """FVU of an SAE and of what it lies between, on the same rows.

    Args:
        kmeans_fvu: of the k-means autoencoder.
        sae_fvu: of the SAE.
        local_pca_fvu: of local PCA.
        kmeans_cells: cells of the k-means autoencoder.
        local_pca_cells: k-means cells that local PCA works on.
        local_pca_rank: principal directions in each, as far as its training rows go.
        rows_fitted: N.
        rows_measured: M.
    """

    kmeans_fvu: float
    sae_fvu: float
    local_pca_fvu: float
    kmeans_cells: int
    local_pca_cells: int
    local_pca_rank: int
    rows_fitted: int
    rows_measured: int


def references(sae: SAE, train: Rows, rows: Rows, rank: int, seed: int = 0) -> References:
    """Measure an SAE against k-means and local PCA, each with as many cells as the training rows allow.

    k-means gets `min(d_sae, N / 4)` cells, local PCA `min(d_sae, N / (4 rank))`, at least one.

    Args:
        sae: the autoencoder.
        train: rows that the references are fitted on, (N, D), N > 0.
        rows: rows that all three are measured on, (M, D), M > 0.
        rank: the SAE's rank on its own cells, K or the mean L0; more than D is D.
        seed: of k-means.

    Returns:
        The three FVUs; where the rows measured are all equal infinite, as `sae eval` has it, or NaN where they
        are met exactly.

    Cost: two k-means fits of at most `LLOYD_WORK` multiplications an iteration, and one SVD a cell.
    """
    spread = float(np.square(rows - rows.mean(0, dtype=np.float64)).sum())

    def measure(rows_per_cell: int, directions: int) -> tuple[float, int]:
        partition = kmeans(train, max(1, min(sae.d_sae, len(train) // rows_per_cell)), seed)
        residual = affine_residual(train, partition.predict(train), rows, partition.predict(rows),
                                   partition.cluster_centers_, directions)
        return fvu(residual), len(partition.cluster_centers_)

    def fvu(residual: float) -> float:
        return residual / spread if spread > 0 else math.inf if residual > 0 else math.nan

    rank = min(rank, train.shape[1])
    kmeans_fvu, kmeans_cells = measure(KMEANS_ROWS, 0)
    local_pca_fvu, local_pca_cells = measure(LOCAL_PCA_ROWS * max(1, rank), rank)
    return References(kmeans_fvu, fvu(sae_residual(sae, rows)), local_pca_fvu, kmeans_cells, local_pca_cells, rank,
                      rows_fitted=len(train), rows_measured=len(rows))
