"""The Gram matrix of codes, summed up over blocks of rows; see `cholesky.py` for how it is solved by.

Shapes: B rows in a block, F = d_sae.
"""

from torch import Tensor

from ..distributed import rows_axis
from ..products import NonZeros
from .cholesky import Cholesky

COLUMNS = 256  # at a time, of which what lies above the diagonal is left out
SPARSE_COLUMNS = 1024  # the same where codes are sparse, and a product is not faster the wider it is
PAIRS_SHARE = 0.2  # pairs of non-zeros, of the matrix' entries, up to which their products are added one by one


class Gram(Cholesky):
    """`sum z z'`, on and below its diagonal, in the array that its factor shares."""

    def add(self, z: Tensor, non_zeros: NonZeros | None) -> None:
        """Add a block's: codes z, (B, F), and those that are not zero, where they are few."""
        zz = self.matrix
        if non_zeros is None:
            for begin in range(0, len(zz), COLUMNS):
                end = begin + COLUMNS
                zz[begin:end, :end] += z[:, begin:end].T @ z[:, :end]
        elif non_zeros.pairs <= PAIRS_SHARE * zz.numel():
            non_zeros.add_gram(zz)
        else:
            for begin in range(0, len(zz), SPARSE_COLUMNS):
                end = begin + SPARSE_COLUMNS
                zz[begin:, begin:end] += non_zeros.transposed_times(z[:, begin:end].contiguous())[begin:]

    def add_outer(self, left: Tensor, right: Tensor) -> None:
        """Add the product of a column (F,) and a row (F,)."""
        self.matrix.addr_(left, right)

    def fade(self, factor: float) -> None:
        """Multiply all that has been added."""
        self.matrix.mul_(factor)

    def add_up_on_first(self) -> None:
        """Put the sum over all processes that share rows into the first one's; the others' become zero."""
        zz = self.matrix
        for begin in range(0, len(zz), COLUMNS):
            end = begin + COLUMNS
            zz[begin:end, :end] = rows_axis().add_up_on_first(zz[begin:end, :end].contiguous())
