"""An SAE between k-means and local PCA, on the same rows.

    FVU = sum ||x - x_hat||^2 / sum ||x - mean||^2 over the rows measured

    k-means      x_hat = m_c                            constant on each cell c, m_c the mean of its training rows
    SAE          affine on each of its cells, all from the same dictionary vectors
    local PCA    x_hat = m_c + (x - m_c) V_c V_c'       V_c the first r principal directions of the cell's rows

Local PCA minimises `sum ||x - x_hat||^2` over all maps affine of rank r on each cell; k-means is rank 0. All are in the
metric of the SAE's training. Source: the paper on SAEs as a bridge between k-means and local PCA, its theorem on the
optimal piecewise affine autoencoder. Shapes: N training rows, M rows measured, D = d_in, C cells, r = rank.
"""

import math
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..base.console import Listener, Silent
from ..sae.dictionary import SAE

# Least mean number of training rows per cell; of local PCA per dimension of its rank, or its directions fit noise.
ROWS_PER_CELL = 4
# N C D up to which k-means starts from k-means++ and converges, which takes minutes beyond.
CAREFUL_WORK = 3 * 10**8
MINIBATCH_WORK = 10**12  # N C D of all passes of mini-batches at most, 20 seconds on two cores
PASSES = 3  # over the rows in mini-batches
BATCH = 4096
REFERENCE_CODES = 2**22  # codes at a time, 16 MiB in float32
LEAST_VARIANCE = 1e-10  # orthonormal to 1e-6
NO_PROGRESS = Silent()

RowArray = NDArray[np.floating]
Assignment = NDArray[np.integer]


def measure_references(
    sae: SAE, rows: RowArray, train: RowArray, rank: int, listener: Listener = NO_PROGRESS
) -> dict[str, Any]:
    """Fit k-means and local PCA on `train`, (N, D); measure them and the SAE on `rows`, (M, D).

    k-means has `min(d_sae, N / 4)` cells, local PCA `min(d_sae, N / (4 rank))`, at least one; `rank` is the SAE's on
    its cells, K or the mean L0, at most D. Cost: two k-means fits of `MINIBATCH_WORK` products, an SVD per cell.
    """
    rank = min(rank, train.shape[1])
    scale = sae.normalisation.target_scale.numpy()
    predicted = reconstruct(sae, rows) / scale
    rows, train = rows / scale, train / scale
    counts = [
        max(1, min(sae.d_sae, len(train) // per_cell))
        for per_cell in (ROWS_PER_CELL, ROWS_PER_CELL * max(1, rank))
    ]
    fvus, cells = [], []
    # The time grows with the cells.
    with listener.progress("k-means and local PCA", sum(counts), "cells") as show:
        for count, directions in zip(counts, (0, rank), strict=True):
            fitted = kmeans(train, count)
            reference = LocalPCA(train, fitted.cluster_centers_, fitted.labels_)
            fvus.append(fvu(rows, reference.reconstruct(rows, directions, fitted.predict(rows))))
            cells.append(len(reference.centres))
            show(sum(cells))
    return {
        "kmeans_fvu": fvus[0],
        "sae_fvu": fvu(rows, predicted),
        "local_pca_fvu": fvus[1],
        "metric": sae.normalisation.metric,
        "kmeans_cells": cells[0],
        "local_pca_cells": cells[1],
        "local_pca_rank": rank,
        "rows_fitted": len(train),
        "rows_measured": len(rows),
    }


def reconstruct(sae: SAE, rows: RowArray) -> RowArray:
    step = max(1, REFERENCE_CODES // sae.d_sae)
    parts = torch.from_numpy(rows).to(sae.W_enc.dtype).split(step)
    return np.concatenate([sae(part).numpy() for part in parts])


def fvu(rows: RowArray, reconstruction: RowArray) -> float:
    """FVU; if all rows are equal, infinite, or NaN without a residual."""
    residual = float(np.square(reconstruction - rows.astype(np.float64)).sum())
    spread = float(np.square(rows - rows.mean(0, dtype=np.float64)).sum())
    if spread > 0:
        return residual / spread
    return math.inf if residual > 0 else math.nan


def kmeans(train: RowArray, count: int) -> Any:
    """scikit-learn's fitted estimator of at most `count` <= N cells of training rows, (N, D): KMeans from k-means++
    until it converges; above `CAREFUL_WORK` MiniBatchKMeans from random rows, with fewer cells where its passes would
    exceed `MINIBATCH_WORK`.

    Source: Sculley, "Web-scale k-means clustering" (2010), for mini-batches.
    """
    from sklearn.cluster import KMeans, MiniBatchKMeans  # half a second that only this needs
    from sklearn.exceptions import ConvergenceWarning

    if train.size * count <= CAREFUL_WORK:
        estimator = KMeans(count, n_init=1, random_state=0)
    else:
        estimator = MiniBatchKMeans(
            max(1, min(count, MINIBATCH_WORK // (PASSES * train.size))),
            n_init=1,
            random_state=0,
            init="random",
            max_iter=PASSES,
            batch_size=BATCH,
            max_no_improvement=None,
        )
    with warnings.catch_warnings():
        # Rows that repeat leave fewer distinct ones than cells, which costs nothing but empty cells.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(train)


def nearest(rows: RowArray, centres: RowArray) -> Assignment:
    from sklearn.metrics import pairwise_distances_argmin

    return pairwise_distances_argmin(rows, centres.astype(rows.dtype))


class LocalPCA:
    """Local PCA on the cells nearest to centres, (C, D), fitted on training rows, (N, D).

    `labels`, (N,), are the training rows' cells, by default the nearest. A centre is the mean of a cell without rows.
    """

    def __init__(
        self, train: RowArray, centres: RowArray, labels: Assignment | None = None
    ) -> None:
        self.centres = centres
        self._train = train
        labels = nearest(train, centres) if labels is None else labels
        self._members = members(labels, len(centres))

    def mean(self, cell: int) -> RowArray:
        inside = self._members[cell]
        if not len(inside):
            return self.centres[cell].astype(np.float64)
        return self._train[inside].mean(0, dtype=np.float64)

    def directions(self, cell: int) -> RowArray:
        return principal_directions(self._train[self._members[cell]] - self.mean(cell))

    def reconstruct(self, rows: RowArray, rank: int, labels: Assignment | None = None) -> RowArray:
        """`x_hat`, (M, D), float64, of rows, (M, D). Cost: an SVD per cell, O(N D min(N / C, D)); none for rank 0."""
        labels = nearest(rows, self.centres) if labels is None else labels
        result = np.empty(rows.shape)
        for cell, inside in enumerate(members(labels, len(self.centres))):
            if not len(inside):
                continue
            mean = self.mean(cell)
            result[inside] = mean
            if rank:
                directions = self.directions(cell)[:, :rank]
                result[inside] += ((rows[inside] - mean) @ directions) @ directions.T
        return result


def principal_directions(rows: RowArray) -> RowArray:
    """Principal directions of rows about zero, (N, D), orthonormal, (D, r), largest variance first, float64; r is at
    most min(N - 1, D); for N <= D, variances under `LEAST_VARIANCE` of the largest are out. Cost: O(N D min(N, D))."""
    N, D = rows.shape
    r = min(N - 1, D)
    if r < 1:
        return np.empty((D, 0))
    if N > D:
        return np.linalg.eigh(rows.T @ rows)[1][:, ::-1][:, :r]
    # A third of the time of a singular value decomposition.
    variances, vectors = (found[..., : -r - 1 : -1] for found in np.linalg.eigh(rows @ rows.T))
    spanned = variances > LEAST_VARIANCE * variances[0]
    return (rows.T @ vectors[:, spanned]) / np.sqrt(variances[spanned])


def members(labels: Assignment, count: int) -> list[NDArray[np.int64]]:
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.searchsorted(labels[order], np.arange(1, count)))
