"""What a decoder step collects from the rows of its pass.

n rows sampled, D = d_in, E = d_out, F = d_sae. With a skip S the targets are [y - x S_t, x], (B, E + D).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from ..base.devices import moved
from ..base.processes import Communicator
from ..sae.codes import Codes
from ..sae.dictionary import Batch, Dictionary
from .ridge import (
    TOLERANCE,
    DecoderState,
    HeldRows,
    SkipSums,
    StreamedCodes,
    Sums,
    System,
    Terms,
    choose_alpha,
    method_for,
    optimal_decoder,
)
from .rows import BLOCK_ROWS

# Least mean norm of the decoder, over the encoder's at the start; least of a latent, over the mean.
LEAST_SIZE = 1e-2

FIGURES = ("relative_alpha", "condition", "residual")  # of a decoder step

# Alpha as it is; or of least leave-one-out error, in a walk from the last one, or searched for from the start.
AlphaRule = Literal["keep", "walk", "anew"]


@dataclass(frozen=True)
class Pass:
    """A pass over rows, for a decoder step."""

    number: int  # of decoder steps before it
    step: int  # steps of descent before it
    rows: int  # that it takes; others each time, if not all
    alpha: AlphaRule
    last: bool = False  # of training: rows are unsmoothed, and encoded in float32
    release: bool = False  # whether descent on the decoder may begin after it


def alpha_rule(number: int) -> AlphaRule:
    """Alpha, which settles, is chosen at passes 0, 1, 2, 4, ..."""
    if number == 0:
        return "anew"
    return "walk" if number & (number - 1) == 0 else "keep"


class Moments:
    """N, sum z, sum y, sum z z', sum z y' of a pass; every `ceil(rows / BLOCK_ROWS)`-th row as a sample; how often and
    how much each latent fires."""

    def __init__(self, system: System, dictionary: Dictionary, sparsity: str, rows: int) -> None:
        self.system = system
        self._dictionary, self._sparsity = dictionary, sparsity
        self._stride = max(1, math.ceil(rows / BLOCK_ROWS))
        self._holds = isinstance(system, HeldRows)  # then all rows are collected
        W_dec = dictionary.decoder().detach()
        self._weighed = dictionary.weighed(W_dec)
        # Of each latent, (F,): the penalty's weights of its decoder norm, summed over rows; rows on which it fires.
        self.norm_weights = torch.zeros(len(W_dec), dtype=torch.float64, device=W_dec.device)
        self.firings = torch.zeros(len(W_dec), dtype=torch.int64, device=W_dec.device)
        self.skip: SkipSums | None = None
        width = dictionary.d_out
        if dictionary.W_skip is not None:
            self.skip = SkipSums(dictionary.d_in, dictionary.d_out, W_dec.device)
            width += dictionary.d_in
        # Of the sampled rows: codes (n, F), targets (n, E), and their numbers among all rows.
        self.z, self.y = W_dec.new_empty(0, len(W_dec)), W_dec.new_empty(0, width)
        self._z, self._y = [self.z], [self.y]
        self._numbers = [torch.arange(0)]
        self._seen = 0

    @classmethod
    def of(
        cls,
        dictionary: Dictionary,
        sparsity: str,
        rows: int,
        memory: float,
        solve: str,
        encoded: Callable[[], Iterator[tuple[Codes, Batch]]],
    ) -> Self:
        """Empty moments, for the method that `method_for` chooses; `encoded` gives the codes again to an iterative
        solution that cannot keep them."""

        def codes_again() -> Iterator[Codes]:
            return (codes for codes, batch in encoded() if len(batch.x))

        start = dictionary.decoder().detach()
        if dictionary.W_skip is not None:  # the rows' dimensions are targets too
            start = torch.cat([start, start.new_zeros(len(start), dictionary.d_in)], 1)
        d_sae, d_out = start.shape
        method = method_for(rows, d_sae, d_out, memory, solve, dictionary.prefixes)
        return cls(method.system(start, codes_again), dictionary, sparsity, rows)

    @property
    def rows(self) -> float:
        """Of all processes."""
        return self.system.rows

    @property
    def fired(self) -> Tensor:
        """Which latents fire on any row, (F,) bool."""
        return self.firings > 0

    def used(self, state: DecoderState) -> Tensor:
        """Which latents fire on any row, and are not needless, (F,) bool."""
        return self.fired if state.needless is None else self.fired & (state.needless == 0)

    @property
    def solved_together(self) -> bool:
        """In lockstep, each process with its own codes; else rank 0 solves alone."""
        return isinstance(self.system, StreamedCodes)

    def add(self, codes: Codes, batch: Batch) -> None:
        numbers = batch.numbers + self._seen
        self._seen += batch.size
        if not len(batch.x):
            return
        y, dictionary = batch.y, self._dictionary
        if self.skip is not None and dictionary.W_skip is not None:
            y = torch.addmm(y, batch.x, dictionary.W_skip.detach(), alpha=-1)
            self.skip.add(batch.x, y)
            y = torch.cat([y, batch.x], 1)
        stride = 1 if self._holds else self._stride
        sampled = (numbers % stride == 0).nonzero()[:, 0]
        if len(sampled):
            here = moved(sampled, y.device)
            self._z.append(codes.dense_rows(here))
            self._y.append(y[here])
            self._numbers.append(numbers[sampled])
        if isinstance(self.system, Sums | StreamedCodes):
            self.system.add(codes, y)
        self.norm_weights += dictionary.activation.norm_weights(
            self._sparsity, codes, self._weighed, dictionary.activation_parameters
        )
        self.firings += codes.latent_counts()

    def reduce(self, communicator: Communicator) -> None:
        """Sum over processes; the sample is then rank 0's, or if `solved_together` everyone's."""
        z, y = torch.cat(self._z), torch.cat(self._y)
        several = communicator.world_size > 1
        if several:  # rank 0 has all rows, sorted by their numbers; the others only their own
            order = communicator.gather(torch.cat(self._numbers)).argsort().to(z.device)
            z, y = communicator.gather(z)[order], communicator.gather(y)[order]
            self.norm_weights = communicator.all_reduce(self.norm_weights)
            self.firings = communicator.all_reduce(self.firings)
            if self.skip is not None:
                self.skip.reduce(communicator.all_reduce)
        if self._holds:
            self.system = HeldRows(z, y)
            z, y = z[:: self._stride], y[:: self._stride]
        elif several and isinstance(self.system, Sums | StreamedCodes):
            self.system.reduce(communicator.all_reduce)
        if several and self.solved_together:
            z, y = communicator.broadcast_rows(z), communicator.broadcast_rows(y)
        self.z, self.y = z, y

    @property
    def W_t(self) -> Tensor:  # noqa: N802
        return self._dictionary.decoder().detach()

    @property
    def b_t(self) -> Tensor:
        """b_dec, (E,); with a skip (E + D,), zeros at the end."""
        b_dec = self._dictionary.b_dec.detach()
        return torch.cat([b_dec, b_dec.new_zeros(self.y.shape[1] - len(b_dec))])

    def optimum(
        self,
        terms: Terms,
        rule: AlphaRule,
        rows: int,
        communicator: Communicator,
        needless: int = 0,
    ) -> DecoderState:
        """The optimum, the same in all processes, its alpha relative to `rows`; `needless` as in `optimal_decoder`."""
        dictionary, state = self._dictionary, None
        tensors = {
            "Delta": terms.W_t,
            "b": dictionary.b_dec,
            "skip": dictionary.W_skip,
            "needless": dictionary.b_enc.detach() if needless else None,
        }
        like = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        if communicator.is_main or self.solved_together:
            factorisation = None
            if math.isnan(terms.alpha):  # a text ended before the first decoder step that was due
                rule = "anew"
            if rule != "keep":
                last_alpha = terms.alpha if rule == "walk" else None
                factorisation = choose_alpha(self.system, terms, self.z, self.y, last_alpha)
            state = optimal_decoder(self.system, terms, factorisation, needless)
            if state.skip is not None and dictionary.W_skip is not None:
                state = replace(state, skip=state.skip + dictionary.W_skip)
            cast: dict[str, Any] = {
                name: getattr(state, name).to(dictionary.W_enc.dtype) for name in like
            }
            state = replace(state, alpha=state.alpha * rows / self.rows, **cast)
        return broadcast_state(state, like, communicator)


@dataclass(frozen=True)
class Solution:
    """Figures of the last decoder step, and the largest ridge that had to be raised."""

    encoder_norm: float  # at the start of training
    alpha: float = math.nan  # relative to all rows
    relative_alpha: float = math.nan
    condition: float = math.nan
    residual: float = math.nan
    raised: float = 0.0

    def after(self, state: DecoderState) -> Self:
        figures = {name: getattr(state, name) for name in ("alpha", *FIGURES)}
        raised = max(self.raised, state.ridge) if state.raised else self.raised
        return replace(self, raised=raised, **figures)

    def record(self) -> dict[str, float]:
        figures = {name: getattr(self, name) for name in FIGURES}
        known = {name: figure for name, figure in figures.items() if not math.isnan(figure)}
        return {"alpha": self.alpha, **known}

    def notes(self, chosen: bool) -> list[str]:
        """Warnings; `chosen`: alpha is by leave-one-out."""
        notes = []
        if self.residual > 2 * TOLERANCE:
            notes.append(
                f"the last decoder step has a residual of {self.residual:.1g}, expected {TOLERANCE:g}; give a larger "
                "--alpha, or --solve direct"
            )
        if self.raised:
            advice = "give a larger --alpha, or leave the choice to --alpha auto"
            if chosen:
                advice = "the codes are degenerate: see `sae sparsity`, and try a lower --lr"
            notes.append(
                f"a decoder step failed with the ridge asked for, and took {self.raised:.3g}; {advice}"
            )
        return notes

    def state(self) -> dict[str, Tensor]:
        return {
            f"decoder.{name}": torch.tensor(value, dtype=torch.float64)
            for name, value in vars(self).items()
        }

    @classmethod
    def restored(cls, state: Mapping[str, Tensor]) -> Self:
        return cls(**{entry.name: state[f"decoder.{entry.name}"].item() for entry in fields(cls)})


def sampled_bytes(rows: int, d_in: int, d_sae: int) -> int:
    return 4 * 4 * min(rows, BLOCK_ROWS) * (d_sae + d_in)


def broadcast_state(
    state: DecoderState | None, like: Mapping[str, Tensor], communicator: Communicator
) -> DecoderState:
    """Rank 0's state in all processes; `like` has the shapes of its tensors."""
    if state is not None and communicator.world_size == 1:
        return state
    nothing: dict[str, Any] = dict.fromkeys(like)
    numbers = communicator.broadcast_object(lambda: state and replace(state, **nothing))
    assert numbers is not None, "rank 0's"
    tensors: dict[str, Any] = {}
    for name, tensor in like.items():
        sent = tensor if state is None else getattr(state, name)
        sent = sent.detach().clone(memory_format=torch.contiguous_format)
        tensors[name] = communicator.broadcast(sent)
    return replace(numbers, **tensors)


def penalty_decay(dictionary: Dictionary, weights: Tensor, size: float) -> Tensor:
    """Weights, (F,), of the quadratics in `||W_i||` that majorise the penalty, and equal it at the current decoder.

    `a ||W|| <= a (||W||^2 / ||W_t|| + ||W_t||) / 2`: encoder and decoder step descend on one objective, else the two
    would drive the codes to zero. `weights`, (F,), are the penalty's derivatives in the norms, summed over rows; a
    crosscoder's norms are sums over hook points, and the quadratic majorises for multiples of W_t.
    """
    W_dec = dictionary.decoder().detach().double()
    sizes = dictionary.weighed(W_dec).norm(dim=1)
    norms = W_dec.square().sum(1) / sizes.clamp(min=torch.finfo(torch.float64).tiny)
    mean = max(norms.mean().item(), LEAST_SIZE * size / math.sqrt(len(norms)))
    return weights / (2 * norms.clamp(min=LEAST_SIZE * mean))
