"""Which latents fire on the same rows.

Shapes: S sampled rows, C chosen latents, F = d_sae.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..sae.codes import DenseCodes

SAMPLED_ROWS = 1 << 15  # at most, spread evenly over the rows
LEAST = 3  # rows that two latents share; fewer are taken for chance
BLOCK_PAIRS = 1 << 22  # counted at a time: 16 MB in float32, of which a few are held
CHUNK = 1024  # sampled rows at a time


class Partners(NamedTuple):
    """The latents that fire together with chosen ones, the highest phi first; (C, count) each, on the CPU.

    phi is 0 where a latent has fewer partners.
    """

    phi: Tensor
    latents: Tensor


class CoFiring:
    """On which of evenly spaced rows each latent fires, one bit each.

    Memory: `SAMPLED_ROWS / 8` bytes per latent, 4 KB, at most.

    Args:
        d_sae: number of latents.
        rows: number of all rows.
    """

    def __init__(self, d_sae: int, rows: int) -> None:
        self._d_sae, self._every = d_sae, max(1, math.ceil(rows / SAMPLED_ROWS))
        self._seen = 0
        self._bits: list[np.ndarray] = []

    def update(self, z: Tensor) -> None:
        """Take in the codes of the next rows, (B, F)."""
        some = z[-self._seen % self._every :: self._every]
        self._seen += len(z)
        if len(some):
            self._bits.append(np.packbits(some.bool().cpu().numpy(), axis=1))

    @torch.no_grad()
    def partners(self, chosen: Tensor, count: int, show: Callable[[int], None]) -> Partners:
        """The latents that fire together with chosen ones, by the phi coefficient, the correlation of firing:

            phi = (p_ij - p_i p_j) / sqrt(p_i (1 - p_i) p_j (1 - p_j))

        where p_i is the fraction of the sampled rows on which latent i fires, and p_ij that on which both do. Pairs
        with a phi of 0 or less, or together on fewer than `LEAST` rows, are left out.

        Args:
            chosen: latents, (C,), int64; the products are computed on its device.
            count: number of partners, at most F - 1.
            show: called after each block with the number of chosen latents done.

        Cost: `2 S C F` operations, or `2 n C` for n codes that are not zero, if these are few.
        """
        count, bits, device = min(count, self._d_sae - 1), np.concatenate(self._bits), chosen.device
        found: list[Partners] = []
        for part in chosen.split(max(1, BLOCK_PAIRS // self._d_sae)):
            together = torch.zeros(self._d_sae, len(part), device=device)  # numbers of rows, exact in float32
            alone = torch.zeros(self._d_sae, device=device)
            for begin in range(0, len(bits), CHUNK):
                fires = np.unpackbits(bits[begin : begin + CHUNK], axis=1, count=self._d_sae)
                codes = DenseCodes(torch.from_numpy(fires).to(device, torch.float32))
                together += codes.transposed_times(codes.values[:, part])
                alone += codes.sums()
            found.append(_ranked(together.T / len(bits), alone / len(bits), part, count, LEAST / len(bits)))
            show(sum(len(one.phi) for one in found))
        return Partners(*map(torch.cat, zip(*found, strict=True)))


def _ranked(both: Tensor, p: Tensor, part: Tensor, count: int, least: float) -> Partners:
    """The partners of some latents, from the fractions of rows on which pairs fire, (C, F), and latents, (F,)."""
    expected = p[part, None] * p
    spread = (p * (1 - p)).sqrt()
    phi = (both - expected) / (spread[part, None] * spread).clamp_min(torch.finfo(p.dtype).tiny)
    phi[both < least * (1 - 1e-6)] = 0
    phi.scatter_(1, part[:, None], -torch.inf)
    phi, latents = phi.topk(count, dim=1)
    return Partners(phi.clamp_min_(0).cpu(), latents.cpu())
