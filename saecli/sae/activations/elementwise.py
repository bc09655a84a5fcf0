"""Activations whose latents switch independently: relu, jumprelu, gated, batchtopk. Shapes as in `base.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import Anneals, KeepsK, Parameters, TargetsL0, TargetsRate, Thresholded

if TYPE_CHECKING:
    from torch import Tensor

    from ..codes import Codes

# Weight of the newest batch in batchtopk's threshold. A slower mean lags behind growing pre-activations; PAM-SGD's
# decoder is then fitted to denser codes than in training, which makes pre-activations grow faster (digits, k = 16: FVU
# 0.129 with 0.05, 0.092 with 0.3 and 0.5).
NEWEST = 0.3


@dataclass(frozen=True)
class Relu(Thresholded, TargetsRate, Anneals):
    """`z = max(pre, 0)`."""

    name: ClassVar[str] = "relu"
    sparsities: ClassVar[tuple[str, ...]] = ("l1", "lp", "l1-codes", "kl", "none")
    opposites: ClassVar[bool] = True

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        from .selection import selected

        return selected(pre, pre > 0).map(lambda values: values.relu())


@dataclass(frozen=True)
class BatchTopK(Thresholded, KeepsK):
    """The `k B` largest pre-activations of a training batch, clipped at zero.

    At inference codes are `pre * H(pre - threshold)`, with one threshold for all latents: during training the running
    mean of each batch's smallest code, at the end the one with which sampled rows have `k` active latents on average.
    Source: Bussmann, Leask and Nanda, "BatchTopK Sparse Autoencoders" (2024); clipped as in its authors' code.
    """

    name: ClassVar[str] = "batchtopk"

    @property
    def estimates(self) -> tuple[str, ...]:
        return ("threshold",)

    def parameters(self, d_sae: int) -> Parameters:
        import torch

        return {"threshold": torch.zeros(())}  # before the first batch

    def thresholds(self, parameters: Parameters, d_sae: int) -> Tensor:
        return parameters["threshold"].clamp(min=0).expand(d_sae)

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        from .selection import where

        return where(pre, pre > self.thresholds(parameters, pre.shape[-1]))

    def training_codes(self, pre: Tensor, parameters: Parameters) -> Codes:
        """`max(pre, 0)` at the `k B` largest entries of this process' rows."""
        from .selection import largest

        return largest(pre, self.k * len(pre)).map(lambda values: values.relu())

    def estimated(self, codes: Codes, parameters: Parameters, progress: float) -> Parameters:
        values, threshold = codes.values, parameters["threshold"]
        if not values.numel():
            return {"threshold": threshold}
        smallest = values.where(values > 0, math.inf).amin()
        moved = threshold.lerp(smallest, NEWEST).where(threshold > 0, smallest)
        return {"threshold": moved.where(smallest.isfinite(), threshold)}

    def calibrated(
        self, pre: Tensor, parameters: Parameters, smoothed: Callable[[float], Tensor]
    ) -> Parameters:
        kept = self.k * len(pre)
        if kept >= pre.numel():
            return {"threshold": parameters["threshold"].new_zeros(())}
        largest = pre.flatten().topk(kept + 1).values
        return {"threshold": ((largest[-2] + largest[-1]) / 2).clamp(min=0)}

    def rescaled(self, parameters: Parameters, factor: float) -> Parameters:
        return {"threshold": parameters["threshold"] * factor}


THRESHOLD = 0.1  # at the start, in units of normalised rows, unless fitted to a target
BANDWIDTH = 0.3  # of the kernel in the gradient of thresholds, in units of codes
RELATIVE_BANDWIDTH = 0.5  # with a target, over the threshold


@dataclass(frozen=True)
class JumpRelu(TargetsL0, TargetsRate):
    """`z = pre * H(pre - threshold)`, one learned threshold per latent; its gradient takes a rectangular kernel for the
    derivative of the step H.

    With `--sparsity target-l0`, training minimises the squared error subject to L0 = L by the method of multipliers
    (Hestenes, "Multiplier and gradient methods", 1969). It adds to the squared error, times a weight,

        e^2 + 2 m e,    e = (L0 - aim) / L

    where the aim falls from several times L to L. The quadratic alone exerts pressure only while L0 is above its
    target; the multiplier m, a sum of past excess, holds L0 there. One factor on all thresholds, changed after each
    step, removes at once the excess that Adam's small steps would leave.

    Sources: Rajamanoharan et al., "Jumping Ahead: Improving Reconstruction Fidelity with JumpReLU Sparse Autoencoders"
    (2024), equations 8 to 12, and the quadratic of its appendix on training to a fixed sparsity, used by Gemma Scope 2;
    Anthropic, "Circuits Updates - January 2025", for the gradient of pre-activations; Gallego-Posada et al.,
    "Controlled Sparsity via Constrained Optimization" (2022), for multipliers on L0.
    """

    name: ClassVar[str] = "jumprelu"
    sparsities: ClassVar[tuple[str, ...]] = ("target-l0", "l0", "l1", "l1-codes", "kl", "none")
    multiplier_rate: ClassVar[float] = 0.05

    def parameters(self, d_sae: int) -> Parameters:
        import torch

        return {"threshold": torch.full((d_sae,), THRESHOLD)}

    def _width(self, thresholds: Tensor) -> Tensor:
        """The width of each latent's kernel, (F,)."""
        if self.target_l0 is None:
            return thresholds.new_full(thresholds.shape, BANDWIDTH)
        # Relative, since pre-activations, and thresholds with them, grow severalfold in training.
        return RELATIVE_BANDWIDTH * thresholds.detach()

    def _near(self, pre: Tensor, parameters: Parameters) -> tuple[Codes, Tensor, Tensor]:
        from .selection import selected

        thresholds = self.thresholds(parameters, pre.shape[-1])
        width = self._width(thresholds)
        # Pre-activations just below their threshold give zero codes, but contribute to gradients.
        reach = thresholds.detach() - (width / 2 if thresholds.requires_grad else 0)
        near = selected(pre, pre > reach)
        return near, near.by_latent(thresholds), near.by_latent(width)

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        from .selection import Gate

        near, thresholds, width = self._near(pre, parameters)
        return near.with_values(
            Gate.apply(near.values, thresholds, width, self.target_l0 is not None)
        )

    def default_weight(self, sparsity: str, d_in: int) -> float:
        weights = {"l0": 0.001 * d_in, "target-l0": 0.05 * d_in}
        return weights[sparsity] if sparsity in weights else super().default_weight(sparsity, d_in)

    def penalty_l0(
        self, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters
    ) -> Tensor:
        """Mean number of active latents."""
        return self._l0(pre.detach(), parameters)

    def penalty_target_l0(
        self, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters
    ) -> Tensor:
        assert self.target_l0 is not None  # see `resolved`
        excess = (self._l0(pre, parameters) - parameters["aim"]) / self.target_l0
        return excess.square() + 2 * parameters["multiplier"] * excess

    def _l0(self, pre: Tensor, parameters: Parameters) -> Tensor:
        from .selection import Step

        near, thresholds, width = self._near(pre, parameters)
        return Step.apply(near.values, thresholds, width).sum() / len(pre)


@dataclass(frozen=True)
class Gated(TargetsL0, Anneals):
    """`z = pre * H(pre - threshold)`, as `jumprelu`, with thresholds t >= 0 that gates train:

        loss = ||y_hat(z) - y||^2 + weight * penalty(g) + ||y_hat'(g) - y||^2,    g = relu(pre - t) / exp(r_mag)

    y_hat', and the penalty's decoder norms, are without gradient: with it, norms shrank without end, and FVU at L0 16
    was 0.25 on tiny-gemma2 instead of 0.125. It is the source's encoder with the magnitudes as `pre`: W_mag = W_enc,
    b_mag = b_enc, W_gate = W_enc / exp(r_mag), b_gate = (b_enc - t) / exp(r_mag). For t < 0, which is left out, gates
    would open where magnitudes are 0. With `--sparsity target-l0` the penalty is l1 times exp(m).

    Source: Rajamanoharan et al., "Improving Dictionary Learning with Gated Sparse Autoencoders" (2024).
    """

    name: ClassVar[str] = "gated"
    sparsities: ClassVar[tuple[str, ...]] = ("target-l0", "l1", "lp", "none")
    opposites: ClassVar[bool] = True
    multiplier_rate: ClassVar[float] = 0.02
    loose: ClassVar[bool] = True

    def parameters(self, d_sae: int) -> Parameters:
        import torch

        return {"threshold": torch.zeros(d_sae), "r_mag": torch.zeros(d_sae)}

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        from .selection import where

        return where(pre, pre > self.thresholds(parameters, pre.shape[-1]))

    def gates(self, codes: Codes, parameters: Parameters) -> Codes:
        thresholds, slopes = (
            self.thresholds(parameters, codes.shape[1]),
            (-parameters["r_mag"]).exp(),
        )
        return codes.with_values(
            (codes.values - codes.by_latent(thresholds)).relu() * codes.by_latent(slopes)
        )

    def estimated(self, codes: Codes, parameters: Parameters, progress: float) -> Parameters:
        """Thresholds follow gates alone: with jumprelu's factor on them, FVU was 0.140 instead of 0.125."""
        return super().estimated(codes, parameters, progress) | {
            "threshold": parameters["threshold"].clamp(min=0)
        }

    def default_weight(self, sparsity: str, d_in: int) -> float:
        return super().default_weight("l1" if sparsity == "target-l0" else sparsity, d_in)

    def penalty_target_l0(
        self, pre: Tensor, gates: Codes, W_dec: Tensor, parameters: Parameters
    ) -> Tensor:
        return parameters["multiplier"].exp() * self.penalty_l1(pre, gates, W_dec, parameters)

    def norm_weights(
        self, sparsity: str, codes: Codes, W_dec: Tensor, parameters: Parameters
    ) -> Tensor:
        """0, since the decoder of gates has no gradient."""
        return W_dec.new_zeros(len(W_dec))
