"""One decoder step: its pass over the rows, the solution, and the upkeep of the latents.

B rows in a block, b of them in this process, n sampled; D = d_in, E = d_out, F = d_sae, P places of a crosscoder, one
otherwise. With a skip the rows stand next to the targets, (B, E + D), which lack what the last skip predicts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..base.devices import moved
from ..base.processes import Communicator
from ..sae.codes import Codes
from ..sae.dictionary import Batch, Coupled, Dictionary
from .ridge import (
    DecoderState,
    HeldRows,
    SkipSums,
    StreamedCodes,
    Sums,
    System,
    Terms,
    solve,
)
from .ridge.choice import choose_alpha

SAMPLED_ROWS = 4096  # evenly spaced over all rows: alpha is chosen on them
DOF_ROWS = 512  # of these, for the effective degrees of freedom
LEAST_SIZE = 1e-2  # least size of encoder and decoder, over the encoder's norm at the start
LEAST_NORM = (
    1e-3  # decoder norm over the mean one, below which a penalty is replaced by a quadratic
)
MOST_REAIMED = 0.02  # largest fraction of the latents re-aimed at a decoder step as replaceable
# A penalty has silenced a latent whose contributions, over a row's norm, are on average below the first on all rows,
# and below the second on those where it fires: a rare one contributes little to all rows, but much to its own.
SILENT, SILENT_WHERE_FIRING = 1e-7, 1e-2


@dataclass(frozen=True)
class Pass:
    """A pass over rows that ends in a decoder step."""

    number: int  # of decoder steps before it
    epoch: int
    after_batch: int  # of the epoch; 0 before the first
    rows: int  # that it takes; others each time, if not all
    chooses: bool  # alpha anew
    decides: bool  # on the release, by alpha
    releases: bool
    last: bool  # takes rows unsmoothed, and leaves the penalty out


@dataclass(frozen=True, eq=False)
class Observed:
    """A pass over the N rows of all processes."""

    system: System
    rows: float  # N
    z: Tensor  # of sampled rows, (n, F); of this process, unless rank 0 or `solve_together`
    y: Tensor  # their targets, (n, E)
    norm_weights: (
        Tensor  # the penalty's weight of each decoder norm, summed over rows, (F,), float64
    )
    firings: Tensor  # rows on which each latent fires, (F,), int64
    skip: SkipSums | None

    @property
    def fired(self) -> Tensor:
        """On any row, a mask, (F,)."""
        return self.firings > 0

    @property
    def solve_together(self) -> bool:
        """In lockstep, each multiplying by its own codes; else rank 0 alone."""
        return isinstance(self.system, StreamedCodes)


class DecoderPass:
    """Collects a pass, with every `ceil(rows / SAMPLED_ROWS)`-th row as a sample."""

    def __init__(self, system: System, dictionary: Dictionary, sparsity: str, rows: int) -> None:
        self._system, self._activation, self._sparsity = system, dictionary.activation, sparsity
        self._parameters = dictionary.activation_parameters
        self._stride = max(1, math.ceil(rows / SAMPLED_ROWS))
        self._holds = isinstance(
            system, HeldRows
        )  # all rows are collected, not only the sampled ones
        W_dec = dictionary.decoder().detach()
        self._weighed = dictionary.weighed(W_dec)
        self._norm_weights = torch.zeros(len(W_dec), dtype=torch.float64, device=W_dec.device)
        self._firings = torch.zeros(len(W_dec), dtype=torch.int64, device=W_dec.device)
        self._W_skip, d_out = dictionary.W_skip, dictionary.d_out
        self._skip = (
            None if self._W_skip is None else SkipSums(dictionary.d_in, d_out, W_dec.device)
        )
        width = d_out if self._skip is None else d_out + dictionary.d_in
        self._z, self._y = [W_dec.new_empty(0, len(W_dec))], [W_dec.new_empty(0, width)]
        self._numbers, self._seen = [torch.arange(0)], 0

    def add(self, codes: Codes, batch: Batch) -> None:
        numbers = batch.numbers + self._seen
        self._seen += batch.size
        if not len(batch.x):
            return
        y = batch.y
        if self._skip is not None and self._W_skip is not None:
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
            self._system.add(codes, y)
        self._norm_weights += self._activation.norm_weights(
            self._sparsity, codes, self._weighed, self._parameters
        )
        self._firings += codes.latent_counts()

    def finish(self, communicator: Communicator) -> Observed:
        z, y, system = torch.cat(self._z), torch.cat(self._y), self._system
        norm_weights, firings = self._norm_weights, self._firings
        several = communicator.world_size > 1
        if several:  # rank 0 has all rows, sorted by their numbers; the others only their own
            order = communicator.gather(torch.cat(self._numbers)).argsort().to(z.device)
            z, y = communicator.gather(z)[order], communicator.gather(y)[order]
            norm_weights = communicator.all_reduce(norm_weights)
            firings = communicator.all_reduce(firings)
            if self._skip is not None:
                self._skip.reduce(communicator.all_reduce)
        if self._holds:
            system, z, y = HeldRows(z, y), z[:: self._stride], y[:: self._stride]
        elif several and isinstance(system, Sums | StreamedCodes):
            system.reduce(communicator.all_reduce)
        if several and isinstance(system, StreamedCodes):
            sizes = communicator.broadcast_object(lambda: len(z))
            z, y = (
                communicator.broadcast(
                    rows if communicator.is_main else rows.new_empty(sizes, rows.shape[1])
                )
                for rows in (z.contiguous(), y.contiguous())
            )
        return Observed(system, system.rows, z, y, norm_weights, firings, self._skip)


def sampled_bytes(rows: int, d_in: int, d_sae: int) -> int:
    return 4 * 4 * min(rows, SAMPLED_ROWS) * (d_sae + d_in)


def solved(
    observed: Observed, terms: Terms, chooses: bool, most_replaceable: int, dof: bool
) -> DecoderState:
    """The decoder, at the terms' alpha, or where a choice from there ends; NaN for a choice over all decades."""
    system, z, y, factorisation = observed.system, observed.z, observed.y, None
    if chooses:
        factorisation = choose_alpha(
            system, terms, z, y, None if math.isnan(terms.alpha) else terms.alpha
        )
    some = z if len(z) == observed.rows else z[:: math.ceil(len(z) / DOF_ROWS)]
    return solve(system, terms, factorisation, some if dof else None, most_replaceable)


def penalty_decay(W_dec: Tensor, penalised: Tensor, weights: Tensor, size: float) -> Tensor:
    """Of each latent, (F,), the weight of the quadratic in `||W_i||` that majorises the penalty, and equals it at the
    current decoder.

    `a ||W|| <= a (||W||^2 / ||W_t|| + ||W_t||) / 2`, so encoder and decoder step descend on one objective; without the
    penalty the two would drive the codes to zero. `weights`, (F,), are its derivatives in the `penalised` norms, summed
    over rows. Of a crosscoder these are sums over hook points; the quadratic then majorises it for multiples of W_t.
    """
    square = W_dec.double().square().sum(1)
    norms = square / penalised.clamp(min=torch.finfo(torch.float64).tiny)
    mean = max(norms.mean().item(), LEAST_SIZE * size / math.sqrt(len(norms)))
    return weights / (2 * norms.clamp(min=LEAST_NORM * mean))


def broadcast(
    state: DecoderState | None, like: Mapping[str, Tensor], communicator: Communicator
) -> DecoderState:
    if communicator.world_size == 1:
        assert state is not None
        return state

    def without_tensors() -> DecoderState:
        assert state is not None
        nothing: dict[str, Any] = dict.fromkeys(like)
        return replace(state, **nothing)

    numbers, parts = communicator.broadcast_object(without_tensors), dict[str, Any]()
    for name, tensor in like.items():
        part = tensor if state is None else getattr(state, name)
        parts[name] = communicator.broadcast(
            part.detach().clone(memory_format=torch.contiguous_format)
        )
    return replace(numbers, **parts)


def directions_of_worst(
    x: Tensor, residuals: Tensor, count: int, generator: torch.Generator
) -> Tensor:
    """Unit directions, (m, E), of the residuals, (n, E), of different rows x, (n, D), drawn without replacement with
    probability proportional to their square: `count`, or as many as there are different rows with a residual.

    Latents re-aimed at one row would be copies, which descent never parts.
    """
    scaled = residuals.double() / residuals.abs().max().clamp(min=torch.finfo(residuals.dtype).tiny)
    groups = torch.unique(x, dim=0, return_inverse=True)[1].cpu()  # (n,), the same for equal rows
    numbers = torch.arange(len(x))
    first = numbers.new_full((len(x),), len(x)).scatter_reduce_(0, groups, numbers, "amin")
    weights = torch.where(first[groups] == numbers, scaled.square().sum(1).cpu(), 0.0)
    count = min(count, int(weights.count_nonzero()))
    if not count:
        return residuals[:0]
    drawn = torch.multinomial(weights, count, generator=generator)
    chosen = scaled[moved(drawn, scaled.device)]
    return (chosen / chosen.norm(dim=1, keepdim=True)).to(residuals.dtype)


@torch.no_grad()
def revive(
    dictionary: Dictionary,
    dead: Tensor,
    others: Tensor,
    directions: Tensor,
    B: Tensor | None,
    biased: bool,
) -> None:
    """Re-aim m dead latents, a mask (F,), at unit vectors d, (m, E), with the mean norms and parameters of others, a
    mask, (F,).

    The encoder is aimed along `B d`, B being the targets' regression, (D, E). A decoder that descends is aimed at d;
    one that is solved for stays tied, or zero if free, until the next decoder step. b_enc is 0, which finds most
    features, or if `biased` the mean of the others: under a penalty latents that start dense can stay so, with small
    codes.
    """

    def mean_of_others(values: Tensor) -> Tensor:
        return values.masked_fill(~others, 0).sum() / others.sum()

    W_enc, along = dictionary.W_enc, directions.T
    if B is not None:
        along = B @ along
        norms = along.norm(dim=0)
        along = along / norms.masked_fill(norms == 0, 1)
    W_enc[:, dead] = mean_of_others(W_enc.norm(dim=0)) * along
    dictionary.b_enc.masked_fill_(dead, mean_of_others(dictionary.b_enc) if biased else 0.0)
    for name, parameter in dictionary.activation_parameters.items():
        if dictionary.latent_dimension(name) is not None:
            parameter.masked_fill_(dead, mean_of_others(parameter))
    for name, parameter in dictionary.named_parameters():
        if name in ("W_dec", "Delta"):
            norm = mean_of_others(parameter.norm(dim=1)) if parameter.requires_grad else 0.0
            parameter[dead] = norm * directions


@torch.no_grad()
def silence(dictionary: Dictionary, norm_weights: Tensor, firings: Tensor, rows: float) -> bool:
    """Turn off latents whose contribution to N rows, and to those on which they fire, `firings` of them, (F,), a
    penalty has driven to nothing; whether there were any.

    Otherwise a decoder step without the penalty would bring them back.
    """
    W_dec = dictionary.decoder()
    contributed = norm_weights * W_dec.double().norm(dim=1) / math.sqrt(W_dec.shape[1])  # (F,)
    little = contributed < SILENT * rows
    small = contributed < SILENT_WHERE_FIRING * firings
    gone = (norm_weights > 0) & little & small
    dictionary.W_enc.masked_fill_(gone, 0)
    dictionary.b_enc.masked_fill_(gone, 0)
    return bool(gone.any())


@torch.no_grad()
def balance(dictionary: Coupled, size: float) -> float | None:
    """Scale the codes, and the decoder by the inverse, to one norm of encoder and decoder: the factor, None if
    one of them is zero.

    Otherwise a penalty shrinks the codes in each encoder step, the decoder step compensates, and Adam's steps become
    large compared to the encoder. It keeps `LEAST_SIZE` of its norm at the start, so that biases can silence codes.
    """
    norm, Delta = dictionary.W_enc.norm().item(), dictionary.Delta
    assert Delta is not None
    square = dictionary.c or Delta.norm().item() / max(
        norm, torch.finfo(dictionary.W_enc.dtype).tiny
    )
    if not 0 < square < math.inf or not norm:
        return None
    factor = max(math.sqrt(square), LEAST_SIZE * size / norm)
    rescaled = dictionary.activation.rescaled(dictionary.activation_parameters, factor)
    dictionary.W_enc.mul_(factor)
    dictionary.b_enc.mul_(factor)
    for name, value in rescaled.items():
        getattr(dictionary, name).copy_(value)
    dictionary.c /= factor**2
    Delta.div_(factor)
    return factor
