"""The best autoencoder that is affine on each cell of a partition: local PCA, with fixed or variable rank.

    x_hat = m_c + (x - m_c) V_c V_c'        m_c the mean of the cell's rows, V_c their first K_c principal directions

minimises `sum ||x - x_hat||^2` over all maps that are affine of rank K_c on cell c; with K_c = 0 for every c it is the
k-means autoencoder. Where rank costs lambda a row, `sum (||x - x_hat||^2 + lambda K_c)` is least with

    lambda_{K_c} > lambda >= lambda_{K_c + 1}       lambda_1 >= lambda_2 >= ... eigenvalues of the cell's covariance

Source: the paper's theorem on the optimal piecewise affine autoencoder, in the form for fixed and for variable rank.
Shapes: N training rows, M rows measured, D = d_in, C cells, r directions.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .kmeans import Labels, Rows


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
    variances, directions = np.linalg.eigh(rows.T @ rows / len(rows))
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
        # A hair above, since the sum of many shares may be less than a rounding above the whole number asked for.
        affordable = int(np.searchsorted(taken, rank * (1 + 1e-12), side="right"))
        return float(every[order[affordable]]) if affordable < len(every) else 0.0

    def mean_rank(self, ranks: NDArray[np.int64]) -> float:
        """Mean over the training rows of the directions that their cells have, at most so many each, (C,)."""
        had = np.minimum(ranks, [len(own) for own in self.variances])
        return float(had @ self.rows / self.rows.sum())

    def residual(self, ranks: NDArray[np.int64]) -> float:
        """`sum ||x - x_hat||^2` over the rows measured, given K_c, (C,); a cell of N_c training rows has at most
        N_c - 1 directions."""
        kept = [float(own[:rank].sum()) for own, rank in zip(self.explained, ranks, strict=True)]
        return max(0.0, float(self.total.sum()) - sum(kept))


@dataclass(frozen=True)
class LocalPCA:
    """Local PCA on the cells of a partition, fitted on training rows.

    Args:
        train: training rows, (N, D).
        cells: the cell of each, (N,).
        centres: stand in for the mean of a cell without training rows, (C, D).
    """

    train: Rows
    cells: Labels
    centres: Rows

    def _members(self) -> list[NDArray[np.int64]]:
        """Numbers of the training rows in each cell, C arrays."""
        return members(self.cells, len(self.centres))

    def _fit(self, cell: int, inside: NDArray[np.int64]) -> tuple[Rows, Rows, Rows]:
        """Mean (D,), directions (D, r) and variances (r,) of one cell."""
        fitted = self.train[inside].astype(np.float64)
        mean = fitted.mean(0) if len(fitted) else self.centres[cell].astype(np.float64)
        return mean, *principal_components(fitted - mean)

    def spectrum(self, rows: Rows, cells: Labels) -> Spectrum:
        """Measure rows, (M, D), of those cells, (M,).

        Cost: one SVD a cell, O(N D min(N / C, D)) in all.
        """
        variances, explained, total = [], [], np.zeros(len(self.centres))
        inside = self._members()
        for cell, measured in enumerate(members(cells, len(self.centres))):
            mean, directions, own = self._fit(cell, inside[cell])
            offset = rows[measured] - mean
            variances.append(own)
            explained.append(np.square(offset @ directions).sum(0))
            total[cell] = np.square(offset).sum()
        return Spectrum(np.array([len(some) for some in inside]), variances, explained, total)

    def means_residual(self, rows: Rows, cells: Labels) -> float:
        """`sum ||x - m_c||^2` over rows, (M, D), of those cells, (M,): the spectrum's at rank 0, without an SVD."""
        total = 0.0
        for cell, (inside, measured) in enumerate(zip(self._members(), members(cells, len(self.centres)), strict=True)):
            if len(measured):
                mean = self.train[inside].mean(0, dtype=np.float64) if len(inside) else self.centres[cell]
                total += float(np.square(rows[measured] - mean).sum())
        return total

    def reconstruct(self, rows: Rows, cells: Labels, ranks: NDArray[np.int64]) -> Rows:
        """`x_hat`, (M, D), of rows, (M, D), of those cells, (M,), given K_c, (C,)."""
        result, inside = np.empty(rows.shape), self._members()
        for cell, measured in enumerate(members(cells, len(self.centres))):
            if len(measured):
                mean, directions, _ = self._fit(cell, inside[cell])
                kept = directions[:, :ranks[cell]]
                result[measured] = mean + ((rows[measured] - mean) @ kept) @ kept.T
        return result


def members(cells: Labels, count: int) -> list[NDArray[np.int64]]:
    """The numbers of the rows in each of so many cells, given the cell of each row."""
    order = np.argsort(cells, kind="stable")
    return np.split(order, np.searchsorted(cells[order], np.arange(1, count)))
