"""The alpha of least PRESS, the exact leave-one-out error, by a walk over its logarithm.

    PRESS(alpha) = mean_i ||r_i||^2 / (1 - h_i)^2

with r_i the residual of row i and h_i its leverage, `psi_i' M psi_i + 1 / (N + beta + nu)`: the squared error of row i
under the decoder fitted to all other rows, with c fixed. Generalised cross-validation, with the mean leverage, chooses
a ridge far too small if rows differ much in norm, as activations do.

A row of a nested dictionary has a psi, a residual and an error in each of L prefixes, and is left out of all at once:

    PRESS(alpha) = mean_i ||(I - H_i)^-1 r_i||^2 / L      H_i = (psi_i M psi_i' + 1 1' / (N + beta + nu)) / L

An affine skip (see `solve.py`) is held while alpha is chosen: rows are left out of the decoder alone.

N rows, n sampled; F = d_sae, E targets, L prefixes, 1 without.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...base.devices import moved
from .solve import best_multiple
from .system import Factorisation, System, Terms

LEAST, MOST = 1e-7, 1e3  # range of alpha over A's mean diagonal; W is lost in rounding, or is T
STEP = 3.0  # factor between neighbouring alphas
FIRST_STRIDE = 3  # steps at once, where there is no start
PRESS_ROWS = 256
MIXED = 64  # random sums of columns that determine c
UNIFORM = 0.5  # fraction of the sampling probability that is uniform; the rest is by squared norm


def choose_alpha(
    system: System, terms: Terms, z: Tensor, y: Tensor, last: float | None
) -> Factorisation:
    """The factorisation at the alpha of least PRESS over rows z, (n, F), and y, (n, E), if n = N in the system's order.

    From `last`, or without it from A's mean diagonal, alpha walks by factors of three to where neither neighbour has
    less; it ends at the minimum of the parabola through these three.

    Cost per alpha tried, three if `last` is the best: a factorisation, and 2 F^2 operations for each of some 400
    columns. One more factorisation at the end: to keep the best one would take twice the memory.
    """
    scale = max(system.scale(terms.shrink(system.rows)), np.finfo(float).tiny)
    press = Press(system, terms, z, y)
    start = float(np.clip(last or scale, LEAST * scale, MOST * scale))
    errors: dict[int, float] = {}

    def factorised(steps: float) -> Factorisation:
        alpha = float(np.clip(start * STEP**steps, LEAST * scale, MOST * scale))
        return system.factorise(replace(terms, alpha=alpha))

    def error(steps: int) -> float:
        if steps not in errors:
            errors[steps] = press(factorised(steps))
        return errors[steps]

    best, stride = 0, 1 if last else FIRST_STRIDE
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


class Press:
    """PRESS of sampled rows, up to a factor, at the alpha of a factorisation of the system."""

    def __init__(
        self, system: System, terms: Terms, z: Tensor, y: Tensor, size: int = PRESS_ROWS
    ) -> None:
        rows, targets = system.rows, slice(0, terms.d_out)
        index, weight = sample_rows(y[:, targets], system.y_bar[targets], size)
        self._system, self._terms = system, terms
        self._index = index if len(z) == rows else None  # numbers in the system, if known
        self._weight = weight  # of each row's error, (n,)
        self._z, self._y = z[index].double(), y[index, targets].double()
        self._centre = terms.centre(rows, system.y_bar)  # with a skip (E + D,)
        cross = system.cross(self._centre)[:, targets]
        self._right = cross.add_(terms.W_t.double(), alpha=terms.mu)  # (F, E)
        if terms.direction is not None:
            signs = _mixing(terms.d_out).to(self._right)
            self._mixed_T0 = terms.direction.double() @ signs  # (F, p)
            self._mixed_right = self._right @ signs

    def __call__(self, factorisation: Factorisation) -> float:
        """W itself is not solved for: with `u = M psi'`, `psi W = u' (right + c alpha T0)`."""
        system, terms, E = self._system, self._terms, self._terms.d_out
        psi = system.centred(self._z, terms.shrink(system.rows))
        rows, prefixes, F = psi.shape
        own = None if self._index is None else factorisation.own(self._index, self._centre)
        if own is None:
            u = factorisation.solve(psi.reshape(-1, F).T)  # (F, n L)
            bias = 1 / (system.rows + terms.beta + terms.nu)
            leverage = (psi @ u.T.reshape(psi.shape).mT + bias) / prefixes
            slack = torch.eye(prefixes).to(leverage) - leverage  # I - H_i, (n, L, L)
            about = (self._y - self._centre[:E]).repeat_interleave(prefixes, 0)
            residual = about - u.T @ self._right
        else:
            u, slack = own.u, own.slack[:, None, None]
            residual = own.residual[:, :E] - terms.mu * (u.T @ terms.W_t.double())
        if terms.direction is not None:
            both = factorisation.solve(torch.cat([self._mixed_right, self._mixed_T0], 1))
            untargeted, along = both.chunk(2, 1)
            c = best_multiple(self._mixed_T0, untargeted, along, factorisation.alpha)
            residual -= c * factorisation.alpha * (u.T @ terms.direction.double())
        errors = _inverse(slack) @ residual.view(rows, prefixes, E)
        return (self._weight @ errors.square().sum((1, 2))).item()


def _inverse(slack: Tensor) -> Tensor:
    """Of I - H, (n, L, L); an eigenvalue near 0 belongs to a row that alone determines its fit."""
    values, vectors = torch.linalg.eigh(slack)
    return (vectors / values.clamp(min=1e-12)[:, None]) @ vectors.mT


def _mixing(columns: int) -> Tensor:
    if columns <= MIXED:
        return torch.eye(columns)
    return 2.0 * torch.randint(2, (columns, MIXED), generator=torch.Generator().manual_seed(0)) - 1


def sample_rows(y: Tensor, centre: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """A systematic sample of about `size` rows, and the weights that make its sums unbiased, (m,) each.

    Row i of the targets, (n, E), is in it with probability `min(1, size (p / n + (1 - p) ||y_i - centre||^2 / sum))`:
    large norms dominate PRESS.
    """
    if len(y) <= size:
        return torch.arange(len(y), device=y.device), y.new_ones(len(y), dtype=torch.float64)
    norms = (y.double() - centre).square().sum(1)
    by_norm = norms / norms.sum().clamp(min=torch.finfo(torch.float64).tiny)
    chance = (size * (UNIFORM / len(y) + (1 - UNIFORM) * by_norm)).clamp(max=1)
    # On the CPU a running sum has one order, so that the sample is the same on every call.
    ticks = (chance.cpu().cumsum(0) - 0.5).ceil()
    index = moved(torch.diff(ticks, prepend=ticks.new_zeros(1)).nonzero().squeeze(1), y.device)
    return index, 1 / chance[index]
