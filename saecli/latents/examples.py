"""Where the codes of each latent are largest: a window of tokens each, with the codes of the tokens about its peak.

Shapes: B rows, W windows, C latents, N examples a latent, T tokens of an excerpt, m and n of those at hand.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..metrics import in_cache
from .blocks import Block

TOKENS, BEFORE = 48, 31  # of an excerpt at most, and of those before its peak
FACTOR = 0x9E3779B97F4A7C15  # odd, so that it can be divided by modulo 2^64
INVERSE = pow(FACTOR, -1, 1 << 64)


class Examples:
    """The N windows in which each of some latents' codes reach the largest sizes `|z|`, merged batch by batch.

    A window counts once, at its first largest code, and windows whose excerpts read the same count once, so that a
    text that is repeated does not fill the list. Among equals the first in the store is kept.

    Args:
        latents: numbers of the latents.
        d_sae: number of all latents.
        count: N, examples a latent.
        tokens: whether the rows have tokens, which need room: `8 TOKENS C N` bytes.

    Attributes:
        found: arrays by name, (C, N) each, the largest first: `size`, 0 where there is none; `number`, the peak's row
            within the store. With tokens further `document` and `position`, the peak's; `peak`, its place in the
            excerpt; `gap`, (C, N, T), whether rows are missing before a token; `token`, (C, N, T), the excerpt's token
            ids, -1 after its end. In any case `code`, the codes, (C, N, T), T being 1 without tokens.
    """

    def __init__(self, latents: Sequence[int], d_sae: int, count: int, tokens: bool) -> None:
        self._latents = None if len(latents) == d_sae else torch.tensor(latents)
        shape, width = (len(latents), count), TOKENS if tokens else 1
        self.found = {"size": np.zeros(shape, np.float32), "number": np.zeros(shape, np.int64),
                      "code": np.zeros((*shape, width), np.float32)}
        self._marks = np.zeros(shape, np.uint64)  # of excerpts; equal ones read the same
        if tokens:
            self.found |= {"document": np.zeros(shape, np.int64), "position": np.zeros(shape, np.int32),
                           "peak": np.zeros(shape, np.int16), "gap": np.zeros((*shape, width), bool),
                           "token": np.full((*shape, width), -1, np.int32)}

    @torch.no_grad()
    def update(self, z: Tensor, block: Block) -> None:
        """Look at the codes of a block, (B, F)."""
        if self._latents is not None:
            z = z[:, self._latents.to(z.device)]
        rows, latents, sizes = self._candidates(z)
        starts = block.starts
        windows = np.searchsorted(starts, rows, side="right") - 1
        best = _first_of_each(np.lexsort((-sizes, latents, windows)), windows, latents)
        rows, latents, sizes, windows = rows[best], latents[best], sizes[best], windows[best]
        begins, ends = _excerpts(rows, starts[windows], starts[windows + 1])
        marks = block.numbers[rows].astype(np.uint64) if block.columns is None else _marks(block.columns[2], begins,
                                                                                           ends)
        self._merge(z, block, rows, latents, sizes, begins, ends, marks)

    def keep(self, latents: Sequence[int]) -> None:
        """Forget all but the examples of some latents, by their numbers, where those of all are there."""
        self.found = {name: values[latents] for name, values in self.found.items()}

    def _candidates(self, z: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, latents and sizes, (n,) each, of the codes that are larger than the smallest example of their latent:
        few, once some windows have been seen."""
        least = torch.from_numpy(self.found["size"][:, -1].copy()).to(z)
        row, width, parts = 0, z.shape[1], []
        for some in in_cache(z):
            sizes = some.abs()
            flat = np.flatnonzero((sizes > least).cpu().numpy())
            chosen = sizes.flatten()[torch.from_numpy(flat).to(z.device)].cpu().numpy()
            parts.append((row + flat // width, flat % width, chosen))
            row += len(some)
        return tuple(np.concatenate(part) for part in zip(*parts, strict=True))

    def _merge(self, z: Tensor, block: Block, rows: np.ndarray, latents: np.ndarray, sizes: np.ndarray,
               begins: np.ndarray, ends: np.ndarray, marks: np.ndarray) -> None:
        """Let new windows, (n,) each, take their places among the examples of their latents."""
        count = self._marks.shape[1]
        touched, owner = np.unique(latents, return_inverse=True)
        stored = len(touched) * count  # those already there come first, then the new ones
        owner = np.concatenate([np.arange(len(touched)).repeat(count), owner])
        sizes = np.concatenate([self.found["size"][touched].ravel(), sizes])
        marks = np.concatenate([self._marks[touched].ravel(), marks])
        order = np.lexsort((-sizes, owner))
        order = order[sizes[order] > 0]
        order = order[np.sort(_first_of_each(np.lexsort((marks[order], owner[order])), owner[order], marks[order]))]
        rank = np.arange(len(order)) - np.searchsorted(owner[order], np.arange(len(touched)))[owner[order]]
        order, rank = order[rank < count], rank[rank < count]
        old = order < stored
        new = order[~old] - stored
        values = {"size": sizes[stored:][new], "number": block.numbers[rows[new]],
                  **_read(z, block, rows[new], latents[new], begins[new], ends[new], self.found["code"].shape[-1])}
        for state, fresh in ((self._marks, marks[stored:][new]), *((self.found[name], values[name])
                                                                    for name in self.found)):
            before = state[touched].reshape(stored, *state.shape[2:])
            after = np.zeros_like(before).reshape(len(touched), *state.shape[1:])
            after[owner[order[old]], rank[old]] = before[order[old]]
            after[owner[order[~old]], rank[~old]] = fresh
            state[touched] = after


def _first_of_each(order: np.ndarray, *keys: np.ndarray) -> np.ndarray:
    """Of indices in an order that groups equal keys, the first of each group."""
    new = np.ones(len(order), bool)
    new[1:] = np.any([key[order[1:]] != key[order[:-1]] for key in keys], axis=0)
    return order[new]


def _excerpts(rows: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the excerpts about some rows begin and end, inside the windows that do so: as many tokens as there is room
    for, `BEFORE` of them before the row unless the window is short of others."""
    first = np.maximum(begins, np.minimum(rows - BEFORE, ends - TOKENS))
    return first, np.minimum(ends, first + TOKENS)


def _marks(tokens: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """A number for each stretch of tokens, (n,) uint64, by which equal stretches are told: a polynomial of the tokens
    modulo 2^64, the difference of two sums from the start."""
    steps = np.full(len(tokens), FACTOR, np.uint64)
    steps[0] = 1
    sums = np.concatenate([[np.uint64(0)], np.cumsum((tokens + 1).astype(np.uint64) * np.cumprod(steps))])
    steps[1:] = INVERSE
    return (sums[ends] - sums[begins]) * np.cumprod(steps)[begins]


def _read(z: Tensor, block: Block, rows: np.ndarray, latents: np.ndarray, begins: np.ndarray, ends: np.ndarray,
          width: int) -> dict[str, np.ndarray]:
    """What `Examples.found` holds of excerpts beside size and number, their codes and tokens read, (m, T) each."""
    places = begins[:, None] + np.arange(width)
    inside = places < ends[:, None]
    places = np.where(inside, places, begins[:, None])
    codes = z[torch.from_numpy(places).to(z.device), torch.from_numpy(latents[:, None]).to(z.device)]
    values = {"code": codes.float().cpu().numpy() * inside}
    if block.columns is not None:
        documents, positions, tokens = block.columns
        gaps = np.diff(positions, prepend=positions[:1]) > 1
        values |= {"document": documents[rows], "position": positions[rows], "peak": rows - begins,
                   "gap": gaps[places] & inside & (np.arange(width) > 0),
                   "token": np.where(inside, tokens[places], -1)}
    return values
