"""Products with codes that skip those which are zero.

On a CPU the products of an SAE with few active latents cost a small part of the dense ones: of the 10 D F operations a
row of a training step, 2 D F remain, which are the pre-activations. On an accelerator dense products are taken: finding
what is not zero would make the host wait for it. Shapes: B rows, n non-zeros, D = d_in, F = d_sae.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

DENSITY = 0.1  # share of non-zeros above which dense products take less time


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
        if matrix.device.type != "cpu" or matrix.count_nonzero() > DENSITY * matrix.numel():
            return None
        flat = matrix.flatten()
        places = flat.detach().nonzero()[:, 0]
        rows = places.div(matrix.shape[1], rounding_mode="floor")
        return cls(rows, places - rows * matrix.shape[1], flat.gather(0, places), tuple(matrix.shape))

    def times(self, right: Tensor) -> Tensor:
        """The matrix times `right`, (F, D): (B, D), differentiable in both."""
        return embedding_bag(self.columns, right, _starts(self.rows, self.shape[0]), mode="sum",
                             per_sample_weights=self.values)

    def transposed_times(self, right: Tensor) -> Tensor:
        """The matrix, transposed, times `right`, (B, D): (F, D)."""
        columns, order = self.columns.sort(stable=True)
        return embedding_bag(self.rows[order], right, _starts(columns, self.shape[1]), mode="sum",
                             per_sample_weights=self.values[order])


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


def reconstructions(z: Tensor, W_dec: Tensor, b_dec: Tensor) -> Tensor:
    """`z W_dec + b_dec`, (B, D), differentiable in weights, (F, D), bias, (D,), and codes z, (B, F).

    Where few codes are not zero, those which are get no gradient. That is exact for activations whose own derivative is
    zero there.
    """
    non_zeros = NonZeros.of(z)
    return torch.addmm(b_dec, z, W_dec) if non_zeros is None else non_zeros.times(W_dec) + b_dec
