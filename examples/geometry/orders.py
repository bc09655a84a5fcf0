"""Voronoi diagram, power diagram, and the second-order power diagram, which a Top-2 SAE makes.

    python examples/geometry/orders.py [--out orders.png]

Circles have the root of a site's weight as radius. In the second order every cell has a site of its own, nu_S with
weight beta_S; from these the sites of the first order are found again. After the paper's figure of orders one and two.
"""

import argparse
import itertools
import os
from pathlib import Path

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # before torch is loaded: threads that wait sleep

import numpy as np
import torch
from diagrams import cells_in, sites_of
from matplotlib.axes import Axes
from matplotlib.patches import Circle
from recovery import recover

from saecli.geometry.cells import PowerDiagram
from saecli.show.geometry import fill_cells, tints
from saecli.show.style import COLOURS, figure

WINDOW = (-4.0, 4.0, -4.0, 4.0)
SITES = 7


def draw(axes: Axes, diagram: PowerDiagram, k: int, title: str) -> None:
    """Draw the cells of a diagram of the K-th order, its sites, and its weights as circles."""
    cells, _ = cells_in(diagram, WINDOW, k)
    fill_cells(axes, cells, tints(len(cells.sizes)))
    for number, (site, weight) in enumerate(
        zip(diagram.centroids.numpy(), diagram.weights.tolist(), strict=True), 1
    ):
        axes.scatter(*site, s=26, c="#222222", edgecolors="white", linewidths=0.6, zorder=3)
        axes.annotate(
            str(number), site, xytext=(4, 4), textcoords="offset points", fontsize=8, zorder=4
        )
        if weight > 0:
            axes.add_patch(Circle(site, weight**0.5, fill=False, color=COLOURS[1], linewidth=1))
    axes.set(title=f"{title}: {len(cells.sizes)} cells in view", xticks=[], yticks=[])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("orders.png"), help="PNG, PDF or SVG")
    out = parser.parse_args().out
    rng = np.random.default_rng(42)
    centroids, weights = (
        torch.from_numpy(rng.uniform(-3, 3, (SITES, 2))),
        torch.from_numpy(rng.uniform(0, 2, SITES)),
    )
    weights[0] += 4  # one site stronger than the others
    power = PowerDiagram(centroids, weights)

    with figure(out, 12.4, 4.5) as drawn:
        left, middle, right = drawn.subplots(1, 3)
        draw(left, PowerDiagram(centroids, torch.zeros(SITES)), 1, "Voronoi")
        draw(middle, power, 1, "power diagram")
        draw(right, power, 2, "second order")

    pairs = list(itertools.combinations(range(SITES), 2))
    found = recover(sites_of(power, torch.tensor(pairs)), 2, pairs)
    moved = (found.diagram.centroids - centroids).abs().max()
    print(
        f"{len(pairs)} pairs have sites nu_S; the {SITES} sites found from them are off by {moved:.1e}, "
        f"residual {found.residual:.1e}"
    )
    points = torch.from_numpy(rng.uniform(-4, 4, (9999, 2)))
    pair = power.nearest(torch.zeros(1, 2), 2).sort().values
    side = (
        centroids.square().sum(1) - weights
    ) / 2  # mu_i is nearer than mu_j: (mu_i - mu_j) x > side_i - side_j
    i, j = np.array([(i, j) for i in pair[0].tolist() for j in range(SITES) if j not in pair]).T
    H, c = centroids[i] - centroids[j], side[i] - side[j]
    held = (points @ H.T > c).all(1)
    same = (power.nearest(points, 2).sort().values == pair).all(1)
    print(
        f"the origin's second-order cell has {len(H)} inequalities H x > c; {int(held.sum())} of {len(points)} "
        f"points hold them, and {int(same.sum())} have its pair of nearest sites"
    )
    print(f"drew {out}")


if __name__ == "__main__":
    main()
