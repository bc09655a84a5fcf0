"""The Gram matrix of codes where several processes share the latents: each has the columns of its own.

Latents are eliminated panel by panel, one panel of each process in turn, so that all have work to the end. A process
keeps, of each of its panels, the rows from the panel's own on, and hands the panel round once it is factorised; all
then subtract what it contributes from what they have left. To solve, right sides change hands, so that each process
has all rows of some columns: it solves for those while the panels are handed round once more each way. Nowhere is the
matrix, or its factor, whole (Golub and Van Loan, "Matrix Computations", section 4.2 for the outer-product form).

Shapes: B rows in a block, F latents of each process, P processes, p a panel's columns, S = F P latents of all. Rows
called ordered are in the order of elimination. All sums are float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributed import latents_axis, rows_axis
from ..products import NonZeros
from .cholesky import Factorised, Update, panels


@dataclass(frozen=True)
class Panel:
    """Some columns of the matrix.

    Args:
        place: whose they are.
        begin: the first of them among its owner's.
        end: the one after the last.
        start: the first of them in the order of elimination.
    """

    place: int
    begin: int
    end: int
    start: int

    @property
    def width(self) -> int:
        """p."""
        return self.end - self.begin

    @property
    def stop(self) -> int:
        """The one after its last in the order of elimination."""
        return self.start + self.width


class SharedGram(Factorised):
    """`sum z z'`, and a factor of it with something added.

    Args:
        side: F.
        device: where it is held.

    Memory of each process: about 8 F S bytes, half for the matrix and half for the factor.
    """

    def __init__(self, side: int, device: torch.device | str = "cpu") -> None:
        super().__init__(latents_axis())
        self._side, self._device = side, device
        self._order: list[Panel] = []
        for begin, end in panels(side):
            for place in range(self.axis.size):
                start = self._order[-1].stop if self._order else 0
                self._order.append(Panel(place, begin, end, start))
        self._matrix = {panel: self._empty(panel).zero_() for panel in self._order if panel.place == self.axis.place}
        self._factor: dict[Panel, Tensor] = {}  # of the own panels, as the matrix

    def add(self, z: Tensor, non_zeros: NonZeros | None) -> None:
        """Add a block's: codes z of the own latents, (B, F). Whether those of all latents are few is seen here."""
        everything = self._ordered(z)
        few = NonZeros.of(everything)
        for panel, sums in self._matrix.items():
            own = z[:, panel.begin:panel.end].contiguous()
            sums += (everything[:, panel.start:].T @ own if few is None else few.transposed_times(own)[panel.start:])

    def add_outer(self, left: Tensor, right: Tensor) -> None:
        """Add the product of a column and a row, of each the entries of the own latents, (F,)."""
        column = self._ordered(left)
        for panel, sums in self._matrix.items():
            sums.addr_(column[panel.start:], right[panel.begin:panel.end])

    def fade(self, factor: float) -> None:
        """Multiply all that has been added."""
        for sums in self._matrix.values():
            sums.mul_(factor)

    def add_up_on_first(self) -> None:
        """Put the sum over all processes that share rows into the first one's; the others' become zero."""
        for sums in self._matrix.values():
            rows_axis().add_up_on_first(sums)

    def diagonal(self) -> Tensor:
        """A's entries of the own latents, (F,)."""
        return torch.cat([sums.diagonal() for sums in self._matrix.values()])

    def solve(self, right: Tensor) -> Tensor:
        """The inverse of what was factorised, times the columns of the right side, of which this process hands over
        and gets back its own rows, (F, *).

        Cost: every process computes 2 S^2 operations for its share of the columns, and is sent the factor twice.
        """
        solution = self._forward(self._by_columns(right))
        for panel in reversed(self._order):
            columns = self._handed_round(panel)
            rows, below = solution[panel.start:panel.stop], solution[panel.stop:]
            rows.addmm_(columns[panel.width:].T, below, alpha=-1)
            rows.copy_(torch.linalg.solve_triangular(columns[:panel.width].tril().T, rows, upper=True))
        return self._by_rows(solution)[:, :right.shape[1]]

    def squared_norms(self, right: Tensor) -> Tensor:
        """`g' M g`, with M the inverse of what was factorised, of each column g of the right side, of which this
        process hands over its own rows, (F, n): (n,)."""
        own = self._forward(self._by_columns(right)).square().sum(0)
        return self.axis.side_by_side(own)[:right.shape[1]]

    def _factorised(self, diagonal: Tensor, updates: Sequence[Update]) -> bool:
        vectors = [(weight, vector, self._ordered(vector)) for weight, vector in updates]
        sums = torch.zeros(self._side * self.axis.size, dtype=torch.float64, device=self._device)
        self._factor = {}  # before there is another
        for panel, columns in self._matrix.items():
            left = columns.clone()
            for weight, vector, ordered in vectors:
                left.addr_(ordered[panel.start:], vector[panel.begin:panel.end], alpha=weight)
            left.diagonal().copy_(columns.diagonal() + diagonal[panel.begin:panel.end])
            sizes = left.abs()
            sums[panel.start:panel.stop] += sizes.sum(0)
            sums[panel.stop:] += sizes[panel.width:].sum(1)
            self._factor[panel] = left
        self.axis.add_up(sums)
        finite = bool(sums.isfinite().all())
        self._norm = sums.max().item() if finite else float("nan")
        if not finite:
            return False
        for panel in self._order:
            if panel in self._factor:
                self._finish(self._factor[panel], panel.width)
            columns = self._handed_round(panel)
            if not columns[:panel.width].isfinite().all():
                return False
            for later, left in self._factor.items():
                if later.start > panel.start:
                    rows = columns[later.start - panel.start:]
                    left.addmm_(rows, rows[:later.width].T, alpha=-1)
        return True

    def _finish(self, left: Tensor, width: int) -> None:
        """Make of what is left of a panel, (*, p), the factor's columns, in its place; NaN where there are none."""
        corner, info = torch.linalg.cholesky_ex(left[:width])
        if info.item():
            corner.fill_(torch.nan)
        left[:width] = corner
        left[width:] = torch.linalg.solve_triangular(corner.T, left[width:], upper=True, left=False)

    def _forward(self, right: Tensor) -> Tensor:
        """The inverse of the factor, times columns, ordered, in their place."""
        for panel in self._order:
            columns = self._handed_round(panel)
            rows, below = right[panel.start:panel.stop], right[panel.stop:]
            rows.copy_(torch.linalg.solve_triangular(columns[:panel.width].tril(), rows, upper=False))
            below.addmm_(columns[panel.width:], rows, alpha=-1)
        return right

    def _handed_round(self, panel: Panel) -> Tensor:
        """The factor's columns of a panel, from the rows of its own on, (S - start, p), on every process."""
        columns = self._factor[panel] if panel in self._factor else self._empty(panel)
        return self.axis.from_place(columns, panel.place)

    def _empty(self, panel: Panel) -> Tensor:
        """Room for a panel, (S - start, p)."""
        rows = self._side * self.axis.size - panel.start
        return torch.empty(rows, panel.width, dtype=torch.float64, device=self._device)

    def _ordered(self, own: Tensor) -> Tensor:
        """Columns of all latents, ordered, (*, S), of which this process has its own, (*, F)."""
        parts = self.axis.everyones(own)
        return torch.cat([parts[panel.place][..., panel.begin:panel.end] for panel in self._order], -1)

    def _by_columns(self, own: Tensor) -> Tensor:
        """All rows, ordered, of some of the columns, (S, n / P), of which this process has its own rows, (F, n);
        columns of zeros fill up to a multiple of P."""
        places = self.axis.size
        filled = torch.nn.functional.pad(own, (0, -own.shape[1] % places))
        parts = self.axis.exchanged(torch.stack(filled.chunk(places, 1)))
        return torch.cat([parts[panel.place, panel.begin:panel.end] for panel in self._order])

    def _by_rows(self, columns: Tensor) -> Tensor:
        """The own rows of all columns, (F, n), given all rows of some: the way back from `_by_columns`."""
        parts = columns.new_empty(self.axis.size, self._side, columns.shape[1])
        for panel in self._order:
            parts[panel.place, panel.begin:panel.end] = columns[panel.start:panel.stop]
        return torch.cat(list(self.axis.exchanged(parts)), 1)


def shared_memory(d_in: int, d_sae: int, block: int) -> int:
    """Bytes that a decoder step takes at its peak in each process of those that share d_sae latents.

    The matrix and its factor, some matrices of F x d_in in float64, the codes of all latents of a block of rows in
    float32 and in order, and two panels.

    Args:
        d_in: D.
        d_sae: S.
        block: B.
    """
    side = d_sae // latents_axis().size
    return 8 * side * (d_sae + 9 * d_in) + 2 * 4 * block * d_sae + 2 * 8 * next(panels(side))[1] * d_sae
