"""Activations whose latents switch each on its own: relu, jumprelu, batchtopk. Shapes: B rows, F = d_sae."""

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

# Fraction of the newest batch in batchtopk's threshold. A slower mean lags behind growing pre-activations; PAM-SGD's
# decoder is then fitted to denser codes than training keeps, which makes them grow the faster (digits, k = 16: FVU
# 0.129 with 0.05, 0.092 with 0.3 and 0.5).
THRESHOLD_RATE = 0.3


@dataclass(frozen=True)
class Thresholded(Activation):
    """An activation whose latents switch each on its own: latent i is active where `pre_i > threshold_i`."""

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
    """`z = pre * H(pre - threshold)`, one threshold a latent, learned unless it is fixed.

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
        """The thresholds, where they are fixed."""
        return ("threshold",) if self.fixed_threshold else ()

    @property
    def default_sparsity(self) -> str:
        """`l0`, which pulls on thresholds alone; where they are fixed, `l1`."""
        return "l1" if self.fixed_threshold else "l0"

    def check_sparsity(self, sparsity: str) -> None:
        """Refuse to count latents by a gradient that fixed thresholds do not have."""
        super().check_sparsity(sparsity)
        if self.fixed_threshold and sparsity == "l0":
            others = ", ".join(name for name in self.sparsities if name != "l0")
            raise ConfigError("sparsity", "l0 trains nothing but thresholds, which {fixed_threshold} holds",
                              "leave one of the two out, or use {sparsity} {others}", others=others)

    def parameters(self, d_sae: int) -> Parameters:
        """The thresholds, (F,)."""
        return {"threshold": torch.full((d_sae,), self.threshold)}

    def thresholds(self, parameters: Parameters, d_sae: int) -> Tensor:
        """The thresholds, (F,); one that training pushed below zero acts as zero."""
        return parameters["threshold"].clamp(min=0)

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        """`pre` where it exceeds its latent's threshold, else 0, (B, F)."""
        thresholds = self.thresholds(parameters, pre.shape[-1])
        # Pre-activations just below their threshold are zero, and yet their gradient moves it.
        reach = thresholds.detach() - (self.bandwidth / 2 if thresholds.requires_grad else 0)
        near = selected(pre, pre > reach)
        return near.with_values(_JumpReluGate.apply(near.values, near.by_latent(thresholds), self.bandwidth))

    def rescaled(self, parameters: Parameters, factor: float) -> Parameters | None:
        """The thresholds grow with the pre-activations; fixed ones do not.

        The gradient's kernel, which no code depends on, stays `bandwidth` wide: against the pre-activations it is
        1 / `factor` as wide as before.
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
    """The `k` largest pre-activations a row on average over a training batch, those below zero clipped to zero.

    In use a row's codes cannot depend on its neighbours: they are `pre * H(pre - threshold)`, with one threshold for
    all latents: while training lasts, the running mean of the smallest pre-activation that batches keep; at the end,
    the one with which a sample of the rows has `k` active latents on average.
    Source: Bussmann, Leask and Nanda, "BatchTopK Sparse Autoencoders" (2024); clipped as in its authors' code.
    """

    name: ClassVar[str] = "batchtopk"

    @property
    def estimates(self) -> tuple[str, ...]:
        """The threshold."""
        return ("threshold",)

    def parameters(self, d_sae: int) -> Parameters:
        """The threshold, a scalar; 0 until a batch was seen."""
        return {"threshold": torch.zeros(())}

    def thresholds(self, parameters: Parameters, d_sae: int) -> Tensor:
        """The one threshold for each latent, (F,); below zero it acts as zero."""
        return parameters["threshold"].clamp(min=0).expand(d_sae)

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        """`pre` where it exceeds the threshold, else 0, (B, F)."""
        return where(pre, pre > self.thresholds(parameters, pre.shape[-1]))

    def training_codes(self, pre: Tensor, parameters: Parameters) -> Codes:
        """`max(pre, 0)` at the `B k` entries of the batch where it is largest, else 0, (B, F); of several processes
        each takes its own rows for a batch."""
        return at_entries(pre, pre.detach().flatten().topk(self.k * len(pre), sorted=False).indices).map(torch.relu)

    def estimated(self, codes: Codes, parameters: Parameters) -> Parameters:
        """The running mean moved towards the smallest positive code, which starts it; a batch without one moves
        nothing."""
        values, threshold = codes.values, parameters["threshold"]
        if not values.numel():
            return {"threshold": threshold}
        smallest = torch.where(values > 0, values, torch.inf).amin()
        moved = torch.where(threshold > 0, threshold.lerp(smallest, THRESHOLD_RATE), smallest)
        return {"threshold": torch.where(smallest.isfinite(), moved, threshold)}

    def calibrated(self, pre: Tensor, parameters: Parameters) -> Parameters:
        """The threshold that `k` pre-activations a row exceed, on average over the rows; 0 where fewer are positive."""
        kept = self.k * len(pre)
        if kept >= pre.numel():
            return {"threshold": torch.zeros_like(parameters["threshold"])}
        largest = pre.flatten().topk(kept + 1).values
        return {"threshold": ((largest[-2] + largest[-1]) / 2).clamp(min=0)}

    def rescaled(self, parameters: Parameters, factor: float) -> Parameters:
        """The threshold grows with the pre-activations."""
        return {"threshold": parameters["threshold"] * factor}
