"""topk, relu-topk, abs-topk: the largest pre-activations of each row; and matching-pursuit.

Shapes: B rows, D = d_in, F = d_sae, K = k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import KeepsK, Parameters

if TYPE_CHECKING:
    from torch import Tensor

    from ..codes import Codes


@dataclass(frozen=True)
class Largest(KeepsK):
    """An activation that keeps `k` pre-activations of each row, and zeros the others."""

    def ranking(self, pre: Tensor) -> Tensor:
        """The values whose `k` largest are kept, (B, F)."""
        return pre

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        from .selection import at

        return at(pre, self.ranking(pre.detach()).topk(self.k, dim=-1, sorted=False).indices)


@dataclass(frozen=True)
class TopK(Largest):
    """The `k` largest pre-activations of each row, with their signs; source: the paper's TopK."""

    name: ClassVar[str] = "topk"


@dataclass(frozen=True)
class ReluTopK(Largest):
    """The `k` largest pre-activations of each row, clipped at zero: the TopK of SAELens, sparsify and
    dictionary_learning. Differs from `topk` only on rows with fewer than `k` positive pre-activations."""

    name: ClassVar[str] = "relu-topk"

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        return super().__call__(pre, parameters).map(lambda values: values.relu())


@dataclass(frozen=True)
class AbsTopK(Largest):
    """The `k` pre-activations largest in magnitude, with their signs, as in the paper's own code."""

    name: ClassVar[str] = "abs-topk"

    def ranking(self, pre: Tensor) -> Tensor:
        return pre.abs()


@dataclass(frozen=True)
class MatchingPursuit(KeepsK):
    """`k` latents chosen one after another, each by what the others have left of the row.

    With w_i the columns of W_enc, and `s_i = pre_i / ||w_i||` at first, each choice is

        j = argmax s over latents not yet chosen,  v = max(s_j, 0),  z_j = v ||w_j||,  s_i <- s_i - v cos(w_i, w_j)

    so that latents of similar directions do not all code for what one of them explains. The gradient holds the choice
    only. With a decoder in closed form this is dictionary learning by the method of optimal directions. Cost: k times a
    product (B, D) by (D, F), or if F <= 4 B one of (F, D) by (D, F).

    Sources: Mallat and Zhang, "Matching pursuits with time-frequency dictionaries" (1993); Engan, Aase and Husoy,
    "Method of optimal directions for frame design" (1999); Costa et al., "From Flat to Hierarchical: Extracting Sparse
    Representations with Matching Pursuit" (2025).
    """

    name: ClassVar[str] = "matching-pursuit"
    one_scale: ClassVar[bool] = True

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        import torch
        from torch.nn.functional import embedding

        from .selection import at

        W_enc, tiny = parameters["W_enc"], torch.finfo(pre.dtype).tiny
        size = W_enc.detach().abs().max().clamp(min=tiny)  # whose square need not be finite
        scaled = (W_enc / size).norm(dim=0).clamp(min=tiny)
        norms = size * scaled  # (F,)
        directions = (W_enc / size / scaled).T  # (F, D)
        with torch.no_grad():
            indices, active = self._chosen(pre / norms, directions)

        def differentiable(values: Tensor) -> Tensor:
            """`z = v ||w||` where `(I + L) v = s`, L the strictly lower part of the cosines of the chosen latents."""
            own = embedding(indices, directions)  # (B, K, D)
            sizes = embedding(indices, norms[:, None])  # (B, K, 1)
            v = torch.linalg.solve_triangular(
                own @ own.mT, values[..., None] / sizes, upper=False, unitriangular=True
            )
            return (v * sizes)[..., 0] * active

        return at(pre, indices, differentiable)

    def _chosen(self, left: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """The latents of each row in the order of their choice, and whether each adds to it, (B, K); `left`: s."""
        import torch

        chosen, parts = [], []
        # With few latents all cosines cost less than those of the chosen.
        all_cosines = len(directions) <= min(self.k, 4) * len(left)
        cosines = directions @ directions.T if all_cosines else None
        for _ in range(self.k):
            part, latent = left.max(dim=1)
            chosen.append(latent)
            parts.append(part.relu_())
            explained = directions[latent] @ directions.T if cosines is None else cosines[latent]
            left = left.addcmul_(explained, part[:, None], value=-1)
            left = left.scatter_(1, latent[:, None], -torch.inf)
        return torch.stack(chosen, 1), torch.stack(parts, 1) > 0
