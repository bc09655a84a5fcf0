"""The windows of tokens in which each latent's codes are largest, or some at random, with an excerpt about each peak;
found in blocks of rows that end where windows end.

Shapes: B rows, W windows, C latents, N examples per latent, T tokens of an excerpt, n peaks, D = d_in.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..store.rows import Rows
from ..store.split import window_starts

COLUMNS = ("document", "position", "token_id")
LONGEST = 8  # batches that a window may span before it is split, which keeps memory constant


@dataclass(frozen=True)
class Block:
    """Some rows, in stored order.

    Args:
        x: the rows, (B, D).
        numbers: their numbers within the store, (B,).
        columns: their values of `COLUMNS`, (3, B); None if the store lacks one, so that it has no windows.
    """

    x: Tensor
    numbers: np.ndarray
    columns: np.ndarray | None

    @property
    def starts(self) -> np.ndarray:
        """The begin of each window and the end of the last, (W + 1,); without tokens each row is a window."""
        rows = len(self.x)
        if self.columns is None:
            return np.arange(rows + 1)
        return np.concatenate([[0], window_starts(self.columns[0], self.columns[1]), [rows]])


def in_blocks(batches: Iterable[Tensor], rows: Rows, batch_rows: int) -> Iterator[Block]:
    """Batches with their columns; with tokens, in whole windows.

    Args:
        batches: the rows in stored order, in batches (B, D).
        rows: the same rows.
        batch_rows: rows of every batch but the last.

    Yields:
        Blocks of about a batch, valid until the next is asked for. Only a window of more than `LONGEST` batches is
        split.
    """
    numbers = rows.numbers(batch_rows)
    if not set(COLUMNS) <= set(rows.store.meta.columns):
        for x, own in zip(batches, numbers, strict=True):
            yield Block(x, own, None)
        return
    streams = [rows.column(name, batch_rows) for name in COLUMNS]
    waiting: Block | None = None
    for x, own, *columns in zip(batches, numbers, *streams, strict=True):
        block = Block(x, own, np.stack(columns))
        block = block if waiting is None else _joined(waiting, block)
        end = int(block.starts[-2]) or (len(block.x) if len(block.x) > LONGEST * batch_rows else 0)
        if end:
            yield _part(block, slice(0, end))
        waiting = _part(block, slice(end, None))
        waiting = Block(waiting.x.clone(), waiting.numbers, waiting.columns)  # the batch's memory is reused
    if waiting is not None and len(waiting.x):
        yield waiting


def _joined(first: Block, second: Block) -> Block:
    return Block(torch.cat([first.x, second.x]), np.concatenate([first.numbers, second.numbers]),
                 np.concatenate([first.columns, second.columns], axis=1))


def _part(block: Block, which: slice) -> Block:
    return Block(block.x[which], block.numbers[which], block.columns[:, which])


TOKENS, BEFORE = 48, 31  # most tokens of an excerpt, and those before its peak
WINDOWS = 128  # examined before the smallest examples are updated
FACTOR = 0x9E3779B97F4A7C15  # odd, so invertible modulo 2^64
INVERSE = pow(FACTOR, -1, 1 << 64)


Ranking = Callable[[Tensor, np.ndarray, np.ndarray], Tensor]


def by_size(z: Tensor, numbers: np.ndarray, latents: np.ndarray) -> Tensor:
    """The codes' sizes `|z|`, (B, C), under which the examples are the largest; see `Examples`."""
    return z.abs()


def at_random(z: Tensor, numbers: np.ndarray, latents: np.ndarray) -> Tensor:
    """A random number in [0, 1) for each code that is not zero, else 0, (B, C), under which the examples are a random
    sample of the rows on which a latent fires.

    Args:
        z: codes, (B, C).
        numbers: of the rows within the store, (B,), from which alone, and from the latents, the numbers follow.
        latents: (C,).

    Each row has a number, which each latent turns by its own along a circle: as random for a latent as numbers of its
    own, in a fraction of the time.
    """
    turned = _uniform(numbers).to(z.device)[:, None] + _uniform(~latents).to(z.device)
    return turned.frac_().mul_(z != 0)


def _uniform(numbers: np.ndarray) -> Tensor:
    """A number in [0, 1) for each integer, float32: the upper bits of a hash (the finaliser of SplitMix64)."""
    x = numbers.astype(np.uint64) * np.uint64(FACTOR)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy((x >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24))


class Peaks(NamedTuple):
    """The codes of some latents that rank first in some windows of a block, (n,) each.

    Args:
        rows: their rows within the block.
        latents: their latents, as indices into the chosen ones.
        ranks: their values under the ranking.
        begins: where in the block their excerpts begin.
        ends: where these end.
        marks: hashes of the excerpts.
    """

    rows: np.ndarray
    latents: np.ndarray
    ranks: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    marks: np.ndarray


class Examples:
    """The N windows that rank first for each chosen latent, merged batch by batch.

    A window counts once, at its first code of highest rank, and so do windows with equal excerpts, so that a repeated
    text does not fill the list. Of equal ranks the first in the store is kept.

    Args:
        latents: numbers of the latents.
        d_sae: number of all latents.
        count: N, examples per latent.
        tokens: whether the rows have tokens, which take `8 TOKENS C N` bytes.
        ranking: ranks codes, `by_size` or `at_random`; a code of rank 0 is no example.
    """

    def __init__(self, latents: Sequence[int], d_sae: int, count: int, tokens: bool,
                 ranking: Ranking = by_size) -> None:
        self._latents, self._all, self._ranking = np.array(latents), len(latents) == d_sae, ranking
        shape, width = (len(latents), count), TOKENS if tokens else 1
        self._ranks = np.zeros(shape, np.float32)  # descending; 0 where there is no example
        self._marks = np.zeros(shape, np.uint64)  # hashes of the excerpts
        self._slots = np.zeros(shape, np.int64)  # index of each example in `_kept`, which is not sorted
        self._kept = {"number": np.zeros(shape, np.int64), "code": np.zeros((*shape, width), np.float32)}
        if tokens:
            self._kept |= {"document": np.zeros(shape, np.int64), "position": np.zeros(shape, np.int32),
                           "peak": np.zeros(shape, np.int16), "gap": np.zeros((*shape, width), bool),
                           "token": np.zeros((*shape, width), np.int32)}

    def of(self, latents: Sequence[int]) -> dict[str, np.ndarray]:
        """The examples of some of its latents.

        Returns:
            Arrays by name, (C, N) each, highest rank first: `rank`, 0 where there is no example; `number`, the peak's
            row within the store; and `code`, the codes, (C, N, T), with T = 1 without tokens. With tokens also
            `document` and `position` of the peak; `peak`, its index in the excerpt; `token`, (C, N, T), the excerpt's
            token ids, -1 after its end; `gap`, (C, N, T), whether rows are missing before a token.
        """
        indices = np.searchsorted(self._latents, np.array(latents))
        slots = self._slots[indices]
        return {"rank": self._ranks[indices],
                **{name: kept[indices[:, None], slots] for name, kept in self._kept.items()}}

    @torch.no_grad()
    def update(self, z: Tensor, block: Block) -> None:
        """Take in the codes of a block, (B, F)."""
        if not self._all:
            z = z[:, torch.from_numpy(self._latents).to(z.device)]
        starts = block.starts
        for first in range(0, len(starts) - 1, WINDOWS):
            self._merge(z, block, self._peaks(z, block, starts[first : first + WINDOWS + 1]))

    def _peaks(self, z: Tensor, block: Block, starts: np.ndarray) -> Peaks:
        """The peaks, in windows bounded by `starts`, (W + 1,), that rank above the last example of their latent; few,
        once some windows have been seen."""
        def ranked(rows: slice, latents: np.ndarray | slice = slice(None)) -> Tensor:
            return self._ranking(z[rows, latents], block.numbers[rows], self._latents[latents])

        if starts[-1] - starts[0] == len(starts) - 1:  # one row per window
            highest = ranked(slice(starts[0], starts[-1]))
        else:  # window by window, which stay in the cache
            highest = torch.stack([ranked(slice(begin, end)).amax(0) for begin, end in pairwise(starts.tolist())])
        least = torch.from_numpy(self._ranks[:, -1].copy()).to(highest)
        windows, latents = np.nonzero((highest > least).cpu().numpy())
        rows = _rows_of(ranked, starts, windows, latents)
        begins, ends = _excerpts(rows, starts[windows], starts[windows + 1])
        numbers = block.numbers[rows].astype(np.uint64)
        marks = numbers if block.columns is None else _marks(block.columns[2], begins, ends)
        return Peaks(rows, latents, highest[windows, latents].float().cpu().numpy(), begins, ends, marks)

    def _merge(self, z: Tensor, block: Block, peaks: Peaks) -> None:
        """Merge peaks into the examples of their latents."""
        count = self._marks.shape[1]
        touched, owner = np.unique(peaks.latents, return_inverse=True)
        stored = len(touched) * count  # those already there come first, then the new ones
        owner = np.concatenate([np.arange(len(touched)).repeat(count), owner])
        ranks = np.concatenate([self._ranks[touched].ravel(), peaks.ranks])
        marks = np.concatenate([self._marks[touched].ravel(), peaks.marks])
        order = np.lexsort((-ranks, owner))
        order = order[ranks[order] > 0]
        order = order[np.sort(_first_of_each(np.lexsort((marks[order], owner[order])), owner[order], marks[order]))]
        place = _numbered(owner[order])
        order, place = order[place < count], place[place < count]
        old, new = order[order < stored], order[order >= stored]
        slots = self._slots[touched].ravel()
        taken = np.zeros((len(touched), count), bool)
        taken[owner[old], slots[old]] = True
        free = np.argsort(taken, axis=1, kind="stable")
        slots = np.concatenate([slots, np.zeros(len(owner) - stored, np.int64)])
        slots[new] = free[owner[new], _numbered(owner[new])]
        for state, values in ((self._ranks, ranks), (self._marks, marks), (self._slots, slots)):
            after = np.zeros((len(touched), count), state.dtype)
            after[owner[order], place] = values[order]
            state[touched] = after
        came = Peaks(*(values[new - stored] for values in peaks))
        for name, values in _read(z, block, came, self._kept["code"].shape[-1]).items():
            self._kept[name][touched[owner[new]], slots[new]] = values


def _rows_of(ranked: Callable[[slice, np.ndarray], Tensor], starts: np.ndarray, windows: np.ndarray,
             latents: np.ndarray) -> np.ndarray:
    """The first row of highest rank of a latent in a window, (n,), for pairs of these ordered by window."""
    ends = np.searchsorted(windows, np.arange(len(starts))).tolist()
    found = [np.empty(0, np.int64)]
    for window, (first, last) in enumerate(pairwise(ends)):
        if last > first:
            ranks = ranked(slice(starts[window], starts[window + 1]), latents[first:last])
            found.append(starts[window] + ranks.argmax(0).cpu().numpy())
    return np.concatenate(found)


def _numbered(owners: np.ndarray) -> np.ndarray:
    """The rank, from 0, of each entry among those of the same owner; owners are ascending."""
    return np.arange(len(owners)) - np.searchsorted(owners, owners)


def _first_of_each(order: np.ndarray, *keys: np.ndarray) -> np.ndarray:
    """The first index of each group of equal keys, from indices that are ordered by group."""
    new = np.ones(len(order), bool)
    new[1:] = np.any([key[order[1:]] != key[order[:-1]] for key in keys], axis=0)
    return order[new]


def _excerpts(rows: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Begin and end of the excerpts about rows, within windows of given begins and ends: at most `TOKENS` tokens, with
    `BEFORE` before the row unless the window ends too early."""
    first = np.maximum(begins, np.minimum(rows - BEFORE, ends - TOKENS))
    return first, np.minimum(ends, first + TOKENS)


def _marks(tokens: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """A hash of each stretch of tokens, (n,) uint64: a polynomial of the tokens modulo 2^64, as the difference of two
    cumulative sums."""
    steps = np.full(len(tokens), FACTOR, np.uint64)
    steps[0] = 1
    sums = np.concatenate([[np.uint64(0)], np.cumsum((tokens + 1).astype(np.uint64) * np.cumprod(steps))])
    steps[1:] = INVERSE
    return (sums[ends] - sums[begins]) * np.cumprod(steps)[begins]


def _read(z: Tensor, block: Block, peaks: Peaks, width: int) -> dict[str, np.ndarray]:
    """The values that `Examples` keeps for peaks and their excerpts, (n,) or (n, width) each."""
    rows = peaks.begins[:, None] + np.arange(width)
    inside = rows < peaks.ends[:, None]
    rows = np.where(inside, rows, peaks.begins[:, None])
    codes = z[torch.from_numpy(rows).to(z.device), torch.from_numpy(peaks.latents[:, None]).to(z.device)]
    values = {"number": block.numbers[peaks.rows], "code": codes.float().cpu().numpy() * inside}
    if block.columns is None:
        return values
    documents, positions, tokens = block.columns
    gaps = np.diff(positions, prepend=positions[:1]) > 1
    return values | {"document": documents[peaks.rows], "position": positions[peaks.rows],
                     "peak": peaks.rows - peaks.begins, "gap": gaps[rows] & inside & (np.arange(width) > 0),
                     "token": np.where(inside, tokens[rows], -1)}
