"""The bridge: an SAE between k-means and local PCA, on the same rows.

    FVU = sum ||x - x_hat||^2 / sum ||x - mean||^2 over the rows measured

    k-means autoencoder     constant on each of its cells
    SAE                     affine on each of its cells, all from the same dictionary vectors
    local PCA               the best affine map on each cell: on cells of k-means, and on the SAE's own

On the SAE's own cells local PCA has the SAE's own rank: the difference is the price of shared dictionary vectors.
Source: the paper on SAEs as a bridge between k-means and local PCA, and its theorem on the optimal piecewise affine
autoencoder. Shapes: N training rows, M rows measured, D = d_in, r = rank, C cells.
"""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..sae.dictionary import SAE
from .cells import Cells
from .local_pca import (
    Labels,
    LocalPCA,
    Partition,
    Rows,
    Stream,
    StreamedPCA,
    affordable,
    kmeans,
    streamed_kmeans,
)
from .survey import rank as map_rank

KMEANS_ROWS = 4  # least mean number of training rows in a cell of the k-means autoencoder
LOCAL_PCA_ROWS = 4  # the same for a cell of local PCA, in units of its rank, or its directions are the rows' noise
# Least sample for the price: over 5 random cells it scattered by 35% to 89% of itself, over 20 by 14% to 32%, over 100
# rows by 11% to 44% (k from 1 to 8, activations and image patches). Fewer cells do if they hold nearly all rows.
PRICE_ROWS, PRICE_CELLS, PRICE_COVER = 100, 20, 0.9
SCATTER = 2**27  # numbers that the scatter matrices of streamed local PCA may hold, 1 GiB
CODES = 2**22  # codes at a time, 16 MiB in float32


def reconstructions(sae: SAE, rows: Rows) -> Rows:
    step = max(1, CODES // sae.d_sae)
    parts = [
        sae(torch.from_numpy(rows[at : at + step]).to(sae.W_enc.dtype)).numpy()
        for at in range(0, len(rows), step)
    ]
    return np.concatenate(parts)


@dataclass(frozen=True)
class OwnCells:
    """The SAE against local PCA of its own rank on its own cells, those that hold enough rows; None without cells."""

    cells: int  # with at least 4 training rows per dimension of the SAE's map, and a row measured
    rank: float | None  # of the SAE's map, mean over the rows measured
    rows_fitted: int
    rows_measured: int
    sae_fvu: float | None  # with the spread about the mean of all rows measured, as the next
    local_pca_fvu: float | None
    price: float | None  # `sae_fvu - local_pca_fvu`
    enough: bool  # 100 rows measured in 20 cells, or in fewer that hold nine tenths of all rows measured


@dataclass(frozen=True)
class References:
    """FVU of an SAE and of its references on the same rows."""

    kmeans_fvu: float
    sae_fvu: float
    local_pca_fvu: float
    variable_rank_fvu: float
    kmeans_cells: int
    local_pca_cells: int
    local_pca_rank: int
    variable_rank_lambda: float  # cost per row of a dimension, in squared units of the rows
    variable_rank_mean: float  # directions, mean over the training rows
    own_cells: OwnCells
    rows_fitted: int
    rows_measured: int


def spread(rows: Rows) -> float:
    """`sum ||x - mean||^2` of rows, (M, D)."""
    return float(np.square(rows - rows.mean(0, dtype=np.float64)).sum())


def fvu(residual: float, total: float) -> float:
    """`residual / total`; if all rows are equal infinite, as in `sae eval`, or NaN without a residual."""
    return residual / total if total > 0 else math.inf if residual > 0 else math.nan


@dataclass(frozen=True)
class Bridge:
    sae: SAE  # between them
    train: Rows  # in memory, (any number, D)
    rows_fitted: int  # N, in memory or streamed
    means: Partition  # the cells of the k-means autoencoder
    kmeans: LocalPCA  # it as local PCA of rank 0
    pieces: Partition
    local_pca: LocalPCA
    rank: int  # principal directions in each piece

    @classmethod
    def fit(
        cls, sae: SAE, train: Rows, rank: int, seed: int = 0, stream: Stream | None = None
    ) -> "Bridge":
        """Fit k-means with `min(d_sae, N / 4)` cells, and local PCA with `min(d_sae, N / (4 rank))`, at least one.

        Args:
            train: rows to fit on, (N, D), N > 0.
            rank: the SAE's rank on its own cells, K or the mean L0; at most D is used.
            stream: N rows to fit on instead, with `train` a sample of them; cells are limited by the sample, for
                local PCA by `SCATTER / D^2`.

        Cost: two k-means fits of at most `MINIBATCH_WORK` products; of a stream two passes, N C D each, and N D^2.
        """
        rank, N = min(rank, train.shape[1]), stream.rows if stream else len(train)
        counts = [
            max(1, min(sae.d_sae, N // rows))
            for rows in (KMEANS_ROWS, LOCAL_PCA_ROWS * max(1, rank))
        ]
        fitted = (
            _pieces_of_stream(train, stream, counts, seed)
            if stream
            else [_pieces(train, count, seed) for count in counts]
        )
        return cls(sae, train, N, *fitted[0], *fitted[1], rank)

    def measure(self, rows: Rows, visited: "Visited", penalty: float | None = None) -> References:
        """Measure the SAE and all references on the same rows, (M, D), M > 0, with one SVD for each cell.

        Rows that were fitted on flatter local PCA in small cells. `penalty`: lambda of the variable rank, at least 0,
        in squared units of the rows; None: the one at which the mean rank is the fixed one.
        """
        total = spread(rows)
        means = self.kmeans.means_residual(rows, self.means.predict(rows))
        spectrum = self.local_pca.spectrum(rows, self.pieces.predict(rows))
        fixed = np.full(len(spectrum.rows), self.rank)
        if penalty is None:
            penalty = spectrum.penalty_for(spectrum.mean_rank(fixed))
        varied = spectrum.ranks(penalty)
        residual = np.square(reconstructions(self.sae, rows) - rows.astype(np.float64)).sum(1)
        return References(
            fvu(means, total),
            fvu(float(residual.sum()), total),
            fvu(spectrum.residual(fixed), total),
            fvu(spectrum.residual(varied), total),
            len(self.kmeans.counts),
            len(self.local_pca.counts),
            self.rank,
            penalty,
            spectrum.mean_rank(varied),
            own_cells(visited, self.train, rows, residual),
            rows_fitted=self.rows_fitted,
            rows_measured=len(rows),
        )

    def reconstructions(self, rows: Rows) -> dict[str, Rows]:
        """Reconstructions of rows, (M, D), by k-means, SAE and local PCA, (M, D) each."""
        none, fixed = (
            np.zeros(len(self.kmeans.counts), int),
            np.full(len(self.local_pca.counts), self.rank),
        )
        return {
            "k-means": self.kmeans.reconstruct(rows, self.means.predict(rows), none),
            "SAE": reconstructions(self.sae, rows),
            "local PCA": self.local_pca.reconstruct(rows, self.pieces.predict(rows), fixed),
        }


def _pieces(train: Rows, count: int, seed: int) -> tuple[Partition, LocalPCA]:
    partition = kmeans(train, count, seed)
    return partition, LocalPCA(train, partition.predict(train), partition.cluster_centers_)


def _pieces_of_stream(
    sample: Rows, stream: Stream, counts: list[int], seed: int
) -> list[tuple[Partition, LocalPCA]]:
    means, pieces = (affordable(sample, min(count, len(sample))) for count in counts)
    pieces = max(1, min(pieces, SCATTER // sample.shape[1] ** 2))
    partitions = streamed_kmeans(sample, stream, [means, pieces], seed)
    fitted = [
        StreamedPCA(partition.cluster_centers_, directions)
        for partition, directions in zip(partitions, (False, True), strict=True)
    ]
    for batch in stream.batches():
        for partition, pca in zip(partitions, fitted, strict=True):
            pca.add(batch, partition.predict(batch))
    return list(zip(partitions, fitted, strict=True))


@dataclass(frozen=True)
class Visited:
    """The keys of the SAE's own cells that N training rows and M rows measured lie in."""

    cells: Cells
    train: list[bytes]
    rows: list[bytes]


def own_cells(visited: Visited, train: Rows, rows: Rows, residual: NDArray[np.float64]) -> OwnCells:
    """Compare the SAE with local PCA on the cells that both training rows, (N, D), and rows measured, (M, D), visit
    often enough, given the SAE's squared error on these, (M,). Cost: one rank and one SVD per such cell."""
    cells, measured = visited.cells, set(visited.rows)
    first = {key: at for at, key in reversed([*enumerate(visited.train)])}
    ranks: dict[bytes, int] = {}
    for key, count in Counter(visited.train).items():
        if count >= LOCAL_PCA_ROWS and key in measured:
            some = torch.from_numpy(train[first[key]])[None]
            support = cells.supports(cells.pre_activations(some))[0]
            rank = map_rank(cells.sae, support.nonzero()[:, 0])
            if count >= LOCAL_PCA_ROWS * rank:
                ranks[key] = rank
    if not ranks:
        return OwnCells(0, None, 0, 0, None, None, None, enough=False)
    number = {key: at for at, key in enumerate(ranks)}
    (train_in, train_labels), (rows_in, labels) = (
        _labelled(some, number) for some in (visited.train, visited.rows)
    )
    fitted = LocalPCA(train[train_in], train_labels, np.zeros((len(ranks), train.shape[1])))
    spectrum = fitted.spectrum(rows[rows_in], labels)
    own = np.array(list(ranks.values()))
    # About the mean of all rows measured, as the FVU of all is: a cell or two may hold next to no spread.
    total = float(np.square(rows[rows_in] - rows.mean(0, dtype=np.float64)).sum())
    sae_fvu, pca_fvu = (
        fvu(float(residual[rows_in].sum()), total),
        fvu(spectrum.residual(own), total),
    )
    enough = len(rows_in) >= PRICE_ROWS and (
        len(ranks) >= PRICE_CELLS or len(rows_in) >= PRICE_COVER * len(rows)
    )
    return OwnCells(
        len(ranks),
        float(own[labels].mean()),
        len(train_in),
        len(rows_in),
        sae_fvu,
        pca_fvu,
        sae_fvu - pca_fvu,
        enough,
    )


def _labelled(keys: list[bytes], number: dict[bytes, int]) -> tuple[NDArray[np.int64], Labels]:
    """The rows that lie in numbered cells, and their cells' numbers."""
    found = np.array([number.get(key, -1) for key in keys])
    inside = np.flatnonzero(found >= 0)
    return inside, found[inside]
