"""Normal equations as sums over rows, one pass over any number of them.

Shapes: N rows in all, B in a block, F = d_sae, D = d_in. Symbols as in the package's docstring; `shrink` is s.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..distributed import latents_axis, rows_axis
from ..products import NonZeros
from .cholesky import Factorised, Update
from .gram import Gram
from .shared_gram import SharedGram
from .systems import Factor

RESOLUTION = 1e-13  # of a matrix' mean diagonal: a smaller ridge is lost in float64's rounding
OFFSET = 100  # times a code's or an input's variance that its squared mean must exceed for sums to be taken from it


class Moments:
    """Normal equations summed over any number of rows.

    Blocks are multiplied in their own precision and summed in float64. Cost of a row: `F^2 + 2 D F` operations where
    codes are dense; `K^2 + 2 D K`, or `2 F K + 2 D K`, where K of them are not zero. Memory: see `memory_needed`.
    Where processes share the latents, all is of this one's own, F of them, and of the Gram matrix its columns.

    Sums are of z - z_0 and x - x_0, so that offsets do not cancel: the first block's means where they are large
    against its spread, else 0, as of any latent that rarely fires. With d = z_bar - z_0 and S the sum of squares,
    `A = S - N d d' + (1 - s) N z_bar z_bar'`.
    """

    def __init__(self, d_in: int, d_sae: int, device: torch.device | str = "cpu") -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.rows = 0.0
        self._has_offsets = False
        self.z_0 = zeros(d_sae)
        self.x_0 = zeros(d_in)
        self.sum_z = zeros(d_sae)
        self.sum_x = zeros(d_in)
        self.gram = (Gram if latents_axis().size == 1 else SharedGram)(d_sae, device)
        self.zx = zeros(d_sae, d_in)

    def add(self, z: Tensor, x: Tensor) -> None:
        """Add a block of rows: codes z, (B, F), and inputs x, (B, D)."""
        if not self.rows:
            self.z_0, self.x_0 = _offset(z).double(), _offset(x).double()
            self._has_offsets = bool(self.z_0.any() or self.x_0.any())
        if self._has_offsets:
            z, x = z - self.z_0.to(z.dtype), x - self.x_0.to(x.dtype)
        self.rows += len(z)
        self.sum_x += x.sum(0)
        non_zeros = NonZeros.of(z)
        self.sum_z += z.sum(0) if non_zeros is None else non_zeros.column_sums()
        self.gram.add(z, non_zeros)
        self.zx += z.T @ x if non_zeros is None else non_zeros.transposed_times(x)

    def fade(self, share: float, factor: float) -> None:
        """Count the rows so far for a share of what they did, and their codes as if multiplied by a factor."""
        self.rows *= share
        self.z_0 *= factor
        for sums, scale in ((self.sum_z, factor), (self.sum_x, 1.0), (self.zx, factor)):
            sums *= share * scale
        self.gram.fade(share * factor**2)

    def add_up_on_first(self) -> float:
        """Put the sums over all processes' rows into those of the first that shares them, and forget the others': what
        is added later adds to them.

        Returns:
            How many rows there are in all.

        Cost: of each other process `F^2 / 2 + F D` numbers of float64 are sent, a part of them at a time.
        """
        axis = rows_axis()
        if axis.size == 1:
            return self.rows
        self._count_from(axis.from_place(self.z_0.clone()), axis.from_place(self.x_0.clone()))
        rows = axis.add_up(torch.tensor([self.rows], dtype=torch.float64, device=self.zx.device)).item()
        self.rows = rows if axis.is_first else 0.0
        for sums in (self.sum_z, self.sum_x, self.zx):
            axis.add_up_on_first(sums)
        self.gram.add_up_on_first()
        return rows

    def _count_from(self, z_0: Tensor, x_0: Tensor) -> None:
        """Take the sums to be of z - z_0 and x - x_0 for other offsets."""
        z, x = self.z_0 - z_0, self.x_0 - x_0
        if latents_axis().any(z) or x.any():
            self.gram.add_outer(z, self.sum_z)
            self.gram.add_outer(self.sum_z + self.rows * z, z)
            self.zx.addr_(z, self.sum_x).addr_(self.sum_z + self.rows * z, x)
            self.sum_z += self.rows * z
            self.sum_x += self.rows * x
            self.z_0, self.x_0 = z_0, x_0
            self._has_offsets = bool(z_0.any() or x_0.any())

    @property
    def z_bar(self) -> Tensor:
        """Mean code, (F,)."""
        return self.z_0 + self.sum_z / self.rows

    @property
    def x_bar(self) -> Tensor:
        """Mean input, (D,)."""
        return self.x_0 + self.sum_x / self.rows

    def cross(self, centre: Tensor) -> Tensor:
        """`sum z (x - centre)'`, (F, D)."""
        about_means = torch.addr(self.zx, self.sum_z / self.rows, self.sum_x, alpha=-1)
        return about_means.addr_(self.z_bar, self.x_bar - centre, alpha=self.rows)

    def scale(self, shrink: float) -> float:
        """Mean of A's diagonal, at least 0."""
        about_mean = self.gram.diagonal() - self.sum_z.square() / self.rows
        diagonal = about_mean + (1 - shrink) * self.rows * self.z_bar.square()
        return max(latents_axis().mean(diagonal).item(), 0.0)

    def factor(self, ridge: float, shrink: float, decay: Tensor) -> Factor:
        """Factorise `A + diag(decay) + ridge I` by Cholesky; costs F^3 / 3 operations."""
        updates = [(-self.rows, self.sum_z / self.rows)]
        if shrink < 1:
            updates.append(((1 - shrink) * self.rows, self.z_bar))
        return direct(self.gram, ridge, decay, self.cross, updates)


def direct(matrix: Factorised, ridge: float, decay: Tensor, cross: Callable[[Tensor], Tensor],
           updates: Sequence[Update] = ()) -> Factor:
    """Factorise `A + diag(decay) + ridge I` in F dimensions, where A is a matrix and its updates."""
    held, raised = matrix.factorise(ridge, decay, updates, RESOLUTION)
    return Factor(matrix.solve, lambda centre: matrix.solve(cross(centre)), lambda psi: matrix.squared_norms(psi.T),
                  held, raised, matrix.condition)


def _offset(block: Tensor) -> Tensor:
    """Each column's mean where its square is more than `OFFSET` variances, else 0."""
    variance, mean = torch.var_mean(block, 0, correction=0)
    return torch.where(mean.square() > OFFSET * variance, mean, 0.0)
