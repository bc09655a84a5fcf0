"""Conjugate gradients for many right sides at once, preconditioned by the diagonal.

Shapes: F the matrix's side, C right sides.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MOST = 500  # iterations before it gives up
RESTARTS = 3  # from the true residual, where the recurrence's has drifted from it


@dataclass(frozen=True)
class Descent:
    """How an iteration ended.

    Args:
        residual: of the worst column, in the diagonal's norm, over that of its right side; computed from the solution,
            not by the recurrence.
        iterations: their number.
        condition: estimate of the preconditioned matrix's condition number.
    """

    residual: float
    iterations: int
    condition: float


def conjugate_gradient(times: Callable[[Tensor], Tensor], right: Tensor, start: Tensor, diagonal: Tensor,
                       tolerance: float) -> tuple[Tensor, Descent]:
    """Solve `A X = G` for a symmetric positive definite A that is known by its products.

    A column's residual r counts as `sqrt(r' diag^-1 r)`. Iterations go on until the worst column is below the
    tolerance; their number grows as the root of the condition number of `diag^-1/2 A diag^-1/2`, which is 1 for latents
    that never fire together, however different their rates (Saad, "Iterative Methods for Sparse Linear Systems",
    sections 6.7 and 9.2).

    Args:
        times: gives A times (F, C).
        right: G, (F, C), float64.
        start: first guess of X, (F, C).
        diagonal: A's, (F,), positive.
        tolerance: of residuals, over those of X = 0.

    Returns:
        X, (F, C), and how the iteration ended.

    Cost: a product per iteration, and one per restart.
    """
    inverse = 1 / diagonal[:, None]
    size = (right.square() * inverse).sum(0).sqrt()  # (C,)
    size = torch.where(size > 0, size, 1.0)
    solution, taken, steps = start.clone(), 0, []
    for _ in range(RESTARTS):
        residual = right - times(solution)
        scaled = inverse * residual
        square = (residual * scaled).sum(0)
        if taken >= MOST or square.sqrt().div(size).max() <= tolerance:
            break
        direction = scaled
        while taken < MOST and square.sqrt().div(size).max() > tolerance / 2:
            image = times(direction)
            step = square / _positive((direction * image).sum(0))
            solution.addcmul_(direction, step)
            residual.addcmul_(image, step, value=-1)
            scaled = inverse * residual
            before, square = square, (residual * scaled).sum(0)
            ratio = square / _positive(before)
            direction = torch.addcmul(scaled, direction, ratio)
            steps.append((step, ratio))
            taken += 1
    worst = square.sqrt().div(size)
    return solution, Descent(worst.max().item(), taken, _condition(steps, int(worst.argmax())))


def _positive(values: Tensor) -> Tensor:
    """The values, with 1 for columns that are solved already, whose steps are then 0."""
    return torch.where(values > 0, values, 1.0)


def _condition(steps: list[tuple[Tensor, Tensor]], column: int) -> float:
    """Ratio of the extreme eigenvalues of the tridiagonal matrix that a column's iterations have built (Saad, section
    6.7.3)."""
    if not steps:
        return 1.0
    alphas, betas = (torch.stack(values)[:, column].cpu().numpy() for values in zip(*steps, strict=True))
    kept = int(np.argmin(alphas > 0)) or len(alphas)
    alphas, betas = alphas[:kept], betas[: kept - 1]
    diagonal = 1 / alphas
    diagonal[1:] += betas / alphas[:-1]
    beside = np.sqrt(betas) / alphas[:-1]
    values = np.linalg.eigvalsh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
    return float(values[-1] / values[0]) if values[0] > 0 else float("inf")
