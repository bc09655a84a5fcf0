"""topk, relu-topk, abs-topk: the largest pre-activations of each row; soft-topk. Shapes: B rows, F = d_sae."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...base.options import option
from .base import KeepsK, Parameters

if TYPE_CHECKING:
    from torch import Tensor

    from ..codes import Codes

ROWS = 256  # of soft-topk at a time, since it holds some twenty numbers per code
LEAST_TEMPERATURE = 1e-6  # soft-topk equals topk long before, and float32 must not round it to zero


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
class SoftTopK(KeepsK):
    """`z_i = pre_i * P(i in S)`, S a random set of `k` latents with `P(S) ~ exp(sum_{j in S} pre_j / temperature)`.

    It tends to `topk` as the temperature falls. Computed exactly, in O(F k) per row. The probabilities sum to `k`, but
    hardly any is exactly zero: l0 is up to d_sae. Source: the paper's smooth TopK, rho_T.
    """

    name: ClassVar[str] = "soft-topk"
    of_codes: ClassVar[tuple[str, ...]] = ("k", "temperature")
    exact_zeros: ClassVar[bool] = False

    temperature: float = option(0.1, "Softness of the choice of latents, in units of the codes: a latent's odds change "
                                     "e-fold over one temperature.", minimum=LEAST_TEMPERATURE, advanced=True)

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        import torch

        from ..codes import DenseCodes
        from .selection import SoftTopKCodes

        if self.k == pre.shape[-1]:
            return DenseCodes(pre)
        return DenseCodes(torch.cat([SoftTopKCodes.apply(rows, self.k, self.temperature) for rows in pre.split(ROWS)]))

    def rescaled(self, parameters: Parameters, factor: float) -> None:
        return None  # the temperature is the user's
