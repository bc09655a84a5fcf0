"""Where to aim latents that have died: at the rows that the others reconstruct worst."""

import torch
from torch import Tensor


def directions_of_worst(residuals: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Unit directions of the residuals of rows drawn with probability proportional to their squared error.

    Args:
        residuals: `x - x_hat` of some rows, (n, D).
        count: how many directions; one may come twice only where there are fewer rows with an error than that.
        generator: on the CPU.

    Returns:
        (count, D); zero where nothing is left to explain.
    """
    scaled = residuals.double() / residuals.abs().max().clamp(min=torch.finfo(residuals.dtype).tiny)
    weights = scaled.square().sum(1).cpu()
    if not weights.any():
        return residuals.new_zeros(count, residuals.shape[1])
    again = int(weights.count_nonzero()) < count
    chosen = scaled[torch.multinomial(weights, count, replacement=again, generator=generator).to(scaled.device)]
    return (chosen / chosen.norm(dim=1, keepdim=True)).to(residuals.dtype)
