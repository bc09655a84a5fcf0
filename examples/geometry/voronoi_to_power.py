"""Four partitions of the plane: Voronoi, nearest neighbour, k-means, and power diagram.

    python examples/geometry/voronoi_to_power.py [--out voronoi_to_power.png]

All four are power diagrams: with weights 0 of the points (Voronoi), of the points with cells of one class taken
together (nearest neighbour), of the cluster means (k-means), and with weights of their own. Each is also the partition
of a Top-1 SAE with encoder mu' and bias (alpha - ||mu||^2) / 2. After the paper's figure of these partitions.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # before torch is loaded: threads that wait sleep

import numpy as np
import torch
from diagrams import cells_in
from matplotlib.axes import Axes
from matplotlib.patches import Circle

from saecli.geometry.cells import PowerDiagram
from saecli.geometry.references import kmeans
from saecli.show.geometry import fill_cells, tints
from saecli.show.style import COLOURS, figure

WINDOW = (-4.5, 4.5, -4.5, 4.5)


def diagram(sites: np.ndarray, weights: np.ndarray | None = None) -> PowerDiagram:
    """A power diagram of sites, (n, 2), and weights, (n,), or of weights 0."""
    return PowerDiagram(
        torch.from_numpy(sites),
        torch.from_numpy(np.zeros(len(sites)) if weights is None else weights),
    )


def draw(
    axes: Axes,
    some: PowerDiagram,
    points: np.ndarray,
    title: str,
    classes: np.ndarray | None = None,
) -> None:
    """Draw the cells of a diagram under points, (M, 2); cells coloured by their site's class, (n,), if it has one."""
    cells, sites = cells_in(some, WINDOW)
    fill_cells(
        axes,
        cells,
        tints(len(some.weights))[sites[:, 0] if classes is None else classes[sites[:, 0]]],
    )
    axes.scatter(*points.T, s=22, c="#222222", edgecolors="white", linewidths=0.6, zorder=3)
    axes.set(title=title, xticks=[], yticks=[])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("voronoi_to_power.png"), help="PNG, PDF or SVG"
    )
    out = parser.parse_args().out
    rng = np.random.default_rng(42)
    points, classes = rng.uniform(-4, 4, (12, 2)), rng.integers(0, 3, 12)
    weights = rng.uniform(0, 4, 12)
    centres = rng.uniform(-3, 3, (3, 2))
    rows = centres[rng.integers(0, 3, 90)] + 0.7 * rng.normal(size=(90, 2))
    means = kmeans(rows, 3).cluster_centers_

    with figure(out, 8.2, 8.4) as drawn:
        (voronoi, neighbour), (clusters, power) = drawn.subplots(2, 2)
        draw(voronoi, diagram(points), points, "Voronoi diagram: the nearest point")
        draw(
            neighbour,
            diagram(points),
            points,
            "nearest neighbour: the nearest point's class",
            classes,
        )
        draw(clusters, diagram(means), rows, "k-means: the nearest mean")
        clusters.scatter(*means.T, s=90, c=COLOURS[1], marker="X", edgecolors="white", zorder=4)
        draw(
            power,
            diagram(points, weights),
            points,
            "power diagram: least squared distance less weight",
        )
        for point, weight in zip(points, weights, strict=True):
            power.add_patch(Circle(point, weight**0.5, fill=False, color=COLOURS[1], linewidth=1.2))
    print(f"drew {out}")


if __name__ == "__main__":
    main()
