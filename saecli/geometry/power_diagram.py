"""Power diagrams: the partition that a TopK encoder makes of its input space.

    power of x to site i:   pi_i(x) = ||x - mu_i||^2 - alpha_i
    of an encoder:          mu_i = w_i,  alpha_i = ||w_i||^2 + 2 b_i   =>   pi_i(x) = ||x||^2 - 2 (w_i . x + b_i)

so that the K largest pre-activations are the K smallest powers, and the cells of a TopK encoder are those of
the K-th order power diagram of its columns. Source: the paper's theorem on TopK SAEs and K-th order power
diagrams. Everything here is float64. Shapes: B rows, D = d_in, F = d_sae, n sites.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..activations import AbsTopK, Largest, TopK
from ..errors import ConfigError
from ..sae import SAE

EPSILON = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class PowerDiagram:
    """Sites of a power diagram.

    Args:
        centroids: mu, one site a row, (n, D), float64.
        weights: alpha, in squared units of the rows, (n,), float64; a constant added to all moves no cell.

    Raises:
        ConfigError: the shapes do not belong together.
    """

    centroids: Tensor
    weights: Tensor

    def __post_init__(self) -> None:
        if self.centroids.ndim != 2 or self.weights.shape != self.centroids.shape[:1]:
            raise ConfigError(f"a power diagram needs centroids (n, D) and weights (n,), got "
                              f"{tuple(self.centroids.shape)} and {tuple(self.weights.shape)}")
        # Sites are gathered by the million, three times faster where each lies in one piece.
        object.__setattr__(self, "centroids", self.centroids.double().contiguous())
        object.__setattr__(self, "weights", self.weights.double())

    @classmethod
    def from_encoder(cls, W_enc: Tensor, b_enc: Tensor) -> Self:
        """The diagram whose K-th order cells are those of the TopK encoder, for every K.

            mu_i = W_enc[:, i]        alpha_i = ||W_enc[:, i]||^2 + 2 b_enc[i]

        Args:
            W_enc: encoder weights, (D, F).
            b_enc: encoder bias, (F,).

        Returns:
            Its F sites.
        """
        centroids = W_enc.double().T
        return cls(centroids, centroids.square().sum(1) + 2 * b_enc.double())

    def to_encoder(self) -> tuple[Tensor, Tensor]:
        """The encoder that `from_encoder` turns into this diagram: `W_enc = mu'`, `b_enc = (alpha - ||mu||^2) / 2`.

        Returns:
            W_enc (D, n) and b_enc (n,), float64.
        """
        return self.centroids.T, (self.weights - self.centroids.square().sum(1)) / 2

    def power(self, x: Tensor) -> Tensor:
        """`||x - mu_i||^2 - alpha_i` of each row and site, summed from true differences.

        Expanding the square would compute the pre-activations again, and prove nothing about distances.

        Args:
            x: rows, (B, D).

        Returns:
            Powers, (B, n), float64.

        Cost: B n D operations without the help of matrix multiplication, about twenty times one.
        """
        distances = torch.cdist(x.double(), self.centroids, compute_mode="donot_use_mm_for_euclid_dist")
        return distances.square() - self.weights

    def nearest(self, x: Tensor, k: int) -> Tensor:
        """The k sites of smallest power of each row, nearest first: the row's cell in the k-th order diagram.

        Args:
            x: rows, (B, D).
            k: how many, at most n.

        Returns:
            Site indices, (B, k).
        """
        return self.power(x).topk(k, dim=-1, largest=False).indices

    def site_of(self, support: Tensor) -> tuple[Tensor, Tensor]:
        """The centroid and weight of a cell of the K-th order diagram, as a cell of an ordinary one.

            nu_S = (1/K) sum_{i in S} mu_i        beta_S = ||nu_S||^2 - (1/K) sum_{i in S} (||mu_i||^2 - alpha_i)

        so that `||x - nu_S||^2 - beta_S` is the mean power of the sites in S, and x lies in the cell of the S
        that makes it smallest.

        Args:
            support: site indices of one or more cells, (..., K).

        Returns:
            nu (..., D) and beta (...,).

        Source: the paper's definition of K-th order power diagrams.
        """
        centroids = self.centroids[support]  # (..., K, D)
        nu = centroids.mean(-2)
        return nu, nu.square().sum(-1) - (centroids.square().sum(-1) - self.weights[support]).mean(-1)


@dataclass(frozen=True)
class KthOrderDiagram:
    """The K-th order power diagram whose cells are those of an SAE that keeps the K largest.

    Args:
        diagram: its n sites; site s belongs to latent `s % F`.
        activation: what ranks the latents.
        d_sae: F.
    """

    diagram: PowerDiagram
    activation: Largest
    d_sae: int

    @property
    def k(self) -> int:
        """K."""
        return self.activation.k

    def support(self, pre: Tensor) -> Tensor:
        """The K latents that the SAE keeps, (B, K), given pre-activations, (B, F)."""
        return self.activation.ranking(pre).topk(self.k, dim=-1).indices

    def values(self, pre: Tensor) -> Tensor:
        """What ranks the sites: the pre-activations, (B, F), where n = 2F followed by their negatives, (B, 2F)."""
        return pre if len(self.diagram.weights) == self.d_sae else torch.cat([pre, -pre], 1)

    def sites(self, support: Tensor, pre: Tensor) -> Tensor:
        """The sites of latents, (B, K): the latents themselves, where n = 2F those of their pre-activations' signs."""
        if len(self.diagram.weights) == self.d_sae:
            return support
        return support + self.d_sae * (pre.gather(1, support) < 0)


def kth_order_diagram(sae: SAE) -> KthOrderDiagram | None:
    """The K-th order power diagram whose cells are the SAE's, or None for an activation that has none.

    The K largest |v_i| of abs-topk are the K largest of the 2F numbers v_i and -v_i: both of one latent cannot
    be among them while K <= F, since one of the two is at most zero. Its diagram therefore has the 2F sites
    +w_i and -w_i, with weights ||w_i||^2 + 2 b_i and ||w_i||^2 - 2 b_i, in this order; its cells tell the signs of
    the kept latents apart, which the SAE's own cells do not.
    """
    if isinstance(sae.activation, TopK):
        diagram = PowerDiagram.from_encoder(sae.W_enc, sae.b_enc)
    elif isinstance(sae.activation, AbsTopK):
        diagram = PowerDiagram.from_encoder(torch.cat([sae.W_enc, -sae.W_enc], 1),
                                            torch.cat([sae.b_enc, -sae.b_enc]))
    else:
        return None
    return KthOrderDiagram(diagram, sae.activation, sae.d_sae)


@dataclass(frozen=True)
class Agreement:
    """How the nearest power cells of rows compare with their supports.

    Args:
        rows: rows compared, ties among them.
        ties: rows whose order at the cell's boundary float64 cannot decide.
        matching: rows, ties left out, whose two supports are the same set.
        sites: sites of the diagram.
        order: K.
    """

    rows: int
    ties: int
    matching: int
    sites: int
    order: int

    @property
    def share(self) -> float | None:
        """Matching rows over rows that are no ties, in [0, 1]; None where all are ties."""
        return self.matching / (self.rows - self.ties) if self.rows > self.ties else None


def agreement(sae: SAE, batches: Iterable[Tensor]) -> Agreement | None:
    """Compare each row's support with its K nearest power cells, both in float64.

    A row is a tie where a latent inside and one outside its support differ by less than the rounding errors of
    the two computations together, `(D + 8) eps ((||x|| + ||mu_i||)^2 + |alpha_i|)` for each.

    Args:
        sae: the autoencoder.
        batches: rows, each batch (B, D).

    Returns:
        The comparison, whose share the theorem says is 1; None for an activation without a power diagram.

    Cost: that of `PowerDiagram.power` over all rows.
    """
    order = kth_order_diagram(sae)
    if order is None:
        return None
    sae = sae.to(torch.float64)
    rows = ties = matching = 0
    for x in batches:
        decided, same = _compare(sae, order, x.double())
        rows, ties, matching = rows + len(x), ties + int((~decided).sum()), matching + int((decided & same).sum())
    return Agreement(rows, ties, matching, len(order.diagram.weights), order.k)


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
