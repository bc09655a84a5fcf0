"""Activations whose latents switch each on its own: relu, jumprelu. Shapes: B rows, F = d_sae."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..config import option
from .base import Activation, Parameters


@dataclass(frozen=True)
class Thresholded(Activation):
    """An activation whose latents switch each on its own: latent i is active where `pre_i > threshold_i`."""

    def thresholds(self, parameters: Parameters, d_sae: int) -> Tensor:
        """The pre-activation above which each latent is active, (F,)."""
        return torch.zeros(d_sae)


@dataclass(frozen=True)
class Relu(Thresholded):
    """`z = max(pre, 0)`."""

    name: ClassVar[str] = "relu"
    sparsities: ClassVar[tuple[str, ...]] = ("l1", "none")

    def __call__(self, pre: Tensor, parameters: Parameters) -> Tensor:
        """`max(pre, 0)`, (B, F)."""
        return pre.relu()


class _JumpReluGate(torch.autograd.Function):
    """`pre * H(pre - threshold)`, with the straight-through gradient of the threshold."""

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
        return grad * active, -(threshold / ctx.bandwidth) * (near * grad).sum(0), None


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
class JumpRelu(Thresholded):
    """`z = pre * H(pre - threshold)`, one learned threshold a latent.

    The threshold's gradient is the straight-through estimate with a rectangular kernel of width `bandwidth`.
    Source: Rajamanoharan et al., "Jumping Ahead: Improving Reconstruction Fidelity with JumpReLU Sparse
    Autoencoders" (2024), equations 8 to 12; the threshold itself is learned here, not its logarithm.
    """

    name: ClassVar[str] = "jumprelu"
    sparsities: ClassVar[tuple[str, ...]] = ("l0", "l1", "none")

    threshold: float = option(0.1, "Threshold of every latent at the start, in units of the normalised rows.",
                              minimum=0)
    bandwidth: float = option(0.3, "Width of the kernel in the threshold's gradient, in the same units.", above=0)

    def parameters(self, d_sae: int) -> Parameters:
        """The thresholds, (F,)."""
        return {"threshold": torch.full((d_sae,), self.threshold)}

    def thresholds(self, parameters: Parameters, d_sae: int) -> Tensor:
        """The thresholds, (F,); one that training pushed below zero acts as zero."""
        return parameters["threshold"].clamp(min=0)

    def __call__(self, pre: Tensor, parameters: Parameters) -> Tensor:
        """`pre` where it exceeds its latent's threshold, else 0, (B, F)."""
        return _JumpReluGate.apply(pre, self.thresholds(parameters, pre.shape[-1]), self.bandwidth)

    def rescaled(self, parameters: Parameters, factor: float) -> Parameters:
        """The thresholds grow with the pre-activations."""
        return {"threshold": parameters["threshold"] * factor}

    def default_weight(self, sparsity: str, d_in: int) -> float:
        """An active latent costs a thousandth of a row's mean squared norm."""
        return 0.001 * d_in if sparsity == "l0" else super().default_weight(sparsity, d_in)

    def penalty_l0(self, pre: Tensor, codes: Tensor, W_dec: Tensor, parameters: Parameters) -> Tensor:
        """Mean number of active latents, with the straight-through gradient of the thresholds."""
        return _StepCount.apply(pre, self.thresholds(parameters, pre.shape[-1]), self.bandwidth).mean()
