"""Normal equations solved by Cholesky: sums over many rows, in F dimensions, or few rows themselves, in N.

N rows, B in a block; F = d_sae, E targets, C columns of a right side. Symbols as in the package's docstring; `shrink`
is s.
"""

import torch
from torch import Tensor

from ...sae.codes import Codes, DenseCodes, Prefixes
from .system import PIECE, AllReduce, Cholesky, Factorisation, Inverse, OwnRows, System, reduced

CONSTANT = 2.0**-23  # spread of a latent over its mean below which float32 cannot tell it from none
RESOLUTION = (
    1e-13  # least ridge over the mean diagonal: a smaller one is lost in float64's rounding
)
OFFSET = 100  # squared mean over variance above which sums are taken about the mean
DUAL_RESOLUTION = (
    1e-9  # the same in N dimensions, where the solution is a difference divided by the ridge
)


class Sums(System):
    """N, means, `S = sum z z'` and `C = sum z y'`.

    Blocks are multiplied in their own precision and summed in float64. Against cancellation the sums are of z - z_0 and
    y - y_0, the first block's means where they are large compared to its spread, else 0. With d = z_bar - z_0,
    `A = S - N d d' + (1 - s) N z_bar z_bar'`. With prefixes the first two terms are means over their masks Q_l:

        A = mean_l (Q_l (S - N d d') Q_l + N (Q_l z_bar - u) (Q_l z_bar - u)') + (1 - s) N u u'

    Cost per row: `F^2 + 2 E F` operations for dense codes; `K^2 + 2 E K`, or `2 F K + 2 E K`, for K entries. Memory:
    8 F^2 + 8 F E bytes.
    """

    def __init__(
        self, d_sae: int, d_out: int, device: torch.device | str = "cpu", prefixes: Prefixes = ()
    ) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.count = zeros(1)
        self.z_0, self.y_0 = zeros(d_sae), zeros(d_out)
        self.sum_z, self.sum_y = zeros(d_sae), zeros(d_out)
        self.prefixes = prefixes
        self.gram = zeros(d_sae, d_sae)  # on and below the diagonal
        self.zy = zeros(d_sae, d_out)
        self._is_empty = True
        self._codes_are_offset = False

    def add(self, codes: Codes, y: Tensor) -> None:
        if self._is_empty:
            self.z_0 = _offset(len(y), codes.sums(), codes.squares())
            self.y_0 = _offset(len(y), y.sum(0), y.square().sum(0))
            self._is_empty, self._codes_are_offset = False, bool(self.z_0.any())
        if self._codes_are_offset:
            codes = DenseCodes(codes.dense() - self.z_0.to(y.dtype))
        y = y - self.y_0.to(y.dtype)
        self.count += len(y)
        self.sum_z += codes.sums()
        self.sum_y += y.sum(0)
        codes.add_gram(self.gram)
        self.zy += codes.transposed_times(y)

    def recentre(self, z_0: Tensor, y_0: Tensor) -> None:
        z, y = self.z_0 - z_0, self.y_0 - y_0
        if z.any() or y.any():
            moved = self.sum_z + self.count * z
            self.gram.addr_(z, self.sum_z).addr_(moved, z)
            self.zy.addr_(z, self.sum_y).addr_(moved, y)
            self.sum_z = moved
            self.sum_y += self.count * y
            self.z_0, self.y_0, self._codes_are_offset = z_0, y_0, bool(z_0.any())

    def reduce(self, all_reduce: AllReduce) -> None:
        """`F^2 / 2 + F E` numbers are all-reduced, a panel at a time."""
        count = all_reduce(self.count.clone()).clamp(min=1)
        # Rounded, since later blocks subtract them in float32.
        self.recentre(
            *(
                (all_reduce(self.count * offset) / count).float().double()
                for offset in (self.z_0, self.y_0)
            )
        )
        reduced([self.count, self.sum_z, self.sum_y, self.zy], all_reduce)
        for begin in range(0, len(self.sum_z), PIECE):
            end = begin + PIECE
            reduced([self.gram[begin:end, :end]], all_reduce)

    @property
    def _spread(self) -> Tensor:  # sum of (z - z_bar)^2, (F,)
        return self.gram.diagonal() - self.sum_z.square() / self.count

    @property
    def rows(self) -> float:
        return self.count.item()

    @property
    def _z_bar(self) -> Tensor:
        return self.z_0 + self.sum_z / self.count

    @property
    def y_bar(self) -> Tensor:
        return self.y_0 + self.sum_y / self.count

    def cross(self, centre: Tensor) -> Tensor:
        about_means = torch.addr(self.zy, self.sum_z / self.count, self.sum_y, alpha=-1)
        # Else rounding, to be divided:
        about_means[self._spread <= self.count * (CONSTANT * self._z_bar).square()] = 0.0
        return about_means.addr_(self._z_bar, self.y_bar - centre, alpha=self.rows).mul_(
            self._membership[..., None]
        )

    def diagonal(self, shrink: float) -> Tensor:
        between = self._membership * self._z_bar.square() - shrink * self.u.square()
        return self._membership * self._spread + self.count * between

    def _factorise(self, ridge: float, shrink: float, decay: Tensor) -> "Direct":
        """F^3 / 3 operations and 8 F^2 bytes more."""
        masks = self._masks
        updates = [(-self.rows / len(masks), mask * (self.sum_z / self.count)) for mask in masks]
        if self.prefixes:
            updates += [(self.rows / len(masks), mask * self._z_bar - self.u) for mask in masks]
        if shrink < 1:
            updates.append(((1 - shrink) * self.rows, self.u))
        diagonal = self._membership * self.gram.diagonal() + decay
        for weight, vector in updates:
            diagonal += weight * vector.square()

        def build(ridge: float) -> Tensor:
            A = self.gram.clone()
            if self.prefixes:
                A *= self._membership[:, None]  # below the diagonal, of the later of two latents
            for weight, vector in updates:
                A.addr_(vector, vector, alpha=weight)
            A.diagonal().copy_(diagonal + ridge)
            return A

        return Direct(
            self, Cholesky.of(build, max(ridge, RESOLUTION * (diagonal.abs().mean().item() or 1.0)))
        )


class Direct(Factorisation):
    """A Cholesky factor of the F x F matrix."""

    def __init__(self, system: System, factor: Cholesky) -> None:
        super().__init__(system, factor.ridge, factor.raised)
        self._factor = factor

    def solve(self, right: Tensor) -> Tensor:
        """2 F^2 operations per column."""
        return self._factor.solve(right)

    def quadratic(self, psi: Tensor) -> Tensor:
        """F^2 operations per row."""
        return self._factor.squared_norms(psi.T)

    def inverse(self) -> Inverse:
        on_cpu = self.system.y_bar.device.type == "cpu"
        return self._factor.inverse() if on_cpu else super().inverse()

    def condition(self) -> float:
        return self._factor.condition()


class HeldRows(System):
    """All rows, kept in float64.

    With P = I - (1 - sqrt(1 - s)) 11'/N and Z_h = P Z, `A = Z_h' Z_h`, and with E = diag(decay) + r I Woodbury's
    identity gives `(A + E)^-1 = E^-1 - E^-1 Z_h' r S^-1 Z_h E^-1`, where `S = r I + r Z_h E^-1 Z_h'`. Then
    `I - H = r P S^-1 P` maps targets to residuals: nothing is subtracted from 1, so leave-one-out errors stay precise
    for any ridge.
    """

    def __init__(self, z: Tensor | None = None, y: Tensor | None = None) -> None:
        self._z = [] if z is None else [z]
        self._y = [] if y is None else [y]
        self._lifts: tuple[float, Tensor, Tensor] | None = (
            None  # s, Z_h, (N, F), and Z_h Z_h', (N, N)
        )

    def add(self, codes: Codes, y: Tensor) -> None:
        self._z.append(codes.dense())
        self._y.append(y)

    @property
    def z(self) -> Tensor:
        return _joined(self._z)

    @property
    def y(self) -> Tensor:
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

    def diagonal(self, shrink: float) -> Tensor:
        return self._centre(shrink)[0].square().sum(0)

    def _factorise(self, ridge: float, shrink: float, decay: Tensor) -> "Dual":
        """2 N^2 F + N^3 / 3 operations, the first term only once if there is no decay."""
        lifted, gram = self._centre(shrink)

        def build(ridge: float) -> Tensor:
            S = (lifted * _weight(decay, ridge).T) @ lifted.T if decay.any() else gram.clone()
            if shrink == 1:
                # The rows sum to 0, so S 1 = r 1; nothing is solved for along 1, so a larger eigenvalue costs nothing.
                S += S.diagonal().mean() / self.rows
            S.diagonal().add_(ridge)
            return S

        least = DUAL_RESOLUTION * (lifted.square().sum().item() / self.rows or 1.0)
        return Dual(self, Cholesky.of(build, max(ridge, least)), shrink, lifted, decay)

    def _centre(self, shrink: float) -> tuple[Tensor, Tensor]:
        """Z_h and its products, kept for other ridges."""
        if self._lifts is None or self._lifts[0] != shrink:
            lifted = self.z - (1 - (1 - shrink) ** 0.5) * self._z_bar
            self._lifts = shrink, lifted, lifted @ lifted.T
        return self._lifts[1:]


class Dual(Direct):
    """A Cholesky factor of the N x N matrix S; `lifted` is Z_h."""

    def __init__(
        self, system: HeldRows, factor: Cholesky, shrink: float, lifted: Tensor, decay: Tensor
    ) -> None:
        super().__init__(system, factor)
        self._rows, self._shrink, self._lifted = system, shrink, lifted
        self._weight = _weight(decay, factor.ridge)  # r E^-1, (F, 1)

    def solve(self, right: Tensor) -> Tensor:
        """4 N F + 2 N^2 operations per column."""
        scaled = self._weight * right
        return (scaled - self._lift(self._factor.solve(self._lifted @ scaled))) / self.ridge

    def solve_cross(self, centre: Tensor) -> Tensor:
        """By `sum z (y - centre)' = Z_h' Y`, without cancellation."""
        return self._lift(self._factor.solve(self._apart(centre)))

    def quadratic(self, psi: Tensor) -> Tensor:
        """2 N F + N^2 operations per row."""
        scaled = self._weight * psi.T
        return (
            (scaled * psi.T).sum(0) - self._factor.squared_norms(self._lifted @ scaled)
        ) / self.ridge

    def own(self, index: Tensor) -> OwnRows:
        """2 N^2 operations for each row."""
        rows, columns = len(self._lifted), torch.arange(len(index), device=index.device)
        units = self._lifted.new_full((rows, len(index)), -(1 - (1 - self._shrink) ** 0.5) / rows)
        units[index, columns] += 1  # P's columns
        solved = self._factor.solve(units)
        return OwnRows(
            self.ridge * (solved * units).sum(0),
            lambda: self._lift(solved),
            lambda centre: self.ridge * (solved.T @ self._apart(centre)),
        )

    inverse = Factorisation.inverse  # the factor's is N x N

    def _lift(self, columns: Tensor) -> Tensor:
        """`r E^-1 Z_h'` times columns, (N, C)."""
        return self._weight * (self._lifted.T @ columns)

    def _apart(self, centre: Tensor) -> Tensor:
        """`Y = P^-1 (y - centre)`, (N, E); with s = 1 P leaves centred targets as they are."""
        rows = self._rows.y - centre
        return (
            rows
            if self._shrink == 1
            else rows.add_(rows.mean(0), alpha=(1 - self._shrink) ** -0.5 - 1)
        )


def _weight(decay: Tensor, ridge: float) -> Tensor:
    """`r E^-1`, (F, 1)."""
    return (ridge / (decay + ridge))[:, None]


def _joined(blocks: list[Tensor]) -> Tensor:
    if len(blocks) > 1 or blocks[0].dtype != torch.float64:
        blocks[:] = [torch.cat([block.double() for block in blocks])]
    return blocks[0]


def _offset(rows: int, sums: Tensor, squares: Tensor) -> Tensor:
    mean = sums.double() / rows
    variance = squares.double() / rows - mean.square()
    return torch.where(mean.square() > OFFSET * variance, mean, 0.0).to(sums.dtype).double()
