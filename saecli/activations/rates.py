"""The penalty kl, for activations whose latents fire at rates of their own. Shapes: B rows, D = d_in, F = d_sae."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..codes import Codes
from ..config import option
from ..errors import ConfigError
from .base import Activation, Parameters

TARGET_RATE = 0.05
HALF_FIRING = 0.03  # of sqrt(D), the norm of a row: the size of a latent's share in x_hat that counts as half a firing
LEAST_RATE = 1e-6  # below it a latent is dead, and the penalty a constant


def half_firing(W_dec: Tensor) -> float:
    """s, the size of a latent's share in x_hat that counts as half a firing; W_dec is (F, D)."""
    return HALF_FIRING * math.sqrt(W_dec.shape[1])


@dataclass(frozen=True)
class TargetsRate(Activation):
    """An activation that offers `kl`, the penalty of the classical sparse autoencoder.

    `sum_i KL(rho || rho_i)` between coins of the target rate rho and of each latent's firing rate over the batch,

        rho_i = mean over rows of u_i / (u_i + s),    u_i = |z_i| ||W_dec_i||,    s = 0.03 sqrt(D)

    Codes of an SAE are not bounded as the sigmoid's were, so a firing counts by the size u of what it adds to x_hat:
    shrinking codes against a growing decoder gains nothing. At the same L0, `u / (u + s)` gave a little less error than
    `1 - exp(-u / s)` on digits and on tiny-gemma2, and either less than L1 (digits, relu, SGD: FVU 0.050 against 0.078
    at L0 51); with an s ten times as large the rates say little about which latents fire, and L0 stays above half.
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
            raise ConfigError("target_rate", "does nothing with {sparsity} {given}",
                              "leave it out, or use {sparsity} kl", given=sparsity)

    def rates(self, codes: Codes, W_dec: Tensor) -> Tensor:
        """rho_i of the rows, (F,), kept off 0 and 1, where the divergence is infinite."""
        u = codes.values.abs() * codes.by_latent(W_dec.norm(dim=1))
        rates = codes.with_values(u / (u + half_firing(W_dec))).sums() / codes.shape[0]
        return rates.clamp(LEAST_RATE, 1 - LEAST_RATE)

    def penalty_kl(self, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters) -> Tensor:
        """`sum_i rho log(rho / rho_i) + (1 - rho) log((1 - rho) / (1 - rho_i))`, in nats."""
        rho, rates = self.rho, self.rates(codes, W_dec)
        return (rho * (rho / rates).log() + (1 - rho) * ((1 - rho) / (1 - rates)).log()).sum()

    def norm_weights(self, sparsity: str, codes: Codes, W_dec: Tensor) -> Tensor:
        """As for every activation; for `kl` a latent that fires less than the target has 0 in place of its negative
        derivative.

        Not with `kl`: that the decoder step never raises the objective. The divergence has no quadratic in the norm
        that touches it from above everywhere, only the tangent here; and a rate below its target is left to the
        encoder step, since a decoder step drawn to larger norms has no minimum.
        """
        if sparsity != "kl":
            return super().norm_weights(sparsity, codes, W_dec)
        rho, rates, half = self.rho, self.rates(codes, W_dec), half_firing(W_dec)
        size, norms = codes.values.abs(), codes.by_latent(W_dec.norm(dim=1))
        rise = codes.with_values(size * half / (size * norms + half).square()).sums()  # of B rho_i with the norm
        pull = ((1 - rho) / (1 - rates) - rho / rates) * rise
        return torch.where((rates > rho) & (rates < 1 - LEAST_RATE), pull, 0.0)

    def default_weight(self, sparsity: str, d_in: int) -> float:
        """A nat of divergence costs a hundredth of a row's mean squared norm."""
        return 0.01 * d_in if sparsity == "kl" else super().default_weight(sparsity, d_in)
