"""Bases of activations, and penalties with settings of their own. They import torch inside functions: help pages list
options without it. Shapes: B rows, D = d_in, F = d_sae. A latent is active on a row if its code is not zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self, TypeAlias

from ...base.errors import ConfigError, flag_of
from ...base.options import Config, option

if TYPE_CHECKING:
    from torch import Tensor

    from ..codes import Codes

Parameters: TypeAlias = dict[str, "Tensor"]
PENALTY_OPTIONS = {
    "target_rate": "kl",
    "last_p": "lp",
    "target_l0": "target-l0",
}  # with the one penalty each is of


@dataclass(frozen=True)
class Activation(Config):
    """A configuration that maps pre-activations to codes, with its parameters, gradient and penalties.

    sparsities: penalties offered, the default first; each but `none` is a method `penalty_NAME(pre, gates, W_dec,
        parameters)`, a mean over rows.
    opposites: whether `phi(v) - phi(-v) = v`, so that two latents of opposite directions are linear together.
    one_scale: whether codes compare directions of latents, so that a scale for each dimension would change them.
    of_codes: settings that a trained SAE's codes depend on.
    """

    panel: ClassVar[str] = "Activation"
    name: ClassVar[str]
    sparsities: ClassVar[tuple[str, ...]] = ("none", "l1", "l1-codes")
    opposites: ClassVar[bool] = False
    one_scale: ClassVar[bool] = False
    of_codes: ClassVar[tuple[str, ...]] = ()

    def check(self, d_sae: int) -> None:
        """Raise a ConfigError for settings that do not fit the number of latents."""

    def check_sparsity(self, sparsity: str) -> None:
        """Raise a ConfigError for a penalty that is not offered, or settings without effect on it."""
        if sparsity not in self.sparsities:
            raise ConfigError(
                f"--sparsity {sparsity} cannot be used with --act {self.name}; use one of "
                f"{', '.join(self.sparsities)}"
            )
        for name, penalty in PENALTY_OPTIONS.items():
            if getattr(self, name, None) is not None and sparsity != penalty:
                raise ConfigError(
                    f"{flag_of(name)} does nothing with --sparsity {sparsity}; leave it out, or use "
                    f"--sparsity {penalty}"
                )

    @property
    def estimates(self) -> tuple[str, ...]:
        """Names of parameters without gradient, which stay fixed or follow `estimated`."""
        return tuple(self.training_parameters(1))

    @property
    def default_sparsity(self) -> str:
        return self.sparsities[0]

    def parameters(self, d_sae: int) -> Parameters:
        """The parameters at the start of training."""
        return {}

    def training_parameters(self, d_sae: int) -> Parameters:
        """Further `estimates` that only training needs."""
        return {}

    def fitted(self, pre: Tensor, parameters: Parameters) -> Parameters:
        """The initial parameters, given some rows' pre-activations, (n, F)."""
        return parameters

    def continuing(self, parameters: Parameters, l0: float) -> Parameters:
        """The initial parameters of a training that starts from an SAE with this L0."""
        return parameters

    def resolved(self, sparsity: str, d_sae: int) -> Self:
        """The same with defaults that depend on other options; idempotent."""
        return self

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

    def estimated(self, codes: Codes, parameters: Parameters, progress: float) -> Parameters:
        """New values of parameters, such as `estimates`, after a step, at this fraction of all steps; processes average
        them."""
        return {}

    def calibrated(
        self, pre: Tensor, parameters: Parameters, smoothed: Callable[[float], Tensor]
    ) -> Parameters:
        """Parameters refitted at the end of training to some rows' pre-activations, (n, F); `smoothed`: those of rows
        smoothed as in training, by at most a given width."""
        return {}

    def norm_weights(
        self, sparsity: str, codes: Codes, W_dec: Tensor, parameters: Parameters
    ) -> Tensor:
        """A penalty's derivative in each decoder norm `||W_dec_i||`, summed over rows, (F,)."""
        return codes.map(abs).sums() if sparsity == "l1" else W_dec.new_zeros(len(W_dec))

    def rescaled(self, parameters: Parameters, factor: float) -> Parameters:
        """The parameters that turn pre-activations times `factor` > 0 into codes times `factor`."""
        return parameters

    def expected_l0(self, d_in: int) -> float:
        """A guess at L0 before training."""
        return d_in / 8

    def default_weight(self, sparsity: str, d_in: int) -> float:
        """For rows of mean squared norm `d_in`."""
        return {"none": 0.0, "l1": 0.1 * math.sqrt(d_in), "l1-codes": 0.1 * math.sqrt(d_in)}[
            sparsity
        ]

    def penalty_l1(
        self, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters
    ) -> Tensor:
        """Scale-free L1, `mean over rows of sum_i |z_i| ||W_dec_i||`."""
        return (codes.map(abs).sums() / len(pre)) @ W_dec.norm(dim=1)

    def penalty_l1_codes(
        self, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters
    ) -> Tensor:
        """L1 of the codes alone, `mean over rows of sum_i |z_i|`."""
        return codes.values.abs().sum() / len(pre)

    def penalty(
        self, sparsity: str, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters
    ) -> Tensor:
        """A penalty of a batch, unweighted; not for `none`."""
        return getattr(self, f"penalty_{sparsity.replace('-', '_')}")(pre, codes, W_dec, parameters)


TARGET_RATE = 0.05
LEAST_RATE = 1e-6  # below this rate a latent is dead, and the penalty constant


@dataclass(frozen=True)
class TargetsRate(Activation):
    """An activation that offers `kl`, the classical penalty `sum_i KL(rho || rho_i)` between coins of the target rate
    rho and of each latent's firing rate over the batch,

        rho_i = mean over rows of u_i / (u_i + s),    u_i = |z_i| ||W_dec_i||,    s = 0.03 sqrt(D)

    Codes are unbounded, so a firing counts by the norm u of its part of x_hat. At equal L0, `u / (u + s)` gave a little
    less error than `1 - exp(-u / s)`, and both less than L1 (digits, relu, SGD: FVU 0.050 against 0.078 at L0 51); with
    an s ten times larger, L0 stays above half of F. Source: Ng, "Sparse autoencoder", lecture notes of CS294A (2011).
    """

    target_rate: float | None = option(
        None,
        f"Firing rate that --sparsity kl aims at for every latent, a fraction of the rows; default: "
        f"{TARGET_RATE}.",
        minimum=LEAST_RATE,
        below=1,
        advanced=True,
    )

    @property
    def rho(self) -> float:
        return self.target_rate or TARGET_RATE

    def rates(self, codes: Codes, W_dec: Tensor) -> Tensor:
        """rho_i, (F,), clamped away from 0 and 1."""
        u = codes.values.abs() * codes.by_latent(W_dec.norm(dim=1))
        rates = codes.with_values(u / (u + _half_firing(W_dec))).sums() / codes.shape[0]
        return rates.clamp(LEAST_RATE, 1 - LEAST_RATE)

    def penalty_kl(
        self, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters
    ) -> Tensor:
        """`sum_i rho log(rho / rho_i) + (1 - rho) log((1 - rho) / (1 - rho_i))`, in nats."""
        rho, rates = self.rho, self.rates(codes, W_dec)
        return (rho * (rho / rates).log() + (1 - rho) * ((1 - rho) / (1 - rates)).log()).sum()

    def norm_weights(
        self, sparsity: str, codes: Codes, W_dec: Tensor, parameters: Parameters
    ) -> Tensor:
        """As in `Activation`; for `kl` 0 below the target, where a decoder step drawn to larger norms has no minimum. A
        decoder step may raise the objective: no quadratic in the norm majorises the divergence."""
        if sparsity != "kl":
            return super().norm_weights(sparsity, codes, W_dec, parameters)
        rho, rates, half = self.rho, self.rates(codes, W_dec), _half_firing(W_dec)
        size, norms = codes.values.abs(), codes.by_latent(W_dec.norm(dim=1))
        rise = codes.with_values(
            size * half / (size * norms + half).square()
        ).sums()  # of B rho_i with the norm
        pull = ((1 - rho) / (1 - rates) - rho / rates) * rise
        return pull.where((rates > rho) & (rates < 1 - LEAST_RATE), 0.0)

    def default_weight(self, sparsity: str, d_in: int) -> float:
        """A nat costs a hundredth of a row's mean squared norm."""
        return 0.01 * d_in if sparsity == "kl" else super().default_weight(sparsity, d_in)


def _half_firing(W_dec: Tensor) -> float:
    """s of `TargetsRate`: the norm of a latent's part of x_hat that is half a firing, for rows of norm sqrt(D)."""
    return 0.03 * math.sqrt(W_dec.shape[1])


LAST_P, FALLS_FROM = (
    0.2,
    0.2,
)  # the default last p; the fraction of all steps from which p falls to it, to the end
EDGE = 0.01  # size at which the penalty's slope stops rising, over the mean size of active codes


@dataclass(frozen=True)
class Anneals(Activation):
    """An activation that offers `lp`, whose p falls from 1:

        s sum_i (u_i + e)^p - e^p,    u_i = |z_i| ||W_dec_i||

    u, the size of a latent's part of x_hat, is free of scale. s, without gradient, gives this process' rows the penalty
    that they have at p = 1, as the source rescales the weight whenever p falls; e, a small fraction of the mean u,
    bounds the slope at 0. Source: Karvonen et al., "Measuring Progress in Dictionary Learning for Language Model
    Interpretability with Board Game Models" (2024).
    """

    last_p: float | None = option(
        None,
        f"Power p that --sparsity lp falls to; default: {LAST_P}.",
        above=0,
        maximum=1,
        advanced=True,
    )

    def resolved(self, sparsity: str, d_sae: int) -> Self:
        settled = super().resolved(sparsity, d_sae)
        return (
            replace(settled, last_p=LAST_P) if sparsity == "lp" and self.last_p is None else settled
        )

    def training_parameters(self, d_sae: int) -> Parameters:
        import torch

        return super().training_parameters(d_sae) | (
            {} if self.last_p is None else {"p": torch.ones(())}
        )

    def estimated(self, codes: Codes, parameters: Parameters, progress: float) -> Parameters:
        found = super().estimated(codes, parameters, progress)
        if self.last_p is None:
            return found
        fallen = max(progress - FALLS_FROM, 0.0) / (1 - FALLS_FROM)
        return found | {"p": parameters["p"].new_full((), 1 - fallen * (1 - self.last_p))}

    def _lp(
        self, gates: Codes, W_dec: Tensor, parameters: Parameters
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u, e, p and s."""
        u = gates.values.abs() * gates.by_latent(W_dec.norm(dim=1))
        e, p = EDGE * u.detach().sum() / gates.count().clamp(min=1), parameters["p"]
        powers = ((u.detach() + e) ** p - e**p).sum()
        return u, e, p, (u.detach().sum() / powers).where(powers > 0, 0.0)

    def penalty_lp(
        self, pre: Tensor, gates: Codes, W_dec: Tensor, parameters: Parameters
    ) -> Tensor:
        """The mean over rows; see the class."""
        u, e, p, s = self._lp(gates, W_dec, parameters)
        return s * ((u + e) ** p - e**p).sum() / len(pre)

    def norm_weights(
        self, sparsity: str, codes: Codes, W_dec: Tensor, parameters: Parameters
    ) -> Tensor:
        if sparsity != "lp":
            return super().norm_weights(sparsity, codes, W_dec, parameters)
        u, e, p, s = self._lp(codes, W_dec, parameters)
        return codes.with_values(s * p * (u + e) ** (p - 1) * codes.values.abs()).sums()

    def default_weight(self, sparsity: str, d_in: int) -> float:
        return (
            0.04 * math.sqrt(d_in) if sparsity == "lp" else super().default_weight(sparsity, d_in)
        )


@dataclass(frozen=True)
class KeepsK(Activation):
    """Keeps `k` pre-activations per row, exactly or on average."""

    of_codes: ClassVar[tuple[str, ...]] = ("k",)

    k: int = option(
        32,
        "Active latents per row; with batchtopk on average.",
        minimum=1,
    )

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
        import torch

        return torch.zeros(d_sae)


TARGET_L0, MOST_TARGETED = (
    32.0,
    1 / 8,
)  # the default target, and the largest fraction of the latents that it may be

# Latents find directions while many are active, and then become sparse. FVU in a world of known features at L0 10,
# after 2,000 steps of SGD: 0.165 with the fall over 0.2 of the steps, 0.160 over 0.5 (batchtopk: 0.174).
DENSE, FALL = (
    4.0,
    0.5,
)  # the first aim over the target; the fraction of all steps over which it falls to the target
# Smoothing at which training rows have about as many active latents as rows held out. Wider smoothing activates more:
# where it is 0.31 in training (6,000 rows, 2,048 latents), held-out rows had 0.84 of the target.
HELD_OUT_WIDTH = 0.2
THRESHOLD_RATE = 0.05  # relative change of all thresholds per step, over the relative excess of L0


@dataclass(frozen=True)
class TargetsL0(Thresholded):
    """A learned threshold per latent, (F,), and `--sparsity target-l0`: an aim for L0 that falls from several times the
    target to it, and at the end the factor on all thresholds that keeps L0 on rows held out."""

    multiplier_rate: ClassVar[float]  # change of m per step, over the relative excess of L0
    loose: ClassVar[bool] = False  # whether the controller may miss the target

    target_l0: float | None = option(
        None,
        "Active latents per row, on average, that --sparsity target-l0 trains to; "
        f"default: {TARGET_L0:g}, at most an eighth of the latents.",
        above=0,
    )

    def check(self, d_sae: int) -> None:
        if self.target_l0 is not None and self.target_l0 > d_sae:
            raise ConfigError(
                f"--target-l0 must be at most --d-sae, {d_sae}, got {self.target_l0:g}; lower "
                "--target-l0 or raise --d-sae"
            )

    def resolved(self, sparsity: str, d_sae: int) -> Self:
        settled = super().resolved(sparsity, d_sae)
        if sparsity != "target-l0" or self.target_l0 is not None:
            return settled
        return replace(settled, target_l0=min(TARGET_L0, MOST_TARGETED * d_sae))

    def expected_l0(self, d_in: int) -> float:
        return super().expected_l0(d_in) if self.target_l0 is None else self.target_l0

    def training_parameters(self, d_sae: int) -> Parameters:
        """With a target the controller's state: the current `aim`, and the `multiplier` m."""
        import torch

        given = super().training_parameters(d_sae)
        if self.target_l0 is None:
            return given
        return given | {
            "aim": torch.tensor(_aim(self.target_l0, 0.0, d_sae)),
            "multiplier": torch.zeros(()),
        }

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
        return parameters | {
            "threshold": parameters["threshold"].new_full((pre.shape[1],), lowest.item())
        }

    def thresholds(self, parameters: Parameters, d_sae: int) -> Tensor:
        return parameters["threshold"].clamp(min=0)

    def estimated(self, codes: Codes, parameters: Parameters, progress: float) -> Parameters:
        found, (rows, d_sae) = super().estimated(codes, parameters, progress), codes.shape
        if self.target_l0 is None:
            return found
        aim = parameters["aim"]
        excess = (codes.count() / (rows * aim) - 1).clamp(max=1.0) if rows else aim.new_zeros(())
        return found | {
            "threshold": parameters["threshold"] * (THRESHOLD_RATE * excess).exp(),
            "multiplier": parameters["multiplier"] + self.multiplier_rate * excess,
            "aim": aim.clamp(max=_aim(self.target_l0, progress, d_sae)),
        }  # which may have begun lower

    def calibrated(
        self, pre: Tensor, parameters: Parameters, smoothed: Callable[[float], Tensor]
    ) -> Parameters:
        """With a target, the thresholds times the factor that gives rows smoothed by `HELD_OUT_WIDTH` the L0 that the
        controller held on rows smoothed as in training, or if it is `loose` the target."""
        import torch

        if self.target_l0 is None:
            return {}
        thresholds = self.thresholds(parameters, pre.shape[-1])
        kept = (
            round(self.target_l0 * len(pre))
            if self.loose
            else int((smoothed(math.inf) > thresholds).sum())
        )
        ratios = (
            smoothed(HELD_OUT_WIDTH) / thresholds.clamp(min=torch.finfo(pre.dtype).tiny)
        ).flatten()
        if not 0 < kept < len(ratios):
            return {}
        return {"threshold": thresholds * ratios.topk(kept + 1).values[-2:].mean().clamp(min=0)}

    def rescaled(self, parameters: Parameters, factor: float) -> Parameters:
        return parameters | {"threshold": parameters["threshold"] * factor}


def _aim(target: float, progress: float, d_sae: int) -> float:
    """The L0 to have at a fraction of all steps; at first `DENSE` targets, at most a quarter of the latents."""
    first = max(target, min(DENSE * target, d_sae / 4))
    return target + (first - target) * max(0.0, 1 - progress / FALL)
