"""One pass over rows that surveys all latents: sizes of codes, examples, and which latents fire together.

An example is the window of tokens in which a latent's code ranks first, with an excerpt around that peak. Rows come in
blocks that end where windows end.

Shapes: B rows of a block, W windows, n peaks or non-zero codes, C chosen latents, N examples per latent, T tokens of an
excerpt, S sampled rows, D = d_in, F = d_sae.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..extract.chats import ROLES
from ..sae.codes import Codes, DenseCodes, SparseCodes, in_cache
from ..sae.dictionary import SAE
from ..sae.metrics import Firing
from ..store.split import splitmix64
from .blocks import Block, Texts
from .measured import Measured

OCTAVE = 4  # bins per power of two: the exponent of a size's fourth power is its bin's number
LOWEST, HIGHEST = -24, 24  # powers of two; sizes outside count in the first or last bin
BINS = (HIGHEST - LOWEST) * OCTAVE
EXPONENT_AT, BIAS = 23, 127  # of a float32's bits
BLOCK_COSINES = 1 << 24  # per product: 64 MB in float32
SAMPLED_ROWS = 1 << 15  # at most, spread evenly over the rows
LEAST = 3  # rows that two latents share; fewer are taken for chance
BLOCK_PAIRS, CHUNK = (
    1 << 22,
    1024,
)  # pairs (16 MB in float32, a few times over) and sampled rows per product
SCANNED_ROWS, SCANNED_PRODUCTS = 1 << 16, 1 << 38  # at most, see `largest_codes`
TOKENS, BEFORE = 48, 31  # most tokens of an excerpt, and those before its peak
NOT_STORED = 255  # in place of the role of a token that is no row
WINDOWS = 128  # examined before the smallest examples are updated
FACTOR = 0x9E3779B97F4A7C15  # odd, so invertible modulo 2^64
INVERSE = pow(FACTOR, -1, 1 << 64)


@torch.no_grad()
def largest_codes(one: Measured, latents: Sequence[int]) -> tuple[list[float], int]:
    """The largest code of each of some latents on rows drawn at random, and the number of these rows.

    Cost: at most `SCANNED_PRODUCTS` multiplications, or one batch.
    """
    sae = one.sae
    rows = min(SCANNED_ROWS, SCANNED_PRODUCTS // (sae.d_in * sae.d_sae))
    largest = torch.full((len(latents),), -torch.inf)
    seen = 0
    for batch in one.rows.batches(one.batch_rows, seed=0, epoch=0):
        x = torch.from_numpy(batch[:, : sae.d_in]).to(sae.W_enc)
        largest = largest.maximum(sae.encode(x)[:, list(latents)].amax(0).float().cpu())
        seen += len(batch)
        if seen >= rows:
            break
    return largest.tolist(), seen


def bin_edges() -> np.ndarray:
    """The edges of the bins, (BINS + 1,), in ratios of `2^(1/4)`: equally spaced on a logarithmic axis."""
    return 2.0 ** (LOWEST + np.arange(BINS + 1) / OCTAVE)


class Magnitudes:
    """Histogram, sum and maximum of the sizes `|z|` of each latent's non-zero codes.

    Bins are fixed and the same for all latents, so that one pass is enough at any scale. Memory: 192 counts per latent.
    """

    def __init__(self, d_sae: int) -> None:
        self._counts = torch.zeros(
            d_sae * (BINS + 1), dtype=torch.int64
        )  # each latent's first counts its zeros
        self._sums = torch.zeros(d_sae, dtype=torch.float64)
        self._largest = torch.zeros(d_sae)

    @torch.no_grad()
    def update(self, codes: Codes) -> None:
        """Count the codes of a batch, (B, F)."""
        z = codes.values
        if z.device != self._sums.device:
            self._counts, self._sums, self._largest = (
                t.to(z.device) for t in (self._counts, self._sums, self._largest)
            )
        if isinstance(codes, SparseCodes):
            self._add(z, codes.indices)
            self._sums.index_add_(0, codes.indices, z.abs().double())
            self._largest.scatter_reduce_(0, codes.indices, z.abs().float(), "amax")
            return
        latents = torch.arange(codes.shape[1], device=z.device)
        for some in in_cache(z):
            sizes = some.abs()
            self._add(some, latents.expand(len(some), -1))
            self._sums += sizes.sum(0, dtype=torch.float64)
            self._largest = torch.maximum(self._largest, sizes.amax(0).float())

    def _add(self, values: Tensor, latents: Tensor) -> None:
        """Count values, each for its latent; zeros in a bin of their own."""
        fourth = (
            values.float().square().square_()
        )  # overflows or underflows only far outside the bins
        bins = (fourth.view(torch.int32) >> EXPONENT_AT).sub_(BIAS + OCTAVE * LOWEST)
        bins = bins.clamp_(0, BINS - 1).add_(1).mul_(values != 0)
        places = latents * (BINS + 1) + bins
        self._counts.scatter_add_(0, places.flatten(), torch.ones_like(places).flatten())

    @property
    def histograms(self) -> np.ndarray:
        """Number of codes in each bin, per latent, (F, BINS), int64; see `bin_edges`."""
        return self._counts.view(-1, BINS + 1)[:, 1:].cpu().numpy()

    @property
    def means(self) -> np.ndarray:
        """Mean size of each latent's non-zero codes, (F,), float64; 0 without any."""
        return self._sums.cpu().numpy() / np.maximum(self.histograms.sum(1), 1)

    @property
    def largest(self) -> np.ndarray:
        """The largest size of each latent's codes, (F,), float32; 0 if it never fires."""
        return self._largest.cpu().numpy()


@torch.no_grad()
def neighbours(
    W_dec: Tensor, chosen: Tensor, count: int, show: Callable[[int], None]
) -> tuple[Tensor, Tensor]:
    """The nearest other latents to chosen ones, (C,), by the cosine of their decoder vectors.

    Returns:
        The cosines, (C, count), descending, 0 for a vector of zeros, and the neighbours, (C, count), int64; on the CPU;
        count is at most F - 1.

    Cost: `2 C F D` operations; `BLOCK_COSINES` cosines are held.
    """
    directions = torch.nn.functional.normalize(W_dec, dim=1)
    found: list[tuple[Tensor, Tensor]] = []
    for part in chosen.to(W_dec.device).split(max(1, BLOCK_COSINES // len(W_dec))):
        cosines = directions[part] @ directions.T
        cosines.scatter_(1, part[:, None], -torch.inf)
        nearest = cosines.topk(min(count, len(W_dec) - 1), dim=1)
        found.append((nearest.values.cpu(), nearest.indices.cpu()))
        show(sum(len(values) for values, _ in found))
    return torch.cat([values for values, _ in found]), torch.cat([latents for _, latents in found])


class Partners(NamedTuple):
    """Latents that fire together with chosen ones, the highest phi first, 0 without more; (C, count), on the CPU."""

    phi: Tensor
    latents: Tensor


class CoFiring:
    """On which of evenly spaced rows each latent fires, one bit each: at most 4 KB per latent.

    Args:
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
        """The latents that fire together with chosen ones, (C,), by the phi coefficient, the correlation of firing:

            phi = (p_ij - p_i p_j) / sqrt(p_i (1 - p_i) p_j (1 - p_j))

        where p_i is the fraction of the sampled rows on which latent i fires, and p_ij the fraction on which both do.
        Pairs with a phi of 0 or less, or together on fewer than `LEAST` rows, are left out.

        Cost: `2 S C F` operations, or `2 n C` if few codes are not zero.
        """
        count, bits, device = min(count, self._d_sae - 1), np.concatenate(self._bits), chosen.device
        found: list[Partners] = []
        for part in chosen.split(max(1, BLOCK_PAIRS // self._d_sae)):
            together = torch.zeros(
                self._d_sae, len(part), device=device
            )  # numbers of rows, exact in float32
            alone = torch.zeros(self._d_sae, device=device)
            for begin in range(0, len(bits), CHUNK):
                fires = np.unpackbits(bits[begin : begin + CHUNK], axis=1, count=self._d_sae)
                codes = DenseCodes(torch.from_numpy(fires).to(device, torch.float32))
                together += codes.transposed_times(codes.values[:, part])
                alone += codes.sums()
            p, both = alone / len(bits), together.T / len(bits)
            spread = (p * (1 - p)).sqrt()
            phi = (both - p[part, None] * p) / (spread[part, None] * spread).clamp_min(
                torch.finfo(p.dtype).tiny
            )
            phi[both < LEAST / len(bits) * (1 - 1e-6)] = 0
            phi.scatter_(1, part[:, None], -torch.inf)
            phi, latents = phi.topk(count, dim=1)
            found.append(Partners(phi.clamp_min_(0).cpu(), latents.cpu()))
            show(sum(len(one.phi) for one in found))
        return Partners(*map(torch.cat, zip(*found, strict=True)))


Ranking = Callable[[Tensor, np.ndarray, np.ndarray], Tensor]


def by_size(z: Tensor, numbers: np.ndarray, latents: np.ndarray) -> Tensor:
    """The codes' sizes `|z|`, (B, C), under which the examples are the largest."""
    return z.abs()


def at_random(z: Tensor, numbers: np.ndarray, latents: np.ndarray) -> Tensor:
    """A random number in [0, 1) for each non-zero code, else 0, (B, C), under which the examples are a random sample of
    the rows on which a latent fires.

    Each row has a number, which each latent, (C,), turns by its own along a circle: as random for a latent as numbers
    of its own, in a fraction of the time.
    """
    turned = _uniform(numbers).to(z.device)[:, None] + _uniform(~latents).to(z.device)
    return turned.frac_().mul_(z != 0)


def _uniform(numbers: np.ndarray) -> Tensor:
    """A number in [0, 1) for each integer, float32: the upper bits of a hash."""
    return torch.from_numpy(
        (splitmix64(numbers.astype(np.uint64)) >> np.uint64(40)).astype(np.float32) / 2**24
    )


class _Peaks(NamedTuple):
    """The codes of some latents that rank first in some windows of a block, (n,) each."""

    rows: np.ndarray  # within the block
    latents: np.ndarray  # as indices into the chosen ones
    ranks: np.ndarray  # their values under the ranking
    begins: np.ndarray  # of their excerpts in the block's texts; without tokens, in its rows
    ends: np.ndarray
    marks: np.ndarray  # hashes of the excerpts


class Examples:
    """The N windows that rank first for each chosen latent, merged batch by batch.

    A window counts once, at its first code of highest rank, and so do windows with equal excerpts, so that a repeated
    text does not fill the list. Of equal ranks the first in the store is kept.

    Args:
        count: N.
        tokens: whether the rows have tokens, which take `8 TOKENS C N` bytes.
        ranking: `by_size` or `at_random`; a code of rank 0 is no example.
    """

    def __init__(
        self,
        latents: Sequence[int],
        d_sae: int,
        count: int,
        tokens: bool,
        ranking: Ranking = by_size,
    ) -> None:
        self._latents, self._all, self._ranking = np.array(latents), len(latents) == d_sae, ranking
        shape, self._width = (len(latents), count), TOKENS if tokens else 1
        self._ranks = np.zeros(shape, np.float32)  # descending; 0 where there is no example
        self._marks = np.zeros(shape, np.uint64)
        self._slots = np.zeros(
            shape, np.int64
        )  # index of each example in `_kept`, which is not sorted
        self._kept: dict[str, np.ndarray] = {
            "number": np.zeros(shape, np.int64),
            "code": np.zeros((*shape, self._width), np.float32),
        }
        if tokens:
            self._kept |= {
                "document": np.zeros(shape, np.int64),
                "position": np.zeros(shape, np.int32),
                "peak": np.zeros(shape, np.int16),
                "gap": np.zeros((*shape, TOKENS), bool),
                "token": np.zeros((*shape, TOKENS), np.int32),
            }

    def of(self, latents: Sequence[int]) -> dict[str, np.ndarray]:
        """The examples of some of its latents.

        Returns:
            Arrays by name, (C, N) each, highest rank first: `rank`, 0 where there is no example; `number`, the peak's
            row within the store; and `code`, the codes, (C, N, T), with T = 1 without tokens. With tokens also
            `document` and `position` of the peak; `peak`, its index in the excerpt; `token`, (C, N, T), the excerpt's
            token ids, -1 after its end, those that are no rows too if the store keeps windows, with code 0; `gap`,
            (C, N, T), whether tokens are missing before a token; of chats `role`, (C, N, T), or `NOT_STORED`.
        """
        indices = np.searchsorted(self._latents, np.array(latents))
        slots = self._slots[indices]
        return {
            "rank": self._ranks[indices],
            **{name: kept[indices[:, None], slots] for name, kept in self._kept.items()},
        }

    @torch.no_grad()
    def update(self, z: Tensor, block: Block) -> None:
        """Take in the codes of a block, (B, F)."""
        if block.roles is not None:
            self._kept.setdefault("role", np.zeros(self._kept["token"].shape, np.uint8))
        if not self._all:
            z = z[:, torch.from_numpy(self._latents).to(z.device)]
        windows = len(block.starts) - 1
        for first in range(0, windows, WINDOWS):
            self._merge(z, block, self._peaks(z, block, slice(first, first + WINDOWS + 1)))

    def _peaks(self, z: Tensor, block: Block, bounds: slice) -> _Peaks:
        """The peaks, in windows between these bounds, that rank above the last example of their latent: few, once some
        windows have been seen."""

        starts = block.starts[bounds]

        def ranked(rows: slice, latents: np.ndarray | slice = slice(None)) -> Tensor:
            return self._ranking(z[rows, latents], block.numbers[rows], self._latents[latents])

        if starts[-1] - starts[0] == len(starts) - 1:  # one row per window
            highest = ranked(slice(starts[0], starts[-1]))
        else:  # window by window, which stay in the cache
            highest = torch.stack(
                [ranked(slice(begin, end)).amax(0) for begin, end in pairwise(starts.tolist())]
            )
        least = torch.from_numpy(self._ranks[:, -1].copy()).to(highest)
        windows, latents = np.nonzero((highest > least).cpu().numpy())
        own = np.searchsorted(windows, np.arange(len(starts))).tolist()  # of each window's peaks
        rows = np.concatenate(
            [np.empty(0, np.int64)]
            + [
                starts[window]
                + ranked(slice(starts[window], starts[window + 1]), latents[a:b])
                .argmax(0)
                .cpu()
                .numpy()
                for window, (a, b) in enumerate(pairwise(own))
                if b > a
            ]
        )
        begins, ends, marks = rows, rows + 1, block.numbers[rows].astype(np.uint64)
        if block.texts is not None:
            places = np.flatnonzero(block.texts.stored)[rows]
            edges = block.texts.starts[bounds]
            # At most TOKENS tokens, with BEFORE before the peak unless the window ends too early.
            begins = np.maximum(
                edges[windows], np.minimum(places - BEFORE, edges[windows + 1] - TOKENS)
            )
            ends = np.minimum(edges[windows + 1], begins + TOKENS)
            marks = _marks(block.texts.token_ids, begins, ends)
        return _Peaks(
            rows, latents, highest[windows, latents].float().cpu().numpy(), begins, ends, marks
        )

    def _merge(self, z: Tensor, block: Block, peaks: _Peaks) -> None:
        """Merge peaks into the examples of their latents."""
        count = self._marks.shape[1]
        touched, owner = np.unique(peaks.latents, return_inverse=True)
        stored = len(touched) * count  # those already there come first, then the new ones
        owner = np.concatenate([np.arange(len(touched)).repeat(count), owner])
        ranks = np.concatenate([self._ranks[touched].ravel(), peaks.ranks])
        marks = np.concatenate([self._marks[touched].ravel(), peaks.marks])
        order = np.lexsort((-ranks, owner))
        order = order[ranks[order] > 0]
        order = order[
            np.sort(
                _first_of_each(np.lexsort((marks[order], owner[order])), owner[order], marks[order])
            )
        ]
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
        came = _Peaks(*(values[new - stored] for values in peaks))
        for name, values in _read(z, block, came, self._width).items():
            self._kept[name][touched[owner[new]], slots[new]] = values


def _numbered(owners: np.ndarray) -> np.ndarray:
    """The rank, from 0, of each entry within its owner's; owners are ascending."""
    return np.arange(len(owners)) - np.searchsorted(owners, owners)


def _first_of_each(order: np.ndarray, *keys: np.ndarray) -> np.ndarray:
    """The first index of each group of equal keys, from indices that are ordered by group."""
    new = np.ones(len(order), bool)
    new[1:] = np.any([key[order[1:]] != key[order[:-1]] for key in keys], axis=0)
    return order[new]


def _marks(tokens: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """A hash of each stretch of tokens, (n,) uint64: a polynomial of the tokens modulo 2^64, as the difference of two
    cumulative sums."""
    steps = np.full(len(tokens), FACTOR, np.uint64)
    steps[0] = 1
    sums = np.concatenate(
        [[np.uint64(0)], np.cumsum((tokens + 1).astype(np.uint64) * np.cumprod(steps))]
    )
    steps[1:] = INVERSE
    return (sums[ends] - sums[begins]) * np.cumprod(steps)[begins]


def _read(z: Tensor, block: Block, peaks: _Peaks, width: int) -> dict[str, np.ndarray]:
    """The values that `Examples` keeps for peaks and their excerpts, (n,) or (n, width) each."""
    values = {"number": block.numbers[peaks.rows]}
    if block.texts is None:
        codes = z[
            torch.from_numpy(peaks.rows).to(z.device), torch.from_numpy(peaks.latents).to(z.device)
        ]
        return values | {"code": codes[:, None].float().cpu().numpy()}
    assert block.columns is not None
    texts: Texts = block.texts
    at = peaks.begins[:, None] + np.arange(width)
    inside = at < peaks.ends[:, None]
    at = np.where(inside, at, peaks.begins[:, None])
    row_of = np.maximum(np.cumsum(texts.stored) - 1, 0)
    stored = texts.stored[at] & inside
    codes = z[
        torch.from_numpy(row_of[at]).to(z.device),
        torch.from_numpy(peaks.latents[:, None]).to(z.device),
    ]
    if block.roles is not None:
        values["role"] = np.where(texts.stored[at], block.roles[row_of[at]], NOT_STORED)
    return values | {
        "code": np.where(stored, codes.float().cpu().numpy(), 0),
        "document": block.columns[0][peaks.rows],
        "position": block.columns[1][peaks.rows],
        "peak": np.flatnonzero(texts.stored)[peaks.rows] - peaks.begins,
        "gap": texts.gaps[at] & inside & (np.arange(width) > 0),
        "token": np.where(inside, texts.token_ids[at], -1),
    }


@dataclass(frozen=True)
class Survey:
    """The results of one pass: `examples` where the chosen latents' codes are largest, `samples` at random."""

    firing: Firing
    magnitudes: Magnitudes
    examples: Examples
    samples: Examples
    cofiring: CoFiring
    by_role: Tensor  # (ROLES, F) float64, sums of the codes' sizes by role in chats; else 0


@torch.no_grad()
def survey(
    sae: SAE, blocks: Iterable[Block], rows: int, examples: Examples, samples: Examples
) -> Survey:
    """Encode rows once, and measure all latents on them; `examples` and `samples` are filled.

    Memory: 1.5 KB per latent, plus `Examples` and `CoFiring`; independent of the number of rows.
    """
    found = Survey(
        Firing(sae.d_sae),
        Magnitudes(sae.d_sae),
        examples,
        samples,
        CoFiring(sae.d_sae, rows),
        torch.zeros(len(ROLES), sae.d_sae, dtype=torch.float64),
    )
    for block in blocks:
        codes = sae.codes(block.x)
        found.firing.update(codes)
        found.magnitudes.update(codes)
        z = codes.dense()
        found.examples.update(z, block)
        found.samples.update(z, block)
        found.cofiring.update(z)
        if block.roles is not None:
            one_hot = torch.from_numpy(block.roles[:, None] == np.arange(len(ROLES))).to(z)
            found.by_role.add_((one_hot.T @ z.abs()).cpu())
    return found
