"""Activations whose latents switch independently: relu, batchtopk; jumprelu is in `jumprelu.py`. Shapes: B rows,
F = d_sae."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import Activation, Parameters, TargetsRate
from .largest import KeepsK

if TYPE_CHECKING:
    from torch import Tensor

    from ..codes import Codes

# Weight of the newest batch in batchtopk's threshold. A slower mean lags behind growing pre-activations; PAM-SGD's
# decoder is then fitted to denser codes than in training, which makes pre-activations grow faster (digits, k = 16: FVU
# 0.129 with 0.05, 0.092 with 0.3 and 0.5).
THRESHOLD_RATE = 0.3


@dataclass(frozen=True)
class Thresholded(Activation):
    """An activation whose latents switch independently: latent i is active where `pre_i > threshold_i`."""

    def thresholds(self, parameters: Parameters, d_sae: int) -> Tensor:
        """The pre-activation above which each latent is active, (F,)."""
        import torch

        return torch.zeros(d_sae)


@dataclass(frozen=True)
class Relu(Thresholded, TargetsRate):
    """`z = max(pre, 0)`."""

    name: ClassVar[str] = "relu"
    sparsities: ClassVar[tuple[str, ...]] = ("l1", "l1-codes", "kl", "none")
    opposites: ClassVar[bool] = True

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        """`max(pre, 0)`, (B, F)."""
        from ..encoding import selected

        return selected(pre, pre > 0).map(lambda values: values.relu())


@dataclass(frozen=True)
class BatchTopK(Thresholded, KeepsK):
    """The `k` largest pre-activations per row on average over a training batch, clipped at zero.

    At inference a row's codes do not depend on its batch: they are `pre * H(pre - threshold)`, with one threshold for
    all latents: during training the running mean of the smallest pre-activation kept per batch; at the end the one
    with which a sample of the rows has `k` active latents on average.
    Source: Bussmann, Leask and Nanda, "BatchTopK Sparse Autoencoders" (2024); clipped as in its authors' code.
    """

    name: ClassVar[str] = "batchtopk"

    @property
    def estimates(self) -> tuple[str, ...]:
        """The threshold."""
        return ("threshold",)

    def parameters(self, d_sae: int) -> Parameters:
        """The threshold, a scalar; 0 before the first batch."""
        import torch

        return {"threshold": torch.zeros(())}

    def thresholds(self, parameters: Parameters, d_sae: int) -> Tensor:
        """The one threshold, clamped at zero, for each latent, (F,)."""
        return parameters["threshold"].clamp(min=0).expand(d_sae)

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        """`pre` where it exceeds the threshold, else 0, (B, F)."""
        from ..encoding import where

        return where(pre, pre > self.thresholds(parameters, pre.shape[-1]))

    def training_codes(self, pre: Tensor, parameters: Parameters) -> Codes:
        """`max(pre, 0)` at the batch's `B k` largest entries, else 0, (B, F); with several processes, each takes its
        own rows as the batch."""
        from ..encoding import at_entries

        kept = pre.detach().flatten().topk(self.k * len(pre), sorted=False).indices
        return at_entries(pre, kept).map(lambda values: values.relu())

    def estimated(self, codes: Codes, parameters: Parameters, progress: float) -> Parameters:
        """The running mean of the smallest positive code, which the first one sets; unchanged by a batch without
        positive codes."""
        values, threshold = codes.values, parameters["threshold"]
        if not values.numel():
            return {"threshold": threshold}
        smallest = values.where(values > 0, math.inf).amin()
        moved = threshold.lerp(smallest, THRESHOLD_RATE).where(threshold > 0, smallest)
        return {"threshold": moved.where(smallest.isfinite(), threshold)}

    def calibrated(self, pre: Tensor, parameters: Parameters, smoothed: Callable[[float], Tensor]) -> Parameters:
        """The threshold that `k` pre-activations per row exceed, on average; 0 if fewer are positive."""
        kept = self.k * len(pre)
        if kept >= pre.numel():
            return {"threshold": parameters["threshold"].new_zeros(())}
        largest = pre.flatten().topk(kept + 1).values
        return {"threshold": ((largest[-2] + largest[-1]) / 2).clamp(min=0)}

    def rescaled(self, parameters: Parameters, factor: float) -> Parameters:
        """The threshold, scaled."""
        return {"threshold": parameters["threshold"] * factor}
