"""Products with codes that skip those which are zero.

On a CPU the products of an SAE with few active latents cost a small part of the dense ones: of the 10 D F operations a
row of a training step, 2 D F remain, which are the pre-activations. On an accelerator dense products are taken: finding
what is not zero would make the host wait for it. Shapes: B rows, n non-zeros, D = d_in, F = d_sae.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from .distributed import latents_axis, over_latents

DENSITY = 0.1  # share of non-zeros above which dense products take less time
PAIRS = 1 << 19  # of non-zeros, worked on at a time


@dataclass(frozen=True)
class NonZeros:
    """The entries of a matrix, (B, F), that are not zero, row after row.

    Args:
        rows: their rows, (n,), ascending.
        columns: their columns, (n,).
        values: the entries, (n,), differentiable in the matrix.
        shape: B and F.
    """

    rows: Tensor
    columns: Tensor
    values: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, matrix: Tensor) -> Self | None:
        """Those of a matrix; None where dense products are the faster ones."""
        if matrix.device.type != "cpu":
            return None
        # NumPy counts and finds what is true several times as fast as PyTorch does, or either of them what is not zero.
        there = (matrix.detach() != 0).flatten().numpy()
        if np.count_nonzero(there) > DENSITY * matrix.numel():
            return None
        flat, places = matrix.flatten(), torch.from_numpy(np.flatnonzero(there))
        rows = places.div(matrix.shape[1], rounding_mode="floor")
        return cls(rows, places - rows * matrix.shape[1], flat.gather(0, places), tuple(matrix.shape))

    @classmethod
    def joined(cls, blocks: Sequence[Self]) -> Self:
        """Those of matrices of one width, one below the other."""
        *above, height = accumulate((block.shape[0] for block in blocks), initial=0)
        rows = torch.cat([block.rows + begin for block, begin in zip(blocks, above, strict=True)])
        return cls(rows, torch.cat([block.columns for block in blocks]), torch.cat([block.values for block in blocks]),
                   (height, blocks[0].shape[1]))

    def times(self, right: Tensor) -> Tensor:
        """The matrix times `right`, (F, D): (B, D), differentiable in both."""
        return embedding_bag(self.columns, right, _starts(self.rows, self.shape[0]), mode="sum",
                             per_sample_weights=self.values)

    def transposed_times(self, right: Tensor) -> Tensor:
        """The matrix, transposed, times `right`, (B, D): (F, D)."""
        rows, values, starts = self._by_column
        return embedding_bag(rows, right, starts, mode="sum", per_sample_weights=values)

    @cached_property
    def _by_column(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows and values, each (n,), column after column, and where each column begins, (F,)."""
        columns, order = self.columns.sort(stable=True)
        return self.rows[order], self.values[order], _starts(columns, self.shape[1])

    def column_sums(self) -> Tensor:
        """The sum of each column, (F,), float64."""
        return torch.bincount(self.columns, weights=self.values, minlength=self.shape[1]).double()

    @property
    def pairs(self) -> int:
        """How many pairs of entries share a row, an entry and itself counted, in one order."""
        return int(_with_those_before(self._sizes).sum())

    def add_gram(self, gram: Tensor) -> None:
        """Add the matrix, transposed, times itself to the lower triangle of `gram`, (F, F), pair by pair of entries in
        one row. It may be the left part of a wider array.

        Pairs are multiplied in their own precision and added in that of `gram`. Cost: some 25 ns a pair, since each
        goes to another place in memory; `PAIRS` of them are held at a time, or those of a row.
        """
        sizes = self._sizes
        ends, pairs = sizes.cumsum(0), _with_those_before(sizes).cumsum(0)
        flat = gram.as_strided((len(gram) * gram.stride(0),), (1,))
        begun = 0
        while begun < len(sizes):
            seen = int(pairs[begun - 1]) if begun else 0
            stop = max(int(torch.searchsorted(pairs, seen + PAIRS, right=True)), begun + 1)
            entries = slice(int(ends[begun] - sizes[begun]), int(ends[stop - 1]))
            columns, values, own = self.columns[entries], self.values[entries], sizes[begun:stop]
            firsts = (own.cumsum(0) - own).repeat_interleave(own)  # of the row of each entry, (n,)
            partners = torch.arange(1, len(columns) + 1) - firsts  # those up to itself, whose columns are no larger
            left = torch.arange(len(columns)).repeat_interleave(partners)
            right = torch.arange(len(left)) - (partners.cumsum(0) - partners - firsts)[left]
            places = columns[left] * gram.stride(0) + columns[right]
            flat.scatter_add_(0, places, (values[left] * values[right]).to(gram.dtype))
            begun = stop

    @property
    def _sizes(self) -> Tensor:
        """How many entries each row has, (B,)."""
        return torch.bincount(self.rows, minlength=self.shape[0])


def _with_those_before(sizes: Tensor) -> Tensor:
    """Pairs of each of so many entries with itself or one before."""
    return sizes * (sizes + 1) // 2


def _starts(bags: Tensor, count: int) -> Tensor:
    """Where each of `count` bags begins in a list, (n,), that names the bag of each entry, in order."""
    sizes = torch.bincount(bags, minlength=count)
    return sizes.cumsum(0) - sizes


class _PreActivations(torch.autograd.Function):
    """`x W_enc + b_enc`; what comes back for it is as sparse as the codes."""

    @staticmethod
    def forward(ctx, x: Tensor, W_enc: Tensor, b_enc: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.addmm(b_enc, x, W_enc)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        non_zeros = NonZeros.of(gradient)
        W_gradient = gradient.T @ x if non_zeros is None else non_zeros.transposed_times(x)  # (F, D)
        return None, W_gradient.T, gradient.sum(0)


def pre_activations(x: Tensor, W_enc: Tensor, b_enc: Tensor) -> Tensor:
    """`x W_enc + b_enc`, (B, F), differentiable in weights, (D, F), and bias, (F,), but not in the rows x, (B, D)."""
    return _PreActivations.apply(x, W_enc, b_enc)


def reconstructions(z: Tensor | NonZeros, W_dec: Tensor, b_dec: Tensor, moves_zeros: bool = False) -> Tensor:
    """`z W_dec + b_dec`, (B, D), differentiable in weights, (F, D), bias, (D,), and codes z, (B, F); of all latents,
    where other processes hold more of them.

    Where few codes are not zero, those which are get no gradient. That is exact for activations whose own derivative is
    zero there; `moves_zeros` is for the others.
    """
    non_zeros = z if isinstance(z, NonZeros) else None if moves_zeros else NonZeros.of(z)
    if non_zeros is None and latents_axis().size == 1:
        return torch.addmm(b_dec, z, W_dec)
    return over_latents(z @ W_dec if non_zeros is None else non_zeros.times(W_dec)) + b_dec
