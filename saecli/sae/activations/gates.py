"""The steps of jumprelu, with straight-through gradients (equations 8 to 12 of the paper; see `jumprelu.py`).

Shapes: n entries of codes.
"""

from typing import Any

import torch
from torch import Tensor


class Gate(torch.autograd.Function):
    """`pre * H(pre - threshold)`, elementwise, with straight-through gradients: of the threshold, and, if `to_pre`, of
    the step in the pre-activation."""

    @staticmethod
    def forward(ctx: Any, pre: Tensor, threshold: Tensor, width: Tensor | float, to_pre: bool) -> Tensor:
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
    """The rectangular kernel that stands for the derivative of the step, 1 / width where `|pre - threshold| < width /
    2`."""
    return torch.where((pre - threshold).abs() < width / 2, 1 / torch.as_tensor(width).to(pre), 0.0)
