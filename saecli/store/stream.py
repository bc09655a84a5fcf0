"""Streams of rows, in stored order or shuffled, read ahead by threads in constant memory.

A stream is a series of blocks of whole batches. A few are being filled by a small thread pool, in NumPy and PyTorch
calls that release the GIL, while one is consumed.

Legend: B rows of a batch, R rows, U units, D = d_in.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise
from types import SimpleNamespace

import numpy as np

from .chunks import Chunks
from .codec import DTYPES, StoredType

READERS = 2
BLOCK_BYTES = 4 << 20
AHEAD_BYTES = 32 << 20
LOAD_BYTES = 4 << 20
RUN_BYTES = 1 << 20  # about the size of a core's own cache

LARGEST_TABLE = 1 << 20  # numbers that are permuted by a table
ROUNDS = 6

Buffer = tuple[list[Future[None]], np.ndarray]  # the tasks that fill it, and its rows, (R, D)


@dataclass(frozen=True)
class Part:
    """One of several equal, contiguous parts, each for another process; numbered from 0."""

    number: int = 0
    parts: int = 1

    def of(self, count: int) -> tuple[int, int]:
        return count * self.number // self.parts, count * (self.number + 1) // self.parts


WHOLE = Part()


class Permutation:
    """A random permutation of `range(count)`, in memory of order `sqrt(count)`.

    Up to 2^20 numbers it is a table. Beyond, it is a Feistel network, which makes a bijection of all b-bit numbers from
    random functions of b/2 bits (Luby and Rackoff 1988), applied again to images outside the range.
    """

    def __init__(self, count: int, rng: np.random.Generator, largest_table: int = LARGEST_TABLE) -> None:
        self.count = count
        self._table = rng.permutation(count) if count <= largest_table else None
        bits = max(2, (count - 1).bit_length())
        self._low = bits // 2
        sizes = (1 << self._low, 1 << (bits - self._low))
        self._functions = [] if count <= largest_table else [
            rng.integers(sizes[1 - turn % 2], size=sizes[turn % 2]) for turn in range(ROUNDS)]

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        if self._table is not None:
            return self._table[numbers]
        images = self._network(numbers)
        while len(outside := np.flatnonzero(images >= self.count)):
            images[outside] = self._network(images[outside])
        return images

    def _network(self, numbers: np.ndarray) -> np.ndarray:
        high, low = numbers >> self._low, numbers & ((1 << self._low) - 1)
        for of_low, of_high in zip(self._functions[::2], self._functions[1::2], strict=True):
            high = high ^ of_low[low]
            low = low ^ of_high[high]
        return (high << self._low) | low


class Deal:
    """Deals the wanted rows of a store to the windows of an epoch, and orders each window.

    Neighbouring rows are of one document and must not share a batch. Rows are dealt in units, short runs of neighbours,
    each window's from all over the store. A window of units of n rows is ordered in n turns: every unit gives one row
    to each turn, at the same position in all of them. Two rows of a unit are then at least a turn's length apart, and
    never in one batch of fewer rows than a turn has. So a batch holds no more pairs of rows of one document than under
    a uniform shuffle, however small the window, and the disk is still read in runs.

    Args:
        stored, wanted: rows in the store, and how many are wanted.
        keeps: (R,) ascending row numbers -> (R,) bool, whether each is wanted; None for all.
        window_rows: approximate number of wanted rows in a window, which holds whole units.
        unit_rows: most stored rows in a unit.
        batch_size: units are short enough that a turn has at least twice this number of rows.
    """

    def __init__(self, stored: int, wanted: int, keeps: Callable[[np.ndarray], np.ndarray | None],
                 seed: tuple[int, ...], window_rows: int, unit_rows: int, batch_size: int) -> None:
        self._stored, self._keeps, self._seed = stored, keeps, seed
        self.windows = -(-wanted // max(window_rows, batch_size))
        self._unit = max(1, min(unit_rows, window_rows // (2 * batch_size))) if self.windows > 1 else 1
        self._permutation = Permutation(-(-stored // self._unit), np.random.default_rng(seed))
        self._units = -(-self._permutation.count // self.windows)

    def window(self, number: int) -> np.ndarray:
        """The rows of a window, (R,) int64 numbers within the store, in order. Cost: about 30 ns per stored row."""
        first = number * self._units
        units = self._permutation(np.arange(first, min(first + self._units, self._permutation.count)))
        units.sort()  # so that `keeps` goes forward
        rows = (units[:, None] * self._unit + np.arange(self._unit)).ravel()
        kept = rows < self._stored  # the last unit may be short
        if (wanted := self._keeps(np.minimum(rows, self._stored - 1))) is not None:
            kept &= wanted
        order = self._order(number, len(units))
        return rows[order[kept[order]]]

    def _order(self, number: int, units: int) -> np.ndarray:
        rng = np.random.default_rng((*self._seed, 1 + number))  # NumPy ignores a trailing 0
        order = rng.permutation(units)
        if self._unit == 1:
            return order
        turns = np.tile(np.arange(self._unit, dtype=np.int32), (units, 1))
        offsets = rng.permuted(turns, axis=1, out=turns)[order]  # (U, turns)
        return (order * self._unit + offsets.T).ravel()


@dataclass(frozen=True)
class Source:
    """Wanted rows of a store.

    Args:
        counts: (chunks,) number of wanted rows in each chunk.
        kept: chunk number -> ascending indices of its wanted rows; None for all.
        decoded: yield them as float32, not in the storage dtype.
    """

    store: Chunks
    counts: np.ndarray
    kept: Callable[[int], np.ndarray | None]
    decoded: bool = True

    @property
    def d_in(self) -> int:
        return self.store.d_in

    @property
    def stored(self) -> StoredType:
        return DTYPES[self.store.dtype]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32) if self.decoded else self.stored.storage

    def rows(self, chunk: int, begin: int, end: int) -> np.ndarray:
        """Wanted rows `begin` to `end` of a chunk, in the storage dtype; a view where all are wanted."""
        rows, kept = self.store.chunk(chunk), self.kept(chunk)
        return rows[begin:end] if kept is None else rows[kept[begin:end]]


def in_order(source: Source, batch_size: int, part: Part) -> Iterator[np.ndarray]:
    """The wanted rows in stored order, (B, D), each batch valid until the next; `part` of the sequence of batches."""
    ends = np.cumsum(source.counts)
    total = int(ends[-1])
    first, stop = (min(total, batch_size * batch) for batch in part.of(-(-total // batch_size)))
    buffers = _Buffers(source, batch_size, stop - first)

    def fill(begin: int, end: int, out: np.ndarray) -> None:
        at, chunk = begin, int(np.searchsorted(ends, begin, side="right"))
        while at < end:
            before, until = int(ends[chunk] - source.counts[chunk]), min(end, int(ends[chunk]))
            if until > at:
                rows = source.rows(chunk, at - before, until - before)
                _decode(rows, out[at - begin : until - begin])
            at, chunk = until, chunk + 1

    def blocks(pool: ThreadPoolExecutor) -> Iterator[Buffer]:
        for begin in range(first, stop, buffers.rows):
            yield buffers.fill(pool, fill, begin, min(begin + buffers.rows, stop))

    return _read_ahead(blocks, buffers.ahead, batch_size)


def shuffled(source: Source, deal: Deal, batch_size: int, part: Part, row_bytes: int) -> Iterator[np.ndarray]:
    """The wanted rows once each, shuffled.

    If the store is in the page cache, batches are gathered from there. Otherwise a window's rows are read forward
    through the store into memory and yielded while the next window is filled. Both give the same order.

    Args:
        part: of the rows of every batch; a batch without rows in it is skipped.
        row_bytes: bytes per row, to which the order within a batch is fitted.

    Yields:
        (B, D) of the source's dtype, valid until the next is asked for.
    """
    run = max(1, RUN_BYTES // row_bytes)
    own_size = part.of(batch_size)[1] - part.of(batch_size)[0]
    buffers = _Buffers(source, own_size, int(source.counts.sum()), run)

    def leaving_here(pool: ThreadPoolExecutor) -> Iterator[np.ndarray]:
        return (_part_of_batches(leaving, batch_size, part) for leaving in _leaving(deal, batch_size, run, pool))

    def gathered(pool: ThreadPoolExecutor) -> Iterator[Buffer]:
        for leaving in leaving_here(pool):
            gather = partial(_gather, source, source.store.whole_shards(), leaving, own_size, run)
            for begin in range(0, len(leaving), buffers.rows):
                yield buffers.fill(pool, gather, begin, min(begin + buffers.rows, len(leaving)))

    def from_windows(pool: ThreadPoolExecutor) -> Iterator[Buffer]:
        memory = [np.empty((0, source.d_in), source.stored.storage)] * 2
        window = memory[0]
        for turn, leaving in enumerate(chain(leaving_here(pool), [np.empty(0, np.int64)])):
            if len(leaving) > len(memory[turn % 2]):
                memory[turn % 2] = np.empty((len(leaving), source.d_in), source.stored.storage)
            following = memory[turn % 2][: len(leaving)]
            loads = _loads(source, leaving, following)

            def decode(begin: int, end: int, out: np.ndarray, window: np.ndarray = window) -> None:
                _decode(window[begin:end], out)

            begins = range(0, len(window), buffers.rows)
            loaded: list[Future[None]] = []
            decoded: list[Future[None]] = []
            for number, begin in enumerate(begins, 1):
                block = buffers.fill(pool, decode, begin, min(begin + buffers.rows, len(window)))
                decoded += block[0]
                loaded += [pool.submit(load) for load in loads[len(loaded) : len(loads) * number // len(begins)]]
                yield block
            loaded += [pool.submit(load) for load in loads[len(loaded) :]]
            for done in (*loaded, *decoded):
                done.result()
            window = following

    def blocks(pool: ThreadPoolExecutor) -> Iterator[Buffer]:
        return gathered(pool) if source.store.in_memory() else from_windows(pool)

    return _read_ahead(blocks, buffers.ahead, own_size)


def numbers_shuffled(deal: Deal, batch_size: int, row_bytes: int) -> Iterator[np.ndarray]:
    """The numbers within the store, (B,), of the rows of each batch that `shuffled` yields."""
    with ThreadPoolExecutor(1) as pool:
        for leaving in _leaving(deal, batch_size, max(1, RUN_BYTES // row_bytes), pool):
            yield from (leaving[begin : begin + batch_size] for begin in range(0, len(leaving), batch_size))


def _part_of_batches(leaving: np.ndarray, batch_size: int, part: Part) -> np.ndarray:
    """The rows of a part of each batch, from all rows in the order in which they leave."""
    if part.parts == 1:
        return leaving
    whole = len(leaving) - len(leaving) % batch_size
    (begin, end), (first, stop) = part.of(batch_size), part.of(len(leaving) - whole)
    return np.concatenate([leaving[:whole].reshape(-1, batch_size)[:, begin:end].ravel(),
                           leaving[whole:][first:stop]])


def _leaving(deal: Deal, batch_size: int, run: int, pool: ThreadPoolExecutor) -> Iterator[np.ndarray]:
    """The rows of each window in the order in which they leave, (R,) numbers; dealt ahead.

    Rows that do not fill a batch at a window's end leave with the next window. Within a batch, runs of `run` rows are
    sorted, so that they are read forward.
    """
    dealt = deque(pool.submit(deal.window, number) for number in range(min(2, deal.windows)))
    rest = np.empty(0, np.int64)
    for number in range(deal.windows):
        rows = np.concatenate([rest, dealt.popleft().result()])
        dealt.extend(pool.submit(deal.window, later) for later in range(number + 2, deal.windows)[:1])
        whole = len(rows) - (len(rows) % batch_size if number + 1 < deal.windows else 0)
        rows, rest = rows[:whole], rows[whole:]
        for begin, end in _runs(whole, batch_size, run):
            rows[begin:end].sort()
        yield rows


def _runs(rows: int, batch_size: int, run: int) -> Iterator[tuple[int, int]]:
    """Begin and end of runs of at most `run` rows, none of which spans two batches."""
    for batch in range(0, rows, batch_size):
        end = min(batch + batch_size, rows)
        yield from ((begin, min(begin + run, end)) for begin in range(batch, end, run))


def _ascending(rows: np.ndarray, batch_size: int, run: int) -> Iterator[tuple[int, int]]:
    """Begin and end of ascending runs; a part of a batch may hold the end of a run and the start of the next."""
    for begin, end in _runs(len(rows), batch_size, run):
        falls = np.flatnonzero(np.diff(rows[begin:end]) < 0) + 1 + begin
        yield from pairwise([begin, *falls.tolist(), end])


def _gather(source: Source, shards: Sequence[np.ndarray], leaving: np.ndarray, batch_size: int, run: int, begin: int,
            end: int, out: np.ndarray) -> None:
    """Decode rows `begin` to `end` of a window's order, from shards in memory, run by run."""
    starts = source.store.shard_starts
    scratch = np.empty((min(run, end - begin), source.d_in), source.stored.storage)
    for start, stop in _ascending(leaving[begin:end], batch_size, run):
        rows = leaving[begin + start : begin + stop]
        first, last = (np.searchsorted(starts, rows[[0, -1]], side="right") - 1).tolist()
        ends = np.searchsorted(rows, starts[first + 1 : last + 2]).tolist()
        for shard, (low, high) in enumerate(pairwise([0, *ends]), first):
            shards[shard].take(rows[low:high] - starts[shard], 0, scratch[low:high], "clip")
        _decode(scratch[: stop - start], out[start:stop])


def _loads(source: Source, leaving: np.ndarray, out: np.ndarray) -> list[Callable[[], None]]:
    """Tasks that copy rows, (R,) numbers, into out, (R, D), in any order; each reads forward."""
    order = np.argsort(leaving)
    whole = np.dtype((np.void, source.store.meta.row_bytes))  # NumPy copies a row faster as one value
    targets = out.view(whole)[:, 0]

    def load(part: np.ndarray) -> None:
        chunks, within = source.store.locate(leaving[part])
        ends = np.flatnonzero(np.diff(chunks, append=-1)) + 1
        for end in ends.tolist():  # all at once, so as not to wait for each
            source.store.expect(int(chunks[end - 1]))
        for begin, end in pairwise([0, *ends.tolist()]):
            rows = source.store.chunk(int(chunks[begin])).take(within[begin:end], axis=0)
            targets[part[begin:end]] = rows.view(whole)[:, 0]

    step = max(1, LOAD_BYTES // source.store.meta.row_bytes)
    return [partial(load, order[begin : begin + step]) for begin in range(0, len(order), step)]


def _decode(rows: np.ndarray, out: np.ndarray) -> None:
    """Copy rows as stored, (R, D), into out, of their own dtype or float32, both contiguous, in one pass."""
    if rows.dtype == out.dtype:
        np.copyto(out, rows)
        return
    import torch  # here, since listing and writing stores do not need it

    bits, kind = rows.view(np.int16), torch.float16 if rows.dtype == np.float16 else torch.bfloat16
    if not bits.flags.writeable:  # PyTorch would warn, although it only reads
        there = bits.__array_interface__
        bits = np.asarray(SimpleNamespace(__array_interface__={**there, "data": (there["data"][0], False)}))
    torch.from_numpy(out).copy_(torch.from_numpy(bits).view(kind))


class _Buffers:
    """The memory of a stream's blocks, used in turn; blocks are of whole batches, filled in parts of whole runs."""

    def __init__(self, source: Source, batch_size: int, total: int, run: int = 1) -> None:
        row_bytes = source.dtype.itemsize * source.d_in
        batch_bytes = row_bytes * batch_size
        self.rows = batch_size * max(1, BLOCK_BYTES // batch_bytes)
        self.ahead = max(1, min(READERS + 2, AHEAD_BYTES // (self.rows * row_bytes)))
        self._part = self.rows if batch_bytes <= BLOCK_BYTES else run * -(-self.rows // (READERS * run))
        shape = (min(self.rows, total), source.d_in)
        # One more than are being filled: the one that the consumer holds.
        self._blocks = [np.empty(shape, source.dtype) for _ in range(self.ahead + 1)]
        self._turn = 0

    def fill(self, pool: ThreadPoolExecutor, fill: Callable[[int, int, np.ndarray], None], begin: int,
             end: int) -> Buffer:
        """Have `fill` write rows `begin` to `end` into the next block, which is reused after `ahead` others."""
        self._turn += 1
        out = self._blocks[self._turn % len(self._blocks)][: end - begin]
        return [pool.submit(fill, part, min(part + self._part, end), out[part - begin : part - begin + self._part])
                for part in range(begin, end, self._part)], out


def _read_ahead(blocks: Callable[[ThreadPoolExecutor], Iterator[Buffer]], ahead: int,
                batch_size: int) -> Iterator[np.ndarray]:
    """Yield blocks batch by batch, with `ahead` of them being filled; a task's error is raised here."""
    import torch

    threads = torch.get_num_threads()
    # PyTorch would start helpers for each of these threads. A number set in one holds for all threads started later.
    pool = ThreadPoolExecutor(READERS, "sae-read", torch.set_num_threads, (1,))
    try:
        series = blocks(pool)
        under_way = deque(islice(series, ahead))
        while True:
            # Only now is the previous block free: its last batch was valid until the next was asked for.
            under_way.extend(islice(series, 1))
            if not under_way:
                return
            parts, block = under_way.popleft()
            for part in parts:
                part.result()
            for start in range(0, len(block), batch_size):
                yield block[start : start + batch_size]
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
