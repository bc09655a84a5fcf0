"""A decoder step's pass over the rows: their normal equations, and the statistics for revival and penalties.

Shapes: B rows in a block, b of them in this process, n sampled, D = d_in, E = d_out, F = d_sae. With a skip the rows
stand beside the targets, (B, E + D), and the targets lack what the last skip predicts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..base.devices import moved
from ..base.distributed import Communicator
from ..sae.batch import Batch
from ..sae.codes import Codes
from ..sae.dictionary import Dictionary
from .ridge import TOLERANCE, DecoderState, HeldRows, SkipSums, StreamedCodes, System

SAMPLED_ROWS = 4096  # evenly spaced over all rows: alpha is chosen and dead latents are re-aimed on them
# A given alpha is warned about if rows and latents are within this ratio, and degrees of freedom above this fraction
# of the rows.
THRESHOLD_RATIO, THRESHOLD_FRACTION = 2, 0.8


@dataclass(frozen=True, eq=False)
class Observed:
    """A pass over the rows of all processes.

    Args:
        system: the normal equations; solved by rank 0 alone, or by all processes if `solve_together`.
        rows: N.
        z: codes of the sampled rows, (n, F); of all rows if there are fewer than `SAMPLED_ROWS`. If rank 0 solves, the
            others have only their own.
        y: the targets of those rows, (n, E).
        norm_weights: the penalty's weight of each decoder norm, (F,).
        fired: the latents that fired on any row, a mask, (F,).
        skip: sums for the affine skip; None for none.
    """

    system: System
    rows: float
    z: Tensor
    y: Tensor
    norm_weights: Tensor
    fired: Tensor
    skip: SkipSums | None

    @property
    def solve_together(self) -> bool:
        """Whether all processes solve, in lockstep, since each multiplies by its own codes."""
        return isinstance(self.system, StreamedCodes)


class DecoderPass:
    """Collects a pass block by block; `finish` combines the processes.

    Args:
        system: collects the normal equations of this process' rows.
        dictionary: its decoder has the norms that a penalty weighs.
        sparsity: the penalty, or `none`.
        rows: number of rows expected; every `ceil(rows / SAMPLED_ROWS)`-th is sampled.
    """

    def __init__(self, system: System, dictionary: Dictionary, sparsity: str, rows: int) -> None:
        self.system = system
        self._activation, self._sparsity = dictionary.activation, sparsity
        self._stride = max(1, math.ceil(rows / SAMPLED_ROWS))
        self._holds = isinstance(system, HeldRows)  # all rows are collected, not only the sampled ones
        W_dec = dictionary.decoder().detach()
        self._weighed = dictionary.weighed(W_dec)
        self._norm_weights = torch.zeros(len(W_dec), dtype=torch.float64, device=W_dec.device)
        self._fired = torch.zeros(len(W_dec), dtype=torch.bool, device=W_dec.device)
        self._W_skip, d_out = dictionary.W_skip, dictionary.d_out
        self._skip = None if self._W_skip is None else SkipSums(dictionary.d_in, d_out, W_dec.device)
        width = d_out if self._skip is None else d_out + dictionary.d_in
        self._z, self._y = [W_dec.new_empty(0, len(W_dec))], [W_dec.new_empty(0, width)]
        self._numbers, self._seen = [torch.arange(0)], 0

    def add(self, codes: Codes, batch: Batch) -> None:
        """Add a block of rows, with the codes of this process' rows, (b, F)."""
        numbers = batch.numbers + self._seen
        self._seen += batch.size
        if not len(batch.x):
            return
        y = batch.y
        if self._skip is not None:
            y = torch.addmm(y, batch.x, self._W_skip.detach(), alpha=-1)
            self._skip.add(batch.x, y)
            y = torch.cat([y, batch.x], 1)
        sampled = (numbers % (1 if self._holds else self._stride) == 0).nonzero()[:, 0]
        if len(sampled):
            here = moved(sampled, y.device)
            self._z.append(codes.dense_rows(here))
            self._y.append(y[here])
            self._numbers.append(numbers[sampled])
        if not self._holds:
            self.system.add(codes, y)
        self._norm_weights += self._activation.norm_weights(self._sparsity, codes, self._weighed)
        self._fired |= codes.fired()

    def finish(self, communicator: Communicator) -> Observed:
        """The pass over all processes' rows."""
        z, y = in_order(torch.cat(self._z), torch.cat(self._y), torch.cat(self._numbers), communicator)
        system = self.system
        if self._holds:
            system, z, y = HeldRows(z, y), z[::self._stride], y[::self._stride]
        norm_weights, fired = self._norm_weights, self._fired
        if communicator.world_size == 1:
            return Observed(system, system.rows, z, y, norm_weights, fired, self._skip)
        if self._skip is not None:
            self._skip.reduce(communicator.all_reduce)
        if not isinstance(system, HeldRows):
            system.reduce(communicator.all_reduce)
        norm_weights = communicator.all_reduce(norm_weights.clone())
        fired = communicator.all_reduce(fired.to(torch.int32)) > 0
        if isinstance(system, StreamedCodes):
            sizes = communicator.broadcast_object(lambda: len(z))
            z, y = (communicator.broadcast(rows if communicator.is_main else rows.new_empty(sizes, rows.shape[1]))
                    for rows in (z.contiguous(), y.contiguous()))
        return Observed(system, system.rows, z, y, norm_weights, fired, self._skip)


def choosing_bytes(rows: int, d_in: int, d_sae: int) -> int:
    """Memory of the sample on which alpha is chosen, of N rows."""
    return 4 * 4 * min(rows, SAMPLED_ROWS) * (d_sae + d_in)


def in_order(z: Tensor, y: Tensor, numbers: Tensor, communicator: Communicator) -> tuple[Tensor, Tensor]:
    """All processes' codes and targets on rank 0, sorted by their rows' numbers; the others keep their own."""
    if communicator.world_size == 1:
        return z, y
    order = communicator.gather(numbers).argsort().to(z.device)
    z, y = communicator.gather(z), communicator.gather(y)
    return z[order], y[order]


def broadcast(state: DecoderState | None, like: Mapping[str, Tensor], communicator: Communicator) -> DecoderState:
    """Rank 0's decoder on every process; `state` is None on processes that did not solve, where `like` has tensors of
    the shapes and on the device of its Delta, (F, E), b, (E,), and with a skip skip, (D, E)."""
    if communicator.world_size == 1:
        return state
    numbers = communicator.broadcast_object(lambda: replace(state, **dict.fromkeys(like)))
    parts = {name: tensor if state is None else getattr(state, name) for name, tensor in like.items()}
    return replace(numbers, **{
        name: communicator.broadcast(part.detach().clone(memory_format=torch.contiguous_format))
        for name, part in parts.items()})



def notes_on(decoder: DecoderState, chosen: bool, rows: int, latents: int, raised: float) -> list[str]:
    """Sentences on the problems of the decoder steps.

    Args:
        decoder: after the last step.
        chosen: whether alpha was chosen, not given.
        rows: N.
        latents: F.
        raised: the largest ridge that a decoder step used instead of a smaller one; 0 for none.
    """
    alpha, dof = decoder.alpha, decoder.dof
    notes = []
    if not chosen and dof > THRESHOLD_FRACTION * rows and 1 / THRESHOLD_RATIO <= rows / latents <= THRESHOLD_RATIO:
        notes.append(f"--alpha {alpha:.3g} lets the decoder fit nearly every one of {rows:,} rows by itself with "
                     f"{latents:,} latents, which is where the error on other rows peaks; use --alpha auto, or a "
                     "larger --alpha")
    if decoder.residual > 2 * TOLERANCE:
        notes.append(f"the last decoder step was solved to a residual of {decoder.residual:.1g} only, where "
                     f"{TOLERANCE:g} was wanted; give a larger --alpha, or --solve direct")
    if raised:
        advice = ("the codes are degenerate: see `sae sparsity`, and try a lower --lr" if chosen
                  else "give a larger --alpha, or leave the choice to --alpha auto")
        notes.append(f"a decoder step could not be solved with the ridge asked for, and took "
                     f"{raised:.3g} instead; {advice}")
    return notes
