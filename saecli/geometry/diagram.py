"""Power diagrams: the partition that a TopK encoder makes of its input space, and a test of that theorem in float64.

    power of x to site i:   pi_i(x) = ||x - mu_i||^2 - alpha_i
    of an encoder:          mu_i = w_i,  alpha_i = ||w_i||^2 + 2 b_i   =>   pi_i(x) = ||x||^2 - 2 (w_i . x + b_i)

so the K largest pre-activations are the K smallest powers: the cells of a TopK encoder are the cells of the K-th order
power diagram of its columns:

    R_S = {x : TopK keeps S} = {x : pi_i(x) < pi_j(x) for i in S, j not in S}

Source: the paper's theorem on TopK SAEs and K-th order power diagrams. All float64.
Shapes: B rows, D = d_in, F = d_sae, n sites, K = k.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..base.errors import ConfigError
from ..sae.activations import AbsTopK, Largest, TopK
from ..sae.dictionary import SAE

EPSILON = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class PowerDiagram:
    centroids: Tensor  # mu of the sites, (n, D), float64
    weights: Tensor  # alpha, in squared units of the rows, (n,), float64; a constant added to all moves no cell

    def __post_init__(self) -> None:
        if self.centroids.ndim != 2 or self.weights.shape != self.centroids.shape[:1]:
            raise ConfigError(
                "a power diagram needs centroids (n, D) and weights (n,), got "
                f"{tuple(self.centroids.shape)} and {tuple(self.weights.shape)}"
            )
        # Sites are gathered by the million, three times faster from contiguous rows.
        object.__setattr__(self, "centroids", self.centroids.double().contiguous())
        object.__setattr__(self, "weights", self.weights.double())

    @classmethod
    def from_encoder(cls, W_enc: Tensor, b_enc: Tensor) -> Self:
        """The diagram whose K-th order cells are the TopK encoder's, (D, F), (F,), for every K: `mu = W_enc'`,
        `alpha_i = ||w_i||^2 + 2 b_i`."""
        centroids = W_enc.double().T
        return cls(centroids, centroids.square().sum(1) + 2 * b_enc.double())

    def power(self, x: Tensor) -> Tensor:
        """`||x - mu_i||^2 - alpha_i`, (B, n), of rows (B, D), summed from true differences.

        Expanding the square would compute the pre-activations again and prove nothing about distances.

        Cost: B n D operations without a matrix product, about twenty times the time of one.
        """
        distances = torch.cdist(
            x.double(), self.centroids, compute_mode="donot_use_mm_for_euclid_dist"
        )
        return distances.square() - self.weights

    def nearest(self, x: Tensor, k: int) -> Tensor:
        """The k sites of smallest power, (B, k), nearest first: the row's cell in the k-th order diagram."""
        return self.power(x).topk(k, dim=-1, largest=False).indices


@dataclass(frozen=True)
class KthOrderDiagram:
    """The K-th order power diagram with the cells of an SAE that keeps the K largest; site s is of latent `s % F`."""

    diagram: PowerDiagram
    activation: Largest
    d_sae: int

    @property
    def k(self) -> int:
        return self.activation.k

    def support(self, pre: Tensor) -> Tensor:
        """The K latents that the SAE keeps, (B, K), given pre-activations, (B, F)."""
        return self.activation.ranking(pre).topk(self.k, dim=-1).indices

    def values(self, pre: Tensor) -> Tensor:
        """The values that rank the sites, (B, n): the pre-activations; where n = 2F followed by their negatives."""
        return pre if len(self.diagram.weights) == self.d_sae else torch.cat([pre, -pre], 1)

    def sites(self, support: Tensor, pre: Tensor) -> Tensor:
        """The sites of latents, (B, K): the latents themselves; where n = 2F those with their pre-activation's sign."""
        if len(self.diagram.weights) == self.d_sae:
            return support
        return support + self.d_sae * (pre.gather(1, support) < 0)


def kth_order_diagram(sae: SAE) -> KthOrderDiagram | None:
    """The K-th order power diagram whose cells are the SAE's; None for an activation that has none.

    The K largest |v_i| of abs-topk are the K largest of the 2F numbers v_i and -v_i: both of one latent cannot be
    among them, since one of the two is at most zero. Its diagram has the 2F sites +w_i and -w_i, with weights
    ||w_i||^2 + 2 b_i and ||w_i||^2 - 2 b_i; its cells separate signs of the kept latents, which the SAE's do not.
    """
    if isinstance(sae.activation, TopK):
        diagram = PowerDiagram.from_encoder(sae.W_enc, sae.b_enc)
    elif isinstance(sae.activation, AbsTopK):
        diagram = PowerDiagram.from_encoder(
            torch.cat([sae.W_enc, -sae.W_enc], 1), torch.cat([sae.b_enc, -sae.b_enc])
        )
    else:
        return None
    return KthOrderDiagram(diagram, sae.activation, sae.d_sae)


def agreement(sae: SAE, batches: Iterable[Tensor]) -> dict[str, Any] | None:
    """Compare each row's support with its K nearest power cells, both in float64; batches are (B, D) each.

    A row is a tie where a latent inside and one outside its support differ by less than the rounding errors of both
    computations together, `(D + 8) eps ((||x|| + ||mu_i||)^2 + |alpha_i|)` for each.

    Returns:
        `agreement`, the fraction of `rows` less `ties` whose K nearest sites are their support, 1 by the theorem, None
        if all are ties; `sites` and `order`, K, of the diagram. None for an activation without one.

    Cost: `PowerDiagram.power` of all rows.
    """
    order = kth_order_diagram(sae)
    if order is None:
        return None
    sae = sae.copy_to(torch.float64)
    rows = ties = matching = 0
    for x in batches:
        decided, same = _compare(sae, order, x.double())
        rows += len(x)
        ties += int((~decided).sum())
        matching += int((decided & same).sum())
    return {
        "agreement": matching / (rows - ties) if rows > ties else None,
        "ties": ties,
        "rows": rows,
        "sites": len(order.diagram.weights),
        "order": order.k,
    }


def _compare(sae: SAE, order: KthOrderDiagram, x: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each row's support is beyond rounding, and whether the two supports are equal, (B,) each."""
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
