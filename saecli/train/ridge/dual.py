"""Normal equations for fewer rows than latents: the rows themselves, solved in N dimensions.

Shapes: N rows in all, m selected, F = d_sae, E targets, C columns of a right side. Symbols as in the package's
docstring; `shrink` is s.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...sae.codes import Codes
from .system import AllReduce, Cholesky, Factorisation, System

RESOLUTION = 1e-9  # least ridge over the mean diagonal, since the solution is a difference divided by the ridge


class HeldRows(System):
    """All rows, kept in float64.

    With P = I - (1 - sqrt(1 - s)) 11'/N and Z_h = P Z, the codes less a multiple of their mean, `A = Z_h' Z_h`, and
    with E = diag(decay) + r I Woodbury's identity gives `(A + E)^-1 = E^-1 - E^-1 Z_h' r S^-1 Z_h E^-1`, where `S = r I
    + r Z_h E^-1 Z_h'`. Then `I - H = r P S^-1 P` maps targets to residuals: nothing is subtracted from 1, so
    leave-one-out errors stay precise for any ridge.
    """

    def __init__(self, z: Tensor | None = None, y: Tensor | None = None) -> None:
        self._z = [] if z is None else [z]
        self._y = [] if y is None else [y]
        self._lifts: tuple[float, Tensor, Tensor] | None = None  # s, Z_h, (N, F), and Z_h Z_h', (N, N)

    def add(self, codes: Codes, y: Tensor) -> None:
        self._lifts = None
        self._z.append(codes.dense())
        self._y.append(y)

    def reduce(self, all_reduce: AllReduce) -> None:
        raise TypeError("rows are gathered from all processes, not summed")

    @property
    def z(self) -> Tensor:
        """All codes, (N, F), float64."""
        return _joined(self._z)

    @property
    def y(self) -> Tensor:
        """All targets, (N, E), float64."""
        return _joined(self._y)

    @property
    def rows(self) -> float:
        return sum(len(y) for y in self._y)

    @property
    def _z_bar(self) -> Tensor:
        return self.z.mean(0)

    @property
    def y_bar(self) -> Tensor:
        return self.y.mean(0)

    def cross(self, centre: Tensor) -> Tensor:
        about_means = (self.z - self._z_bar).T @ (self.y - centre)
        return about_means.addr_(self._z_bar, self.y_bar - centre, alpha=self.rows)

    def scale(self, shrink: float) -> float:
        return self._centre(shrink)[0].square().sum().item() / self.z.shape[1]

    def _factorise(self, ridge: float, shrink: float, decay: Tensor) -> "Dual":
        """By Cholesky of S; 2 N^2 F + N^3 / 3 operations, the first term only once if there is no decay."""
        lifted, gram = self._centre(shrink)

        def build(ridge: float) -> Tensor:
            S = (lifted * _weight(decay, ridge).T) @ lifted.T if decay.any() else gram.clone()
            if shrink == 1:
                # The rows sum to 0, so S 1 = r 1. Nothing is solved for along 1: a larger eigenvalue there costs no
                # precision.
                S += S.diagonal().mean() / self.rows
            S.diagonal().add_(ridge)
            return S

        least = RESOLUTION * (lifted.square().sum().item() / self.rows or 1.0)
        return Dual(self, Cholesky.of(build, max(ridge, least)), shrink, lifted, decay)

    def _centre(self, shrink: float) -> tuple[Tensor, Tensor]:
        """Z_h and its products, kept for the other ridges of this decoder step."""
        if self._lifts is None or self._lifts[0] != shrink:
            lifted = self.z - (1 - (1 - shrink) ** 0.5) * self._z_bar
            self._lifts = shrink, lifted, lifted @ lifted.T
        return self._lifts[1:]


class Dual(Factorisation):
    """A Cholesky factor of the N x N matrix S; `lifted` is Z_h."""

    def __init__(self, system: HeldRows, factor: Cholesky, shrink: float, lifted: Tensor, decay: Tensor) -> None:
        super().__init__(system, factor.ridge, factor.raised)
        self._rows, self._factor, self._shrink, self._lifted = system, factor, shrink, lifted
        self._weight = _weight(decay, factor.ridge)  # r E^-1, (F, 1)

    def solve(self, right: Tensor) -> Tensor:
        """4 N F + 2 N^2 operations per column."""
        scaled = self._weight * right
        return (scaled - self.lift(self._factor.solve(self._lifted @ scaled))) / self.ridge

    def solve_cross(self, centre: Tensor) -> Tensor:
        """By `sum z (y - centre)' = Z_h' Y`, without cancellation."""
        return self.lift(self._factor.solve(self.apart(centre)))

    def quadratic(self, psi: Tensor) -> Tensor:
        """2 N F + N^2 operations per row."""
        scaled = self._weight * psi.T
        return ((scaled * psi.T).sum(0) - self._factor.squared_norms(self._lifted @ scaled)) / self.ridge

    def condition(self) -> float:
        """Estimate for S."""
        return self._factor.condition()

    def own(self, index: Tensor) -> "DualRows":
        """2 N^2 operations for each row."""
        rows, columns = len(self._lifted), torch.arange(len(index), device=index.device)
        units = self._lifted.new_full((rows, len(index)), -(1 - (1 - self._shrink) ** 0.5) / rows)
        units[index, columns] += 1  # P's columns
        solved = self._factor.solve(units)
        return DualRows(self, self.ridge * (solved * units).sum(0), solved)

    def lift(self, columns: Tensor) -> Tensor:
        """`r E^-1 Z_h'` times columns (N, C): (F, C)."""
        return self._weight * (self._lifted.T @ columns)

    def apart(self, centre: Tensor) -> Tensor:
        """`Y = P^-1 (y - centre)`, (N, E); with s = 1 the targets are centred, and P leaves them as they are."""
        rows = self._rows.y - centre
        return rows if self._shrink == 1 else rows.add_(rows.mean(0), alpha=(1 - self._shrink) ** -0.5 - 1)


@dataclass(frozen=True)
class DualRows:
    """See `OwnRows`; `solved` are their columns of `S^-1 P`, (N, m)."""

    dual: Dual
    slack: Tensor
    solved: Tensor

    def u(self) -> Tensor:
        return self.dual.lift(self.solved)

    def residual(self, centre: Tensor) -> Tensor:
        return self.dual.ridge * (self.solved.T @ self.dual.apart(centre))


def _weight(decay: Tensor, ridge: float) -> Tensor:
    """`r E^-1`, (F, 1)."""
    return (ridge / (decay + ridge))[:, None]


def _joined(blocks: list[Tensor]) -> Tensor:
    """All blocks as one in float64, which replaces them in the list."""
    if len(blocks) > 1 or blocks[0].dtype != torch.float64:
        blocks[:] = [torch.cat([block.double() for block in blocks])]
    return blocks[0]
