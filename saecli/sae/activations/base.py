"""Bases of activations, and penalties: what training adds to the squared error to make codes sparse.

Functions import torch, which help pages do without. Shapes: B rows, D = d_in, E = d_out, F = d_sae. A latent is active
on a row if its code is not zero; `u_i = |z_i| ||W_dec_i||` is the size of its part of x_hat, free of scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Self, TypeAlias

from ...base.errors import ConfigError
from ...base.options import Config, Count, Positive, Shown
from ...base.words import does_nothing, flag_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..codes import Codes

Parameters: TypeAlias = dict[str, "Tensor"]

DEFAULT_K = 32  # at most a half of the dimensions, and an eighth of the latents
TARGET_L0 = 32.0  # the default of target-l0
MOST_TARGETED = 1 / 8  # fraction of the latents that the default may be at most

# Latents find directions while many are active, and then become sparse.
DENSE = 4.0  # the first aim over the target
FALL = 0.5  # fraction of all steps over which the aim falls to the target, and k from --k-start


@dataclass(frozen=True)
class Penalty:
    """A penalty on a batch's codes, (B, F), or gates, weighed by the row norms of W_dec, (F, E). This one is zero.

    `parameters` are the activation's and the penalty's own, which have no gradient.
    """

    # Of the default weight, for rows of mean squared norm `d_in`.
    per_sqrt_d_in: ClassVar[float] = 0.0
    per_d_in: ClassVar[float] = 0.0

    def value(self, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters) -> Tensor:
        """The penalty per row, a mean over the batch."""
        return pre.new_zeros(())

    def norm_weights(self, codes: Codes, W_dec: Tensor, parameters: Parameters) -> Tensor:
        """Its derivative in each norm `||W_dec_i||`, summed over rows, (F,)."""
        return W_dec.new_zeros(len(W_dec))

    def default_weight(self, d_in: int) -> float:
        return self.per_sqrt_d_in * math.sqrt(d_in) + self.per_d_in * d_in

    def initial(self, d_sae: int) -> Parameters:
        """Its own parameters before training."""
        return {}

    def fitted(self, pre: Tensor, parameters: Parameters) -> Parameters:
        """Initial parameters, given some rows' pre-activations, (n, F)."""
        return parameters

    def continuing(self, parameters: Parameters, l0: float) -> Parameters:
        """Initial parameters of training from an SAE with this L0."""
        return parameters

    def after_step(self, codes: Codes, parameters: Parameters, progress: float) -> Parameters:
        """New values of some parameters after a step, at a fraction `progress` of all steps."""
        return {}

    def calibrated(self, pre: Tensor, parameters: Parameters) -> Parameters:
        """New values for use, given pre-activations, (n, F), of rows not trained on."""
        return {}


@dataclass(frozen=True)
class L1(Penalty):
    """`sum_i u_i`."""

    per_sqrt_d_in: ClassVar[float] = 0.1

    def value(self, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters) -> Tensor:
        return (codes.map(abs).sums() / len(pre)) @ W_dec.norm(dim=1)

    def norm_weights(self, codes: Codes, W_dec: Tensor, parameters: Parameters) -> Tensor:
        return codes.map(abs).sums()


@dataclass(frozen=True)
class L1OfCodes(Penalty):
    """`sum_i |z_i|`, as in the paper's experiments."""

    per_sqrt_d_in: ClassVar[float] = 0.1

    def value(self, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters) -> Tensor:
        return codes.values.abs().sum() / len(pre)


@dataclass(frozen=True)
class TargetL0(Penalty):
    """Training to a target L0: the `aim` falls to it from several times it, and the `multiplier` m, a sum of past
    excess, holds L0 there; at the end one factor on all thresholds gives rows held out that L0."""

    target_l0: float | None

    rate: ClassVar[float]  # change of m per step, over the relative excess of L0

    @property
    def target(self) -> float:
        assert self.target_l0 is not None, "filled in by `resolved`"
        return self.target_l0

    def initial(self, d_sae: int) -> Parameters:
        import torch

        return {"aim": torch.tensor(self._aim(0.0, d_sae)), "multiplier": torch.zeros(())}

    def _aim(self, progress: float, d_sae: int) -> float:
        """The L0 to have at a fraction of all steps; first `DENSE` targets, at most a quarter of the latents."""
        first = max(self.target, min(DENSE * self.target, d_sae / 4))
        return self.target + (first - self.target) * max(0.0, 1 - progress / FALL)

    def fitted(self, pre: Tensor, parameters: Parameters) -> Parameters:
        """With the threshold at which L0 is the first aim."""
        active = min(max(1, round(parameters["aim"].item() * len(pre))), pre.numel())
        lowest = pre.flatten().topk(active).values[-1].clamp(min=1e-3 * pre.std())
        threshold = parameters["threshold"].new_full((pre.shape[1],), lowest.item())
        return parameters | {"threshold": threshold}

    def continuing(self, parameters: Parameters, l0: float) -> Parameters:
        """With an aim of at most the SAE's L0, since the SAE has found its directions."""
        return parameters | {"aim": parameters["aim"].clamp(max=max(self.target, l0))}

    def excess(self, codes: Codes, parameters: Parameters) -> Tensor:
        """Relative excess of L0 over the aim, at most 1."""
        rows, aim = codes.shape[0], parameters["aim"]
        return (codes.count() / (rows * aim) - 1).clamp(max=1.0) if rows else aim.new_zeros(())

    def after_step(self, codes: Codes, parameters: Parameters, progress: float) -> Parameters:
        return {
            "multiplier": parameters["multiplier"] + self.rate * self.excess(codes, parameters),
            # The aim may have begun lower than the schedule.
            "aim": parameters["aim"].clamp(max=self._aim(progress, codes.shape[1])),
        }

    def calibrated(self, pre: Tensor, parameters: Parameters) -> Parameters:
        """Thresholds times the factor that gives these rows the target as L0."""
        active = round(self.target * len(pre))
        if not 0 < active < pre.numel():
            return {}
        return {"threshold": scaled_to(active, pre, parameters["threshold"].clamp(min=0))}


def scaled_to(active: int, pre: Tensor, thresholds: Tensor) -> Tensor:
    """Thresholds times the factor that leaves `active` entries of pre, (n, F), above them; where none does, since more
    are above thresholds of 0, plus the amount that does."""
    import torch

    above = torch.where(pre > 0, torch.inf, -torch.inf)  # any multiple of 0
    ratios = torch.where(thresholds > 0, pre / thresholds, above)
    scaled = thresholds * between(ratios, active).clamp(min=0)
    if scaled.isfinite().all():
        return scaled
    return thresholds + between(pre - thresholds, active)


def between(values: Tensor, count: int) -> Tensor:
    """Halfway between the `count`-th largest value and the next."""
    return values.flatten().topk(count + 1).values[-2:].mean()


@dataclass(frozen=True)
class Activation(Config):
    """Maps pre-activations to codes of their scale; a configuration with parameters, gradients and penalties."""

    panel: ClassVar[str] = "Activation"
    name: ClassVar[str]
    trained: ClassVar[tuple[str, ...]] = ()  # names of parameters that have a gradient
    # Whether codes depend on angles between latents, in the metric of training; then `parameters` have W_enc in it.
    compares_directions: ClassVar[bool] = False
    estimates_threshold: ClassVar[bool] = False  # at the end of training
    of_codes: ClassVar[tuple[str, ...]] = ()  # settings that a trained SAE's codes depend on
    sets_l0: ClassVar[str] = ""  # the setting that is the L0 wanted, if there is one

    @property
    def l0_wanted(self) -> float | None:
        return getattr(self, self.sets_l0) if self.sets_l0 else None

    def check(self, d_sae: int) -> None:
        """ConfigError for an L0 above the number of latents."""
        if self.l0_wanted is not None and self.l0_wanted > d_sae:
            flag = flag_of(self.sets_l0)
            raise ConfigError(
                f"{flag} must be at most --d-sae, {d_sae}, got {self.l0_wanted:.10g}; lower {flag} or raise --d-sae"
            )

    def penalties(self) -> dict[str, Penalty]:
        """Penalties by name, the default first."""
        return {"none": Penalty(), "l1": L1(), "l1-codes": L1OfCodes()}

    def penalty(self, sparsity: str) -> Penalty:
        return self.penalties()[sparsity]

    @property
    def default_sparsity(self) -> str:
        return next(iter(self.penalties()))

    def is_calibrated(self, sparsity: str | None) -> bool:
        """Whether training ends by setting thresholds for other rows."""
        penalty = self.penalties().get(sparsity or self.default_sparsity)
        return self.estimates_threshold or isinstance(penalty, TargetL0)

    def check_sparsity(self, sparsity: str) -> None:
        """ConfigError for a penalty that is not offered, or settings without effect on it."""
        if sparsity not in self.penalties():
            raise ConfigError(
                f"--sparsity {sparsity} cannot be used with --act {self.name}; use one of {', '.join(self.penalties())}"
            )
        if getattr(self, "target_l0", None) is not None and sparsity != "target-l0":
            advice = "leave it out, or use --sparsity target-l0"
            raise does_nothing("target_l0", f"with --sparsity {sparsity}; {advice}")

    def resolved(self, sparsity: str, d_sae: int) -> Self:
        """With the defaults that its penalty needs; idempotent."""
        return self

    def parameters(self, d_sae: int) -> Parameters:
        """Parameters at the start of training."""
        return {}

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        """The codes of pre-activations, (B, F)."""
        raise TypeError(f"{type(self).__name__} does not say what its codes are")

    def training_codes(self, pre: Tensor, parameters: Parameters) -> Codes:
        """A training batch's codes, which may depend on all of it."""
        return self(pre, parameters)

    def gates(self, codes: Codes, parameters: Parameters) -> Codes:
        """The codes that penalties act on; if not `codes`, they must reconstruct too, by a decoder without gradient."""
        return codes

    def norm_weights(
        self, sparsity: str, codes: Codes, W_dec: Tensor, parameters: Parameters
    ) -> Tensor:
        """See `Penalty.norm_weights`."""
        return self.penalty(sparsity).norm_weights(codes, W_dec, parameters)

    def after_step(self, codes: Codes, parameters: Parameters) -> Parameters:
        """New values of some parameters after a step; processes average them."""
        return {}

    def calibrated(self, pre: Tensor, parameters: Parameters) -> Parameters:
        """See `Penalty.calibrated`."""
        return {}

    def rescaled(self, parameters: Parameters, factor: float) -> Parameters:
        """Parameters that turn pre-activations times `factor` > 0 into codes times `factor`."""
        if "threshold" not in parameters:
            return parameters
        return parameters | {"threshold": parameters["threshold"] * factor}


@dataclass(frozen=True)
class KeepsK(Activation):
    """Keeps `k` pre-activations per row, exactly or on average."""

    of_codes: ClassVar[tuple[str, ...]] = ("k",)
    sets_l0: ClassVar[str] = "k"

    k: Annotated[
        Count,
        Shown(
            "Active latents per row; with batchtopk on average.",
            default_words=f"{DEFAULT_K}, at most d_in / 2 and d_sae / 8",
        ),
    ] = DEFAULT_K

    def with_default_k(self, d_in: int, d_sae: int) -> Self:
        return replace(self, k=max(1, min(DEFAULT_K, d_in // 2, d_sae // 8)))


@dataclass(frozen=True)
class Thresholded(Activation):
    """`z = pre * H(pre - threshold)`: latent i is active where `pre_i > threshold_i`."""

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        from ..codes import where

        return where(pre, pre > self.thresholds(parameters, pre.shape[-1]))

    def thresholds(self, parameters: Parameters, d_sae: int) -> Tensor:
        return parameters["threshold"].clamp(min=0).expand(d_sae)


@dataclass(frozen=True)
class LearnsThresholds(Thresholded):
    """A learned threshold per latent, (F,)."""

    trained: ClassVar[tuple[str, ...]] = ("threshold",)
    sets_l0: ClassVar[str] = "target_l0"
    start: ClassVar[float] = 0.0  # of the trained parameters, (F,) each

    target_l0: Annotated[
        Positive | None,
        Shown(
            "Active latents per row, on average, that --sparsity target-l0 trains to; "
            f"default: {TARGET_L0:g}, at most an eighth of the latents."
        ),
    ] = None

    def resolved(self, sparsity: str, d_sae: int) -> Self:
        if sparsity != "target-l0" or self.target_l0 is not None:
            return self
        return replace(self, target_l0=min(TARGET_L0, MOST_TARGETED * d_sae))

    def parameters(self, d_sae: int) -> Parameters:
        import torch

        return {name: torch.full((d_sae,), self.start) for name in self.trained}
