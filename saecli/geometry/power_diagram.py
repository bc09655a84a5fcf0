"""Power diagrams: the partition that a TopK encoder makes of its input space, and sections of them.

    power of x to site i:   pi_i(x) = ||x - mu_i||^2 - alpha_i
    of an encoder:          mu_i = w_i,  alpha_i = ||w_i||^2 + 2 b_i   =>   pi_i(x) = ||x||^2 - 2 (w_i . x + b_i)

so that the K largest pre-activations are the K smallest powers, and the cells of a TopK encoder are those of
the K-th order power diagram of its columns. Source: the paper's theorem on TopK SAEs and K-th order power
diagrams.

    lift:      sites (mu_i, h_i) in D + 1 dimensions,  h_i = sqrt(max_j alpha_j - alpha_i)
               ||(x, 0) - (mu_i, h_i)||^2 = ||x - mu_i||^2 - alpha_i + max_j alpha_j
    section:   on the plane o + u B, B orthonormal,  mu_i' = (mu_i - o) B',  alpha_i' = alpha_i - dist(mu_i, plane)^2

so that the plane x_{D+1} = 0 cuts the Voronoi cells of the lifted sites in the power cells of the diagram. Source: the
paper's remark that a power diagram is a section of a Voronoi diagram in one more dimension, after Imai, Iri and
Murota, "Voronoi diagram in the Laguerre geometry and its applications" (1985).
Everything here is float64. Shapes: B rows, D = d_in, F = d_sae, n sites.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..base.errors import ConfigError
from ..sae.activations import AbsTopK, Largest, TopK
from ..sae.dictionary import SAE


@dataclass(frozen=True)
class PowerDiagram:
    """Sites of a power diagram.

    Args:
        centroids: mu, one site per row, (n, D), float64.
        weights: alpha, in squared units of the rows, (n,), float64; a constant added to all moves no cell.

    Raises:
        ConfigError: the shapes do not belong together.
    """

    centroids: Tensor
    weights: Tensor

    def __post_init__(self) -> None:
        if self.centroids.ndim != 2 or self.weights.shape != self.centroids.shape[:1]:
            raise ConfigError("a power diagram needs centroids (n, D) and weights (n,), got "
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
        """The encoder that `from_encoder` turns into this diagram: `W_enc = mu'`, (D, n), and `b_enc = (alpha -
        ||mu||^2) / 2`, (n,), float64."""
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

    def sites_of(self, support: Tensor) -> tuple[Tensor, Tensor]:
        """The centroids and weights of cells of the K-th order diagram, as cells of an ordinary one.

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
    """The section of a diagram by a plane, in the plane's coordinates: a power diagram again, of every order.

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
