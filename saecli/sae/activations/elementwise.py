"""Activations whose latents switch independently: relu, jumprelu, gated, batchtopk, swish. Shapes: B rows, F = d_sae.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from ...base.errors import ConfigError
from ...base.options import option
from .base import Activation, Anneals, KeepsK, Parameters, TargetsRate

if TYPE_CHECKING:
    from torch import Tensor

    from ..codes import Codes

# Weight of the newest batch in batchtopk's threshold. A slower mean lags behind growing pre-activations; PAM-SGD's
# decoder is then fitted to denser codes than in training, which makes pre-activations grow faster (digits, k = 16: FVU
# 0.129 with 0.05, 0.092 with 0.3 and 0.5).
NEWEST = 0.3


@dataclass(frozen=True)
class Thresholded(Activation):
    """Latent i is active where `pre_i > threshold_i`."""

    def thresholds(self, parameters: Parameters, d_sae: int) -> Tensor:
        """The pre-activations above which latents are active, (F,)."""
        import torch

        return torch.zeros(d_sae)


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
        from .selection import at_entries

        kept = pre.detach().flatten().topk(self.k * len(pre), sorted=False).indices
        return at_entries(pre, kept).map(lambda values: values.relu())

    def estimated(self, codes: Codes, parameters: Parameters, progress: float) -> Parameters:
        values, threshold = codes.values, parameters["threshold"]
        if not values.numel():
            return {"threshold": threshold}
        smallest = values.where(values > 0, math.inf).amin()
        moved = threshold.lerp(smallest, NEWEST).where(threshold > 0, smallest)
        return {"threshold": moved.where(smallest.isfinite(), threshold)}

    def calibrated(self, pre: Tensor, parameters: Parameters, smoothed: Callable[[float], Tensor]) -> Parameters:
        kept = self.k * len(pre)
        if kept >= pre.numel():
            return {"threshold": parameters["threshold"].new_zeros(())}
        largest = pre.flatten().topk(kept + 1).values
        return {"threshold": ((largest[-2] + largest[-1]) / 2).clamp(min=0)}

    def rescaled(self, parameters: Parameters, factor: float) -> Parameters:
        return {"threshold": parameters["threshold"] * factor}


@dataclass(frozen=True)
class Swish(TargetsRate):
    """`z = pre * sigmoid(pre)`, also called SiLU. Hardly any code is exactly zero: l0 is about d_sae.

    Source: Ramachandran, Zoph and Le, "Searching for Activation Functions" (2017), with beta = 1: another beta is the
    same SAE with the encoder multiplied and the decoder divided by beta.
    """

    name: ClassVar[str] = "swish"
    sparsities: ClassVar[tuple[str, ...]] = ("none", "l1", "l1-codes", "kl")
    opposites: ClassVar[bool] = True
    exact_zeros: ClassVar[bool] = False

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        from ..codes import DenseCodes

        return DenseCodes(pre * pre.sigmoid())

    def rescaled(self, parameters: Parameters, factor: float) -> None:
        return None  # swish has a scale of its own


TARGET_L0, MOST_TARGETED = 32.0, 1 / 8  # the default target, and the largest fraction of the latents that it may be
THRESHOLD = 0.1  # at the start, unless fitted to a target
BANDWIDTH, RELATIVE_BANDWIDTH = 0.3, 0.5  # without a target, and with one, over the threshold

# Latents find directions while many are active, and then become sparse. FVU in a world of known features at L0 10,
# after 2,000 steps of SGD: 0.165 with the fall over 0.2 of the steps, 0.160 over 0.5 (batchtopk: 0.174).
DENSE, FALL = 4.0, 0.5  # the first aim over the target; the fraction of all steps over which it falls to the target
MULTIPLIER_RATE = 0.05  # change of m per step, over the relative excess of L0
THRESHOLD_RATE = 0.05  # relative change of all thresholds per step, over the same
# Smoothing at which training rows have about as many active latents as rows held out. Wider smoothing activates more:
# where it is 0.31 in training (6,000 rows, 2,048 latents), held-out rows had 0.84 of the target.
HELD_OUT_WIDTH = 0.2


@dataclass(frozen=True)
class TargetsL0(Thresholded):
    """A learned threshold per latent, (F,), and `--sparsity target-l0`: an aim for L0 that falls from several times the
    target to it, and at the end the factor on all thresholds that keeps L0 on rows held out."""

    target_l0: float | None = option(None, "Active latents per row, on average, that --sparsity target-l0 trains to; "
                                           f"default: {TARGET_L0:g}, at most an eighth of the latents.", above=0)

    def check(self, d_sae: int) -> None:
        if self.target_l0 is not None and self.target_l0 > d_sae:
            raise ConfigError(f"--target-l0 must be at most --d-sae, {d_sae}, got {self.target_l0:g}; lower "
                              "--target-l0 or raise --d-sae", option="target_l0")

    def check_sparsity(self, sparsity: str) -> None:
        super().check_sparsity(sparsity)
        if self.target_l0 is not None and sparsity != "target-l0":
            raise ConfigError(f"--target-l0 does nothing with --sparsity {sparsity}; leave it out, or use --sparsity "
                              "target-l0", option="target_l0")

    def resolved(self, sparsity: str, d_sae: int) -> Self:
        settled = super().resolved(sparsity, d_sae)
        if sparsity != "target-l0" or self.target_l0 is not None:
            return settled
        return replace(settled, target_l0=min(TARGET_L0, MOST_TARGETED * d_sae))

    def expected_l0(self, d_in: int) -> float:
        return super().expected_l0(d_in) if self.target_l0 is None else self.target_l0

    def training_parameters(self, d_sae: int) -> Parameters:
        """With a target its current `aim`."""
        import torch

        given = super().training_parameters(d_sae)
        return given if self.target_l0 is None else given | {"aim": torch.tensor(_aim(self.target_l0, 0.0, d_sae))}

    def continuing(self, parameters: Parameters, l0: float) -> Parameters:
        """With a target, an aim of at most the SAE's L0: it has found its directions."""
        if self.target_l0 is None:
            return parameters
        return parameters | {"aim": parameters["aim"].clamp(max=max(self.target_l0, l0))}

    def fitted(self, pre: Tensor, parameters: Parameters) -> Parameters:
        """With a target, the threshold at which L0 is the first aim."""
        if self.target_l0 is None:
            return parameters
        kept = min(max(1, round(parameters["aim"].item() * len(pre))), pre.numel())
        lowest = pre.flatten().topk(kept).values[-1].clamp(min=1e-3 * pre.std())
        return parameters | {"threshold": parameters["threshold"].new_full((pre.shape[1],), lowest.item())}

    def thresholds(self, parameters: Parameters, d_sae: int) -> Tensor:
        return parameters["threshold"].clamp(min=0)

    def excess(self, codes: Codes, parameters: Parameters, progress: float) -> tuple[Tensor, Tensor]:
        """L0 over the aim, minus one and at most one, and the next aim."""
        assert self.target_l0 is not None  # see `resolved`
        rows, aim = codes.shape[0], parameters["aim"]
        excess = (codes.count() / (rows * aim) - 1).clamp(max=1.0) if rows else aim.new_zeros(())
        return excess, aim.clamp(max=_aim(self.target_l0, progress, codes.shape[1]))  # which may have begun lower

    def calibrated(self, pre: Tensor, parameters: Parameters, smoothed: Callable[[float], Tensor]) -> Parameters:
        """With a target, the thresholds times the factor that gives rows smoothed by `HELD_OUT_WIDTH` the L0 that the
        controller held on rows smoothed as in training."""
        import torch

        if self.target_l0 is None:
            return {}
        thresholds = self.thresholds(parameters, pre.shape[-1])
        kept = self._held(smoothed(math.inf), thresholds)
        ratios = (smoothed(HELD_OUT_WIDTH) / thresholds.clamp(min=torch.finfo(pre.dtype).tiny)).flatten()
        if not 0 < kept < len(ratios):
            return {}
        return {"threshold": thresholds * ratios.topk(kept + 1).values[-2:].mean().clamp(min=0)}

    def _held(self, pre: Tensor, thresholds: Tensor) -> int:
        return int((pre > thresholds).sum())

    def rescaled(self, parameters: Parameters, factor: float) -> Parameters | None:
        return parameters | {"threshold": parameters["threshold"] * factor}


@dataclass(frozen=True)
class JumpRelu(TargetsL0, TargetsRate):
    """`z = pre * H(pre - threshold)`, one threshold per latent, learned unless fixed; its gradient takes a rectangular
    kernel for the derivative of the step H.

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

    threshold: float | None = option(None, "Initial threshold of every latent, in units of the normalised rows; "
                                           f"default: {THRESHOLD}, with --sparsity target-l0 fitted to the rows.",
                                     minimum=0, advanced=True)
    bandwidth: float | None = option(None, "Width of the kernel in the gradient of thresholds, in units of the codes; "
                                           f"default: {BANDWIDTH}, with --sparsity target-l0 half of each threshold.",
                                     above=0, advanced=True)
    fixed_threshold: bool = option(False, "Keep every threshold at its initial value; --sparsity is then l1 by "
                                         "default.", advanced=True)

    @property
    def estimates(self) -> tuple[str, ...]:
        return ("threshold",) if self.fixed_threshold else super().estimates

    @property
    def default_sparsity(self) -> str:
        return "l1" if self.fixed_threshold else "target-l0"

    def check_sparsity(self, sparsity: str) -> None:
        if self.fixed_threshold and sparsity in ("l0", "target-l0"):
            others = ", ".join(name for name in self.sparsities if name not in ("l0", "target-l0"))
            raise ConfigError(f"--sparsity {sparsity} trains thresholds, which --fixed-threshold holds; leave one of "
                              f"the two out, or use --sparsity {others}", option="sparsity")
        super().check_sparsity(sparsity)
        if self.threshold is not None and sparsity == "target-l0":
            raise ConfigError("--threshold does nothing with --sparsity target-l0, which fits thresholds to the "
                              "rows; leave it out, or use another --sparsity", option="threshold")

    def parameters(self, d_sae: int) -> Parameters:
        import torch

        return {"threshold": torch.full((d_sae,), THRESHOLD if self.threshold is None else self.threshold)}

    def training_parameters(self, d_sae: int) -> Parameters:
        """With a target also the multiplier m."""
        import torch

        return {} if self.target_l0 is None else {**super().training_parameters(d_sae), "multiplier": torch.zeros(())}

    def _width(self, thresholds: Tensor) -> Tensor:
        """The width of each latent's kernel, (F,)."""
        if self.bandwidth is not None or self.target_l0 is None:
            return thresholds.new_full(thresholds.shape, self.bandwidth or BANDWIDTH)
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
        return near.with_values(Gate.apply(near.values, thresholds, width, self.target_l0 is not None))

    def estimated(self, codes: Codes, parameters: Parameters, progress: float) -> Parameters:
        if self.target_l0 is None:
            return {}
        excess, aim = self.excess(codes, parameters, progress)
        return {"threshold": parameters["threshold"] * (THRESHOLD_RATE * excess).exp(),
                "multiplier": parameters["multiplier"] + MULTIPLIER_RATE * excess, "aim": aim}

    def rescaled(self, parameters: Parameters, factor: float) -> Parameters | None:
        return None if self.fixed_threshold else super().rescaled(parameters, factor)

    def default_weight(self, sparsity: str, d_in: int) -> float:
        weights = {"l0": 0.001 * d_in, "target-l0": 0.05 * d_in}
        return weights[sparsity] if sparsity in weights else super().default_weight(sparsity, d_in)

    def penalty_l0(self, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters) -> Tensor:
        """Mean number of active latents."""
        return self._l0(pre.detach(), parameters)

    def penalty_target_l0(self, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters) -> Tensor:
        assert self.target_l0 is not None  # see `resolved`
        excess = (self._l0(pre, parameters) - parameters["aim"]) / self.target_l0
        return excess.square() + 2 * parameters["multiplier"] * excess

    def _l0(self, pre: Tensor, parameters: Parameters) -> Tensor:
        from .selection import Step

        near, thresholds, width = self._near(pre, parameters)
        return Step.apply(near.values, thresholds, width).sum() / len(pre)


PRESSURE_RATE = 0.01  # change per step of the logarithm of the pressure, over the relative excess of L0


@dataclass(frozen=True)
class Gated(TargetsL0, Anneals):
    """`z = pre * H(pre - threshold)`, as `jumprelu`, with thresholds t >= 0 that gates train:

        loss = ||y_hat(z) - y||^2 + weight * penalty(g) + ||y_hat'(g) - y||^2,    g = relu(pre - t) / exp(r_mag)

    y_hat', and the penalty's decoder norms, are without gradient: with it, norms shrank without end, and FVU at L0 16
    was 0.25 on tiny-gemma2 instead of 0.125. It is the source's encoder with the magnitudes as `pre`: W_mag = W_enc,
    b_mag = b_enc, W_gate = W_enc / exp(r_mag), b_gate = (b_enc - t) / exp(r_mag). For t < 0, which is left out, gates
    would open where magnitudes are 0.

    With `--sparsity target-l0` the penalty is l1 times a pressure, which rises while L0 is above its aim.

    Source: Rajamanoharan et al., "Improving Dictionary Learning with Gated Sparse Autoencoders" (2024).
    """

    name: ClassVar[str] = "gated"
    sparsities: ClassVar[tuple[str, ...]] = ("target-l0", "l1", "lp", "none")
    opposites: ClassVar[bool] = True

    def parameters(self, d_sae: int) -> Parameters:
        import torch

        return {"threshold": torch.zeros(d_sae), "r_mag": torch.zeros(d_sae)}

    def training_parameters(self, d_sae: int) -> Parameters:
        """With a target also the pressure."""
        import torch

        given = super().training_parameters(d_sae)
        return given if self.target_l0 is None else given | {"pressure": torch.ones(())}

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        from .selection import where

        return where(pre, pre > self.thresholds(parameters, pre.shape[-1]))

    def gates(self, codes: Codes, parameters: Parameters) -> Codes:
        """g."""
        thresholds, slopes = self.thresholds(parameters, codes.shape[1]), (-parameters["r_mag"]).exp()
        return codes.with_values((codes.values - codes.by_latent(thresholds)).relu() * codes.by_latent(slopes))

    def estimated(self, codes: Codes, parameters: Parameters, progress: float) -> Parameters:
        found = super().estimated(codes, parameters, progress) | {"threshold": parameters["threshold"].clamp(min=0)}
        if self.target_l0 is None:
            return found
        excess, aim = self.excess(codes, parameters, progress)
        return found | {"pressure": parameters["pressure"] * (PRESSURE_RATE * excess).exp(), "aim": aim}

    def _held(self, pre: Tensor, thresholds: Tensor) -> int:
        """As of the target: l1 follows it slowly."""
        assert self.target_l0 is not None
        return round(self.target_l0 * len(pre))

    def default_weight(self, sparsity: str, d_in: int) -> float:
        return super().default_weight("l1" if sparsity == "target-l0" else sparsity, d_in)

    def penalty_target_l0(self, pre: Tensor, gates: Codes, W_dec: Tensor, parameters: Parameters) -> Tensor:
        return parameters["pressure"] * self.penalty_l1(pre, gates, W_dec, parameters)

    def norm_weights(self, sparsity: str, codes: Codes, W_dec: Tensor, parameters: Parameters) -> Tensor:
        """0, since the decoder of gates has no gradient."""
        return W_dec.new_zeros(len(W_dec))


def _aim(target: float, progress: float, d_sae: int) -> float:
    """The L0 to have at a fraction of all steps; at first `DENSE` targets, at most a quarter of the latents."""
    first = max(target, min(DENSE * target, d_sae / 4))
    return target + (first - target) * max(0.0, 1 - progress / FALL)
