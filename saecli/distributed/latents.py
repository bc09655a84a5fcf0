"""Tensors that have latents, taken apart and put together where processes share the latents.

Shapes: F = d_sae, P processes along the axis of latents; the one at place p holds latents p F / P to (p + 1) F / P.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .axes import latents_axis, rows_axis

LATENT_DIMENSION = {"W_enc": 1, "b_enc": 0, "W_dec": 0, "Delta": 0, "threshold": 0}  # by the last word of a name


def of_latents(name: str, tensor: Tensor) -> int | None:
    """The dimension of a tensor that latents are along; None where it has none, such as `b_dec` and scalars.

    Args:
        name: what it is, after whose it is: `W_enc`, `adam.exp_avg.W_enc`.
        tensor: the tensor.
    """
    dimension = LATENT_DIMENSION.get(name.rpartition(".")[2])
    return dimension if dimension is not None and dimension < tensor.dim() else None


def own_part(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this process holds of tensors of all latents, by name."""
    axis = latents_axis()
    if axis.size == 1:
        return dict(tensors)
    found = {}
    for name, tensor in tensors.items():
        dimension = of_latents(name, tensor)
        found[name] = tensor if dimension is None else tensor.chunk(axis.size, dimension)[axis.place].clone()
    return found


def whole_on_main(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of all latents on the main process' CPU, by name, put together of those that each process holds; the
    others get their own back."""
    axis = latents_axis()
    if axis.size == 1 or not rows_axis().is_first:  # those further along the axis of rows hold the same once more
        return dict(tensors)
    found = {}
    for name, tensor in tensors.items():
        dimension = of_latents(name, tensor)
        together = tensor if dimension is None else axis.on_first(tensor.movedim(dimension, 0)).movedim(0, dimension)
        found[name] = together.cpu() if axis.is_first else tensor
    return found


class _OverLatents(torch.autograd.Function):
    """The sum over all processes along the axis, of whose losses that of the training is the sum."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        return latents_axis().add_up(own.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return latents_axis().size * gradient  # each has the same, of its equal part of the loss


def over_latents(own: Tensor) -> Tensor:
    """The sum of what each process has from its own latents, differentiable.

    Its gradient is right where every process goes on with the sum in the same way, to an equal part of one loss.
    """
    return own if latents_axis().size == 1 else _OverLatents.apply(own)
