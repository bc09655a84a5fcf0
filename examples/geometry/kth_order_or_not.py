"""Six cells about a regular hexagon's corners: when are they a second-order power diagram of four sites?

    python examples/geometry/kth_order_or_not.py [--out kth_order_or_not.png]

A power diagram with C(4, 2) = 6 cells is one where its sites are `nu_S = (mu_i + mu_j) / 2`, the same for the weights.
Then pairs that share no site have one middle between them: nu_12 + nu_34 = nu_13 + nu_24 = nu_14 + nu_23. Called pair
by pair around the hexagon, opposite corners share a site, and the diagram is refused; called so that opposite corners
share none, four sites are found; with one corner heavier no way to call them will do. After the paper's remark that
not every power diagram with C(d, K) cells is a K-th order one.
"""

import argparse
import math
import os
from pathlib import Path

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # before torch is loaded: threads that wait sleep

import torch
from diagrams import cells_in
from matplotlib.axes import Axes
from recovery import Recovery, recover

from saecli.geometry.cells import PowerDiagram
from saecli.show.geometry import fill_cells, tints
from saecli.show.style import COLOURS, figure

WINDOW = (-2.6, 2.6, -2.6, 2.6)
AROUND = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]


def draw(axes: Axes, hexagon: PowerDiagram, found: Recovery, words: str) -> None:
    """Draw the cells, what each is called, and the sites found where there are any."""
    fill_cells(axes, cells_in(hexagon, WINDOW)[0], tints(6))
    axes.scatter(*hexagon.centroids.numpy().T, s=26, c="#222222", edgecolors="white", zorder=3)
    for (x, y), support in zip(
        hexagon.centroids.tolist(), (found.supports + 1).tolist(), strict=True
    ):
        axes.annotate(
            "".join(map(str, support)), (1.28 * x, 1.28 * y), ha="center", va="center", zorder=4
        )
    if found.is_kth_order:
        axes.scatter(
            *found.diagram.centroids.numpy().T,
            s=80,
            c=COLOURS[1],
            marker="X",
            edgecolors="white",
            zorder=5,
        )
        for number, site in enumerate(found.diagram.centroids.numpy(), 1):
            axes.annotate(
                str(number),
                site,
                xytext=(7, 5),
                textcoords="offset points",
                color=COLOURS[1],
                weight="bold",
                zorder=6,
            )
    verdict = "second order, of four sites" if found.is_kth_order else "refused"
    axes.set(title=f"{words}:\n{verdict}, residual {found.residual:.2g}", xticks=[], yticks=[])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("kth_order_or_not.png"), help="PNG, PDF or SVG"
    )
    out = parser.parse_args().out
    angles = torch.arange(6).double() * math.pi / 3
    corners = torch.stack([angles.cos(), angles.sin()], 1)
    regular = PowerDiagram(corners, torch.zeros(6))
    heavier = PowerDiagram(corners, torch.eye(1, 6)[0] * 0.5)
    cases = [
        (regular, recover(regular, 2, AROUND), "called pair by pair around"),
        (regular, recover(regular, 2), "called as fits best"),
        (heavier, recover(heavier, 2), "one corner heavier, called as fits best"),
    ]
    with figure(out, 11.4, 4.4) as drawn:
        for axes, (hexagon, found, words) in zip(drawn.subplots(1, 3), cases, strict=True):
            draw(axes, hexagon, found, words)
            print(
                f"{words}: {'a second-order diagram' if found.is_kth_order else 'refused'}, "
                f"residual {found.residual:.2g}"
            )
    print(f"drew {out}")


if __name__ == "__main__":
    main()
