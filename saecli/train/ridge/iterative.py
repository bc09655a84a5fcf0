"""Normal equations without a Gram matrix: conjugate gradients with products computed from the codes.

N rows, B in a block; F = d_sae, E targets, C columns of a right side; `shrink` is s.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...base.errors import TrainingError
from ...sae.codes import Codes, Prefixes, SparseCodes, joined
from .sums import BlockSums
from .system import NOT_FINITE, AllReduce, Factorisation, Inverse, Ridge, random_signs, reduced

MOST_ITERATIONS = 500
TOLERANCE = 1e-4  # of residuals; the objective is then some 1e-7 of its decrease above the minimum
# Columns of the right side at a time: the sums for a row of codes then stay in a core's cache.
SOLVED_COLUMNS = 256


def conjugate_gradient(
    times: Callable[[Tensor], Tensor],
    right: Tensor,
    start: Tensor,
    diagonal: Tensor,
    tolerance: float,
) -> tuple[Tensor, float]:
    """Solve `A X = G`, (F, C), for a symmetric positive definite A, given by its products and diagonal; X, and the
    residual of the worst column, `sqrt(r' diag^-1 r)`, over its right side's; it ends below the tolerance.

    Iterations grow as the root of the condition number of `diag^-1/2 A diag^-1/2`, which is 1 for latents that never
    fire together (Saad, "Iterative Methods for Sparse Linear Systems", 6.7 and 9.2).
    """
    inverse = 1 / diagonal[:, None]
    size = (right.square() * inverse).sum(0).sqrt()  # (C,)
    size = torch.where(size > 0, size, 1.0)
    solution = start.clone()
    iterations = 0
    for _ in range(3):  # again from the true residual, from which the recurrence drifts
        residual = right - times(solution)
        scaled = inverse * residual
        square = (residual * scaled).sum(0)
        if square.sqrt().div(size).max() <= tolerance:
            break
        direction = scaled
        while iterations < MOST_ITERATIONS and square.sqrt().div(size).max() > tolerance / 2:
            image = times(direction)
            step = square / _positive((direction * image).sum(0))
            solution.addcmul_(direction, step)
            residual.addcmul_(image, step, value=-1)
            scaled = inverse * residual
            square_before, square = square, (residual * scaled).sum(0)
            direction = torch.addcmul(scaled, direction, square / _positive(square_before))
            iterations += 1
    return solution, square.sqrt().div(size).max().item()


def _positive(values: Tensor) -> Tensor:
    """1 for columns already solved, whose steps are then 0."""
    return torch.where(values > 0, values, 1.0)


class StreamedCodes(BlockSums):
    """Normal equations whose matrix is given by its products, computed from the codes block by block.

    With v = z V - u' V, z being the codes of one prefix, `A V = mean_l sum (z - u) v' + (1 - s) N u (u' V)`: for K
    entries per row, 4 K C operations per row and iteration. Codes of more than `budget` bytes come from `reread` in
    each iteration; the first starts at the decoder `start`, (F, E).
    """

    def __init__(
        self,
        start: Tensor,
        reread: Callable[[], Iterator[Codes]],
        budget: float,
        prefixes: Prefixes = (),
    ) -> None:
        d_sae, d_out = start.shape
        super().__init__(d_sae, d_out, start.device, prefixes)
        self.squares = torch.zeros_like(self.sum_z)
        self.start = start
        # Whether codes did not fit, in any process, and every iteration encodes again.
        self.streams = False
        self._reread, self._room = reread, budget
        self._kept: list[Codes] | None = []
        self._all_reduce: AllReduce = lambda tensor: tensor

    def add(self, codes: Codes, y: Tensor) -> None:
        codes = codes.compact()
        super().add(codes, y)
        self.squares += codes.squares()
        self._room -= codes.bytes()
        if self._room < 0:
            self.streams, self._kept = True, None
        if self._kept is None:
            return
        last = self._kept[-1] if self._kept else None
        if (
            isinstance(last, SparseCodes)
            and isinstance(codes, SparseCodes)
            and last.shape[0] < 12_000
        ):
            # Each block adds to F sums in each product.
            self._kept[-1] = joined([last, codes])
        else:
            self._kept.append(codes)

    def reduce(self, all_reduce: AllReduce) -> None:
        """The sums, and later every product: processes solve for the same right sides in the same order."""
        self._all_reduce = all_reduce
        streams = self.count.new_tensor([self.streams])
        reduced([self.count, self.sum_z, self.sum_y, self.squares, self.zy, streams], all_reduce)
        self.streams = bool(streams)

    def cross(self, centre: Tensor) -> Tensor:
        return torch.addr(self.zy, self.sum_z, centre, alpha=-1).mul_(self._membership[..., None])

    def diagonal(self, shrink: float) -> Tensor:
        return self._membership * self.squares - shrink * self.count * self.u.square()

    def _factorise(self, ridge: Ridge, shrink: float, decay: Tensor) -> "Iterative":
        least = 1e-8 * (self.scale(shrink) or 1.0)  # less is lost in float32 products
        return Iterative(self, ridge.raised_to(max(ridge.total, least)), shrink, decay)

    def times(self, V: Tensor, shrink: float) -> Tensor:
        """`A V`, (F, C): products in the codes' precision, sums in float64."""
        u = self.u
        mean = u @ V  # (C,)
        narrow_V, narrow_mean = V.to(self.start.dtype), mean.to(self.start.dtype)
        sums = V.new_zeros(len(V) + 1, V.shape[1])  # of z v', and of v
        for codes in self._reread() if self._kept is None else self._kept:
            v = codes.prefix_times(narrow_V, self.prefixes) - narrow_mean  # (B, L, C)
            sums[:-1] += codes.prefix_transposed_times(v, self.prefixes)
            sums[-1] += v.sum((0, 1), dtype=torch.float64)
        sums = self._all_reduce(sums) / max(1, len(self.prefixes))
        return sums[:-1].addr_(u, (1 - shrink) * self.count * mean - sums[-1])


class Iterative(Factorisation):
    def __init__(self, system: StreamedCodes, ridge: Ridge, shrink: float, decay: Tensor) -> None:
        super().__init__(system, ridge, raised=False)
        self._codes, self._shrink = system, shrink
        self._added = decay + ridge.total  # (F,)
        self._diagonal = system.diagonal(shrink).clamp(min=0) + self._added
        self._residuals: list[float] = []

    def solve(self, right: Tensor) -> Tensor:
        """Some 30 to 100 products, each of 4 N K C operations for K entries per row."""
        return self._solve(right, None)

    def solve_cross(self, centre: Tensor) -> Tensor:
        return self._solve(self._codes.cross(centre), self._codes.start)

    def inverse(self) -> Inverse:
        """Its diagonal is estimated, `E v * M v` over random signs v, to some 20% for a latent with a copy.

        Source: Bekas, Kokiopoulou and Saad, "An estimator for the diagonal of a matrix" (2007).
        """
        signs = random_signs(len(self._diagonal)).to(self._diagonal)
        estimate = (signs * self.solve(signs)).mean(1)
        return Inverse(estimate.maximum(1 / self._diagonal), self._block)

    def residual(self) -> float:
        return max(self._residuals, default=math.nan)

    def _solve(self, right: Tensor, start: Tensor | None) -> Tensor:
        def times(V: Tensor) -> Tensor:
            return self._codes.times(V, self._shrink).addcmul_(self._added[:, None], V)

        width = right.shape[1] if self._codes.streams else SOLVED_COLUMNS
        solution = torch.empty_like(right)
        for begin in range(0, right.shape[1], width):
            columns = slice(begin, begin + width)
            G = right[:, columns]
            guess = G / self._diagonal[:, None] if start is None else start[:, columns].double()
            solution[:, columns], residual = conjugate_gradient(
                times, G, guess, self._diagonal, TOLERANCE
            )
            if not math.isfinite(residual):
                raise TrainingError(NOT_FINITE)
            self._residuals.append(residual)
        return solution
