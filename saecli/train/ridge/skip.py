"""The affine skip of a transcoder, solved for exactly together with the decoder.

Over (W, S, b) the squared error is `||z W + x S + b - y||^2`. The system has the targets (y, x) side by side, so that
one factorisation M gives both `M C_y` and `P = M C_x`. With the rows' own blocks, centred like C,

    A_xx = sum x x' - N x_bar (s x_bar)'        A_xy = sum x y' - N x_bar (s y_bar + t b_t)'

W follows S, `W = M (C_y + alpha T) - P S`, and S solves what is left, K its Schur complement:

    K = A_xx - C_x' P        S = K^-1 (A_xy - C_x' M (C_y + alpha T))

Shapes: B rows in a block, F = d_sae, D skipped dimensions, E targets proper. All float64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

RIDGE = 1e-9  # over A_xx's mean diagonal: dimensions of x that codes explain, or that never vary, get no skip


class SkipSums:
    """The sums of the rows' own blocks.

    Args:
        d_skip: D.
        d_out: E.
        device: of the sums.
    """

    def __init__(self, d_skip: int, d_out: int, device: torch.device) -> None:
        self.d_out = d_out
        self._sums = torch.zeros(d_skip, d_skip + d_out, dtype=torch.float64, device=device)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add a block of rows, (B, D), and their targets, (B, E)."""
        self._sums += x.double().T @ torch.cat([x, y], 1).double()

    def reduce(self, all_reduce: Callable[[Tensor], Tensor]) -> None:
        """All-reduce the sums in place."""
        self._sums.copy_(all_reduce(self._sums))

    def blocks(self, rows: float, x_bar: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
        """A_xx, (D, D), and A_xy, (D, E), for N rows of mean `x_bar`, (D,), and a centre of (y, x), (E + D,)."""
        E = self.d_out
        centred = self._sums - rows * torch.outer(x_bar, torch.cat([centre[E:], centre[:E]]))
        return centred[:, :len(x_bar)], centred[:, len(x_bar):]


@dataclass(frozen=True)
class Elimination:
    """The skip eliminated from W's equations.

    Args:
        P: (F, D).
        C: C_x, (F, D).
        factor: Cholesky factor of K, (D, D).
    """

    P: Tensor
    C: Tensor
    factor: Tensor

    @classmethod
    def of(cls, P: Tensor, C: Tensor, A_xx: Tensor) -> Self:
        """For the solution P = M C_x."""
        K = A_xx - C.T @ P
        K = (K + K.T) / 2
        ridge = RIDGE * max(A_xx.diagonal().mean().item(), torch.finfo(torch.float64).tiny)
        factor, failed = torch.linalg.cholesky_ex(K + ridge * torch.eye(len(K)).to(K))
        while failed:  # rounding, where codes explain some of x exactly
            ridge *= 10
            factor, failed = torch.linalg.cholesky_ex(K + ridge * torch.eye(len(K)).to(K))
        return cls(P, C, factor)

    def skip(self, W: Tensor, A_xy: Tensor | None = None) -> Tensor:
        """`K^-1 (A_xy - C_x' W)`, (D, E), for a solution without the skip, (F, E); A_xy is 0 if it is None."""
        right = -self.C.T @ W
        return torch.cholesky_solve(right if A_xy is None else right + A_xy, self.factor)

    def inverse_diagonal(self) -> Tensor:
        """What the skip adds to the diagonal of M, (F,): that of `P K^-1 P'`."""
        return torch.linalg.solve_triangular(self.factor, self.P.T, upper=False).square().sum(0)

    def __call__(self, W: Tensor, A_xy: Tensor | None = None) -> Tensor:
        """The solution with the skip, (F, E), from that without it."""
        return W - self.P @ self.skip(W, A_xy)
