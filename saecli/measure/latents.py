"""One pass over rows that surveys all latents: sizes of codes, examples, and which latents fire together.

An example is a window of tokens in which a latent's code ranks first, with an excerpt around that peak. Rows come in
stored order, in blocks of whole windows.

Shapes: B rows of a block, W windows, n tokens, peaks or non-zero codes, C chosen latents, N examples per latent, T
tokens of an excerpt, S sampled rows, D = d_in, F = d_sae.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import csc_array, csr_array, vstack
from torch import Tensor
from xxhash import xxh3_64_intdigest

from ..base.errors import ConfigError, MachineError
from ..base.machine import available_memory
from ..base.words import counted, size_words
from ..extract.texts import ROLES
from ..sae.codes import Codes, SparseCodes, in_cache
from ..sae.dictionary import SAE
from ..sae.metrics import Firing
from ..store.reader import Rows
from ..store.split import splitmix64

OCTAVE = 4  # bins per power of two: the exponent of a size's fourth power is its bin's number
LOWEST, HIGHEST = -24, 24  # powers of two; sizes outside count in the first or last bin
SIZE_BINS = (HIGHEST - LOWEST) * OCTAVE
EXPONENT_AT, BIAS = 23, 127  # of a float32's bits
COFIRING_ROWS = 1 << 15  # at most, spread evenly over the rows
LEAST_TOGETHER = 3  # rows that two latents share; fewer are taken for chance
BLOCK_PAIRS = 1 << 22  # per product: 16 MB in float32, a few times over
CHUNK = 1024  # sampled rows per product
MOST_FIRING = 1 / 64  # of codes that are not zero, for sparse products
NOT_STORED = 255  # in place of the role of a token that is no row
MERGED_WINDOWS = 128  # examined before the smallest examples are updated


def chosen_latents(latents: int | Sequence[int], d_sae: int, name: str) -> list[int]:
    """The latents as a list; ConfigError for one that the SAE of this name lacks, or one given twice."""
    chosen = np.ravel(latents)
    got = ", ".join(map(str, chosen.tolist())) or "none"
    is_whole = chosen.size and chosen.dtype.kind in "iu"
    if not is_whole or chosen.min() < 0 or chosen.max() >= d_sae:
        raise ConfigError(f"--latent must be from 0 to {d_sae - 1}, the last of {name}, got {got}")
    if len(np.unique(chosen)) < len(chosen):
        raise ConfigError(f"--latent must name each latent once, got {got}; leave the second out")
    return chosen.tolist()


def latents_given(latents: int | Sequence[int] | None, d_sae: int, name: str) -> list[int] | None:
    return None if latents is None else chosen_latents(latents, d_sae, name)


class ExcerptShape(NamedTuple):
    """At most `length` tokens of a window, `before` of them before the peak unless the window ends too early."""

    length: int
    before: int

    def bounds(
        self, peaks: np.ndarray, starts: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The first tokens of excerpts, (n,), and their ends, given peaks and the bounds of windows."""
        begins = np.maximum(starts, np.minimum(peaks - self.before, ends - self.length))
        return begins, np.minimum(begins + self.length, ends)


EXCERPT = ExcerptShape(48, 31)


class WindowTokens(NamedTuple):
    token_ids: np.ndarray  # (n,)
    starts: np.ndarray  # (W + 1,) the begin of each window among them, and the end of the last
    stored: np.ndarray  # (n,) bool, which are rows of the block

    @classmethod
    def of(cls, windows: Sequence[tuple[np.ndarray, np.ndarray]]) -> "WindowTokens":
        """Of windows, each its token ids, (T,), and which of them are rows, (T,) bool."""
        token_ids, stored = (np.concatenate(part) for part in zip(*windows, strict=True))
        return cls(token_ids, np.cumsum([0, *(len(ids) for ids, _ in windows)]), stored)


@dataclass(frozen=True)
class SurveyBlock:
    x: Tensor  # (B, D)
    numbers: np.ndarray  # within the store, (B,)
    # The rows' windows, documents and positions, (2, B), of a store that keeps windows; else each row is a window.
    texts: WindowTokens | None = None
    columns: np.ndarray | None = None
    roles: np.ndarray | None = None  # numbers in `tokenizer.ROLES`, (B,), of a store of chats

    @cached_property
    def starts(self) -> np.ndarray:
        """The first row of each window and the end of the last, (W + 1,)."""
        if self.texts is None:
            return np.arange(len(self.x) + 1)
        return np.searchsorted(np.flatnonzero(self.texts.stored), self.texts.starts)


def row_blocks(batches: Iterable[Tensor], rows: Rows, batch_rows: int) -> Iterator[SurveyBlock]:
    """Batches of rows, (B, D), as blocks, of whole windows if the store keeps them."""
    meta = rows.store.meta
    numbers = rows.numbers(batch_rows)
    if not meta.windows:
        for x, numbers_of_batch in zip(batches, numbers, strict=True):
            yield SurveyBlock(x, numbers_of_batch)
        return
    names = ["document", "position", *(["role"] if "role" in meta.columns else [])]
    columns = [rows.column(name, batch_rows) for name in names]
    windows = rows.windows()
    x, table = torch.empty(0), np.empty((1 + len(names), 0), np.int64)  # of a window begun
    pending: list[tuple[np.ndarray, np.ndarray]] = []  # windows of these rows
    in_pending = 0  # rows, also those to come
    for batch, *values in zip(batches, numbers, *columns, strict=True):
        x = torch.cat([x, batch]) if len(x) else batch
        table = np.concatenate([table, np.stack(values)], axis=1)
        while in_pending < len(x):
            pending.append(next(windows))
            in_pending += int(pending[-1][1].sum())
        goes_on = pending[-1:] if in_pending > len(x) else []
        whole = pending[: len(pending) - len(goes_on)]
        end = in_pending - sum(int(stored.sum()) for _, stored in goes_on)
        if whole:
            roles = table[3, :end] if len(table) > 3 else None
            yield SurveyBlock(
                x[:end], table[0, :end], WindowTokens.of(whole), table[1:3, :end], roles
            )
        x, table, pending, in_pending = x[end:], table[:, end:], goes_on, in_pending - end


def bin_edges() -> np.ndarray:
    """The edges of the bins, (SIZE_BINS + 1,), in ratios of `2^(1/4)`."""
    return 2.0 ** (LOWEST + np.arange(SIZE_BINS + 1) / OCTAVE)


class Magnitudes:
    """Histogram, sum and maximum of the sizes `|z|` of each latent's non-zero codes. Memory: 192 counts per latent."""

    def __init__(self, d_sae: int, device: torch.device | str = "cpu") -> None:
        # Each latent's first counts its zeros.
        self._counts = torch.zeros(d_sae * (SIZE_BINS + 1), dtype=torch.int64, device=device)
        self._sums = torch.zeros(d_sae, dtype=torch.float64, device=device)
        self._largest = torch.zeros(d_sae, device=device)

    @torch.no_grad()
    def update(self, codes: Codes) -> None:
        z = codes.values
        if isinstance(codes, SparseCodes):
            self._count(z, codes.indices)
            self._sums.index_add_(0, codes.indices, z.abs().double())
            self._largest.scatter_reduce_(0, codes.indices, z.abs().float(), "amax")
            return
        latents = torch.arange(codes.shape[1], device=z.device)
        for rows in in_cache(z):
            sizes = rows.abs()
            self._count(rows, latents.expand(len(rows), -1))
            self._sums += sizes.sum(0, dtype=torch.float64)
            self._largest = torch.maximum(self._largest, sizes.amax(0).float())

    def _count(self, values: Tensor, latents: Tensor) -> None:
        # Overflows or underflows only far outside the bins.
        fourth = values.float().square().square_()
        bins = (fourth.view(torch.int32) >> EXPONENT_AT).sub_(BIAS + OCTAVE * LOWEST)
        bins = bins.clamp_(0, SIZE_BINS - 1).add_(1).mul_(values != 0)
        places = latents * (SIZE_BINS + 1) + bins
        self._counts.scatter_add_(0, places.flatten(), torch.ones_like(places).flatten())

    @property
    def histograms(self) -> np.ndarray:
        """Codes in each bin, (F, SIZE_BINS), int64."""
        return self._counts.view(-1, SIZE_BINS + 1)[:, 1:].cpu().numpy()

    @property
    def means(self) -> np.ndarray:
        """(F,), float64; 0 for a latent that never fires."""
        return self._sums.cpu().numpy() / np.maximum(self.histograms.sum(1), 1)

    @property
    def largest(self) -> np.ndarray:
        """(F,), float32; 0 for a latent that never fires."""
        return self._largest.cpu().numpy()


class CoFiring:
    """Which of evenly spaced rows each latent fires on, one bit each: at most 4 KB per latent."""

    def __init__(self, d_sae: int, rows: int) -> None:
        self._d_sae, self._stride = d_sae, max(1, math.ceil(rows / COFIRING_ROWS))
        self._seen = 0
        self._bits: list[np.ndarray] = []

    def update(self, z: Tensor) -> None:
        sampled = z[-self._seen % self._stride :: self._stride]
        self._seen += len(z)
        if len(sampled):
            self._bits.append(np.packbits(sampled.bool().cpu().numpy(), axis=1))

    @torch.no_grad()
    def partners(
        self, chosen: Tensor, count: int, show: Callable[[int], None]
    ) -> tuple[Tensor, Tensor]:
        """For chosen latents, (C,), the highest phi coefficients, the correlation of firing, 0 without more, and the
        other latents; (C, count) each, on the CPU:

            phi = (p_ij - p_i p_j) / sqrt(p_i (1 - p_i) p_j (1 - p_j))

        where p_i is the fraction of the sampled rows on which latent i fires, p_ij that on which both do. Pairs with a
        phi of 0 or less, or together on fewer than `LEAST_TOGETHER` rows, are left out.

        Cost: `2 S C F` operations; if few codes are not zero, one for each pair of them in a row.
        """
        count, bits = min(count, self._d_sae - 1), np.concatenate(self._bits)
        few = self._few(bits)
        tiny = torch.finfo(torch.float32).tiny
        parts = []
        done = 0
        for part in chosen.split(max(1, BLOCK_PAIRS // self._d_sae)):
            firings, together = self._pairs(bits, part) if few is None else _pairs_of_few(few, part)
            p, both = firings / len(bits), together.T / len(bits)
            spread = (p * (1 - p)).sqrt()
            phi = (both - p[part, None] * p) / (spread[part, None] * spread).clamp_min(tiny)
            phi[both < LEAST_TOGETHER / len(bits) * (1 - 1e-6)] = 0
            phi.scatter_(1, part[:, None], -torch.inf)
            parts.append(phi.topk(count, dim=1))
            done += len(part)
            show(done)
        phis, latents = (torch.cat(each).cpu() for each in zip(*parts, strict=True))
        return phis.clamp_min(0), latents

    def _few(self, bits: np.ndarray) -> csc_array | None:
        """Firings on sampled rows, 1 or 0, (S, F); None if there are many."""
        if np.bitwise_count(bits).sum(dtype=np.int64) > MOST_FIRING * len(bits) * self._d_sae:
            return None
        blocks = (bits[begin : begin + CHUNK] for begin in range(0, len(bits), CHUNK))
        fires = [csr_array(np.unpackbits(block, axis=1, count=self._d_sae)) for block in blocks]
        return vstack(fires, format="csc", dtype=np.float32)

    def _pairs(self, bits: np.ndarray, part: Tensor) -> tuple[Tensor, Tensor]:
        """Sampled rows on which each latent fires, (F,), and on which it does together with some, (F, C)."""
        firings = torch.zeros(self._d_sae, device=part.device)  # exact in float32
        together = torch.zeros(self._d_sae, len(part), device=part.device)
        for begin in range(0, len(bits), CHUNK):
            fires = np.unpackbits(bits[begin : begin + CHUNK], axis=1, count=self._d_sae)
            codes = Codes(torch.from_numpy(fires).to(part.device, torch.float32))
            together += codes.transposed_times(codes.values[:, part])
            firings += codes.sums()
        return firings, together


def _pairs_of_few(few: csc_array, part: Tensor) -> tuple[Tensor, Tensor]:
    together = few.T @ few[:, part.cpu().numpy()]
    counts = few.sum(0), together.toarray()
    firings, pairs = (torch.from_numpy(count).to(part.device) for count in counts)
    return firings, pairs


Ranking = Callable[[Tensor, np.ndarray, np.ndarray], Tensor]


def by_size(z: Tensor, numbers: np.ndarray, latents: np.ndarray) -> Tensor:
    return z.abs()


def at_random(z: Tensor, numbers: np.ndarray, latents: np.ndarray) -> Tensor:
    """A random number in [0, 1) for each non-zero code, else 0, (B, C): the examples are a sample of the rows on which
    a latent fires. A row's number is turned along a circle by each latent's, in place of a draw for each pair."""
    turned = _uniform(numbers).to(z.device)[:, None] + _uniform(~latents).to(z.device)
    return turned.frac_().mul_(z != 0)


def _uniform(numbers: np.ndarray) -> Tensor:
    """A number in [0, 1) for each integer: the upper bits of a hash."""
    upper_bits = splitmix64(numbers.astype(np.uint64)) >> np.uint64(40)
    return torch.from_numpy(upper_bits.astype(np.float32) / 2**24)


class _Peaks(NamedTuple):
    """Codes that rank first in windows of a block, (n,) each."""

    windows: np.ndarray  # numbers in the block
    rows: np.ndarray  # within the block
    latents: np.ndarray  # as indices into the chosen ones
    ranks: np.ndarray  # their values under the ranking


class Examples:
    """The N windows that rank first for each chosen latent, each at its first code of highest rank; of windows with
    equal excerpts the first.

    Args:
        count: N.
        tokens: whether the rows have tokens, which take `8 T C N` bytes.
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
        self._latents, self._ranking = np.array(latents), ranking
        # Of the chosen latents' codes.
        self._columns = slice(None) if len(latents) == d_sae else torch.from_numpy(self._latents)
        shape = (len(latents), count)
        excerpt = (*shape, EXCERPT.length if tokens else 1)
        needed = math.prod(excerpt) * 8 + math.prod(shape) * 40
        if needed > (free := available_memory()):
            raise MachineError(
                f"the examples of {counted(len(latents), 'latent')} do not fit: expected {size_words(needed)} of "
                f"free memory, got {size_words(free)}; ask for fewer latents, or fewer examples of each"
            )
        self._table: dict[str, np.ndarray] = {  # of each latent, by descending rank
            "rank": np.zeros(shape, np.float32),  # 0 where there is no example
            "mark": np.zeros(shape, np.uint64),  # a hash of the excerpt
            "number": np.zeros(shape, np.int64),
            "code": np.zeros(excerpt, np.float32),
        }
        if tokens:
            self._table |= {
                "document": np.zeros(shape, np.int64),
                "position": np.zeros(shape, np.int32),
                "peak": np.zeros(shape, np.int16),
                "token": np.zeros(excerpt, np.int32),
            }

    def of(self, latents: Sequence[int]) -> dict[str, np.ndarray]:
        """The examples of some latents.

        Returns:
            Arrays by name, (C, N) each, highest rank first: `rank`, 0 without example; `number`, the peak's row within
            the store; `code`, (C, N, T), T = 1 without tokens. With tokens `document` and `position` of the peak;
            `peak`, its index in the excerpt; `token`, (C, N, T), ids, -1 after the end; of chats `role`, (C, N, T),
            `NOT_STORED` for tokens that are no rows.
        """
        indices = np.searchsorted(self._latents, np.array(latents))
        return {name: column[indices] for name, column in self._table.items() if name != "mark"}

    @torch.no_grad()
    def update(self, z: Tensor, block: SurveyBlock) -> None:
        if block.roles is not None and "role" not in self._table:
            self._table["role"] = np.zeros(self._table["token"].shape, np.uint8)
        z = z[:, self._columns]
        windows = len(block.starts) - 1
        for first in range(0, windows, MERGED_WINDOWS):
            peaks = self._peaks(z, block, first, min(first + MERGED_WINDOWS, windows))
            if len(peaks.rows):
                self._merge(peaks.latents, {"rank": peaks.ranks, **_read(z, block, peaks)})

    def _peaks(self, z: Tensor, block: SurveyBlock, first: int, last: int) -> _Peaks:
        """The peaks in windows that rank above their latent's last example: few, after the first windows."""
        starts = block.starts[first : last + 1]

        def ranked(begin: int, end: int, latents: np.ndarray | slice = slice(None)) -> Tensor:
            numbers = block.numbers[begin:end]
            return self._ranking(z[begin:end, latents], numbers, self._latents[latents])

        if starts[-1] - starts[0] == last - first:  # one row per window
            highest = ranked(starts[0], starts[-1])
        else:  # window by window, which stay in the cache
            bounds = pairwise(starts.tolist())
            highest = torch.stack([ranked(begin, end).amax(0) for begin, end in bounds])
        least = torch.from_numpy(self._table["rank"][:, -1].copy()).to(highest)
        windows, latents = np.nonzero((highest > least).cpu().numpy())
        ranks = highest[windows, latents].float().cpu().numpy()
        rows = np.empty(len(windows), np.int64)
        of_windows = np.searchsorted(windows, np.arange(last - first + 1))
        for window, (a, b) in enumerate(pairwise(of_windows.tolist())):
            if b > a:
                in_window = ranked(starts[window], starts[window + 1], latents[a:b])
                rows[a:b] = starts[window] + in_window.argmax(0).cpu().numpy()
        return _Peaks(first + windows, rows, latents, ranks)

    def _merge(self, latents: np.ndarray, peaks: dict[str, np.ndarray]) -> None:
        count = self._table["rank"].shape[1]
        touched, owners = np.unique(latents, return_inverse=True)
        owners = np.concatenate([np.arange(len(touched)).repeat(count), owners])
        both = {
            name: np.concatenate([column[touched].reshape(-1, *column.shape[2:]), peaks[name]])
            for name, column in self._table.items()
        }
        order = np.lexsort((-both["rank"], owners))
        order = order[both["rank"][order] > 0]
        keys = both["mark"][order] ^ splitmix64(owners[order].astype(np.uint64))
        _, first_of_each = np.unique(keys, return_index=True)
        order = order[np.sort(first_of_each)]
        places = np.arange(len(order)) - np.searchsorted(owners[order], owners[order])
        order, places = order[places < count], places[places < count]
        for name, column in self._table.items():
            merged = np.zeros((len(touched), *column.shape[1:]), column.dtype)
            merged[owners[order], places] = both[name][order]
            column[touched] = merged


def _read(z: Tensor, block: SurveyBlock, peaks: _Peaks) -> dict[str, np.ndarray]:
    """What `Examples` keeps of peaks and their excerpts, (n,) or (n, T) each."""
    numbers = block.numbers[peaks.rows]
    if block.texts is None:
        code = _codes(z, peaks.rows[:, None], peaks.latents)
        return {"mark": numbers.astype(np.uint64), "number": numbers, "code": code}
    assert block.columns is not None
    texts = block.texts
    peak_tokens = np.flatnonzero(texts.stored)[peaks.rows]
    window_starts, window_ends = texts.starts[peaks.windows], texts.starts[peaks.windows + 1]
    begins, ends = EXCERPT.bounds(peak_tokens, window_starts, window_ends)
    at = begins[:, None] + np.arange(EXCERPT.length)
    inside = at < ends[:, None]
    at = np.where(inside, at, begins[:, None])
    stored = texts.stored[at] & inside
    rows = np.maximum(np.cumsum(texts.stored) - 1, 0)[at]
    token = np.where(inside, texts.token_ids[at], -1).astype(np.int32)
    values = {
        "mark": np.array([xxh3_64_intdigest(excerpt) for excerpt in token], np.uint64),
        "number": numbers,
        "code": np.where(stored, _codes(z, rows, peaks.latents), 0),
        "document": block.columns[0][peaks.rows],
        "position": block.columns[1][peaks.rows],
        "peak": peak_tokens - begins,
        "token": token,
    }
    if block.roles is not None:
        values["role"] = np.where(texts.stored[at], block.roles[rows], NOT_STORED)
    return values


def _codes(z: Tensor, rows: np.ndarray, latents: np.ndarray) -> np.ndarray:
    """The codes of latents, (n,), on rows, (n, T)."""
    of_latents = torch.from_numpy(latents[:, None]).to(z.device)
    return z[torch.from_numpy(rows).to(z.device), of_latents].float().cpu().numpy()


class LatentSurvey:
    """The results of one pass: `examples` of the chosen latents' largest codes, and `samples` at random.

    Memory: 1.5 KB per latent, plus `Examples` and `CoFiring`, whatever the number of rows.
    """

    def __init__(self, sae: SAE, rows: int, examples: Examples, samples: Examples) -> None:
        self.firing = Firing(sae.d_sae, device=sae.W_enc.device)
        self.magnitudes = Magnitudes(sae.d_sae, sae.W_enc.device)
        self.examples, self.samples = examples, samples
        self.cofiring = CoFiring(sae.d_sae, rows)
        # Sums of the codes' sizes by role in chats, (ROLES, F); else 0.
        self.by_role = torch.zeros(len(ROLES), sae.d_sae, dtype=torch.float64)

    def update(self, codes: Codes, z: Tensor, block: SurveyBlock) -> None:
        """Count a block's codes, also given as `z`, (B, F), but for `examples` and `samples`."""
        self.firing.update(codes)
        self.magnitudes.update(codes)
        self.cofiring.update(z)
        if block.roles is not None:
            one_hot = torch.from_numpy(block.roles[:, None] == np.arange(len(ROLES))).to(z)
            self.by_role.add_((one_hot.T @ z.abs()).cpu())


@torch.no_grad()
def survey_latents(
    sae: SAE, blocks: Iterable[SurveyBlock], rows: int, examples: Examples, samples: Examples
) -> LatentSurvey:
    """Encode rows once, and measure all latents; `examples` and `samples` are filled."""
    result = LatentSurvey(sae, rows, examples, samples)
    for block in blocks:
        codes = sae.codes(block.x)
        z = codes.dense()
        result.update(codes, z, block)
        examples.update(z, block)
        samples.update(z, block)
    return result
