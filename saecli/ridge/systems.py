"""The normal equations of a decoder step, held as summed moments or, where rows are few, as the rows.

Shapes: N rows in all, B in a block, F = d_sae, D = d_in. Sums and factors are float64. Symbols as in the
package's docstring; `shrink` is s.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from scipy.linalg.lapack import dpocon
from torch import Tensor

from ..errors import TrainingError
from ..products import NonZeros

GRAM_COLUMNS = 256  # of the Gram matrix at a time, of which what lies above the diagonal is left out
PAIRS_SHARE = 0.2  # pairs of non-zeros, of the Gram matrix' entries, up to which their products are added one by one
RESOLUTION = 1e-13  # of a matrix' mean diagonal: a smaller ridge is lost in float64's rounding
WOODBURY_RESOLUTION = 1e-9  # the same where the solution is a difference divided by the ridge
DIRECT_SHARE = 0.5  # rows a latent from which on F dimensions cost less than N, of which a solve needs two products
OFFSET = 100  # times a code's or an input's variance that its squared mean must exceed for sums to be taken from it
RAISES = 15  # how often a ridge that fails is raised tenfold before giving up


@dataclass(frozen=True)
class Factor:
    """A factorised `A + diag(decay) + ridge I`.

    Args:
        solve: maps G, (F, *), to `(A + diag(decay) + ridge I)^-1 G`.
        solve_cross: maps a centre, (D,), to the same of `sum z (x - centre)'`, (F, D).
        quadratic: maps rows psi, (n, F), to `psi_i' (A + diag(decay) + ridge I)^-1 psi_i`, (n,).
        ridge: the ridge it holds for.
        raised: whether that is more than was asked for, or than float64 resolves, since less did not factorise.
        condition: estimates the 1-norm condition number of the matrix factorised; it copies the factor to the host.
        alpha: the part of the ridge that is not mu, filled in by `solve.factor`: a difference would lose it to a
            large mu.
        own_slack: gives `1 - psi_i' (A + diag(decay) + ridge I)^-1 psi_i` of all the system's own rows, (N,), where
            that is to be had without the difference, which a small ridge cancels.
        own_solve: the same of the rows of an index, (m,), and `(A + diag(decay) + ridge I)^-1 psi_i`, (F, m), first;
            at hand where `own_slack` is.
    """

    solve: Callable[[Tensor], Tensor]
    solve_cross: Callable[[Tensor], Tensor]
    quadratic: Callable[[Tensor], Tensor]
    ridge: float
    raised: bool
    condition: Callable[[], float]
    alpha: float = 0.0
    own_slack: Callable[[], Tensor] | None = None
    own_solve: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None


class System(Protocol):
    """The normal equations of one decoder step, however they are held."""

    rows: int

    @property
    def z_bar(self) -> Tensor:
        """Mean code, (F,)."""

    @property
    def x_bar(self) -> Tensor:
        """Mean input, (D,)."""

    def cross(self, centre: Tensor) -> Tensor:
        """`sum z (x - centre)'`, (F, D), for a centre of shape (D,)."""

    def scale(self, shrink: float) -> float:
        """Mean of A's diagonal, at least 0, which ridges are compared with."""

    def factor(self, ridge: float, shrink: float, decay: Tensor) -> Factor:
        """Factorise `A + diag(decay) + ridge I`, for a decay of shape (F,), nowhere negative.

        Raises:
            TrainingError: it is not finite, or rounding has left it such that no ridge makes it positive definite.
        """


class Moments:
    """Normal equations summed over any number of rows.

    Blocks are multiplied in their own precision and summed in float64. Cost of a row: `F^2 + 2 D F` operations where
    codes are dense; `K^2 + 2 D K`, or `2 F K + 2 D K`, where K of them are not zero. Memory: see `memory_needed`.
    `zz` holds what is summed on and below its diagonal; the rest is filled in by `factor`.

    Sums are of z - z_0 and x - x_0, so that offsets do not cancel: the first block's means where they are large
    against its spread, else 0, as of any latent that rarely fires. With d = z_bar - z_0 and S the sum of squares,
    `A = S - N d d' + (1 - s) N z_bar z_bar'`.
    """

    def __init__(self, d_in: int, d_sae: int, device: torch.device | str = "cpu") -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.rows = 0
        self._has_offsets = False
        self.z_0 = zeros(d_sae)
        self.x_0 = zeros(d_in)
        self.sum_z = zeros(d_sae)
        self.sum_x = zeros(d_in)
        self.zz = zeros(d_sae, d_sae)
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
        if non_zeros is None:
            self.sum_z += z.sum(0)
            for begin in range(0, len(self.zz), GRAM_COLUMNS):
                end = begin + GRAM_COLUMNS
                self.zz[begin:end, :end] += z[:, begin:end].T @ z[:, :end]
            self.zx += z.T @ x
            return
        self.sum_z += non_zeros.column_sums()
        if non_zeros.pairs <= PAIRS_SHARE * self.zz.numel():
            non_zeros.add_gram(self.zz)
        else:
            self.zz += non_zeros.transposed_times(z)
        self.zx += non_zeros.transposed_times(x)

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
        about_mean = self.zz.diagonal() - self.sum_z.square() / self.rows
        return max((about_mean + (1 - shrink) * self.rows * self.z_bar.square()).mean().item(), 0.0)

    def factor(self, ridge: float, shrink: float, decay: Tensor) -> Factor:
        """Factorise `A + diag(decay) + ridge I` by Cholesky; costs F^3 / 3 operations."""
        _mirror(self.zz)
        apart = self.sum_z / self.rows
        matrix = torch.addr(self.zz, apart, apart, alpha=-self.rows)
        if shrink < 1:
            matrix.addr_(self.z_bar, self.z_bar, alpha=(1 - shrink) * self.rows)
        return _direct(matrix, ridge, decay, self.cross)


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
        self._kept: tuple[float, Tensor, Tensor] | None = None

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
            return _direct(gram.clone(), held, decay, self.cross)
        weight = (held / (decay + held))[:, None]  # r E^-1, (F, 1)
        inner = (centred * weight.T) @ centred.T if decay.any() else gram.clone()
        lower, added, raised, condition = _cholesky(inner, held, 0.0)
        if raised:
            return replace(self.factor(added, shrink, decay), raised=True)

        def solve(g: Tensor) -> Tensor:
            scaled = weight * g
            return (scaled - weight * (centred.T @ torch.cholesky_solve(centred @ scaled, lower))) / held

        def solve_cross(centre: Tensor) -> Tensor:
            # With sum z (x - centre)' = Z_h' Y nothing cancels. A shrink of 1 has the mean input for its centre.
            apart = self.x - centre
            if shrink < 1:
                apart += ((1 - shrink) ** -0.5 - 1) * apart.mean(0)
            return weight * (centred.T @ torch.cholesky_solve(apart, lower))

        def quadratic(psi: Tensor) -> Tensor:
            scaled = weight * psi.T
            return ((scaled * psi.T).sum(0) - _squared_norms(lower, centred @ scaled)) / held

        def own_slack() -> Tensor:
            return held * torch.cholesky_inverse(lower).diagonal()

        def own_solve(index: Tensor) -> tuple[Tensor, Tensor]:
            columns = torch.arange(len(index), device=index.device)
            chosen = lower.new_zeros(self.rows, len(index))
            chosen[index, columns] = 1
            inverse = torch.cholesky_solve(chosen, lower)
            return weight * (centred.T @ inverse), held * inverse[index, columns]

        factored = Factor(solve, solve_cross, quadratic, held, False, condition)
        return replace(factored, own_slack=own_slack, own_solve=own_solve) if shrink == 1 else factored

    @property
    def _direct(self) -> bool:
        return self.rows > DIRECT_SHARE * self.z.shape[1]

    def _products(self, shrink: float) -> tuple[Tensor, Tensor]:
        """Z_h, and A or Z_h Z_h', whichever is factorised; kept for the other ridges of this decoder step."""
        if self._kept is None or self._kept[0] != shrink:
            centred = self.z - (1 - (1 - shrink) ** 0.5) * self.z_bar  # gives A for every shrink in [0, 1]
            self._kept = shrink, centred, centred.T @ centred if self._direct else centred @ centred.T
        return self._kept[1:]


def memory_needed(rows: int, d_in: int, d_sae: int) -> int:
    """Bytes that a decoder step takes at its peak.

    `Moments` holds the Gram matrix, a copy with the ridge, its factor and the norm's workspace, all float64;
    `HeldRows` holds codes, their centred copies and products, and as many matrices of N x N or F x F. Both hold some
    F x D ones.
    """
    cross = 8 * 8 * d_in * d_sae
    if rows < d_sae:
        side = d_sae if rows > DIRECT_SHARE * d_sae else rows
        return 8 * (rows * (5 * d_sae + d_in) + 4 * side * side) + cross
    return 4 * 8 * d_sae * d_sae + cross


def _direct(matrix: Tensor, ridge: float, decay: Tensor, cross: Callable[[Tensor], Tensor]) -> Factor:
    """Factorise `matrix + diag(decay) + ridge I`; spoils the matrix."""
    matrix.diagonal().add_(decay)
    lower, held, raised, condition = _cholesky(matrix, ridge, RESOLUTION)

    def solve(g: Tensor) -> Tensor:
        return torch.cholesky_solve(g, lower)

    return Factor(solve, lambda centre: solve(cross(centre)), lambda psi: _squared_norms(lower, psi.T),
                  held, raised, condition)


def _cholesky(matrix: Tensor, ridge: float, resolution: float) -> tuple[Tensor, float, bool, Callable[[], float]]:
    """The lower factor of `matrix + ridge I`, the ridge it took, whether that was raised, and what estimates the
    condition; spoils the matrix."""
    least = resolution * (matrix.diagonal().abs().mean().item() or 1.0)
    added = 0.0
    ridge = max(ridge, least)
    for attempt in range(RAISES):
        matrix.diagonal().add_(ridge - added)
        added = ridge
        lower, info = torch.linalg.cholesky_ex(matrix)
        if info.item() == 0 and lower.diagonal().isfinite().all():  # a NaN need not fail on every device
            return lower, ridge, attempt > 0, partial(_condition, lower, torch.linalg.matrix_norm(matrix, 1))
        if not matrix.isfinite().all():
            raise TrainingError("the decoder step cannot be solved: the codes, or their products, are not finite; "
                                "lower --lr")
        ridge *= 10
    raise TrainingError(f"the decoder step cannot be solved: its matrix is not positive definite with a ridge of "
                        f"{added:.3g}, since the codes' offset is so large against their spread that float32 sums "
                        f"lose it; normalise the rows, e.g. with --normalize scale")


def _mirror(matrix: Tensor) -> None:
    """Fill in what lies above the diagonal of a symmetric matrix, a few columns at a time."""
    for begin in range(0, len(matrix), GRAM_COLUMNS):
        end = begin + GRAM_COLUMNS
        corner = matrix[begin:end, begin:end]
        corner.copy_(corner.tril() + corner.tril(-1).T)
        matrix[:begin, begin:end] = matrix[begin:end, :begin].T


def _condition(lower: Tensor, norm: Tensor) -> float:
    """Estimate of the 1-norm condition number of L L', whose 1-norm is at hand; on the host."""
    reciprocal, _ = dpocon(lower.cpu().numpy().T, norm.item(), uplo="U")
    return 1 / reciprocal if reciprocal > 0 else float("inf")


def _offset(block: Tensor) -> Tensor:
    """Each column's mean where its square is more than `OFFSET` variances, else 0."""
    variance, mean = torch.var_mean(block, 0, correction=0)
    return torch.where(mean.square() > OFFSET * variance, mean, 0.0)


def _squared_norms(lower: Tensor, right: Tensor) -> Tensor:
    """`g' (L L')^-1 g` of each column g of the right side: half the work of solving for it."""
    return torch.linalg.solve_triangular(lower, right, upper=False).square().sum(0)
