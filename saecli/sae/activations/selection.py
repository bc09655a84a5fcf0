"""Pre-activations selected as codes, with gradients as sparse as the codes.

Shapes: B rows, n entries, F = d_sae, K = k.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..codes import DENSITY, Codes, SparseCodes, few_entries, located


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
        places = torch.stack(ctx.saved_tensors)
        sparse = torch.sparse_coo_tensor(places, gradient, ctx.shape, check_invariants=False)
        return sparse, None, None


def at(
    pre: Tensor, indices: Tensor, function: Callable[[Tensor], Tensor] = lambda values: values
) -> Codes:
    """Codes of some distinct latents of each row, (B, K): a function of their pre-activations, (B, K)."""
    count = indices.shape[1]
    if count > DENSITY * pre.shape[1]:
        values = function(pre.gather(1, indices))
        return Codes(torch.zeros_like(pre).scatter(1, indices, values))
    rows = torch.arange(len(pre), device=pre.device)
    flat = indices.flatten()
    taken = _Taken.apply(pre, rows.repeat_interleave(count), flat)
    values = function(taken.view(indices.shape)).flatten()
    return SparseCodes(values, rows * count, flat, pre.shape[1], each=count)


def largest(pre: Tensor, count: int) -> Codes:
    """Codes of the `count` largest entries of the whole batch."""
    flat = pre.flatten()
    entries = _largest(flat.detach(), count)
    if count <= DENSITY * len(flat):
        return _at_ascending(pre, entries)
    kept = torch.zeros_like(flat).scatter(0, entries, flat.gather(0, entries))
    return Codes(kept.view_as(pre))


def _largest(values: Tensor, count: int) -> Tensor:
    """Ascending places of the `count` largest of some numbers, (n,)."""
    if values.device.type == "cpu":  # NumPy's partition takes a fifth of the time of torch's topk
        numbers = values.to(torch.promote_types(values.dtype, torch.float32)).numpy()
        entries = np.flatnonzero(numbers >= np.partition(numbers, -count)[-count])
        if len(entries) == count:  # else some are equal, or NaN
            return torch.from_numpy(entries)
    return values.topk(count, sorted=False).indices.sort().values


def where(pre: Tensor, active: Tensor) -> Codes:
    """Codes that keep `pre` where a mask is true; no gradient flows through the zeros."""
    few = few_entries(active)
    return Codes(pre * active) if few is None else _at_ascending(pre, few)


def selected(pre: Tensor, active: Tensor) -> Codes:
    """As `where`, but all of `pre` if many entries are kept, for activations that zero the others."""
    few = few_entries(active)
    return Codes(pre) if few is None else _at_ascending(pre, few)


def _at_ascending(pre: Tensor, entries: Tensor) -> SparseCodes:
    offsets, rows, indices = located(entries, (pre.shape[0], pre.shape[1]))
    return SparseCodes(_Taken.apply(pre, rows, indices), offsets, indices, pre.shape[1])


class Gate(torch.autograd.Function):
    """`pre * H(pre - threshold)`, with straight-through gradients (see `JumpRelu`) of the threshold and, if `to_pre`,
    of the pre-activation in the step."""

    @staticmethod
    def forward(
        ctx: Any, pre: Tensor, threshold: Tensor, width: Tensor | float, to_pre: bool
    ) -> Tensor:
        active = pre > threshold
        ctx.save_for_backward(active, _kernel(pre, threshold, width) * threshold)
        ctx.to_pre = to_pre
        return pre * active

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        active, jump = ctx.saved_tensors
        step = jump * gradient
        return gradient * active + step if ctx.to_pre else gradient * active, -step, None, None


class Step(torch.autograd.Function):
    """`H(pre - threshold)`, elementwise, with straight-through gradients of both."""

    @staticmethod
    def forward(ctx: Any, pre: Tensor, threshold: Tensor, width: Tensor | float) -> Tensor:
        ctx.save_for_backward(_kernel(pre, threshold, width))
        return (pre > threshold).to(pre.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        step = ctx.saved_tensors[0] * gradient
        return step, -step, None


def _kernel(pre: Tensor, threshold: Tensor, width: Tensor | float) -> Tensor:
    """The derivative of the step: 1 / width where `|pre - threshold| < width / 2`, else 0."""
    return torch.where((pre - threshold).abs() < width / 2, 1 / torch.as_tensor(width).to(pre), 0.0)
