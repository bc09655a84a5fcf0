"""Activations that keep the largest pre-activations of each row: topk and its kin. Shapes: B rows, F = d_sae."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...base.errors import ConfigError
from ...base.options import option
from .base import Activation, Parameters

if TYPE_CHECKING:
    from torch import Tensor

    from ..codes import Codes


@dataclass(frozen=True)
class KeepsK(Activation):
    """An activation that keeps `k` pre-activations per row, exactly, on average or in expectation."""

    of_codes: ClassVar[tuple[str, ...]] = ("k",)

    k: int = option(32, "Active latents per row; with batchtopk on average, with soft-topk in expectation.", minimum=1)

    def expected_l0(self, d_in: int) -> float:
        """k."""
        return self.k

    def check(self, d_sae: int) -> None:
        """Refuse to keep more latents than there are."""
        if self.k > d_sae:
            raise ConfigError(f"--k must be at most --d-sae, {d_sae}, got {self.k}; lower --k or raise --d-sae",
                              option="k")


@dataclass(frozen=True)
class Largest(KeepsK):
    """An activation that keeps `k` pre-activations of each row and sets the others to zero."""

    def ranking(self, pre: Tensor) -> Tensor:
        """The values whose `k` largest are kept, (B, F)."""
        return pre

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        """`pre` at the `k` latents that rank highest, else 0, (B, F)."""
        from ..encoding import at

        return at(pre, self.ranking(pre.detach()).topk(self.k, dim=-1, sorted=False).indices)


@dataclass(frozen=True)
class TopK(Largest):
    """The `k` largest pre-activations of each row, with their signs; source: the paper's TopK."""

    name: ClassVar[str] = "topk"


@dataclass(frozen=True)
class ReluTopK(Largest):
    """The `k` largest pre-activations of each row, clipped at zero: the TopK of SAELens, sparsify and
    dictionary_learning. It differs from `topk` only on rows with fewer than `k` positive pre-activations."""

    name: ClassVar[str] = "relu-topk"

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        """`max(pre, 0)` at the `k` latents that rank highest, else 0, (B, F)."""
        return super().__call__(pre, parameters).map(lambda values: values.relu())


@dataclass(frozen=True)
class AbsTopK(Largest):
    """The `k` pre-activations largest in magnitude, with their signs, as in the paper's own code."""

    name: ClassVar[str] = "abs-topk"

    def ranking(self, pre: Tensor) -> Tensor:
        """The magnitudes."""
        return pre.abs()
