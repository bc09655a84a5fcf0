"""A power diagram of the plane is a section of a Voronoi diagram of space.

    python examples/geometry/lift.py [--out lift.png]

Each site is raised by the root of what its weight falls short of the largest; the plane at height 0 then cuts the
Voronoi cells of the raised sites in the power cells. Sections higher up are power diagrams too, of other weights. After
the paper's figure of a three-dimensional Voronoi diagram and a two-dimensional power diagram.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # before torch is loaded: threads that wait sleep

import numpy as np
import torch
from diagrams import PIXELS, cells_in, pixels_of

from saecli.geometry.cells import PowerDiagram
from saecli.show.geometry import fill_cells, tints
from saecli.show.style import figure

WINDOW = (-1.3, 1.3, -1.3, 1.3)
HEIGHTS = (0.0, 0.5, 1.0)
SITES = 15


def lift(diagram: PowerDiagram) -> PowerDiagram:
    """The Voronoi diagram in one more dimension whose section at height 0 a power diagram is: sites (mu_i, h_i),
    h_i = sqrt(max_j alpha_j - alpha_i). Source: Imai, Iri and Murota, "Voronoi diagram in the Laguerre geometry and its
    applications" (1985)."""
    heights = (diagram.weights.max() - diagram.weights).sqrt()
    return PowerDiagram(
        torch.cat([diagram.centroids, heights[:, None]], 1), torch.zeros_like(heights)
    )


def section(raised: PowerDiagram, height: float) -> PowerDiagram:
    """The section of a diagram of space by the plane at a height: a power diagram of the plane."""
    return PowerDiagram(
        raised.centroids[:, :2], raised.weights - (raised.centroids[:, 2] - height).square()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("lift.png"), help="PNG, PDF or SVG")
    out = parser.parse_args().out
    rng = np.random.default_rng(1)
    power = PowerDiagram(
        torch.from_numpy(rng.uniform(-1, 1, (SITES, 2))),
        torch.from_numpy(rng.uniform(0, 0.7, SITES)),
    )
    raised, colours = lift(power), tints(SITES)
    x, y = pixels_of(WINDOW).T.reshape(2, PIXELS, PIXELS).numpy()

    with figure(out, 11, 5.2) as drawn:
        space = drawn.add_subplot(1, 2, 1, projection="3d", computed_zorder=False)
        for order, height in enumerate(HEIGHTS):
            cells, sites = cells_in(section(raised, height), WINDOW)
            for cell, (site,) in enumerate(sites):
                space.contourf(
                    x,
                    y,
                    (cells.labels == cell) + height,
                    levels=[height + 0.5, height + 1.5],
                    zdir="z",
                    offset=height,
                    colors=[colours[site]],
                    alpha=0.9 if order == 0 else 0.35,
                    zorder=order,
                )
        for x, y, z in raised.centroids.numpy():
            space.plot(
                [x, x], [y, y], [0, z], color="#666666", linewidth=0.7, linestyle="--", zorder=8
            )
            space.scatter(x, y, z, s=16, c="#222222", depthshade=False, zorder=9)
        space.set(
            xlim=WINDOW[:2],
            ylim=WINDOW[2:],
            zlim=(0, 1.05),
            zlabel="height",
            xticks=[],
            yticks=[],
            zticks=HEIGHTS,
            title="Voronoi cells of the raised sites, cut at three heights",
        )
        space.view_init(22, -60)
        plane = drawn.add_subplot(1, 2, 2)
        cells, sites = cells_in(power, WINDOW)
        fill_cells(plane, cells, colours[sites[:, 0]])
        plane.scatter(
            *power.centroids.numpy().T,
            s=60 * power.weights.numpy() + 6,
            c="#222222",
            edgecolors="white",
            linewidths=0.6,
            zorder=3,
        )
        plane.set(title="at height 0: the power diagram, dots by weight", xticks=[], yticks=[])

    points = torch.from_numpy(rng.uniform(-1.3, 1.3, (10_000, 2)))
    same = power.nearest(points, 1) == raised.nearest(
        torch.cat([points, torch.zeros(len(points), 1)], 1), 1
    )
    print(
        f"{int(same.sum()):,} of {len(points):,} points lie in the power cell of their nearest raised site"
    )
    print(f"drew {out}")


if __name__ == "__main__":
    main()
