"""What a decoder step takes from the rows, in one pass over them.

Shapes: B rows in a block, n sampled, D = d_in, F = d_sae.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..distributed import latents_axis, rows_axis
from ..ridge import CodeProducts, HeldRows, Moments, System
from ..sae import SAE
from .base import Rows
from .portions import Portion, joined, portions_of
from .smoothing import Smoothing

BLOCK_ROWS = 4096  # at a time, at least, where batches are put together
SAMPLED_ROWS = 4096  # evenly spaced over all, on which alpha is chosen and dead latents are re-aimed


@dataclass(frozen=True)
class Gathered:
    """What a decoder step takes from the rows.

    Args:
        system: the normal equations; of processes that share rows the first has them, the others nothing of use.
        rows: N, or the sum of their weights where some count for less.
        z: codes of the sampled rows, (n, F); all rows where there are fewer than `SAMPLED_ROWS` and none weigh less.
        x: those rows, (n, D); both that first process has, the others only what they took themselves.
        norm_weights: what the penalty weighs each decoder norm with, (F,).
        fired: the latents that fired on any row, (F,).
    """

    system: System
    rows: float
    z: Tensor
    x: Tensor
    norm_weights: Tensor
    fired: Tensor

    def on_first(self, solve: Callable[[], None]) -> None:
        """Have the first process solve; where codes are multiplied by and not summed, the others do so for it."""
        products = self.system if isinstance(self.system, CodeProducts) and rows_axis().size > 1 else None
        if rows_axis().is_first:
            solve()
            if products is not None:
                products.dismiss()
        elif products is not None:
            products.serve()


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

    def sequential(self) -> Iterator[Portion]:
        """Each of them once, in batches (B, D)."""
        left, pending = self.rows, []
        for portion in portions_of(self.all.sequential() if left == self.all.rows else self.all.shuffled(0)):
            pending.append(portion.first(left))
            left -= pending[-1].size
            if not left or sum(portion.size for portion in pending) >= BLOCK_ROWS:
                yield joined(pending)
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
    def blocks() -> Iterator[tuple[Tensor, Portion]]:
        drawn = draws()
        for portion in portions_of(rows.sequential()):
            x = portion.x if smoothing is None else smoothing(portion, drawn)
            yield sae.encode(x), replace(portion, x=x)

    def codes() -> Iterator[Tensor]:
        return (z for z, _ in blocks() if len(z))

    stride = math.ceil(rows.rows / SAMPLED_ROWS)
    device = sae.W_enc.device
    system: Moments | CodeProducts | None = None
    if iteration is not None:
        system = CodeProducts(sae.d_in, sae.d_sae, codes, iteration.budget, iteration.start, device)
    elif rows.rows >= sae.d_sae * latents_axis().size or latents_axis().size > 1:
        system = Moments(sae.d_in, sae.d_sae, device)
    norm_weights = torch.zeros(sae.d_sae, dtype=torch.float64, device=device)
    fired = torch.zeros(sae.d_sae, dtype=torch.bool, device=device)
    kept_z, kept_x, places, seen = [sae.W_enc.new_empty(0, sae.d_sae)], [sae.W_enc.new_empty(0, sae.d_in)], [], 0
    for z, portion in blocks():
        numbers = portion.numbers() + seen
        kept = (numbers % (1 if system is None else stride) == 0).nonzero()[:, 0]
        seen += portion.size
        if not len(portion.x):
            continue
        here = kept.to(device)
        kept_z.append(z[here])
        kept_x.append(portion.x[here])
        places.append(numbers[kept])
        if system is not None:
            system.add(z, portion.x)
        norm_weights += sae.activation.norm_weights(sparsity, z, sae.W_dec)
        fired |= (z != 0).any(0)
    taken = torch.cat(kept_z), torch.cat(kept_x), torch.cat([torch.arange(0), *places])
    if system is not None:
        return gathered_on_first(system, *taken, norm_weights, fired)
    z, x = in_order_on_first(*taken)
    return Gathered(HeldRows(z, x), rows.rows, z[::stride], x[::stride], rows_axis().add_up(norm_weights),
                    fired_anywhere(fired))


def gathered_on_first(system: Moments | CodeProducts, z: Tensor, x: Tensor, places: Tensor, norm_weights: Tensor,
                     fired: Tensor) -> Gathered:
    """What all processes took from their rows, put together on the first.

    Args:
        system: the sums over this process' rows.
        z: codes of the sampled rows among them, (n, F).
        x: those rows, (n, D).
        places: their numbers among those of all processes, (n,), on the CPU.
        norm_weights: this process' part, (F,).
        fired: the latents that fired on its rows, (F,).
    """
    z, x = in_order_on_first(z, x, places)
    rows = system.add_up_on_first()
    return Gathered(system, rows, z, x, rows_axis().add_up(norm_weights.clone()), fired_anywhere(fired))


def in_order_on_first(z: Tensor, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """All processes' codes and rows on the first, in the order of their places."""
    axis = rows_axis()
    if axis.size == 1:
        return z, x
    order = axis.on_first(places).argsort().to(z.device)
    z, x = axis.on_first(z), axis.on_first(x)
    return z[order], x[order]


def fired_anywhere(fired: Tensor) -> Tensor:
    """The latents that fired on any process' rows."""
    return rows_axis().add_up(fired.to(torch.int32)) > 0
