"""From rows to pre-activations to codes, with gradients as sparse as the codes: the backward pass of `pre_activations`
multiplies the sparse gradient of selected pre-activations. Shapes: B rows, n entries, D = d_in, F = d_sae.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .codes import DENSITY, Codes, DenseCodes, SparseCodes, few_entries, located, offsets_of


class _PreActivations(torch.autograd.Function):
    """`x W_enc + b_enc`; a sparse gradient is multiplied as sparse codes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, W_enc: Tensor, b_enc: Tensor) -> Tensor:
        ctx.save_for_backward(x, W_enc)
        return torch.addmm(b_enc, x, W_enc)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, W_enc = ctx.saved_tensors
        if gradient.layout == torch.strided:
            codes: Codes = DenseCodes(gradient)
            W_gradient = (gradient.T @ x).T if ctx.needs_input_grad[1] else None
            x_gradient = gradient @ W_enc.T if ctx.needs_input_grad[0] else None
        else:
            rows, columns = gradient._indices()
            codes = SparseCodes(offsets_of(rows, len(gradient)), columns, gradient._values(), gradient.shape[1])
            W_gradient = codes.transposed_times(x).T if ctx.needs_input_grad[1] else None
            x_gradient = codes.times(W_enc.T) if ctx.needs_input_grad[0] else None
        return x_gradient, W_gradient, codes.sums() if ctx.needs_input_grad[2] else None


def pre_activations(x: Tensor, W_enc: Tensor, b_enc: Tensor) -> Tensor:
    """`x W_enc + b_enc`, (B, F), of rows x, (B, D), with weights (D, F) and bias (F,)."""
    return _PreActivations.apply(x, W_enc, b_enc)


class _Taken(torch.autograd.Function):
    """Entries of a matrix, (n,), with a sparse gradient."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(rows, columns)
        ctx.shape = matrix.shape
        return matrix.flatten().gather(0, rows * matrix.shape[1] + columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return torch.sparse_coo_tensor(torch.stack(ctx.saved_tensors), gradient, ctx.shape,
                                       check_invariants=False), None, None


def at(pre: Tensor, indices: Tensor) -> Codes:
    """Codes that keep the pre-activations, (B, F), of some distinct latents of each row, (B, K)."""
    count = indices.shape[1]
    if count > DENSITY * pre.shape[1]:
        return DenseCodes(torch.zeros_like(pre).scatter(1, indices, pre.gather(1, indices)))
    rows = torch.arange(len(pre), device=pre.device)
    values = _Taken.apply(pre, rows.repeat_interleave(count), indices.flatten())
    return SparseCodes(rows * count, indices.flatten(), values, pre.shape[1], each=count)


def at_entries(pre: Tensor, entries: Tensor) -> Codes:
    """Codes that keep some entries of the pre-activations, (B, F), by distinct flat indices, (n,)."""
    if len(entries) > DENSITY * pre.numel():
        flat = pre.flatten()
        return DenseCodes(torch.zeros_like(flat).scatter(0, entries, flat.gather(0, entries)).view_as(pre))
    return _at_ascending(pre, entries.sort().values)


def where(pre: Tensor, active: Tensor) -> Codes:
    """Codes that keep `pre` where a mask is true, (B, F) each; no gradient flows through the zeros."""
    found = selected(pre, active)
    return found if isinstance(found, SparseCodes) else DenseCodes(pre * active)


def selected(pre: Tensor, active: Tensor) -> Codes:
    """As `where`, but all of `pre` unless few entries of the mask are true; for activations that zero the others."""
    few = few_entries(active)
    return DenseCodes(pre) if few is None else _at_ascending(pre, few)


def _at_ascending(pre: Tensor, entries: Tensor) -> SparseCodes:
    offsets, rows, indices = located(entries, (pre.shape[0], pre.shape[1]))
    return SparseCodes(offsets, indices, _Taken.apply(pre, rows, indices), pre.shape[1])
