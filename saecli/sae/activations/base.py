"""Bases of activations. They import torch inside functions: help pages list options without it.

Shapes: B rows, D = d_in, E = d_out, F = d_sae. A latent is active on a row if its code is not zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from annotated_types import Ge, Lt

from ...base.errors import ConfigError, flag_of
from ...base.options import Config, Count, Positive, Shown
from .penalties import (
    L1,
    LEAST_RATE,
    TARGET_L0,
    TARGET_RATE,
    L1OfCodes,
    Parameters,
    Penalty,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ..codes import Codes

# Options of penalties, each with the one that it belongs to.
PENALTY_OPTIONS = {"target_rate": "kl", "target_l0": "target-l0"}


@dataclass(frozen=True)
class Activation(Config):
    """A configuration that maps pre-activations to codes, with its parameters, their gradients, and its penalties.

    Codes have the scale of pre-activations: see `rescaled`.

    trained: names of parameters that have a gradient.
    one_scale: whether codes compare directions of latents, so that a scale for each dimension would change them.
    of_codes: settings that a trained SAE's codes depend on.
    """

    panel: ClassVar[str] = "Activation"
    name: ClassVar[str]
    trained: ClassVar[tuple[str, ...]] = ()
    one_scale: ClassVar[bool] = False
    of_codes: ClassVar[tuple[str, ...]] = ()

    def check(self, d_sae: int) -> None:
        """Raise a ConfigError for settings that do not fit the number of latents."""

    def penalties(self) -> dict[str, Penalty]:
        """Those on offer, by name, the default first."""
        return {"none": Penalty(), "l1": L1(), "l1-codes": L1OfCodes()}

    def penalty(self, sparsity: str) -> Penalty:
        return self.penalties()[sparsity]

    @property
    def default_sparsity(self) -> str:
        return next(iter(self.penalties()))

    def check_sparsity(self, sparsity: str) -> None:
        """Raise a ConfigError for a penalty that is not offered, or settings without effect on it."""
        if sparsity not in self.penalties():
            raise ConfigError(
                f"--sparsity {sparsity} cannot be used with --act {self.name}; use one of "
                f"{', '.join(self.penalties())}"
            )
        for name, penalty in PENALTY_OPTIONS.items():
            if getattr(self, name, None) is not None and sparsity != penalty:
                raise ConfigError(
                    f"{flag_of(name)} does nothing with --sparsity {sparsity}; leave it out, or use "
                    f"--sparsity {penalty}"
                )

    def resolved(self, sparsity: str, d_sae: int) -> Self:
        """The same with the defaults that its penalty needs; idempotent."""
        return replace(self, **self.penalty(sparsity).settings(d_sae))

    def parameters(self, d_sae: int) -> Parameters:
        """The parameters at the start of training."""
        return {}

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        """The codes of pre-activations, (B, F); see `selection` for sparse ones."""
        raise TypeError(f"{type(self).__name__} does not say what its codes are")

    def training_codes(self, pre: Tensor, parameters: Parameters) -> Codes:
        """The codes of a training batch, which may depend on all of it."""
        return self(pre, parameters)

    def gates(self, codes: Codes, parameters: Parameters) -> Codes:
        """The codes that penalties act on; if not `codes` itself, they must also reconstruct, by a decoder without
        gradient."""
        return codes

    def norm_weights(
        self, sparsity: str, codes: Codes, W_dec: Tensor, parameters: Parameters
    ) -> Tensor:
        """The penalty's derivative in each decoder norm `||W_dec_i||`, summed over rows, (F,)."""
        return self.penalty(sparsity).norm_weights(codes, W_dec, parameters)

    def after_step(self, codes: Codes, parameters: Parameters) -> Parameters:
        """New values of some parameters, after a step; processes average them."""
        return {}

    def calibrated(self, pre: Tensor, parameters: Parameters) -> Parameters:
        """New values at the end of training, given rows' pre-activations, (n, F)."""
        return {}

    def rescaled(self, parameters: Parameters, factor: float) -> Parameters:
        """The parameters that turn pre-activations times `factor` > 0 into codes times `factor`."""
        if "threshold" not in parameters:
            return parameters
        return parameters | {"threshold": parameters["threshold"] * factor}

    def expected_l0(self, d_in: int) -> float:
        """A guess at L0 before training."""
        return d_in / 8


@dataclass(frozen=True)
class KeepsK(Activation):
    """Keeps `k` pre-activations per row, exactly or on average."""

    of_codes: ClassVar[tuple[str, ...]] = ("k",)

    k: Annotated[Count, Shown("Active latents per row; with batchtopk on average.")] = 32

    def expected_l0(self, d_in: int) -> float:
        return self.k

    def check(self, d_sae: int) -> None:
        if self.k > d_sae:
            raise ConfigError(
                f"--k must be at most --d-sae, {d_sae}, got {self.k}; lower --k or raise --d-sae"
            )


@dataclass(frozen=True)
class Thresholded(Activation):
    """Latent i is active where `pre_i > threshold_i`."""

    def thresholds(self, parameters: Parameters, d_sae: int) -> Tensor:
        """The pre-activations above which latents are active, (F,)."""
        return parameters["threshold"].clamp(min=0).expand(d_sae)


@dataclass(frozen=True)
class LearnsThresholds(Thresholded):
    """A learned threshold per latent, (F,)."""

    trained: ClassVar[tuple[str, ...]] = ("threshold",)

    target_l0: Annotated[
        Positive | None,
        Shown(
            "Active latents per row, on average, that --sparsity target-l0 trains to; "
            f"default: {TARGET_L0:g}, at most an eighth of the latents."
        ),
    ] = None

    def check(self, d_sae: int) -> None:
        if self.target_l0 is not None and self.target_l0 > d_sae:
            raise ConfigError(
                f"--target-l0 must be at most --d-sae, {d_sae}, got {self.target_l0:g}; lower "
                "--target-l0 or raise --d-sae"
            )

    def expected_l0(self, d_in: int) -> float:
        return super().expected_l0(d_in) if self.target_l0 is None else self.target_l0


TargetRate = Annotated[
    float | None,
    Ge(LEAST_RATE),
    Lt(1),
    Shown(
        "Firing rate that --sparsity kl aims at for every latent, a fraction of the rows; default: "
        f"{TARGET_RATE}.",
        advanced=True,
    ),
]
