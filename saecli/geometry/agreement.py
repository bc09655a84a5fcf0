"""Test of the theorem that rows lie in the power cells of their supports: supports against distances, in float64.

    R_S = {x : TopK keeps S} = C_S = {x : pi_i(x) < pi_j(x) for i in S, j not in S} = {x : S' = S minimises
          ||x - nu_S'||^2 - beta_S'}

Source: the paper's theorem on TopK SAEs and K-th order power diagrams, and its definition of nu_S and beta_S.
Shapes: B rows, D = d_in, F = d_sae, n sites, K = k, C visited cells.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..sae.dictionary import SAE
from .power_diagram import KthOrderDiagram, PowerDiagram, kth_order_diagram

EPSILON = torch.finfo(torch.float64).eps
CELLS = 2000  # visited cells whose own sites, nu_S and beta_S, are compared at most


@dataclass(frozen=True)
class Agreement:
    """How rows' power cells compare with their supports.

    Args:
        rows: rows compared, ties among them.
        ties: rows too near a boundary for float64 to decide.
        matching: rows, ties left out, whose K nearest sites are their support.
    """

    rows: int
    ties: int
    matching: int

    @property
    def fraction(self) -> float | None:
        """Matching rows over rows without ties, in [0, 1]; None if all are ties."""
        return self.matching / (self.rows - self.ties) if self.rows > self.ties else None

    def __add__(self, other: "Agreement") -> "Agreement":
        return Agreement(self.rows + other.rows, self.ties + other.ties, self.matching + other.matching)


def agreement(sae: SAE, batches: Iterable[Tensor]) -> Agreement | None:
    """Compare each row's support with its K nearest power cells, both in float64.

    A row is a tie where a latent inside and one outside its support differ by less than the rounding errors of
    the two computations together, `(D + 8) eps ((||x|| + ||mu_i||)^2 + |alpha_i|)` for each.

    Args:
        sae: the autoencoder.
        batches: rows, each batch (B, D).

    Returns:
        The comparison, whose fraction is 1 by the theorem; None for an activation without a power diagram.

    Cost: `PowerDiagram.power` of all rows.
    """
    order = kth_order_diagram(sae)
    if order is None:
        return None
    sae = sae.copy_to(torch.float64)
    found = Agreement(0, 0, 0)
    for x in batches:
        decided, same = _compare(sae, order, x.double())
        found += _counted(decided, same)
    return found


def cell_agreement(sae: SAE, x: Tensor) -> tuple[Agreement, int] | None:
    """Compare each row's support S with the visited S' whose own site is nearest, `||x - nu_S'||^2 - beta_S'`.

    Args:
        sae: the autoencoder.
        x: rows, (B, D), whose cells are compared; rows beyond the first 2000 cells are left out.

    Returns:
        The comparison, ties as in `agreement`, and the cells compared, C; None for an activation without a power
        diagram.

    Cost: O(B C D), C at most 2000, and O(C K D) for the sites.
    """
    order = kth_order_diagram(sae)
    if order is None:
        return None
    x = x.double()
    pre = sae.copy_to(torch.float64).pre_activations(x)
    supports = order.sites(order.support(pre), pre).sort(-1).values  # (B, K)
    visited, own = torch.unique(supports, dim=0, return_inverse=True)
    kept = own < CELLS
    x, own, visited = x[kept], own[kept], visited[:CELLS]
    found, cells = Agreement(0, 0, 0), PowerDiagram(*order.diagram.sites_of(visited))
    spread = (order.diagram.centroids.square().sum(1) + order.diagram.weights.abs())[visited].amax(1)  # (C,)
    for rows, home in zip(x.split(256), own.split(256), strict=True):
        powers = cells.power(rows)
        reach = rows.norm(dim=1, keepdim=True) + cells.centroids.norm(dim=1)
        slack = (sae.d_in + 8) * EPSILON * (reach.square() + spread)
        at_home = torch.zeros_like(powers, dtype=torch.bool).scatter_(1, home[:, None], True)
        others = (powers - slack).masked_fill(at_home, torch.inf).amin(1)
        highest = (powers + slack).masked_fill(~at_home, -torch.inf).amax(1)
        below = (powers + slack).masked_fill(at_home, torch.inf).amin(1)
        lowest = (powers - slack).masked_fill(~at_home, torch.inf).amin(1)
        found += _counted((highest < others) | (below < lowest), powers.argmin(1) == home)
    return found, len(visited)


def _counted(decided: Tensor, same: Tensor) -> Agreement:
    return Agreement(len(same), int((~decided).sum()), int((decided & same).sum()))


def _compare(sae: SAE, order: KthOrderDiagram, x: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each row's support is decided beyond rounding, and whether the two supports are equal, (B,) each."""
    pre = sae.pre_activations(x)
    support = order.support(pre)  # (B, K)
    nearest = order.diagram.nearest(x, order.k) % order.d_sae  # (B, K)
    same = (support.sort(-1).values == nearest.sort(-1).values).all(-1)

    values = order.values(pre)  # (B, n)
    reach = x.norm(dim=1, keepdim=True) + order.diagram.centroids.norm(dim=1)
    slack = (sae.d_in + 8) * EPSILON * (reach.square() + order.diagram.weights.abs())
    inside = torch.zeros_like(values, dtype=torch.bool).scatter_(1, order.sites(support, pre), True)
    lowest = (values - slack).masked_fill(~inside, torch.inf).amin(1)
    highest = (values + slack).masked_fill(inside, -torch.inf).amax(1)
    return lowest > highest, same
