"""Normal equations as sums over rows, from one pass over any number of them.

Shapes: B rows in a block, N rows in all, F = d_sae, E targets. Symbols as in the package's docstring; `shrink` is s.
"""

import torch
from torch import Tensor

from ...sae.codes import Codes, DenseCodes, Prefixes
from .system import PIECE, AllReduce, Cholesky, Factorisation, System, reduced

CONSTANT = 2.0**-23  # spread of a latent over its mean below which float32 cannot tell it from none
RESOLUTION = 1e-13  # least ridge over the mean diagonal: a smaller one is lost in float64's rounding
OFFSET = 100  # squared mean over variance above which sums are taken about the mean


class Sums(System):
    """N, means, `S = sum z z'` and `C = sum z y'`.

    Blocks are multiplied in their own precision and summed in float64. The sums are of z - z_0 and y - y_0, to avoid
    cancellation: z_0 and y_0 are the first block's means where they are large compared to its spread, else 0, as for
    latents that rarely fire. With d = z_bar - z_0, `A = S - N d d' + (1 - s) N z_bar z_bar'`. With prefixes, whose
    masks are Q_l, the first two terms are means over them:

        A = mean_l (Q_l (S - N d d') Q_l + N (Q_l z_bar - u) (Q_l z_bar - u)') + (1 - s) N u u'

    Cost per row: `F^2 + 2 E F` operations for dense codes; `K^2 + 2 E K`, or `2 F K + 2 E K`, for K entries. Memory: 8
    F^2 + 8 F E bytes.
    """

    def __init__(self, d_sae: int, d_out: int, device: torch.device | str = "cpu", prefixes: Prefixes = ()) -> None:
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
        """Change the sums to offsets z_0, (F,), and y_0, (E,)."""
        z, y = self.z_0 - z_0, self.y_0 - y_0
        if z.any() or y.any():
            moved = self.sum_z + self.count * z
            self.gram.addr_(z, self.sum_z).addr_(moved, z)
            self.zy.addr_(z, self.sum_y).addr_(moved, y)
            self.sum_z = moved
            self.sum_y += self.count * y
            self.z_0, self.y_0, self._codes_are_offset = z_0, y_0, bool(z_0.any())

    def reduce(self, all_reduce: AllReduce) -> None:
        """About common offsets. Cost: `F^2 / 2 + F E` float64 numbers are all-reduced, a panel at a time."""
        count = all_reduce(self.count.clone()).clamp(min=1)
        # Rounded, since later blocks subtract them in float32.
        self.recentre(*((all_reduce(self.count * offset) / count).float().double() for offset in (self.z_0, self.y_0)))
        reduced([self.count, self.sum_z, self.sum_y, self.zy], all_reduce)
        for begin in range(0, len(self.sum_z), PIECE):
            end = begin + PIECE
            reduced([self.gram[begin:end, :end]], all_reduce)

    @property
    def _spread(self) -> Tensor:
        """Sum of `(z - z_bar)^2` per latent, (F,)."""
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
        return about_means.addr_(self._z_bar, self.y_bar - centre, alpha=self.rows).mul_(self._membership[..., None])

    def scale(self, shrink: float) -> float:
        between = self._membership * self._z_bar.square() - shrink * self.u.square()
        return max((self._membership * self._spread + self.count * between).mean().item(), 0.0)

    def _factorise(self, ridge: float, shrink: float, decay: Tensor) -> "Direct":
        """By Cholesky; F^3 / 3 operations and 8 F^2 bytes more."""
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

        return Direct(self, Cholesky.of(build, max(ridge, RESOLUTION * (diagonal.abs().mean().item() or 1.0))))


class Direct(Factorisation):
    """A Cholesky factor of the F x F matrix."""

    def __init__(self, system: Sums, factor: Cholesky) -> None:
        super().__init__(system, factor.ridge, factor.raised)
        self._factor = factor

    def solve(self, right: Tensor) -> Tensor:
        """2 F^2 operations per column."""
        return self._factor.solve(right)

    def quadratic(self, psi: Tensor) -> Tensor:
        """F^2 operations per row."""
        return self._factor.squared_norms(psi.T)

    def condition(self) -> float:
        return self._factor.condition()


def _offset(rows: int, sums: Tensor, squares: Tensor) -> Tensor:
    """Each column's mean where its square is more than `OFFSET` variances, else 0; rounded to the rows' precision."""
    mean = sums.double() / rows
    variance = squares.double() / rows - mean.square()
    return torch.where(mean.square() > OFFSET * variance, mean, 0.0).to(sums.dtype).double()
