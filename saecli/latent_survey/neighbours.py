"""Latents whose dictionary vectors point the same way. Shapes: C chosen latents, D = d_in, F = d_sae."""

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK_COSINES = 1 << 24  # at a time: 64 MB in float32


@torch.no_grad()
def neighbours(W_dec: Tensor, chosen: Tensor, count: int, show: Callable[[int], None]) -> tuple[Tensor, Tensor]:
    """The latents whose decoder vectors have the largest cosines with those of some latents.

    Args:
        W_dec: decoder weights, (F, D).
        chosen: latents, (C,), int64.
        count: how many neighbours to find; fewer where there are not so many other latents.
        show: told after each block how many of the chosen are done.

    Returns:
        The cosines, (C, count), in descending order, 0 for a vector of zeros, and the latents that they are of,
        (C, count), int64; both on the CPU. A latent is no neighbour of itself.

    Cost: `2 C F D` operations; `BLOCK_COSINES` cosines are held at a time.
    """
    directions = torch.nn.functional.normalize(W_dec, dim=1)
    count = min(count, len(W_dec) - 1)
    size = max(1, BLOCK_COSINES // len(W_dec))
    found: list[tuple[Tensor, Tensor]] = []
    for part in chosen.to(W_dec.device).split(size):
        cosines = directions[part] @ directions.T
        cosines.scatter_(1, part[:, None], -torch.inf)
        found.append(tuple(t.cpu() for t in cosines.topk(count, dim=1)))
        show(sum(len(cosine) for cosine, _ in found))
    cosines, latents = zip(*found, strict=True)
    return torch.cat(cosines), torch.cat(latents)
