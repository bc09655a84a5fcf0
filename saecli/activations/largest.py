"""Activations that keep the largest pre-activations of each row: topk and its kin. Shapes: B rows, F = d_sae."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..config import option
from ..distributed import latents_axis
from ..errors import ConfigError
from .base import Activation, Parameters


@dataclass(frozen=True)
class KeepsK(Activation):
    """An activation that keeps `k` of a row's pre-activations, in one sense or another."""

    k: int = option(32, "Active latents per row; with batchtopk on average, with soft-topk in expectation.", minimum=1)

    def check(self, d_sae: int) -> None:
        """Refuse to keep more latents than there are."""
        if self.k > d_sae:
            raise ConfigError("k", "must be at most {d_sae}, {most}, got {got}", "lower {k} or raise {d_sae}",
                              most=d_sae, got=self.k)


@dataclass(frozen=True)
class Largest(KeepsK):
    """An activation that keeps `k` pre-activations of each row and sets the others to zero."""

    def ranking(self, pre: Tensor) -> Tensor:
        """What the `k` largest are taken of, (B, F)."""
        return pre

    def __call__(self, pre: Tensor, parameters: Parameters) -> Tensor:
        """`pre` at the `k` latents that rank highest, else 0, (B, F)."""
        if latents_axis().size > 1:
            return self._shared_codes(pre)
        kept = self.ranking(pre).topk(self.k, dim=-1, sorted=False).indices  # (B, k)
        return torch.zeros_like(pre).scatter(-1, kept, pre.gather(-1, kept))

    def _shared_codes(self, pre: Tensor) -> Tensor:
        """The same where several processes have latents of each row: each says which are its largest."""
        own = self.ranking(pre.detach()).topk(min(self.k, pre.shape[-1]), dim=-1)  # (B, n)
        candidates = latents_axis().side_by_side(own.values)  # (B, n P)
        kept = torch.zeros_like(candidates).scatter_(-1, candidates.topk(self.k, dim=-1, sorted=False).indices, 1.0)
        kept = kept.chunk(latents_axis().size, -1)[latents_axis().place]
        return torch.zeros_like(pre).scatter(-1, own.indices, pre.gather(-1, own.indices) * kept)


@dataclass(frozen=True)
class TopK(Largest):
    """The `k` largest pre-activations of each row, with their signs; source: the paper's TopK."""

    name: ClassVar[str] = "topk"


@dataclass(frozen=True)
class ReluTopK(Largest):
    """The `k` largest pre-activations of each row, those below zero clipped to zero: what SAELens, sparsify and
    dictionary_learning call TopK. It is `topk` except on rows with fewer than `k` positive pre-activations."""

    name: ClassVar[str] = "relu-topk"

    def __call__(self, pre: Tensor, parameters: Parameters) -> Tensor:
        """`max(pre, 0)` at the `k` latents that rank highest, else 0, (B, F)."""
        return super().__call__(pre, parameters).relu()


@dataclass(frozen=True)
class AbsTopK(Largest):
    """The `k` pre-activations largest in magnitude, with their signs: what the paper's own code computes."""

    name: ClassVar[str] = "abs-topk"

    def ranking(self, pre: Tensor) -> Tensor:
        """The magnitudes."""
        return pre.abs()
