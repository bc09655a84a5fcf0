"""Cholesky factors of large matrices, each in the memory of its matrix. All is float64."""

from collections.abc import Callable
from typing import Self

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, onenormest
from torch import Tensor

from ...base.errors import TrainingError
from .system import NOT_FINITE

RAISES = 15  # attempts, each with a ridge ten times larger


class Cholesky:
    """A symmetric positive definite matrix, (F, F), as `R' R`.

    Args:
        R: upper triangular.
        ridge: with which it was built.
        raised: whether a smaller ridge failed.
    """

    def __init__(self, R: Tensor, ridge: float, raised: bool) -> None:
        self._R, self.ridge, self.raised = R, ridge, raised

    @classmethod
    def of(cls, build: Callable[[float], Tensor], ridge: float) -> Self:
        """Factorise `build(ridge)`, with a larger ridge if that fails.

        Args:
            build: gives a new matrix, whose lower triangle is read and whose memory the factor takes.
            ridge: at least 0.

        Raises:
            TrainingError: the matrix is not finite, or rounding has left it such that no ridge makes it positive
                definite.

        Cost: F^3 / 3 operations per attempt.
        """
        for attempt in range(RAISES):
            R, info = build(ridge).mT, torch.empty((), dtype=torch.int32)  # column-major, as LAPACK writes it
            info = info.to(R.device)
            torch.linalg.cholesky_ex(R, upper=True, out=(R, info))
            if not info.item() and R.diagonal().isfinite().all():  # a NaN need not fail on every device
                return cls(R, ridge, attempt > 0)
            del R
            if not build(ridge).sum().isfinite():
                raise TrainingError(NOT_FINITE)
            ridge *= 10
        raise TrainingError("the decoder step cannot be solved: its matrix is not positive definite with a ridge of "
                            f"{ridge / 10:.3g}, since the codes' offset is so large against their spread that "
                            "float32 sums lose it; normalise the rows, e.g. with --normalize scale")

    def solve(self, right: Tensor) -> Tensor:
        """`(R' R)^-1` times a right side, (F, C); 2 F^2 C operations."""
        return torch.cholesky_solve(right, self._R, upper=True).contiguous()  # products with it are then faster

    def squared_norms(self, right: Tensor) -> Tensor:
        """`g' (R' R)^-1 g` of each column g of a right side, (F, C): (C,); half the operations of a solution."""
        return torch.linalg.solve_triangular(self._R.mT, right, upper=False).square().sum(0)

    def condition(self) -> float:
        """Estimate of the 1-norm condition number (Higham and Tisseur, "A Block Algorithm for Matrix 1-Norm
        Estimation", 2000), at the cost of solving for a few columns."""
        return self._norm(lambda columns: self._R.mT @ (self._R @ columns)) * self._norm(self.solve)

    def _norm(self, times: Callable[[Tensor], Tensor]) -> float:
        """Estimate of the 1-norm of a symmetric matrix given by its products."""
        side, device = len(self._R), self._R.device
        # The norm is invariant under signs; starting from ones, an eigenvector of `HeldRows`' matrix, rounding would
        # break ties.
        signs = (1.0 - 2.0 * (np.arange(side) % 2))[:, None]

        def signed(columns: np.ndarray) -> np.ndarray:
            return signs * times(torch.from_numpy(signs * columns.reshape(side, -1)).to(device)).cpu().numpy()

        operator = LinearOperator((side, side), matvec=signed, rmatvec=signed, matmat=signed, rmatmat=signed,
                                  dtype=float)
        return float(onenormest(operator, t=1))  # with t > 1, columns would be drawn at random
