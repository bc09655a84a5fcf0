"""The bridge: an SAE between k-means and local PCA, on 100 points of the plane in three clusters.

    python examples/geometry/bridge.py [--out bridge.png] [--steps 5000]

Top-1 and Top-3 SAEs of 80 latents, trained by Adam at 8e-3 on all points at every step. k-means gets as many cells as
the SAE's points visit, so that it is not worse for want of cells; local PCA works on the SAE's own cells with the SAE's
own rank, so that it is not better for other cells, and its gain is the price of shared dictionary vectors. After the
paper's experiment on the bridge between k-means and PCA. In two dimensions the rank of Top-3 is 2, and local PCA exact.
"""

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # before torch is loaded: threads that wait sleep

import numpy as np
import torch
from diagrams import cells_in
from matplotlib.axes import Axes
from torch import Tensor

from saecli.geometry.cells import PowerDiagram, cells_of
from saecli.geometry.geometry import PlaneCells, plane_cells
from saecli.geometry.references import LocalPCA, fvu, kmeans
from saecli.sae.activations import TopK
from saecli.sae.dictionary import SAE
from saecli.show.geometry import fill_cells, tints
from saecli.show.style import COLOURS, GREY, figure

LATENTS, RATE = 80, 8e-3
WINDOW = (-2.1, 2.1, -2.1, 2.1)


def points(generator: torch.Generator) -> Tensor:
    """A line of 40 points, a square of 30 and a diagonal of 30, (100, 2)."""

    def noise(count: int) -> Tensor:
        return torch.randn(count, 2, generator=generator)

    line = torch.stack([torch.linspace(-1.5, 0, 40), torch.full((40,), -0.8)], 1) + 0.1 * noise(40)
    square = 0.8 * torch.rand(30, 2, generator=generator) + torch.tensor([-0.4, 0.4])
    along = torch.linspace(0, 1, 30)
    return torch.cat([line, square, torch.stack([along + 0.8, along - 0.5], 1) + 0.15 * noise(30)])


def trained(x: Tensor, k: int, steps: int, generator: torch.Generator) -> SAE:
    """A Top-K SAE of 80 latents, trained on all points, (N, 2), at every step."""
    W_enc = torch.randn(2, LATENTS, generator=generator)
    sae = SAE(
        W_enc, torch.zeros(LATENTS), (W_enc / W_enc.norm(dim=0)).T, x.mean(0), TopK(k)
    ).requires_grad_()
    optimizer = torch.optim.Adam(sae.parameters(), lr=RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        (sae(x) - x).square().sum(1).mean().backward()
        optimizer.step()
    return sae.sae().copy_to(torch.float64)


def arrows(axes: Axes, starts: np.ndarray, ends: np.ndarray, colour: str) -> None:
    """Draw rows, (M, 2), as open dots, with lines to their reconstructions, (M, 2), as full dots."""
    lines = np.stack([starts, ends], 1).transpose(2, 1, 0)
    axes.plot(*lines, color=colour, linewidth=0.7, alpha=0.8, zorder=2)
    axes.scatter(*starts.T, s=9, facecolors="white", edgecolors=GREY, linewidths=0.6, zorder=3)
    axes.scatter(*ends.T, s=8, c=colour, linewidths=0, zorder=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bridge.png"), help="PNG, PDF or SVG")
    parser.add_argument("--steps", type=int, default=5000)
    given = parser.parse_args()
    torch.set_num_threads(1)  # on 100 points a second thread costs more than it brings
    generator = torch.Generator().manual_seed(0)
    x = points(generator)
    rows = x.double().numpy()
    with figure(given.out, 11.4, 8) as drawn:
        for panels, k in zip(drawn.subplots(2, 3), (1, 3), strict=True):
            started = time.perf_counter()
            sae = trained(x, k, given.steps, generator)
            seconds = time.perf_counter() - started
            cells = cells_of(sae)
            supports = cells.supports(cells.pre_activations(x)).numpy()
            own = np.unique(supports, axis=0, return_inverse=True)[1]
            areas_of_sae = plane_cells(cells, WINDOW)
            count = int(own.max()) + 1
            centres = kmeans(rows, count).cluster_centers_
            voronoi = PowerDiagram(torch.from_numpy(centres), torch.zeros(count))
            local_pca = LocalPCA(rows, np.zeros((count, 2)), own)
            regions: list[tuple[str, PlaneCells, np.ndarray]] = [
                (
                    f"k-means, {count} cells",
                    cells_in(voronoi, WINDOW)[0],
                    LocalPCA(rows, centres).reconstruct(rows, 0),
                ),
                (f"Top-{k} SAE, {count} cells visited", areas_of_sae, sae(x.double()).numpy()),
                (
                    f"local PCA of rank {min(k, 2)} on these cells",
                    areas_of_sae,
                    local_pca.reconstruct(rows, min(k, 2), own),
                ),
            ]
            fvus = []
            for axes, colour, (name, areas, ends) in zip(
                panels, (COLOURS[1], COLOURS[0], COLOURS[2]), regions, strict=True
            ):
                fvus.append(fvu(rows, ends))
                fill_cells(
                    axes, areas, 0.6 + 0.4 * tints(len(areas.sizes))
                )  # paler still: the arrows matter here
                arrows(axes, rows, ends, colour)
                axes.set(
                    title=f"{name}: FVU {fvus[-1] if fvus[-1] > 1e-12 else 0:.4f}",
                    xticks=[],
                    yticks=[],
                )
            print(
                f"Top-{k}: k-means {fvus[0]:.4f}, SAE {fvus[1]:.4f}, local PCA {fvus[2]:.4f}; {count} cells; "
                f"trained in {seconds:.1f} s"
            )
    print(f"drew {given.out}")


if __name__ == "__main__":
    main()
