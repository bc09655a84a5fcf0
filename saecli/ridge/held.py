"""Normal equations where rows are few: the rows themselves.

Shapes: N rows in all, F = d_sae, D = d_in. Symbols as in the package's docstring; `shrink` is s.
"""

from dataclasses import replace

import torch
from torch import Tensor

from .cholesky import Cholesky
from .systems import Factor, OwnRows

WOODBURY_RESOLUTION = 1e-9  # least ridge, of a matrix' mean diagonal, where the solution is a difference divided by it


class HeldRows:
    """Normal equations where there are fewer rows than latents: the rows are kept, and solved for in N dimensions.

    With P = I - (1 - sqrt(1 - s)) 11'/N and Z_h = P Z, the codes less a multiple of their mean, `A = Z_h' Z_h`, and
    with E = diag(decay) + r I Woodbury's identity gives `(A + E)^-1 = E^-1 - E^-1 Z_h' r S^-1 Z_h E^-1`, where
    `S = r I + r Z_h E^-1 Z_h'`. Then `I - H = r P S^-1 P` takes inputs to residuals: nothing is subtracted from 1, so
    that leave-one-out errors keep their digits however small the ridge is. Memory: see `memory_needed`.
    """

    def __init__(self, z: Tensor, x: Tensor) -> None:
        self.rows = len(z)
        self.z = z.double()
        self.x = x.double()
        self.z_bar = self.z.mean(0)
        self.x_bar = self.x.mean(0)
        self._kept: tuple[float, Tensor, Cholesky] | None = None

    def cross(self, centre: Tensor) -> Tensor:
        """`sum z (x - centre)'`, (F, D)."""
        about_means = (self.z - self.z_bar).T @ (self.x - centre)
        return about_means.addr_(self.z_bar, self.x_bar - centre, alpha=self.rows)

    def scale(self, shrink: float) -> float:
        """Mean of A's diagonal, at least 0."""
        return self._products(shrink)[0].square().sum().item() / self.z.shape[1]

    def factor(self, ridge: float, shrink: float, decay: Tensor) -> Factor:
        """Factorise `r (I + Z_h E^-1 Z_h')`, or `A + E`, by Cholesky.

        Costs 2 N^2 F + N^3 / 3 operations; the first term is paid once where it can be kept.
        """
        centred, gram = self._products(shrink)
        held = max(ridge, WOODBURY_RESOLUTION * (centred.square().sum().item() / self.rows or 1.0))
        weight = (held / (decay + held))[:, None]  # r E^-1, (F, 1)
        inner = Cholesky.of(centred * weight.T, centred.T) if decay.any() else gram
        ones = decay.new_ones(self.rows)
        # With s = 1 rows sum to 0 and S 1 = r 1, where nothing is solved for: lifted, it costs no digits.
        lifted = [(inner.diagonal().mean().item() / self.rows, ones)] if shrink == 1 else []
        added, raised = inner.factorise(held, torch.zeros_like(ones), lifted)
        if raised:
            return replace(self.factor(added, shrink, decay), raised=True)

        def solve(g: Tensor) -> Tensor:
            scaled = weight * g
            return (scaled - weight * (centred.T @ inner.solve(centred @ scaled))) / held

        def solve_cross(centre: Tensor) -> Tensor:
            # With sum z (x - centre)' = Z_h' Y nothing cancels.
            return weight * (centred.T @ inner.solve(apart(centre)))

        def apart(centre: Tensor) -> Tensor:
            # Y = P^-1 (x - centre), (N, D). A shrink of 1 has the mean input for its centre.
            rows = self.x - centre
            return rows if shrink == 1 else rows.add_(rows.mean(0), alpha=(1 - shrink) ** -0.5 - 1)

        def quadratic(psi: Tensor) -> Tensor:
            scaled = weight * psi.T
            return ((scaled * psi.T).sum(0) - inner.squared_norms(centred @ scaled)) / held

        def own(index: Tensor) -> OwnRows:
            meaned = 1 - (1 - shrink) ** 0.5
            units = torch.full((self.rows, len(index)), -meaned / self.rows, dtype=self.z.dtype, device=self.z.device)
            units[index, torch.arange(len(index), device=index.device)] += 1  # P's columns
            solved = inner.solve(units)  # S^-1 P
            slack = held * (solved * units).sum(0)
            return OwnRows(slack, lambda: weight * (centred.T @ solved),
                           lambda centre: held * (solved.T @ apart(centre)))

        return Factor(solve, solve_cross, quadratic, held, False, inner.condition, own=own)

    def _products(self, shrink: float) -> tuple[Tensor, Cholesky]:
        """Z_h and Z_h Z_h'; kept for the other ridges of this decoder step."""
        if self._kept is None or self._kept[0] != shrink:
            centred = self.z - (1 - (1 - shrink) ** 0.5) * self.z_bar
            self._kept = shrink, centred, Cholesky.of(centred, centred.T)
        return self._kept[1:]


def memory_needed(rows: int, d_in: int, d_sae: int) -> int:
    """Bytes that a decoder step takes at its peak.

    `Moments` holds the Gram matrix, whose factor shares its array, `HeldRows` codes, their centred copies and products,
    and such a matrix of N x N; all in float64. Both hold some F x D ones.
    """
    cross = 6 * 8 * d_in * d_sae
    if rows < d_sae:
        return 8 * (rows * (5 * d_sae + d_in) + rows * (rows + 1)) + cross
    return 8 * d_sae * (d_sae + 1) + cross
