"""The ridge alpha of a decoder step: the one of least PRESS, the exact leave-one-out error.

    PRESS(alpha) = mean_i ||r_i||^2 / (1 - h_i)^2

with r_i the residual of row i and h_i its leverage, `psi_i' M psi_i + 1 / (N + beta + nu)`; c and a skip are held.
Generalised cross-validation, with the mean leverage, chooses a ridge far too small if rows differ much in norm, as
activations do. A row of a nested dictionary has a psi and a residual in each of L prefixes, and is left out of all:

    PRESS(alpha) = mean_i ||(I - H_i)^-1 r_i||^2 / L      H_i = (psi_i M psi_i' + 1 1' / (N + beta + nu)) / L

N rows, n sampled; F = d_sae, E targets proper, L prefixes, 1 without. All float64.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ...base.devices import moved
from .decoder import best_multiple
from .system import PROBES, Factorisation, Sample, System, Terms, random_signs

LEAST, MOST = 1e-7, 1e3  # alpha over A's mean diagonal; beyond, W is lost in rounding, or is T
FACTOR = 3  # of the walk's steps
STRIDE = 2  # steps at a time at first; on rows of real models the first alpha is 0.07 to 0.15 of A's mean diagonal


def choose_alpha(
    system: System, terms: Terms, z: Tensor, y: Tensor, last: float | None
) -> Factorisation:
    """The factorisation at the alpha of least PRESS over rows z, (n, F), and y, (n, E), if n = N in the system's order.

    From `last`, else from a ninth of A's mean diagonal with longer strides at first, alpha walks by factors of three to
    where neither neighbour has less, and ends at the minimum of the parabola through these three.

    Cost: a factorisation, and 2 F^2 operations for each of some 320 columns, per alpha tried, three or more; and one
    factorisation at the end.
    """
    scale = max(system.scale(terms.shrink(system.rows)), sys.float_info.min)
    press = press_of(system, terms, z, y)
    start = float(np.clip(last or scale / FACTOR**STRIDE, LEAST * scale, MOST * scale))

    def factorised(steps: float) -> Factorisation:
        alpha = float(np.clip(start * float(FACTOR) ** steps, LEAST * scale, MOST * scale))
        return system.factorise(replace(terms, alpha=alpha))

    @cache
    def error(steps: int) -> float:
        return press(factorised(steps))

    best, stride = 0, 1 if last else STRIDE
    while True:
        neighbour = min(best - stride, best + stride, key=error)
        if error(neighbour) < error(best):
            best = neighbour
        elif stride > 1:
            stride = 1
        else:
            break
    fall, rise = error(best - 1) - error(best), error(best + 1) - error(best)
    vertex = (fall - rise) / (2 * (fall + rise)) if fall + rise > 0 else 0.0
    return factorised(best + vertex)


def press_of(
    system: System, terms: Terms, z: Tensor, y: Tensor, size: int = 256
) -> Callable[[Factorisation], float]:
    """PRESS of sampled rows, up to a factor, at a factorisation's alpha: `psi W = u' (right + c alpha T0)`."""
    N, E, T0, W_t = system.rows, terms.d_out, terms.direction, terms.W_t.double()
    index, weight = sample_rows(y[:, :E], system.y_bar[:E], size)
    centre = terms.centre(N, system.y_bar)  # with a skip (E + D,)
    sample = Sample(
        psi=system.centred(z[index].double(), terms.shrink(N)),
        y=y[index, :E].double() - centre[:E],
        C=system.cross(centre)[:, :E],
        centre=centre,
        bias=1 / (N + terms.beta + terms.nu),
        numbers=index if len(z) == N else None,
    )
    rows, prefixes, _ = sample.psi.shape
    right = sample.C + terms.mu * W_t if terms.mu else sample.C  # (F, E)
    if T0 is not None:
        T0 = T0.double()
        # Random sums of the columns determine c.
        signs = (torch.eye(E) if E <= PROBES else random_signs(E)).to(right)
        mixed_T0, mixed_right = T0 @ signs, right @ signs  # (F, p)

    def press(M: Factorisation) -> float:
        u, slack, residual = M.fits(sample)
        if terms.mu:
            residual = residual - terms.mu * (u.T @ W_t)
        if T0 is not None:
            along = M.solve(mixed_T0)
            fitted = (along * mixed_right).sum().item()  # since M is symmetric
            c = best_multiple(mixed_T0, fitted, along, M.alpha)
            residual = residual - c * M.alpha * (u.T @ T0)
        # An eigenvalue near 0 belongs to a row that alone determines its fit.
        values, vectors = torch.linalg.eigh(slack)
        inverse = (vectors / values.clamp(min=1e-12)[:, None]) @ vectors.mT
        errors = inverse @ residual.view(rows, prefixes, E)
        return (weight @ errors.square().sum((1, 2))).item()

    return press


def sample_rows(y: Tensor, centre: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """A systematic sample of some `size` rows of targets, (n, E), and weights that make its sums unbiased, (m,) each.

    Row i is in it with probability `min(1, size / 2 (1 / n + ||y_i - centre||^2 / sum))`: large norms dominate PRESS.
    """
    if len(y) <= size:
        return torch.arange(len(y), device=y.device), y.new_ones(len(y), dtype=torch.float64)
    norms = (y.double() - centre).square().sum(1)
    by_norm = norms / norms.sum().clamp(min=torch.finfo(torch.float64).tiny)
    chance = (size / 2 * (1 / len(y) + by_norm)).clamp(max=1)
    # On the CPU a running sum has one order, so that the sample is the same on every call.
    ticks = (chance.cpu().cumsum(0) - 0.5).ceil()
    index = moved(torch.diff(ticks, prepend=ticks.new_zeros(1)).nonzero().squeeze(1), y.device)
    return index, 1 / chance[index]
