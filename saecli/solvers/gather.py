"""What a decoder step takes from the rows, in one pass over them.

Shapes: B rows in a block, n sampled, D = d_in, F = d_sae.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ridge import CodeProducts, HeldRows, Moments, System
from ..sae import SAE
from .base import Rows
from .smoothing import Smoothing

BLOCK_ROWS = 4096  # at a time, at least, where batches are put together
SAMPLED_ROWS = 4096  # evenly spaced over all, on which alpha is chosen and dead latents are re-aimed


@dataclass(frozen=True)
class Gathered:
    """What a decoder step takes from the rows.

    Args:
        system: the normal equations.
        z: codes of the sampled rows, (n, F); all rows where there are fewer than `SAMPLED_ROWS` and none weigh less.
        x: those rows, (n, D).
        norm_weights: what the penalty weighs each decoder norm with, (F,).
        fired: the latents that fired on any row, (F,).
    """

    system: System
    z: Tensor
    x: Tensor
    norm_weights: Tensor
    fired: Tensor


@dataclass(frozen=True)
class Iteration:
    """How a decoder step is solved by iteration.

    Args:
        start: a decoder near the one sought, (F, D).
        budget: bytes that codes may take.
    """

    start: Tensor
    budget: float


@dataclass(frozen=True)
class SomeRows:
    """At most so many of the rows, spread over all, for a pass that need not take more."""

    all: Rows
    most: int

    @property
    def rows(self) -> int:
        """How many."""
        return min(self.most, self.all.rows)

    def sequential(self) -> Iterator[Tensor]:
        """Each of them once, in batches (B, D)."""
        left, pending = self.rows, []
        for x in self.all.sequential() if left == self.all.rows else self.all.shuffled(0):
            pending.append(x[:left])
            left -= len(pending[-1])
            if not left or sum(map(len, pending)) >= BLOCK_ROWS:
                yield torch.cat(pending)
                pending = []
            if not left:
                return


def gather(rows: Rows | SomeRows, sae: SAE, sparsity: str, smoothing: Smoothing | None,
           draws: Callable[[], torch.Generator], iteration: Iteration | None) -> Gathered:
    """Encode every row once and sum what the decoder step needs.

    Args:
        rows: the training rows, or some of them.
        sae: its encoder gives the codes, its decoder the norms that a penalty weighs.
        sparsity: the penalty, or `none`.
        smoothing: of the rows; None to take them as they are.
        draws: gives the random numbers for it, from their first.
        iteration: where the normal equations are to be solved by iteration.
    """
    def blocks() -> Iterator[tuple[Tensor, Tensor]]:
        drawn = draws()
        for stored in rows.sequential():
            x = stored if smoothing is None else smoothing(stored, drawn)
            yield sae.encode(x), x

    def codes() -> Iterator[Tensor]:
        return (z for z, _ in blocks())

    stride = math.ceil(rows.rows / SAMPLED_ROWS)
    device = sae.W_enc.device
    system: Moments | CodeProducts | None = None
    if iteration is not None:
        system = CodeProducts(sae.d_in, sae.d_sae, codes, iteration.budget, iteration.start, device)
    elif rows.rows >= sae.d_sae:
        system = Moments(sae.d_in, sae.d_sae, device)
    norm_weights = torch.zeros(sae.d_sae, dtype=torch.float64, device=device)
    fired = torch.zeros(sae.d_sae, dtype=torch.bool, device=device)
    kept_z, kept_x, seen = [], [], 0
    for z, x in blocks():
        first = -seen % stride
        kept_z.append(z if system is None else z[first::stride].clone())
        kept_x.append(x if system is None else x[first::stride].clone())
        if system is not None:
            system.add(z, x)
        norm_weights += sae.activation.norm_weights(sparsity, z, sae.W_dec)
        fired |= (z != 0).any(0)
        seen += len(x)
    z, x = torch.cat(kept_z), torch.cat(kept_x)
    if system is not None:
        return Gathered(system, z, x, norm_weights, fired)
    return Gathered(HeldRows(z, x), z[::stride], x[::stride], norm_weights, fired)
