"""Power diagrams as sections of Voronoi diagrams in one more dimension, and back.

    lift:      sites (mu_i, h_i) in D + 1 dimensions,  h_i = sqrt(max_j alpha_j - alpha_i)
               ||(x, 0) - (mu_i, h_i)||^2 = ||x - mu_i||^2 - alpha_i + max_j alpha_j
    section:   on the plane o + u B, B orthonormal,  mu_i' = (mu_i - o) B',  alpha_i' = alpha_i - dist(mu_i, plane)^2

so that the plane x_{D+1} = 0 cuts the Voronoi cells of the lifted sites in the power cells of the diagram. Source: the
paper's remark that a power diagram is a section of a Voronoi diagram in one more dimension, after Imai, Iri and
Murota, "Voronoi diagram in the Laguerre geometry and its applications" (1985). Shapes: n sites, D dimensions.
"""

import torch
from torch import Tensor

from .power_diagram import PowerDiagram


def lift(diagram: PowerDiagram) -> PowerDiagram:
    """The Voronoi diagram in one more dimension whose section at height 0 a power diagram is.

    Args:
        diagram: n sites in D dimensions.

    Returns:
        n sites in D + 1 dimensions whose weights are all 0; the site of largest weight lies at height 0, and no
        other below it.
    """
    heights = (diagram.weights.max() - diagram.weights).sqrt()
    return PowerDiagram(torch.cat([diagram.centroids, heights[:, None]], 1), torch.zeros_like(heights))


def section(diagram: PowerDiagram, origin: Tensor, basis: Tensor) -> PowerDiagram:
    """What a plane cuts out of a diagram, in the plane's coordinates: a power diagram again, and of every order.

    Args:
        diagram: n sites in D dimensions; a Voronoi diagram where its weights are 0.
        origin: a point of the plane, (D,).
        basis: orthonormal directions that span it, (m, D).

    Returns:
        n sites in m dimensions; a section of a lift at height 0 is the diagram that was lifted, but for a constant
        added to all weights.
    """
    offset = diagram.centroids - origin.double()
    on_plane = offset @ basis.double().T
    return PowerDiagram(on_plane, diagram.weights - (offset - on_plane @ basis.double()).square().sum(1))
