"""Cholesky factorisation of a large symmetric matrix within the matrix' own memory.

    A + diag(d) + sum_k w_k u_k u_k' = R' R

with A_ij times the weight of the later of its two rows, if rows have weights. A is stored on and below the diagonal of
an array (F, F + 1), R on and above it, one column to the right: neither is stored twice, and A stays intact for another
factorisation with another diagonal. Panels of rows are taken from A in turn: the contribution of earlier panels is
subtracted, and the rest solved with the Cholesky factor of the panel's diagonal block (Golub and Van Loan, "Matrix
Computations", section 4.2). Nearly all of the work is matrix products, as fast as LAPACK's.

Shapes: F the matrix' side, p a panel's rows, C columns. All is float64.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, onenormest
from torch import Tensor

from ...base.errors import TrainingError
from .system import NOT_FINITE

PANEL = 256  # rows
RAISES = 15  # attempts, each with a ridge ten times larger

Update = tuple[float, Tensor]  # w and u, (F,), of a term w u u'


class Cholesky:
    """A symmetric matrix A, and the Cholesky factor of A with something added.

    Args:
        side: F.
        device: of the array.
        weights: of rows, (F,), positive and not increasing; None for 1.

    Attributes:
        matrix: A on and below the diagonal, (F, F); the entries above it belong to the factor.

    Memory: 8 F (F + 1) bytes.
    """

    def __init__(self, side: int, device: torch.device | str = "cpu", weights: Tensor | None = None) -> None:
        self._weights = weights
        both = torch.zeros(side, side + 1, dtype=torch.float64, device=device)
        self.matrix = both[:, :-1]
        self._factor = both[:, 1:]  # R; below the diagonal stands A
        self._norm = 0.0  # the 1-norm of what was factorised

    @classmethod
    def of(cls, left: Tensor, right: Tensor) -> "Cholesky":
        """Holds the product of (F, n) and (n, F), which must be symmetric."""
        held = cls(len(left), left.device)
        held.matrix.addmm_(left, right)
        return held

    def factorise(self, ridge: float, diagonal: Tensor, updates: Sequence[Update] = (),
                  resolution: float = 0.0) -> tuple[float, bool]:
        """Factorise `A + diag(diagonal) + ridge I + sum w u u'`, with a larger ridge if that fails.

        Args:
            ridge: at least 0.
            diagonal: (F,).
            updates: further terms.
            resolution: the least ridge, as a fraction of the mean diagonal without it.

        Returns:
            The ridge that succeeded, and whether a smaller one failed.

        Raises:
            TrainingError: the matrix is not finite, or rounding has left it such that no ridge makes it positive
                definite.

        Cost: F^3 / 3 operations per attempt.
        """
        diagonal = diagonal + sum((weight * vector.square() for weight, vector in updates), start=0.0)
        mean = (self._diagonal() + diagonal).abs().mean().item()
        ridge = max(ridge, resolution * (mean or 1.0))
        for attempt in range(RAISES):
            if self._factorised(diagonal + ridge, updates):
                return ridge, attempt > 0
            if not np.isfinite(self._norm):
                raise TrainingError(NOT_FINITE)
            ridge *= 10
        raise TrainingError("the decoder step cannot be solved: its matrix is not positive definite with a ridge of "
                            f"{ridge / 10:.3g}, since the codes' offset is so large against their spread that "
                            "float32 sums lose it; normalise the rows, e.g. with --normalize scale")

    def _factorised(self, diagonal: Tensor, updates: Sequence[Update]) -> bool:
        """Compute the factor of `A + diag(diagonal) + sum w u u'`, with the updates' diagonal already in `diagonal`,
        and the matrix' 1-norm; False if it is not positive definite."""
        R, sums, whole = self._factor, torch.zeros_like(diagonal), True
        for begin, end in self._panels():
            panel = self.matrix[begin:, begin:end].T.clone()  # (p, F - begin)
            if self._weights is not None:
                panel *= self._weights[begin:]
            own = panel[:, : end - begin]
            own.copy_(own.triu() + own.triu(1).T)
            for weight, vector in updates:
                panel.addr_(vector[begin:end], vector[begin:], alpha=weight)
            own.diagonal().copy_(self._diagonal()[begin:end] + diagonal[begin:end])
            sizes = panel.abs()
            sums[begin:end] += sizes.sum(1)
            sums[end:] += sizes[:, end - begin :].sum(0)
            if not whole:
                continue  # to complete the norm, which shows a matrix that is not finite
            panel.addmm_(R[:begin, begin:end].T, R[:begin, begin:], alpha=-1)
            corner, info = torch.linalg.cholesky_ex(own)
            whole = info.item() == 0 and bool(corner.diagonal().isfinite().all())  # a NaN need not fail on every device
            rows = torch.linalg.solve_triangular(corner, panel, upper=False)
            upper = torch.ones_like(own, dtype=torch.bool).triu()
            R[begin:end, begin:end] = torch.where(upper, corner.T, R[begin:end, begin:end])
            R[begin:end, end:] = rows[:, end - begin :]
        self._norm = sums.max().item() if sums.isfinite().all() else float("nan")
        return whole

    def solve(self, right: Tensor) -> Tensor:
        """`(R' R)^-1` times a right side, (F, C); 2 F^2 C operations."""
        solution = self._forward(right.clone())
        for begin, end in reversed(list(self._panels())):
            solution[begin:end].addmm_(self._factor[begin:end, end:], solution[end:], alpha=-1)
            solution[begin:end] = torch.linalg.solve_triangular(self._corner(begin, end), solution[begin:end],
                                                                upper=True)
        return solution

    def squared_norms(self, right: Tensor) -> Tensor:
        """`g' (R' R)^-1 g` of each column g of a right side, (F, C): (C,); half the operations of a solution."""
        return self._forward(right.clone()).square().sum(0)

    def condition(self) -> float:
        """Estimate of the factorised matrix' 1-norm condition number (Higham and Tisseur, "A Block Algorithm for Matrix
        1-Norm Estimation", 2000), at the cost of solving for a few columns."""
        side, device = len(self.matrix), self.matrix.device
        # The norm is invariant under signs; starting from ones, an eigenvector of `HeldRows`' matrix, rounding would
        # break ties.
        signs = (1.0 - 2.0 * (np.arange(side) % 2))[:, None]

        def times(columns: np.ndarray) -> np.ndarray:
            return signs * self.solve(torch.from_numpy(signs * columns.reshape(side, -1)).to(device)).cpu().numpy()

        inverse = LinearOperator((side, side), matvec=times, rmatvec=times, matmat=times, rmatmat=times, dtype=float)
        return self._norm * float(onenormest(inverse, t=1))  # with t > 1, columns would be drawn at random

    def _forward(self, right: Tensor) -> Tensor:
        """`R'^-1` times a right side, in place."""
        for begin, end in self._panels():
            right[begin:end].addmm_(self._factor[:begin, begin:end].T, right[:begin], alpha=-1)
            right[begin:end] = torch.linalg.solve_triangular(self._corner(begin, end).T, right[begin:end], upper=False)
        return right

    def _diagonal(self) -> Tensor:
        """The weighted matrix' diagonal, (F,)."""
        return self.matrix.diagonal() if self._weights is None else self._weights * self.matrix.diagonal()

    def _corner(self, begin: int, end: int) -> Tensor:
        return self._factor[begin:end, begin:end].triu()

    def _panels(self) -> Iterator[tuple[int, int]]:
        """Where each panel begins and ends."""
        side = len(self._factor)
        return ((begin, min(begin + PANEL, side)) for begin in range(0, side, PANEL))
