"""Activations whose latents switch independently: relu, jumprelu, batchtopk. Shapes: B rows, F = d_sae."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..codes import Codes
from ..config import option
from ..encoding import at_entries, selected, where
from ..errors import ConfigError
from .base import Activation, Parameters, TargetsRate
from .largest import KeepsK

# Weight of the newest batch in batchtopk's threshold. A slower mean lags behind growing pre-activations; PAM-SGD's
# decoder is then fitted to denser codes than in training, which makes pre-activations grow faster (digits, k = 16: FVU
# 0.129 with 0.05, 0.092 with 0.3 and 0.5).
THRESHOLD_RATE = 0.3


@dataclass(frozen=True)
class Thresholded(Activation):
    """An activation whose latents switch independently: latent i is active where `pre_i > threshold_i`."""

    def thresholds(self, parameters: Parameters, d_sae: int) -> Tensor:
        """The pre-activation above which each latent is active, (F,)."""
        return torch.zeros(d_sae)


@dataclass(frozen=True)
class Relu(Thresholded, TargetsRate):
    """`z = max(pre, 0)`."""

    name: ClassVar[str] = "relu"
    sparsities: ClassVar[tuple[str, ...]] = ("l1", "l1-codes", "kl", "none")
    opposites: ClassVar[bool] = True

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        """`max(pre, 0)`, (B, F)."""
        return selected(pre, pre > 0).map(torch.relu)


class _JumpReluGate(torch.autograd.Function):
    """`pre * H(pre - threshold)`, elementwise, with the straight-through gradient of the threshold."""

    @staticmethod
    def forward(ctx, pre: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
        active = pre > threshold
        ctx.save_for_backward(pre, threshold, active)
        ctx.bandwidth = bandwidth
        return pre * active

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        pre, threshold, active = ctx.saved_tensors
        near = (pre - threshold).abs() < ctx.bandwidth / 2
        return grad * active, -(threshold / ctx.bandwidth) * (near * grad), None


class _StepCount(torch.autograd.Function):
    """`sum_i H(pre_i - threshold_i)`, with the straight-through gradient of the threshold."""

    @staticmethod
    def forward(ctx, pre: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
        ctx.save_for_backward(pre, threshold)
        ctx.bandwidth = bandwidth
        return (pre > threshold).sum(-1).to(pre.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor, None]:
        pre, threshold = ctx.saved_tensors
        near = (pre - threshold).abs() < ctx.bandwidth / 2
        return None, -(near * grad[:, None]).sum(0) / ctx.bandwidth, None


@dataclass(frozen=True)
class JumpRelu(Thresholded, TargetsRate):
    """`z = pre * H(pre - threshold)`, one threshold per latent, learned unless fixed.

    The threshold's gradient is the straight-through estimate with a rectangular kernel of width `bandwidth`.
    Source: Rajamanoharan et al., "Jumping Ahead: Improving Reconstruction Fidelity with JumpReLU Sparse
    Autoencoders" (2024), equations 8 to 12; the threshold itself is learned here, not its logarithm.
    """

    name: ClassVar[str] = "jumprelu"
    sparsities: ClassVar[tuple[str, ...]] = ("l0", "l1", "l1-codes", "kl", "none")

    threshold: float = option(0.1, "Initial threshold of every latent, in units of the normalised rows.",
                              minimum=0, advanced=True)
    bandwidth: float = option(0.3, "Width of the kernel in the threshold's gradient, in units of the codes.", above=0,
                              advanced=True)
    fixed_threshold: bool = option(False, "Keep every threshold at its initial value; --sparsity is then l1 by "
                                         "default.", advanced=True)

    @property
    def estimates(self) -> tuple[str, ...]:
        """The thresholds, if they are fixed."""
        return ("threshold",) if self.fixed_threshold else ()

    @property
    def default_sparsity(self) -> str:
        """`l0`, whose gradient reaches thresholds only; if they are fixed, `l1`."""
        return "l1" if self.fixed_threshold else "l0"

    def check_sparsity(self, sparsity: str) -> None:
        """Refuse l0 with fixed thresholds, which have no gradient."""
        super().check_sparsity(sparsity)
        if self.fixed_threshold and sparsity == "l0":
            others = ", ".join(name for name in self.sparsities if name != "l0")
            raise ConfigError("sparsity", "l0 trains nothing but thresholds, which {fixed_threshold} holds",
                              "leave one of the two out, or use {sparsity} {others}", others=others)

    def parameters(self, d_sae: int) -> Parameters:
        """The thresholds, (F,)."""
        return {"threshold": torch.full((d_sae,), self.threshold)}

    def thresholds(self, parameters: Parameters, d_sae: int) -> Tensor:
        """The thresholds, (F,), clamped at zero."""
        return parameters["threshold"].clamp(min=0)

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        """`pre` where it exceeds its latent's threshold, else 0, (B, F)."""
        thresholds = self.thresholds(parameters, pre.shape[-1])
        # Pre-activations just below their threshold give zero codes, but contribute to its gradient.
        reach = thresholds.detach() - (self.bandwidth / 2 if thresholds.requires_grad else 0)
        near = selected(pre, pre > reach)
        return near.with_values(_JumpReluGate.apply(near.values, near.by_latent(thresholds), self.bandwidth))

    def rescaled(self, parameters: Parameters, factor: float) -> Parameters | None:
        """The thresholds scaled; None if they are fixed.

        The gradient's kernel, on which no code depends, keeps its width `bandwidth`, while pre-activations scale.
        """
        return None if self.fixed_threshold else {"threshold": parameters["threshold"] * factor}

    def default_weight(self, sparsity: str, d_in: int) -> float:
        """An active latent costs a thousandth of a row's mean squared norm."""
        return 0.001 * d_in if sparsity == "l0" else super().default_weight(sparsity, d_in)

    def penalty_l0(self, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters) -> Tensor:
        """Mean number of active latents, with the straight-through gradient of the thresholds."""
        return _StepCount.apply(pre, self.thresholds(parameters, pre.shape[-1]), self.bandwidth).mean()


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
        return {"threshold": torch.zeros(())}

    def thresholds(self, parameters: Parameters, d_sae: int) -> Tensor:
        """The one threshold, clamped at zero, for each latent, (F,)."""
        return parameters["threshold"].clamp(min=0).expand(d_sae)

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        """`pre` where it exceeds the threshold, else 0, (B, F)."""
        return where(pre, pre > self.thresholds(parameters, pre.shape[-1]))

    def training_codes(self, pre: Tensor, parameters: Parameters) -> Codes:
        """`max(pre, 0)` at the batch's `B k` largest entries, else 0, (B, F); with several processes, each takes its
        own rows as the batch."""
        return at_entries(pre, pre.detach().flatten().topk(self.k * len(pre), sorted=False).indices).map(torch.relu)

    def estimated(self, codes: Codes, parameters: Parameters) -> Parameters:
        """The running mean of the smallest positive code, which the first one sets; unchanged by a batch without
        positive codes."""
        values, threshold = codes.values, parameters["threshold"]
        if not values.numel():
            return {"threshold": threshold}
        smallest = torch.where(values > 0, values, torch.inf).amin()
        moved = torch.where(threshold > 0, threshold.lerp(smallest, THRESHOLD_RATE), smallest)
        return {"threshold": torch.where(smallest.isfinite(), moved, threshold)}

    def calibrated(self, pre: Tensor, parameters: Parameters) -> Parameters:
        """The threshold that `k` pre-activations per row exceed, on average; 0 if fewer are positive."""
        kept = self.k * len(pre)
        if kept >= pre.numel():
            return {"threshold": torch.zeros_like(parameters["threshold"])}
        largest = pre.flatten().topk(kept + 1).values
        return {"threshold": ((largest[-2] + largest[-1]) / 2).clamp(min=0)}

    def rescaled(self, parameters: Parameters, factor: float) -> Parameters:
        """The threshold, scaled."""
        return {"threshold": parameters["threshold"] * factor}
