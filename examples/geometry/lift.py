"""A power diagram of the plane is a section of a Voronoi diagram of space.

    python examples/geometry/lift.py [--out lift.png]

Each site is raised by the root of what its weight falls short of the largest; the plane at height 0 then cuts the
Voronoi cells of the raised sites in the power cells. Sections higher up are power diagrams too, of other weights. After
the paper's figure of a three-dimensional Voronoi diagram and a two-dimensional power diagram.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is loaded: threads that wait sleep

import numpy as np
import torch
from mpl_toolkits.mplot3d.art3d import Poly3DCollection

from saecli.geometry.partition import cells_of_diagram
from saecli.geometry.plane_cells import PlaneCells, colouring, polygon_cells
from saecli.geometry.power_diagram import PowerDiagram, lift, section
from saecli.show.cell_plots import TINTS, fill
from saecli.show.style import figure

WINDOW = (-1.3, 1.3, -1.3, 1.3)
HEIGHTS = (0.0, 0.5, 1.0)
SITES = 15


def cut(raised: PowerDiagram, height: float) -> tuple[PlaneCells, np.ndarray]:
    """The cells of a horizontal section, and the site of each, (C,)."""
    flat = section(raised, torch.tensor([0, 0, height]), torch.eye(2, 3))
    cells = polygon_cells(cells_of_diagram(flat), WINDOW)
    middles = torch.from_numpy(np.stack([polygon.mean(0) for polygon in cells.polygons]))
    return cells, flat.nearest(middles, 1)[:, 0].numpy()


def colours_of(cuts: list[tuple[PlaneCells, np.ndarray]]) -> np.ndarray:
    """A colour for each site, (n, 3), the same at every height and unlike its neighbours' at any."""
    neighbours = [set() for _ in range(SITES)]
    for cells, sites in cuts:
        for site, touched in zip(sites, cells.neighbours, strict=True):
            neighbours[site] |= set(sites[touched])
    return TINTS[colouring([sorted(some) for some in neighbours], len(TINTS))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("lift.png"), help="PNG, PDF or SVG")
    out = parser.parse_args().out
    rng = np.random.default_rng(1)
    power = PowerDiagram(torch.from_numpy(rng.uniform(-1, 1, (SITES, 2))), torch.from_numpy(rng.uniform(0, 0.7, SITES)))
    raised = lift(power)
    cuts = [cut(raised, height) for height in HEIGHTS]
    colours = colours_of(cuts)

    with figure(out, 11, 5.2) as drawn:
        space = drawn.add_subplot(1, 2, 1, projection="3d", computed_zorder=False)
        for order, (height, (cells, sites)) in enumerate(zip(HEIGHTS, cuts, strict=True)):
            faces = [np.column_stack([polygon, np.full(len(polygon), height)]) for polygon in cells.polygons]
            space.add_collection3d(Poly3DCollection(faces, facecolors=colours[sites], edgecolors="#333333",
                                                    linewidths=0.5, alpha=0.9 if order == 0 else 0.35, zorder=order))
        for x, y, z in raised.centroids.numpy():
            space.plot([x, x], [y, y], [0, z], color="#666666", linewidth=0.7, linestyle="--", zorder=8)
            space.scatter(x, y, z, s=16, c="#222222", depthshade=False, zorder=9)
        space.set(xlim=WINDOW[:2], ylim=WINDOW[2:], zlim=(0, 1.05), zlabel="height", xticks=[], yticks=[],
                  zticks=HEIGHTS, title="Voronoi cells of the raised sites, cut at three heights")
        space.view_init(22, -60)
        plane = drawn.add_subplot(1, 2, 2)
        cells, sites = cuts[0]
        fill(plane, cells, colours[sites])
        plane.scatter(*power.centroids.numpy().T, s=60 * power.weights.numpy() + 6, c="#222222", edgecolors="white",
                      linewidths=0.6, zorder=3)
        plane.set(title="at height 0: the power diagram, dots by weight", xticks=[], yticks=[])

    points = torch.from_numpy(rng.uniform(-1.3, 1.3, (10_000, 2)))
    same = power.nearest(points, 1) == raised.nearest(torch.cat([points, torch.zeros(len(points), 1)], 1), 1)
    print(f"{int(same.sum()):,} of {len(points):,} points lie in the power cell of their nearest raised site")
    print(f"drew {out}")


if __name__ == "__main__":
    main()
