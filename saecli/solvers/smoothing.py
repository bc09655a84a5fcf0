"""Smoothing: training on rows moved a little along differences of other rows.

    x_i + width ||x_i|| (x_j - x_k) / sqrt(||x_j||^2 + ||x_k||^2),    j, k drawn from the same block

(norms about the block's mean). Rows are then drawn from a kernel estimate of their density whose kernel has the data's
own shape, instead of being met again and again, and the encoder, which no closed form guards, overfits less. The step
is relative to each row's norm, since rows of activations and of images differ in norm a hundredfold.

Source: the smoothed bootstrap (Silverman and Young, 1987), with the kernel taken from pairs of rows.
"""

import math

import torch
from torch import Tensor

WIDEST = 0.55  # width where rows are few


def smoothed(x: Tensor, width: float, generator: torch.Generator) -> Tensor:
    """A block of rows x, (B, D), each moved by about `width` of its own norm.

    Args:
        x: the rows, in an order that puts unlike rows into one block.
        width: at least 0; 0 leaves the rows as they are.
        generator: on the CPU, so that the draws are the same on every device.
    """
    if width == 0:
        return x
    first, second = (torch.randperm(len(x), generator=generator).to(x.device) for _ in range(2))
    square = (x - x.mean(0)).square().sum(1)  # (B,)
    both = square[first] + square[second]
    relative = (square / both.clamp(min=torch.finfo(x.dtype).tiny)).sqrt()
    return x + (width * relative)[:, None] * (x[first] - x[second])


def default_width(rows: int, d_in: int, d_sae: int) -> float:
    """`WIDEST` where there are no more rows than latents, or than 4 d_in; then falling with the square root of their
    number, as overfitting does."""
    return WIDEST * min(1.0, math.sqrt(max(d_sae, 4 * d_in) / rows))
