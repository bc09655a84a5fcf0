"""Normal equations without a Gram matrix: its products are made from the codes, in an iteration.

Shapes: N rows in all, B in a block, F = d_sae, D = d_in. Symbols as in the package's docstring; `shrink` is s.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..distributed import rows_axis
from ..errors import TrainingError
from ..products import NonZeros
from .gradient import Descent, conjugate_gradient
from .systems import NOT_FINITE, Factor

COLUMNS = 256  # of the right side at a time: their sums for a row of codes then stay in a core's cache
TOLERANCE = 1e-4  # of residuals; the objective is then some 1e-7 of its fall above the minimum
RESOLUTION = 1e-8  # of the mean diagonal: a smaller ridge is lost in products of float32
ENTRY_BYTES = 32  # that a code which is not zero takes: its row, column and value, by row and by column
JOINED_ROWS = 16_384  # of kept blocks: each adds to F sums


class CodeProducts:
    """Normal equations whose matrix is known by its products with vectors, made of the codes block by block.

    With y = z V - z_bar' V, `A V = sum (z - z_bar) y' + (1 - s) N z_bar (z_bar' V)`: for K codes a row that are not
    zero, 4 K D operations a row and iteration, where encoding takes 2 D F. Codes are kept where they fit; where they do
    not, every iteration encodes all rows again.

    Args:
        d_in: D.
        d_sae: F.
        again: gives the codes of all blocks again, as they were given to `add`.
        budget: bytes that the codes kept may take.
        start: a decoder near the one sought, (F, D), such as the last, of the codes' precision.
        device: where sums are held.
    """

    def __init__(self, d_in: int, d_sae: int, again: Callable[[], Iterator[Tensor]], budget: float, start: Tensor,
                 device: torch.device | str = "cpu") -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.rows = 0
        self.sum_z, self.sum_x = zeros(d_sae), zeros(d_in)
        self.squares = zeros(d_sae)
        self.zx = zeros(d_sae, d_in)
        self._again, self._room = again, budget
        self._kept: list[NonZeros | Tensor] | None = []
        self._pending: list[NonZeros] = []
        self._start = start
        self._others_stream = False

    def add(self, z: Tensor, x: Tensor) -> None:
        """Add a block of rows: codes z, (B, F), which are not written to again, and inputs x, (B, D)."""
        block = NonZeros.of(z) or z
        self.rows += len(z)
        self.sum_z += z.sum(0, dtype=torch.float64)
        self.sum_x += x.sum(0, dtype=torch.float64)
        self.squares += z.square().sum(0, dtype=torch.float64)
        self.zx += transposed_times(block, x)
        self._keep(block, z)

    def _keep(self, block: NonZeros | Tensor, z: Tensor) -> None:
        """Keep a block of codes where it fits beside those before."""
        sparse = isinstance(block, NonZeros)
        self._room -= len(block.values) * ENTRY_BYTES if sparse else z.numel() * z.element_size()
        if self._room < 0:
            self._kept = None
        if self._kept is None:
            self._pending = []
            return
        if not sparse:
            self._kept.append(z)
            return
        self._pending.append(block)
        if sum(one.shape[0] for one in self._pending) >= JOINED_ROWS:
            self._join()

    def _join(self) -> None:
        if self._pending and self._kept is not None:
            self._kept.append(NonZeros.joined(self._pending))
        self._pending = []

    @property
    def z_bar(self) -> Tensor:
        """Mean code, (F,)."""
        return self.sum_z / self.rows

    @property
    def x_bar(self) -> Tensor:
        """Mean input, (D,)."""
        return self.sum_x / self.rows

    @property
    def streams(self) -> bool:
        """Whether codes are made again in every iteration, since they did not fit, here or in another process."""
        return self._kept is None or self._others_stream

    def add_up_on_first(self) -> float:
        """Put the sums over all processes' rows into those of the first, which solves; the others then `serve` it.

        Returns:
            How many rows there are in all.
        """
        if rows_axis().size == 1:
            return self.rows
        counts = rows_axis().add_up(torch.tensor([self.rows, int(self._kept is None)]))
        self.rows, self._others_stream = int(counts[0]), bool(counts[1])
        for sums in (self.sum_z, self.sum_x, self.squares, self.zx):
            rows_axis().add_up_on_first(sums)
        return self.rows

    def serve(self) -> None:
        """In another process than the first: multiply by the codes that are here, as often as it asks."""
        self._join()
        while columns := int(rows_axis().from_place(torch.zeros(1, dtype=torch.int64))):
            asked = rows_axis().from_place(self._start.new_empty(len(self._start) + 1, columns))
            self._products(asked[:-1], asked[-1])

    def dismiss(self) -> None:
        """In the first process: end what the others do in `serve`."""
        rows_axis().from_place(torch.zeros(1, dtype=torch.int64))

    def cross(self, centre: Tensor) -> Tensor:
        """`sum z (x - centre)'`, (F, D)."""
        return torch.addr(self.zx, self.sum_z, centre, alpha=-1)

    def scale(self, shrink: float) -> float:
        """Mean of A's diagonal, at least 0."""
        return max(self._diagonal(shrink).mean().item(), 0.0)

    def factor(self, ridge: float, shrink: float, decay: Tensor) -> Factor:
        """Nothing is factorised: every solution is an iteration, the decoder's from `start` or from the one before.

        Cost: of a solution of C columns, some 30 to 100 products, of 4 N K C operations where K codes of a row are not
        zero.
        """
        held = max(ridge, RESOLUTION * (self.scale(shrink) or 1.0))
        added = decay + held  # (F,)
        diagonal = self._diagonal(shrink).clamp(min=0) + added
        found: list[Descent] = []
        self._join()

        def matrix_times(V: Tensor) -> Tensor:
            return self._times(V, shrink).addcmul_(added[:, None], V)

        def solve(right: Tensor, start: Tensor | None = None) -> Tensor:
            width = right.shape[1] if self.streams else COLUMNS
            solution = torch.empty_like(right)
            for columns in torch.arange(right.shape[1], device=right.device).split(width):
                some = slice(int(columns[0]), int(columns[-1]) + 1)
                begin = right[:, some] / diagonal[:, None] if start is None else start[:, some].double()
                descent = conjugate_gradient(matrix_times, right[:, some], begin, diagonal, TOLERANCE)
                if not math.isfinite(descent.residual):
                    raise TrainingError(NOT_FINITE)
                solution[:, some] = descent.solution
                found.append(replace(descent, solution=None))
            return solution

        def solve_cross(centre: Tensor) -> Tensor:
            solution = solve(self.cross(centre), self._start)
            self._start = solution.to(self._start.dtype)
            return solution

        return Factor(solve, solve_cross, lambda psi: (psi.T * solve(psi.T)).sum(0), held, False,
                      lambda: max(one.condition for one in found), residual=lambda: max(one.residual for one in found))

    def _diagonal(self, shrink: float) -> Tensor:
        return self.squares - shrink * self.rows * self.z_bar.square()

    def _times(self, V: Tensor, shrink: float) -> Tensor:
        """`A V`, in products of the codes' precision and sums of float64."""
        z_bar = self.z_bar
        apart = z_bar @ V  # (C,)
        asked = torch.cat([V, apart[None]]).to(self._start.dtype)
        rows_axis().from_place(torch.tensor([V.shape[1]]))
        rows_axis().from_place(asked)
        total, sums = self._products(asked[:-1], asked[-1])
        return total.addr_(z_bar, (1 - shrink) * self.rows * apart - sums)

    def _products(self, narrow: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """`sum z y'`, (F, C), and `sum y`, (C,), float64, for `y = z V - offset` of all rows, on the first process."""
        both = self.zx.new_zeros(len(narrow) + 1, narrow.shape[1])
        total, sums = both[:-1], both[-1]
        for block in self._blocks():
            y = times(block, narrow) - offset
            total += transposed_times(block, y)
            sums += y.sum(0, dtype=torch.float64)
        rows_axis().add_up_on_first(both)
        return total, sums

    def _blocks(self) -> Iterator[NonZeros | Tensor]:
        return iter(self._kept) if self._kept is not None else (NonZeros.of(z) or z for z in self._again())


def times(block: NonZeros | Tensor, right: Tensor) -> Tensor:
    """The block times (F, C)."""
    return block.times(right) if isinstance(block, NonZeros) else block @ right


def transposed_times(block: NonZeros | Tensor, right: Tensor) -> Tensor:
    """The block, transposed, times (B, C)."""
    return block.transposed_times(right) if isinstance(block, NonZeros) else block.T @ right


def iterative_memory(d_in: int, d_sae: int, streams: bool) -> int:
    """Bytes that a decoder step takes at its peak without a Gram matrix, the codes kept left out.

    Some F x D matrices of float64, and the iteration's vectors, six of F for every column that is worked on at a time:
    all D of them where codes are streamed.
    """
    return 8 * d_sae * (6 * d_in + 6 * (d_in if streams else min(COLUMNS, d_in)))
