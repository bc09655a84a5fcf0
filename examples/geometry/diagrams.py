"""Power diagrams of the plane for the scripts of this folder: their cells pixel by pixel, and the sites of these cells.

Shapes: n sites, C cells, P pixels per side.
"""

import numpy as np
import torch
from torch import Tensor

from saecli.geometry.cells import PowerDiagram
from saecli.geometry.geometry import Bounds, PlaneCells

PIXELS = 600


def pixels_of(window: Bounds) -> Tensor:
    """The centres of the pixels of a window, (P P, 2), the lowest row first."""
    left, right, bottom, top = window
    steps = (torch.arange(PIXELS, dtype=torch.float64) + 0.5) / PIXELS
    return torch.cartesian_prod(
        bottom + steps * (top - bottom), left + steps * (right - left)
    ).flip(1)


def cells_in(diagram: PowerDiagram, window: Bounds, k: int = 1) -> tuple[PlaneCells, np.ndarray]:
    """The cells of the k-th order in a window of the plane, and the sites of each, (C, k)."""
    nearest = diagram.nearest(pixels_of(window), k).sort(1).values.numpy()
    supports, labels = np.unique(nearest, axis=0, return_inverse=True)
    kept = np.full(len(supports), k)
    return PlaneCells(window, kept, labels.reshape(PIXELS, PIXELS)), supports


def sites_of(diagram: PowerDiagram, support: Tensor) -> PowerDiagram:
    """The cells of the K-th order diagram that keep the sites `support`, (C, K), as cells of an ordinary diagram.

        nu_S = (1/K) sum_{i in S} mu_i        beta_S = ||nu_S||^2 - (1/K) sum_{i in S} (||mu_i||^2 - alpha_i)

    so that `||x - nu_S||^2 - beta_S` is the mean power of the sites in S. Source: the paper's definition of K-th order
    power diagrams.
    """
    centroids = diagram.centroids[support]  # (C, K, D)
    nu = centroids.mean(-2)
    side = (centroids.square().sum(-1) - diagram.weights[support]).mean(-1)
    return PowerDiagram(nu, nu.square().sum(-1) - side)
