"""Local PCA with a rank of each cell's own: its FVU against the mean rank, below that of one rank for all cells.

    python examples/geometry/ranks.py [--out ranks.png]

Where rank costs lambda per row, `sum (||x - x_hat||^2 + lambda K_c)` over maps that are affine of rank K_c on cell c is
least with K_c the number of eigenvalues of the cell's covariance above lambda. Source: the paper's theorem on the
optimal piecewise affine autoencoder, in the form for variable rank. 2,000 points in 12 dimensions, in 10 clusters that
span 1 to 10 of them, cut into 10 cells by k-means. Shapes: N points, D dimensions, C cells.
"""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from saecli.geometry.references import kmeans, members
from saecli.show.style import COLOURS, figure

N, D, C = 2000, 12, 10


def points(rng: np.random.Generator) -> NDArray[np.float64]:
    """Clusters about C centres, the c-th spanning c dimensions, (N, D)."""
    cluster = rng.integers(0, C, N)
    spans = np.arange(D) <= cluster[:, None]
    return 5 * rng.normal(size=(C, D))[cluster] + spans * rng.normal(size=(N, D))


def spectra(x: NDArray, labels: NDArray, cells: int) -> list[NDArray[np.float64]]:
    """The eigenvalues of each cell's covariance, descending, (D,) each, given the cell of each point, (N,)."""
    groups = [x[inside] for inside in members(labels, cells)]
    return [np.linalg.eigvalsh(np.cov(group.T, bias=True))[::-1].clip(0) for group in groups]


def variable_ranks(eigenvalues: list[NDArray], cost: float) -> NDArray[np.int64]:
    """K_c of the theorem, (C,), where a dimension costs lambda per row."""
    return np.array([(own > cost).sum() for own in eigenvalues])


def residual(eigenvalues: list[NDArray], counts: NDArray, ranks: NDArray) -> float:
    """`sum ||x - x_hat||^2` over all points, with `counts` of them in each cell, (C,)."""
    left = [own[rank:].sum() for own, rank in zip(eigenvalues, ranks, strict=True)]
    return float(counts @ left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("ranks.png"), help="PNG, PDF or SVG")
    arguments = parser.parse_args()
    x = points(np.random.default_rng(0))
    labels = kmeans(x, C).labels_
    eigenvalues, counts = spectra(x, labels, C), np.bincount(labels, minlength=C)
    spread = float(np.square(x - x.mean(0)).sum())
    fixed = [(rank, residual(eigenvalues, counts, np.full(C, rank))) for rank in range(D + 1)]
    variable = []
    for cost in np.sort(np.concatenate(eigenvalues)):
        ranks = variable_ranks(eigenvalues, cost)
        variable.append((counts @ ranks / N, residual(eigenvalues, counts, ranks)))
    with figure(arguments.out, 6.5, 4.5) as drawn:
        axes = drawn.subplots()
        for (name, curve), colour in zip(
            (("one rank for all cells", fixed), ("a rank per cell", variable)),
            (COLOURS[2], COLOURS[0]),
            strict=True,
        ):
            rank, error = np.array(curve).T
            axes.plot(rank, error / spread, color=colour, label=name)
            print(
                f"{name}: FVU {np.interp(3, *np.array(sorted(curve)).T) / spread:.4f} at mean rank 3"
            )
        axes.set(xlabel="mean rank", ylabel="fraction of variance unexplained (FVU)")
        axes.legend()
    print(f"drew {arguments.out}")


if __name__ == "__main__":
    main()
