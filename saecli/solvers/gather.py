"""The one pass over all rows that a decoder step makes.

Shapes: B rows in a block, n sampled, D = d_in, F = d_sae.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ridge import HeldRows, Moments, System
from ..sae import SAE
from .base import Rows
from .smoothing import Smoothing

SAMPLED_ROWS = 4096  # evenly spaced over all, on which alpha is chosen and dead latents are re-aimed


@dataclass(frozen=True)
class Gathered:
    """What a decoder step takes from its pass over the rows.

    Args:
        system: the normal equations.
        z: codes of the sampled rows, (n, F); all rows where there are fewer than `SAMPLED_ROWS`.
        x: those rows, (n, D).
        norm_weights: what the penalty weighs each decoder norm with, (F,).
        fired: the latents that fired on any row, (F,).
    """

    system: System
    z: Tensor
    x: Tensor
    norm_weights: Tensor
    fired: Tensor


def gather(rows: Rows, sae: SAE, sparsity: str, smoothing: Smoothing | None, draws: torch.Generator) -> Gathered:
    """Encode every row once and sum what the decoder step needs.

    Args:
        rows: the training rows.
        sae: its encoder gives the codes, its decoder the norms that a penalty weighs.
        sparsity: the penalty, or `none`.
        smoothing: of the rows; None to take them as they are.
        draws: random numbers for it.
    """
    stride = math.ceil(rows.rows / SAMPLED_ROWS)
    hold = rows.rows < sae.d_sae
    moments = None if hold else Moments(sae.d_in, sae.d_sae, device=sae.W_enc.device)
    norm_weights = torch.zeros(sae.d_sae, dtype=torch.float64, device=sae.W_enc.device)
    fired = torch.zeros(sae.d_sae, dtype=torch.bool, device=sae.W_enc.device)
    kept_z, kept_x, seen = [], [], 0
    for stored in rows.sequential():
        x = stored if smoothing is None else smoothing(stored, draws)
        z = sae.encode(x)
        first = -seen % stride
        kept_z.append(z if hold else z[first::stride].clone())
        kept_x.append(x if hold else x[first::stride].clone())
        if moments is not None:
            moments.add(z, x)
        norm_weights += sae.activation.norm_weights(sparsity, z, sae.W_dec)
        fired |= (z != 0).any(0)
        seen += len(x)
    z, x = torch.cat(kept_z), torch.cat(kept_x)
    if moments is not None:
        return Gathered(moments, z, x, norm_weights, fired)
    return Gathered(HeldRows(z, x), z[::stride], x[::stride], norm_weights, fired)
