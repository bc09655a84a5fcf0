"""A crosscoder's latents by hook point.

With rows in the metric of training, divided by their spread at every hook point, so that these compare, and W_ip latent
i's decoder at hook point p (FVU is of raw rows),

    share_ip = ||W_ip|| / sum_q ||W_iq||

is 1 for a latent of p alone, 1/P for one that all P hook points have alike. But L1 drives decoders to zero also where a
latent is needed less. Latent scaling asks the rows: the multiple of the latent's part, along its largest decoder, that
leaves the least squared error at p,

    beta_ip = argmin_b sum ||e_p + z_i W_ip - b z_i W_ip*||^2,    p* = argmax_q ||W_iq||

with e_p the error of p's reconstruction: 0 for a latent that only p* has, 1 for one with the same direction at p. The
same for the reconstruction, r_p = sum_j z_j W_jp, in place of e_p + z_i W_ip, says what other latents carry there. The
ratios to those at p* are nu^epsilon and nu^r of Minder et al.: a latent exclusive to p* by decoder norm may show

    complete shrinkage    nu^epsilon above `SHRUNK`: the error elsewhere holds what its decoder there lacks
    latent decoupling     nu^r above `DECOUPLED`: elsewhere other latents, firing with it, carry its direction

Source: Lindsey et al., "Sparse Crosscoders for Cross-Layer Features and Model Diffing" (2024), for norms; Minder et
al., "Robustly Identifying Concepts Introduced During Chat Fine-Tuning Using Crosscoders" (2025), for latent scaling.

Shapes: B rows, D = d_in, F = d_sae, P hook points.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.console import Listener
from ..sae.dictionary import SAE
from ..store.values import Spread
from .measured import Measured

EXCLUSIVE = 0.9  # a latent with a larger share belongs to that hook point alone
SHARED = 0.6  # a latent whose every share is larger than this over P is shared by all
SHRUNK, DECOUPLED = 0.2, 0.5  # Minder et al.'s thresholds


class HookPointSums:
    def __init__(self, sae: SAE) -> None:
        zeros = partial(torch.zeros, dtype=torch.float64, device=sae.W_enc.device)
        self._sae = sae
        self._error = zeros(sae.d_out)
        self._z_square = zeros(sae.d_sae)
        self._z_error = zeros(sae.d_sae, sae.d_out)
        self._z_predicted = zeros(sae.d_sae, sae.d_out)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        codes = self._sae.codes(x)
        predicted = self._sae.predicted(x, codes)[:, -1]
        error = x - predicted
        self._error += error.double().square().sum(0)
        self._z_square += codes.map(torch.square).sums()
        self._z_error += codes.transposed_times(error)
        self._z_predicted += codes.transposed_times(predicted - self._sae.b_dec)

    def result(self, spread: Spread) -> "HookPointMeasures":
        places, units = self._sae.hook_columns, self._sae.normalisation.target_scale.double()
        scatter = torch.from_numpy(spread.scatter).to(units.device)
        fvu = torch.stack([self._error[place].sum() / scatter[place].sum() for place in places])
        W_dec, scatter = self._sae.W_dec / units, scatter / units.square()
        z_error, z_predicted = self._z_error / units, self._z_predicted / units
        deviations = [(scatter[place].mean() / spread.rows).sqrt() for place in places]
        W = [W_dec[:, place] / scale for place, scale in zip(places, deviations, strict=True)]
        norms = torch.stack([W_p.norm(dim=1) for W_p in W], 1)
        share = norms / norms.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        largest = norms.argmax(1)
        beta = torch.full_like(norms, torch.nan)
        beta_predicted = beta.clone()
        for best, direction in enumerate(W):
            latents = (largest == best) & (self._z_square > 0)
            d = direction[latents]
            scale = self._z_square[latents] * d.square().sum(1)
            for p, (place, W_p, deviation) in enumerate(zip(places, W, deviations, strict=True)):
                if W_p.shape[1] != d.shape[1]:
                    continue
                of_error = (d * z_error[latents, place]).sum(1) / (deviation * scale)
                of_decoder = (d * W_p[latents]).sum(1) / d.square().sum(1)
                beta[latents, p] = of_decoder + of_error
                of_predicted = (d * z_predicted[latents, place]).sum(1)
                beta_predicted[latents, p] = of_predicted / (deviation * scale)
        return HookPointMeasures(fvu.cpu(), share.cpu(), beta.cpu(), beta_predicted.cpu())


class HookPointMeasures(NamedTuple):
    """`beta` is NaN for a latent that never fired, and between hook points of unlike widths."""

    fvu: Tensor  # (P,)
    share: Tensor  # (F, P)
    beta: Tensor  # (F, P)
    beta_predicted: Tensor  # (F, P), for reconstructions

    def nu(self, beta: Tensor) -> Tensor:
        """The largest ratio of beta elsewhere to beta where the latent is largest, (F,)."""
        best = self.share.argmax(1, keepdim=True)
        return (beta / beta.gather(1, best)).scatter(1, best, -torch.inf).amax(1)


def latent_class(
    names: Sequence[str], shares: Sequence[float], nu_error: float, nu_reconstruction: float
) -> str:
    """Which hook points have a latent, in words."""
    largest = max(shares)
    name = names[shares.index(largest)]
    if largest <= EXCLUSIVE:
        if nu_error < SHRUNK and nu_reconstruction < DECOUPLED:
            return f"only {name} by latent scaling"
        return "shared" if min(shares) > SHARED / len(shares) else "in between"
    if math.isnan(nu_error):
        return f"only {name} by decoder norm"
    if nu_error > SHRUNK:
        return f"looks only {name}: complete shrinkage"
    if nu_reconstruction > DECOUPLED:
        return f"looks only {name}: latent decoupling"
    return f"only {name}"


def hook_points_document(measured: Measured, listener: Listener) -> dict[str, Any]:
    """What `saecli.sparsity` adds for a crosscoder, in one more pass over the rows; nothing for others.

    Returns:
        `places`: each with its `name`, of its model or store, `width`, `fvu`, and `exclusive`, the latents with a share
        above `EXCLUSIVE`; `shared`, the latents whose every share is above `SHARED` / P; per latent `share` and
        `scaling` (beta), P numbers each, `nu_error`, `nu_reconstruction` and `class`. None where unknown.
    """
    widths = measured.sae.widths
    if not widths:
        return {}
    sums = HookPointSums(measured.sae)
    for batch in measured.inputs(listener):
        sums.update(batch)
    measures = sums.result(measured.rows.spread())
    share = measures.share
    shares: list[list[float]] = share.tolist()
    nu_error = measures.nu(measures.beta).tolist()
    nu_reconstruction = measures.nu(measures.beta_predicted).tolist()
    names, fvus = _names(measured), measures.fvu.tolist()
    exclusive = (share > EXCLUSIVE).sum(0).tolist()
    latents = zip(shares, nu_error, nu_reconstruction, strict=True)
    return {
        "places": [
            {"name": name, "width": width, "fvu": fvu, "exclusive": count}
            for name, width, fvu, count in zip(names, widths, fvus, exclusive, strict=True)
        ],
        "shared": int((share.amin(1) > SHARED / len(widths)).sum()),
        "share": shares,
        "scaling": [_without_nan(betas) for betas in measures.beta.tolist()],
        "nu_error": _without_nan(nu_error),
        "nu_reconstruction": _without_nan(nu_reconstruction),
        "class": [latent_class(names, *latent) for latent in latents],
    }


def _names(measured: Measured) -> list[str]:
    inputs = measured.rows.inputs
    names = [Path(str(rows.store.meta.origin.model)).name for rows in inputs]
    if len(set(names)) == len(measured.sae.widths):
        return names
    if inputs:
        return [rows.name for rows in inputs]
    return [f"place {number}" for number in range(len(measured.sae.widths))]


def _without_nan(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]
