"""The base of all activations: a configuration that owns its parameters, its gradient and its penalties.

Modules of activations import torch inside functions: help pages list their options without it.

Shapes: B rows, D = d_in, F = d_sae. Latent i is active on a row when its code is not zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self, TypeAlias

from ...base.errors import ConfigError
from ...base.options import Config, option

if TYPE_CHECKING:
    from torch import Tensor

    from ..codes import Codes

Parameters: TypeAlias = dict[str, "Tensor"]


@dataclass(frozen=True)
class Activation(Config):
    """Base of all activations: phi, applied to pre-activations `x @ W_enc + b_enc`.

    `sparsities` names the penalties that the activation offers, its default first; besides `none`, each is
    a method `penalty_NAME(pre, codes, W_dec, parameters)` that gives the mean over the rows of a batch, hyphens in its
    name as underscores.
    `opposites`: whether `phi(v) - phi(-v) = v`; two latents of opposite directions are then linear together.
    `exact_zeros`: whether inactive codes are exactly zero, so that L0 measures sparsity.
    `of_codes`: the settings that codes depend on once it is trained.
    """

    panel: ClassVar[str] = "Activation"
    name: ClassVar[str]
    sparsities: ClassVar[tuple[str, ...]] = ("none", "l1", "l1-codes")
    opposites: ClassVar[bool] = False
    exact_zeros: ClassVar[bool] = True
    of_codes: ClassVar[tuple[str, ...]] = ()

    def check(self, d_sae: int) -> None:
        """Refuse settings that cannot work with `d_sae` latents, by a ConfigError."""

    def check_sparsity(self, sparsity: str) -> None:
        """Refuse a penalty that the activation does not offer, or settings without effect on the penalty, by a
        ConfigError."""
        if sparsity not in self.sparsities:
            raise ConfigError(f"--sparsity {sparsity} cannot be used with --act {self.name}; use one of "
                              f"{', '.join(self.sparsities)}", option="sparsity")

    @property
    def estimates(self) -> tuple[str, ...]:
        """Names of parameters without gradient: they stay fixed, or follow `estimated`."""
        return ()

    @property
    def default_sparsity(self) -> str:
        """The penalty when the user names none."""
        return self.sparsities[0]

    def parameters(self, d_sae: int) -> Parameters:
        """The parameters at the start of training; none for most activations."""
        return {}

    def training_parameters(self, d_sae: int) -> Parameters:
        """Further parameters, `estimates`, that only training needs and a trained SAE is without; none by default."""
        return {}

    def fitted(self, pre: Tensor, parameters: Parameters) -> Parameters:
        """The parameters at the start of training, given the pre-activations of some rows, (n, F)."""
        return parameters

    def continuing(self, parameters: Parameters, l0: float) -> Parameters:
        """The parameters at the start of a training that goes on from an SAE with `l0` active latents per row."""
        return parameters

    def resolved(self, sparsity: str, d_sae: int) -> Self:
        """The same with the settings filled in that depend on those of training; idempotent."""
        return self

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        """The codes of pre-activations.

        Args:
            pre: pre-activations, (B, F).
            parameters: as of `parameters`, trained since.

        Returns:
            Codes, (B, F): sparse if their entries are known (`encoding.at`), or selected by a mask
            (`encoding.where`); else `DenseCodes`.
        """
        raise TypeError(f"{type(self).__name__} does not say what its codes are")

    def training_codes(self, pre: Tensor, parameters: Parameters) -> Codes:
        """The codes of a training batch, (B, F), which may depend on the batch as a whole."""
        return self(pre, parameters)

    def estimated(self, codes: Codes, parameters: Parameters, progress: float) -> Parameters:
        """New values of parameters that a training step changes otherwise than by its gradient, empty by default;
        several processes average them.

        Args:
            codes: the `training_codes` of this process' rows, (B, F).
            parameters: as they are.
            progress: fraction of all steps that are done.
        """
        return {}

    def calibrated(self, pre: Tensor, parameters: Parameters, smoothed: Callable[[float], Tensor]) -> Parameters:
        """The values of parameters at the end of training that suit some rows best. Empty by default.

        Args:
            pre: the rows' pre-activations, (n, F).
            parameters: as trained.
            smoothed: the pre-activations of the same rows smoothed as in training, but at most by a width.
        """
        return {}

    def norm_weights(self, sparsity: str, codes: Codes, W_dec: Tensor) -> Tensor:
        """A penalty's derivative in each decoder norm `||W_dec_i||`, summed over rows, (F,).

        Args:
            sparsity: one of `sparsities`.
            codes: codes of some rows, (B, F).
            W_dec: decoder weights, (F, D).
        """
        return codes.map(abs).sums() if sparsity == "l1" else W_dec.new_zeros(len(W_dec))

    def rescaled(self, parameters: Parameters, factor: float) -> Parameters | None:
        """The parameters with which pre-activations scaled by `factor` > 0 give codes scaled by it; None if there are
        none."""
        return parameters

    def expected_l0(self, d_in: int) -> float:
        """A guess, before training, at the number of latents active per row."""
        return d_in / 8

    def default_weight(self, sparsity: str, d_in: int) -> float:
        """The penalty's weight when the user gives none, for rows of mean squared norm `d_in`."""
        return {"none": 0.0, "l1": 0.1 * math.sqrt(d_in), "l1-codes": 0.1 * math.sqrt(d_in)}[sparsity]

    def penalty_l1(self, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters) -> Tensor:
        """Scale-free L1, `mean over rows of sum_i |z_i| ||W_dec_i||`: shrinking codes against a growing decoder
        gains nothing."""
        return (codes.map(abs).sums() / len(pre)) @ W_dec.norm(dim=1)

    def penalty_l1_codes(self, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters) -> Tensor:
        """L1 of the codes alone, `mean over rows of sum_i |z_i|`, independent of the decoder's norms."""
        return codes.values.abs().sum() / len(pre)

    def penalty(self, sparsity: str, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters) -> Tensor:
        """The penalty of a batch, a mean over its rows, unweighted.

        Args:
            sparsity: one of `sparsities`, not `none`.
            pre: pre-activations, (B, F).
            codes: their codes, (B, F).
            W_dec: decoder weights, (F, D).
            parameters: the activation's own.
        """
        return getattr(self, f"penalty_{sparsity.replace('-', '_')}")(pre, codes, W_dec, parameters)


TARGET_RATE = 0.05
HALF_FIRING = 0.03  # norm of a latent's part of x_hat that counts as half a firing, over sqrt(D), the norm of a row
LEAST_RATE = 1e-6  # below this rate a latent is dead, and the penalty constant


def half_firing(W_dec: Tensor) -> float:
    """s, the norm of a latent's part of x_hat that counts as half a firing; W_dec is (F, D)."""
    return HALF_FIRING * math.sqrt(W_dec.shape[1])


@dataclass(frozen=True)
class TargetsRate(Activation):
    """An activation that offers `kl`, the penalty of the classical sparse autoencoder.

    `sum_i KL(rho || rho_i)` between coins of the target rate rho and of each latent's firing rate over the batch,

        rho_i = mean over rows of u_i / (u_i + s),    u_i = |z_i| ||W_dec_i||,    s = 0.03 sqrt(D)

    Unlike the sigmoid's, codes of an SAE are not bounded, so a firing counts by the norm u of its part of x_hat:
    shrinking codes against a growing decoder gains nothing. At the same L0, `u / (u + s)` gave a little less error than
    `1 - exp(-u / s)` on digits and tiny-gemma2, and both less than L1 (digits, relu, SGD: FVU 0.050 against 0.078 at
    L0 51); with an s ten times larger the rates hardly depend on which latents fire, and L0 stays above half of F.
    Source: Ng, "Sparse autoencoder", lecture notes of CS294A (2011).
    """

    target_rate: float | None = option(
        None, f"Firing rate that --sparsity kl aims at for every latent, a fraction of the rows; default: "
              f"{TARGET_RATE}.",
        minimum=LEAST_RATE, below=1, advanced=True)

    @property
    def rho(self) -> float:
        """The target rate, the user's or the default."""
        return self.target_rate or TARGET_RATE

    def check_sparsity(self, sparsity: str) -> None:
        """Refuse a target rate where nothing aims at it."""
        super().check_sparsity(sparsity)
        if self.target_rate is not None and sparsity != "kl":
            raise ConfigError(f"--target-rate does nothing with --sparsity {sparsity}; leave it out, or use "
                              "--sparsity kl", option="target_rate")

    def rates(self, codes: Codes, W_dec: Tensor) -> Tensor:
        """rho_i of the rows, (F,), clamped away from 0 and 1, where the divergence is infinite."""
        u = codes.values.abs() * codes.by_latent(W_dec.norm(dim=1))
        rates = codes.with_values(u / (u + half_firing(W_dec))).sums() / codes.shape[0]
        return rates.clamp(LEAST_RATE, 1 - LEAST_RATE)

    def penalty_kl(self, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters) -> Tensor:
        """`sum_i rho log(rho / rho_i) + (1 - rho) log((1 - rho) / (1 - rho_i))`, in nats."""
        rho, rates = self.rho, self.rates(codes, W_dec)
        return (rho * (rho / rates).log() + (1 - rho) * ((1 - rho) / (1 - rates)).log()).sum()

    def norm_weights(self, sparsity: str, codes: Codes, W_dec: Tensor) -> Tensor:
        """As for every activation; for `kl` a latent that fires less than the target has 0 instead of its negative
        derivative.

        With `kl` the decoder step may raise the objective: no quadratic in the norm majorises the divergence, only its
        tangent is used; and a rate below its target is left to the encoder step, since a decoder step drawn to larger
        norms has no minimum.
        """
        if sparsity != "kl":
            return super().norm_weights(sparsity, codes, W_dec)
        rho, rates, half = self.rho, self.rates(codes, W_dec), half_firing(W_dec)
        size, norms = codes.values.abs(), codes.by_latent(W_dec.norm(dim=1))
        rise = codes.with_values(size * half / (size * norms + half).square()).sums()  # of B rho_i with the norm
        pull = ((1 - rho) / (1 - rates) - rho / rates) * rise
        return pull.where((rates > rho) & (rates < 1 - LEAST_RATE), 0.0)

    def default_weight(self, sparsity: str, d_in: int) -> float:
        """A nat of divergence costs a hundredth of a row's mean squared norm."""
        return 0.01 * d_in if sparsity == "kl" else super().default_weight(sparsity, d_in)
