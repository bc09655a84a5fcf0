"""Normal equations solved by Cholesky: sums over rows, in F dimensions, or few rows themselves, in N.

N rows, B in a block; F = d_sae, E targets, C columns of a right side; `shrink` is s.
"""

from collections.abc import Callable

import torch
from scipy.linalg.lapack import dpotrf, dtrtri
from torch import Tensor

from ...base.errors import TrainingError
from ...sae.codes import Codes, Prefixes
from .system import (
    NOT_FINITE,
    PIECE,
    AllReduce,
    Factorisation,
    Fits,
    Inverse,
    Ridge,
    Sample,
    System,
    reduced,
)


class BlockSums(System):
    """Sums over blocks of rows, of z - z_0 and y - y_0."""

    def __init__(
        self, d_sae: int, d_out: int, device: torch.device | str, prefixes: Prefixes
    ) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.count = zeros(1)
        self.z_0, self.y_0 = zeros(d_sae), zeros(d_out)
        self.sum_z, self.sum_y = zeros(d_sae), zeros(d_out)
        self.zy = zeros(d_sae, d_out)
        self.prefixes = prefixes

    def add(self, codes: Codes, y: Tensor) -> None:
        """Codes, (B, F), targets, (B, E)."""
        self.count += len(y)
        self.sum_z += codes.sums()
        self.sum_y += y.sum(0)
        self.zy += codes.transposed_times(y)

    @property
    def rows(self) -> float:
        return self.count.item()

    @property
    def _z_bar(self) -> Tensor:
        return self.z_0 + self.sum_z / self.count

    @property
    def y_bar(self) -> Tensor:
        return self.y_0 + self.sum_y / self.count


class Sums(BlockSums):
    """N, means, `S = sum z z'` and `C = sum z y'`.

    Blocks are multiplied in their own precision and summed in float64. Against cancellation the sums are of z - z_0 and
    y - y_0, the first block's means where large against its spread, else 0. With d = z_bar - z_0,
    `A = S - N d d' + (1 - s) N z_bar z_bar'`. With prefixes:

        A = mean_l (Q_l (S - N d d') Q_l + N (Q_l z_bar - u) (Q_l z_bar - u)') + (1 - s) N u u'

    Cost per row: `F^2 + 2 E F` operations for dense codes; `K^2 + 2 E K`, or `2 F K + 2 E K`, for K entries. Memory:
    8 F^2 + 8 F E bytes.
    """

    def __init__(
        self, d_sae: int, d_out: int, device: torch.device | str = "cpu", prefixes: Prefixes = ()
    ) -> None:
        super().__init__(d_sae, d_out, device, prefixes)
        # On and below the diagonal.
        self.gram = torch.zeros(d_sae, d_sae, dtype=torch.float64, device=device)
        self._codes_are_offset: bool | None = None  # unknown before the first block

    def add(self, codes: Codes, y: Tensor) -> None:
        if self._codes_are_offset is None:
            self.z_0 = _offset(len(y), codes.sums(), codes.squares())
            self.y_0 = _offset(len(y), y.sum(0), y.square().sum(0))
            self._codes_are_offset = bool(self.z_0.any())
        if self._codes_are_offset:
            codes = Codes(codes.dense() - self.z_0.to(y.dtype))
        super().add(codes, y - self.y_0.to(y.dtype))
        codes.add_gram(self.gram)

    def reduce(self, all_reduce: AllReduce) -> None:
        """All-reduce `F^2 / 2 + F E` numbers, a panel at a time, about one offset."""
        count = all_reduce(self.count.clone()).clamp(min=1)
        z_0 = all_reduce(self.count * self.z_0) / count
        y_0 = all_reduce(self.count * self.y_0) / count
        shift_z, shift_y = self.z_0 - z_0, self.y_0 - y_0
        if shift_z.any() or shift_y.any():
            sum_z = self.sum_z + self.count * shift_z
            self.gram.addr_(shift_z, self.sum_z).addr_(sum_z, shift_z)
            self.zy.addr_(shift_z, self.sum_y).addr_(sum_z, shift_y)
            self.sum_z = sum_z
            self.sum_y += self.count * shift_y
            self.z_0, self.y_0 = z_0, y_0
        reduced([self.count, self.sum_z, self.sum_y, self.zy], all_reduce)
        for begin in range(0, len(self.sum_z), PIECE):
            end = begin + PIECE
            reduced([self.gram[begin:end, :end]], all_reduce)

    @property
    def _spread(self) -> Tensor:  # sum of (z - z_bar)^2, (F,)
        return self.gram.diagonal() - self.sum_z.square() / self.count

    def cross(self, centre: Tensor) -> Tensor:
        about_means = torch.addr(self.zy, self.sum_z / self.count, self.sum_y, alpha=-1)
        # Float32 cannot tell a latent's spread from none: rounding, to be divided.
        about_means[self._spread <= self.count * (2.0**-23 * self._z_bar).square()] = 0.0
        about_centre = about_means.addr_(self._z_bar, self.y_bar - centre, alpha=self.rows)
        return about_centre.mul_(self._membership[..., None])

    def diagonal(self, shrink: float) -> Tensor:
        between = self._membership * self._z_bar.square() - shrink * self.u.square()
        return self._membership * self._spread + self.count * between

    def _factorise(self, ridge: Ridge, shrink: float, decay: Tensor) -> "Direct":
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

        # A smaller ridge is lost in float64's rounding.
        least = 1e-13 * (diagonal.abs().mean().item() or 1.0)
        return Direct(self, build, ridge, least)


class Direct(Factorisation):
    """`build(ridge)`, (F, F), symmetric positive definite, as `R' R`: its lower triangle is read, its memory taken. The
    ridge is ten times larger for each attempt that fails, of F^3 / 3 operations."""

    def __init__(
        self, system: System, build: Callable[[float], Tensor], ridge: Ridge, least: float = 0.0
    ) -> None:
        asked = max(ridge.total, least)
        self._R, total = cholesky(build, asked)
        super().__init__(system, ridge.raised_to(total), raised=total > asked)

    def solve(self, right: Tensor) -> Tensor:
        """2 F^2 operations per column."""
        return _solve(self._R, right).contiguous()  # products with it are then faster

    def quadratic(self, psi: Tensor) -> Tensor:
        """F^2 operations per row."""
        return torch.linalg.solve_triangular(self._R.mT, psi.T, upper=False).square().sum(0)

    def inverse(self) -> Inverse:
        """On a CPU `R^-1` replaces R, in F^3 / 3 operations."""
        if self._R.device.type != "cpu":
            return super().inverse()
        inverse_R, _ = dtrtri(self._R.numpy(), overwrite_c=1)
        del self._R
        root = torch.from_numpy(inverse_R)
        diagonal = torch.linalg.vector_norm(root, dim=1).square()
        return Inverse(diagonal, lambda latents: root[latents] @ root[latents].T)

    def condition(self) -> float:
        """From below, by power iterations."""
        R = self._R
        largest = _norm(R, lambda vector: R.mT @ (R @ vector))
        return largest * _norm(R, lambda vector: _solve(R, vector))


def _solve(R: Tensor, right: Tensor) -> Tensor:
    """`torch.cholesky_solve` would copy R, which on a GPU may not fit a third time."""
    half = torch.linalg.solve_triangular(R.mT, right, upper=False)
    return torch.linalg.solve_triangular(R, half, upper=True)


def cholesky(build: Callable[[float], Tensor], ridge: float) -> tuple[Tensor, float]:
    """R, and the ridge that it took."""
    for _ in range(15):
        R = build(ridge).mT  # column-major, as LAPACK writes it
        if _factorises(R) and R.diagonal().isfinite().all():  # a NaN need not fail
            return R, ridge
        del R
        if not build(ridge).sum().isfinite():
            raise TrainingError(NOT_FINITE)
        ridge *= 10
    raise TrainingError(
        "the decoder step cannot be solved: its matrix is not positive definite with a ridge of "
        f"{ridge / 10:.3g}, since the codes' offset is so large against their spread that "
        "float32 sums lose it; normalise the rows, e.g. with --normalize scale"
    )


def _factorises(A: Tensor) -> bool:
    """Whether the factor has replaced A."""
    if A.device.type == "cpu":  # SciPy's takes 0.7 of the time of PyTorch's
        _, failed = dpotrf(A.numpy(), overwrite_a=1)
        return not failed
    failed = torch.empty((), dtype=torch.int32, device=A.device)
    torch.linalg.cholesky_ex(A, upper=True, out=(A, failed))
    return not failed.item()


def _norm(like: Tensor, times: Callable[[Tensor], Tensor]) -> float:
    vector = torch.randn(len(like), 1, generator=torch.Generator().manual_seed(0)).to(like)
    for _ in range(10):
        vector = times(vector / vector.norm())
    return vector.norm().item()


class HeldRows(System):
    """All rows, in float64: codes z, (N, F), and targets y, (N, E).

    With P = I - (1 - sqrt(1 - s)) 11'/N, Z_h = P Z and E = diag(decay) + r I, `A = Z_h' Z_h` and by Woodbury
    `(A + E)^-1 = E^-1 - E^-1 Z_h' r S^-1 Z_h E^-1`, where `S = r I + r Z_h E^-1 Z_h'`. Then `I - H = r P S^-1 P` maps
    targets to residuals: nothing is subtracted from 1, and leave-one-out errors are precise for any ridge.
    """

    def __init__(self, z: Tensor, y: Tensor) -> None:
        self.z, self.y = z.double(), y.double()
        # s, Z_h, (N, F), and Z_h Z_h', (N, N).
        self._lifted: tuple[float, Tensor, Tensor] | None = None

    @property
    def rows(self) -> float:
        return len(self.y)

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
        return self.lift(shrink)[0].square().sum(0)

    def _factorise(self, ridge: Ridge, shrink: float, decay: Tensor) -> "Dual":
        return Dual(self, ridge, shrink, decay)

    def lift(self, shrink: float) -> tuple[Tensor, Tensor]:
        if self._lifted is None or self._lifted[0] != shrink:
            Z_h = self.z - (1 - (1 - shrink) ** 0.5) * self._z_bar
            self._lifted = shrink, Z_h, Z_h @ Z_h.T
        return self._lifted[1:]


class Dual(Direct):
    """A Cholesky factor of S, (N, N): 2 N^2 F + N^3 / 3 operations, the first term once if there is no decay."""

    def __init__(self, system: HeldRows, ridge: Ridge, shrink: float, decay: Tensor) -> None:
        Z_h, gram = system.lift(shrink)

        def build(ridge: float) -> Tensor:
            S = (Z_h * _weight(decay, ridge).T) @ Z_h.T if decay.any() else gram.clone()
            if shrink == 1:
                # The rows sum to 0, so S 1 = r 1; nothing is solved for along 1, so a larger eigenvalue costs nothing.
                S += S.diagonal().mean() / system.rows
            S.diagonal().add_(ridge)
            return S

        # The solution is a difference divided by the ridge: a smaller one is lost in rounding.
        least = 1e-9 * (gram.diagonal().sum().item() / system.rows or 1.0)
        super().__init__(system, build, ridge, least)
        self._y, self._shrink, self._Z_h = system.y, shrink, Z_h
        self._r = self.ridge.total
        self._weight = _weight(decay, self._r)  # r E^-1, (F, 1)

    def solve(self, right: Tensor) -> Tensor:
        """4 N F + 2 N^2 operations per column."""
        weighted = self._weight * right
        return (weighted - self._lift(super().solve(self._Z_h @ weighted))) / self._r

    def solve_cross(self, centre: Tensor) -> Tensor:
        """`C = Z_h' Y`, without cancellation."""
        return self._lift(super().solve(self._targets(centre)))

    def quadratic(self, psi: Tensor) -> Tensor:
        """2 N F + N^2 operations per row."""
        weighted = self._weight * psi.T
        subtracted = super().quadratic((self._Z_h @ weighted).T)
        return ((weighted * psi.T).sum(0) - subtracted) / self._r

    def fits(self, sample: Sample) -> Fits:
        """Exact for the system's own rows: 2 N^2 operations for each."""
        if sample.numbers is None:
            return super().fits(sample)
        rows, columns = len(self._Z_h), torch.arange(len(sample.y), device=sample.y.device)
        units = self._Z_h.new_full((rows, len(columns)), -(1 - (1 - self._shrink) ** 0.5) / rows)
        units[sample.numbers, columns] += 1  # P's columns
        solved = super().solve(units)
        residual = self._r * (solved.T @ self._targets(sample.centre))
        return Fits(
            self._lift(solved),
            self._r * (solved * units).sum(0)[:, None, None],
            residual[:, : sample.y.shape[1]],
        )

    inverse = Factorisation.inverse  # the factor's is N x N

    def _lift(self, columns: Tensor) -> Tensor:
        """`r E^-1 Z_h'` times columns, (N, C)."""
        return self._weight * (self._Z_h.T @ columns)

    def _targets(self, centre: Tensor) -> Tensor:
        """`Y = P^-1 (y - centre)`, (N, E); with s = 1 centred targets are P's own."""
        y = self._y - centre
        if self._shrink == 1:
            return y
        return y.add_(y.mean(0), alpha=(1 - self._shrink) ** -0.5 - 1)


def _weight(decay: Tensor, ridge: float) -> Tensor:
    """`r E^-1`, (F, 1)."""
    return (ridge / (decay + ridge))[:, None]


def _offset(rows: int, sums: Tensor, squares: Tensor) -> Tensor:
    """The mean where its square is above a hundred times the variance; else 0."""
    mean = sums.double() / rows
    variance = squares.double() / rows - mean.square()
    return torch.where(mean.square() > 100 * variance, mean, 0.0).to(sums.dtype).double()
