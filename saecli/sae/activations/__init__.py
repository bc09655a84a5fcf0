"""Activations, which map pre-activations to codes.

An activation is a configuration, whose fields are its options, with its parameters, gradient and penalties. To add one,
write its class and add it to `KINDS`; base.py has the bases.

Shapes: B rows, D = d_in, E = d_out, F = d_sae, K = k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ...base.options import Shown
from ...base.words import unknown_choice
from .base import (
    L1,
    Activation,
    KeepsK,
    L1OfCodes,
    LearnsThresholds,
    Parameters,
    Penalty,
    TargetL0,
    Thresholded,
    between,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ..codes import Codes

# Weight of the newest batch in batchtopk's threshold. A slower mean lags behind growing pre-activations: PAM-SGD's
# decoder is then fitted to denser codes than in training.
NEWEST = 0.3
BANDWIDTH = 0.3  # of the kernel in the gradient of thresholds, in units of codes
RELATIVE_BANDWIDTH = 0.5  # with a target, over the threshold
THRESHOLD_RATE = 0.05  # relative change of all thresholds per step, over the relative excess of L0


@dataclass(frozen=True)
class Relu(Thresholded):
    """`z = max(pre, 0)`."""

    name: ClassVar[str] = "relu"

    def penalties(self) -> dict[str, Penalty]:
        return {"l1": L1(), "l1-codes": L1OfCodes(), "none": Penalty()}

    def thresholds(self, parameters: Parameters, d_sae: int) -> Tensor:
        import torch

        return torch.zeros(d_sae)

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        from ..codes import selected

        return selected(pre, pre > 0).map(lambda values: values.relu())


@dataclass(frozen=True)
class BatchTopK(Thresholded, KeepsK):
    """The `k B` largest pre-activations of a training batch, clipped at zero.

    At inference `pre * H(pre - threshold)`, with one threshold for all latents: in training the running mean of each
    batch's smallest code, at the end that at which sampled rows have `k` active latents on average.
    Source: Bussmann, Leask and Nanda, "BatchTopK Sparse Autoencoders" (2024); clipped as in its authors' code.
    """

    name: ClassVar[str] = "batchtopk"
    estimates_threshold: ClassVar[bool] = True

    def parameters(self, d_sae: int) -> Parameters:
        import torch

        return {"threshold": torch.zeros(())}  # before the first batch

    def training_codes(self, pre: Tensor, parameters: Parameters) -> Codes:
        """The `k B` largest of this process' rows."""
        from ..codes import largest

        return largest(pre, self.k * len(pre)).map(lambda values: values.relu())

    def after_step(self, codes: Codes, parameters: Parameters) -> Parameters:
        values, threshold = codes.values, parameters["threshold"]
        if not values.numel():
            return {"threshold": threshold}
        smallest = values.where(values > 0, math.inf).amin()
        moved = threshold.lerp(smallest, NEWEST).where(threshold > 0, smallest)
        return {"threshold": moved.where(smallest.isfinite(), threshold)}

    def calibrated(self, pre: Tensor, parameters: Parameters) -> Parameters:
        active = self.k * len(pre)
        if active >= pre.numel():
            return {"threshold": parameters["threshold"].new_zeros(())}
        return {"threshold": between(pre, active).clamp(min=0)}


@dataclass(frozen=True)
class JumpRelu(LearnsThresholds):
    """`z = pre * H(pre - threshold)`, one learned threshold per latent; its gradient takes a rectangular kernel for the
    derivative of the step H.

    Sources: Rajamanoharan et al., "Jumping Ahead: Improving Reconstruction Fidelity with JumpReLU Sparse Autoencoders"
    (2024), equations 8 to 12; Anthropic, "Circuits Updates - January 2025", for the gradient of pre-activations with
    `--sparsity target-l0`.
    """

    name: ClassVar[str] = "jumprelu"
    start: ClassVar[float] = 0.1  # in units of normalised rows, unless fitted to a target

    def penalties(self) -> dict[str, Penalty]:
        return {
            "target-l0": L0Constraint(self.target_l0, self),
            "l0": L0(self),
            "l1": L1(),
            "l1-codes": L1OfCodes(),
            "none": Penalty(),
        }

    def _near(self, pre: Tensor, parameters: Parameters) -> tuple[Codes, Tensor, Tensor]:
        """Entries that give codes or gradients, with each one's threshold and kernel width."""
        from ..codes import selected

        thresholds = self.thresholds(parameters, pre.shape[-1])
        if self.target_l0 is None:
            width = thresholds.new_full(thresholds.shape, BANDWIDTH)
        else:  # relative, since pre-activations, and thresholds with them, grow severalfold in training
            width = RELATIVE_BANDWIDTH * thresholds.detach()
        # Pre-activations just below their threshold give zero codes, but contribute to gradients.
        reach = thresholds.detach() - (width / 2 if thresholds.requires_grad else 0)
        near = selected(pre, pre > reach)
        return near, near.by_latent(thresholds), near.by_latent(width)

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        from ..codes import Gate

        near, thresholds, width = self._near(pre, parameters)
        to_pre = self.target_l0 is not None
        return near.with_values(Gate.apply(near.values, thresholds, width, to_pre))

    def l0(self, pre: Tensor, parameters: Parameters) -> Tensor:
        """Mean number of active latents, with straight-through gradients."""
        from ..codes import Heaviside

        near, thresholds, width = self._near(pre, parameters)
        return Heaviside.apply(near.values, thresholds, width).sum() / len(pre)


@dataclass(frozen=True)
class L0(Penalty):
    """Mean number of active latents; trains thresholds only."""

    activation: JumpRelu
    per_d_in: ClassVar[float] = 0.001

    def value(self, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters) -> Tensor:
        return self.activation.l0(pre.detach(), parameters)


@dataclass(frozen=True)
class L0Constraint(TargetL0):
    """Squared error subject to L0 = L by the method of multipliers (Hestenes, "Multiplier and gradient methods", 1969):

        e^2 + 2 m e,    e = (L0 - aim) / L

    The quadratic alone presses only while L0 is above its target; m holds it there. One factor on all thresholds after
    each step removes the excess that Adam's small steps would leave.

    Sources: the appendix of `JumpRelu`'s on training to a fixed sparsity, used by Gemma Scope 2, for the quadratic;
    Gallego-Posada et al., "Controlled Sparsity via Constrained Optimization" (2022), for multipliers on L0.
    """

    activation: JumpRelu
    rate: ClassVar[float] = 0.05
    per_d_in: ClassVar[float] = 0.05

    def value(self, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters) -> Tensor:
        excess = (self.activation.l0(pre, parameters) - parameters["aim"]) / self.target
        return excess.square() + 2 * parameters["multiplier"] * excess

    def after_step(self, codes: Codes, parameters: Parameters, progress: float) -> Parameters:
        factor = (THRESHOLD_RATE * self.excess(codes, parameters)).exp()
        return super().after_step(codes, parameters, progress) | {
            "threshold": parameters["threshold"] * factor
        }


@dataclass(frozen=True)
class Gated(LearnsThresholds):
    """`z = pre * H(pre - threshold)`, as `jumprelu`, with thresholds t >= 0 that gates train:

        loss = ||y_hat(z) - y||^2 + weight * penalty(g) + ||y_hat'(g) - y||^2,    g = relu(pre - t) / exp(r_mag)

    y_hat' and the penalty's decoder norms have no gradient: with it, norms shrank without end (FVU at L0 16 on
    tiny-gemma2: 0.25 instead of 0.125). In the source's terms W_mag = W_enc, b_mag = b_enc, W_gate = W_enc /
    exp(r_mag), b_gate = (b_enc - t) / exp(r_mag); for t < 0, left out, gates would open where magnitudes are 0.

    Source: Rajamanoharan et al., "Improving Dictionary Learning with Gated Sparse Autoencoders" (2024).
    """

    name: ClassVar[str] = "gated"
    trained: ClassVar[tuple[str, ...]] = ("threshold", "r_mag")

    def penalties(self) -> dict[str, Penalty]:
        return {"target-l0": ControlledL1(self.target_l0), "l1": L1(), "none": Penalty()}

    def gates(self, codes: Codes, parameters: Parameters) -> Codes:
        thresholds = codes.by_latent(self.thresholds(parameters, codes.shape[1]))
        slopes = codes.by_latent((-parameters["r_mag"]).exp())
        return codes.with_values((codes.values - thresholds).relu() * slopes)

    def norm_weights(
        self, sparsity: str, codes: Codes, W_dec: Tensor, parameters: Parameters
    ) -> Tensor:
        """0, since the decoder of gates has no gradient."""
        return W_dec.new_zeros(len(W_dec))

    def after_step(self, codes: Codes, parameters: Parameters) -> Parameters:
        return {"threshold": parameters["threshold"].clamp(min=0)}


@dataclass(frozen=True)
class ControlledL1(TargetL0):
    """L1 of the gates, times exp(m). Thresholds follow gates alone: with jumprelu's factor FVU was 0.140, not 0.125."""

    rate: ClassVar[float] = 0.02
    per_sqrt_d_in: ClassVar[float] = L1.per_sqrt_d_in

    def value(self, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters) -> Tensor:
        return parameters["multiplier"].exp() * L1().value(pre, codes, W_dec, parameters)


@dataclass(frozen=True)
class Largest(KeepsK):
    """Keeps `k` pre-activations of each row, and zeros the others."""

    def ranking(self, pre: Tensor) -> Tensor:
        """Values whose `k` largest are kept, (B, F)."""
        return pre

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        from ..codes import at, largest_of_rows

        return at(pre, largest_of_rows(self.ranking(pre.detach()), self.k))


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

    so that latents of similar directions do not all code for what one explains. With `least_squares` codes are anew the
    ridge regression of the row on the directions of those with v > 0, C their cosines, clipped at zero:

        z = max((C + 0.001 I)^-1 s, 0) ||w||,    s as at first

    The gradient holds the choice. With a decoder in closed form this is the method of optimal directions. Cost: k
    passes over (B, F), and k products (B, D) by (D, F), or if F <= k B half of one of (F, D) by (D, F); B k (k + D)
    for the codes.

    Sources: Mallat and Zhang, "Matching pursuits with time-frequency dictionaries" (1993); Pati, Rezaiifar and
    Krishnaprasad, "Orthogonal matching pursuit" (1993), for codes on the chosen; Engan, Aase and Husoy, "Method of
    optimal directions for frame design" (1999); Costa et al., "From Flat to Hierarchical: Extracting Sparse
    Representations with Matching Pursuit" (2025).
    """

    name: ClassVar[str] = "matching-pursuit"
    compares_directions: ClassVar[bool] = True
    of_codes: ClassVar[tuple[str, ...]] = ("k", "least_squares")

    least_squares: Annotated[
        bool, Shown("Fit the codes of the latents chosen to the row anew, by least squares.")
    ] = False

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        from ..pursuit import pursued

        return pursued(pre, parameters["W_enc"], self.k, self.least_squares)


KINDS = (Relu, JumpRelu, Gated, TopK, ReluTopK, AbsTopK, BatchTopK, MatchingPursuit)
ACTIVATIONS: dict[str, type[Activation]] = {kind.name: kind for kind in KINDS}


def sparsity_names() -> tuple[str, ...]:
    names = (name for kind in KINDS for name in ("none", *kind().penalties()))
    return tuple(dict.fromkeys(names))


def activation_to_json(activation: Activation) -> dict[str, Any]:
    return {"name": activation.name, **activation.to_json()}


def activation_from_json(document: dict[str, Any]) -> Activation:
    """ConfigError for an unknown name or setting."""
    settings = dict(document)
    name = settings.pop("name", None)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise unknown_choice("act", str(name), ACTIVATIONS)
    return ACTIVATIONS[name].from_json(settings)
