"""Normal equations where rows are few: the rows themselves.

Shapes: N rows in all, F = d_sae, D = d_in. Symbols as in the package's docstring; `shrink` is s.
"""

from dataclasses import replace

import torch
from torch import Tensor

from .cholesky import PANEL, Cholesky
from .moments import direct
from .systems import Factor

WOODBURY_RESOLUTION = 1e-9  # least ridge, of a matrix' mean diagonal, where the solution is a difference divided by it
DIRECT_SHARE = 0.5  # rows a latent from which on F dimensions cost less than N, of which a solve needs two products


class HeldRows:
    """Normal equations where there are fewer rows than latents: the rows are kept, and solved for in N dimensions.

    With Z_h the codes less a multiple of their mean, `A = Z_h' Z_h`, and with E = diag(decay) + r I Woodbury's
    identity gives `(A + E)^-1 = E^-1 - E^-1 Z_h' (I + Z_h E^-1 Z_h')^-1 Z_h E^-1`. Where rows are more than
    `DIRECT_SHARE` of the latents, A itself is the cheaper of the two. Memory: see `memory_needed`.
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

        Costs 2 N^2 F + N^3 / 3 operations, or 2 N F^2 + F^3 / 3; the first term is paid once where it can be kept.
        """
        centred, gram = self._products(shrink)
        held = max(ridge, WOODBURY_RESOLUTION * (centred.square().sum().item() / self.rows or 1.0))
        if self._direct:
            return direct(gram, held, decay, self.cross)
        weight = (held / (decay + held))[:, None]  # r E^-1, (F, 1)
        inner = Cholesky.of(centred * weight.T, centred.T) if decay.any() else gram
        added, raised = inner.factorise(held, decay.new_zeros(self.rows))
        if raised:
            return replace(self.factor(added, shrink, decay), raised=True)

        def solve(g: Tensor) -> Tensor:
            scaled = weight * g
            return (scaled - weight * (centred.T @ inner.solve(centred @ scaled))) / held

        def solve_cross(centre: Tensor) -> Tensor:
            # With sum z (x - centre)' = Z_h' Y nothing cancels. A shrink of 1 has the mean input for its centre.
            apart = self.x - centre
            if shrink < 1:
                apart += ((1 - shrink) ** -0.5 - 1) * apart.mean(0)
            return weight * (centred.T @ inner.solve(apart))

        def quadratic(psi: Tensor) -> Tensor:
            scaled = weight * psi.T
            return ((scaled * psi.T).sum(0) - inner.squared_norms(centred @ scaled)) / held

        def own_slack() -> Tensor:
            places = torch.arange(self.rows, device=centred.device)
            return held * torch.cat([inner.squared_norms(self._units(some)) for some in places.split(PANEL)])

        def own_solve(index: Tensor) -> tuple[Tensor, Tensor]:
            inverse = inner.solve(self._units(index))
            own = inverse[index, torch.arange(len(index), device=index.device)]
            return weight * (centred.T @ inverse), held * own

        factored = Factor(solve, solve_cross, quadratic, held, False, inner.condition)
        return replace(factored, own_slack=own_slack, own_solve=own_solve) if shrink == 1 else factored

    @property
    def _direct(self) -> bool:
        return self.rows > DIRECT_SHARE * self.z.shape[1]

    def _units(self, index: Tensor) -> Tensor:
        """The unit vectors of some rows, (N, m)."""
        units = self.z.new_zeros(self.rows, len(index))
        units[index, torch.arange(len(index), device=index.device)] = 1
        return units

    def _products(self, shrink: float) -> tuple[Tensor, Cholesky]:
        """Z_h, and A or Z_h Z_h', whichever is factorised; kept for the other ridges of this decoder step."""
        if self._kept is None or self._kept[0] != shrink:
            centred = self.z - (1 - (1 - shrink) ** 0.5) * self.z_bar  # gives A for every shrink in [0, 1]
            left = centred.T if self._direct else centred
            gram = Cholesky.of(left, left.T)
            self._kept = shrink, centred, gram
        return self._kept[1:]


def memory_needed(rows: int, d_in: int, d_sae: int) -> int:
    """Bytes that a decoder step takes at its peak.

    `Moments` holds the Gram matrix, whose factor shares its array, `HeldRows` codes, their centred copies and products,
    and such a matrix of N x N or F x F; all in float64. Both hold some F x D ones.
    """
    cross = 6 * 8 * d_in * d_sae
    if rows < d_sae:
        side = d_sae if rows > DIRECT_SHARE * d_sae else rows
        return 8 * (rows * (5 * d_sae + d_in) + side * (side + 1)) + cross
    return 8 * d_sae * (d_sae + 1) + cross
