"""Streams of a store's rows, in stored order or shuffled, read ahead by threads in constant memory.

A stream is a series of blocks of whole batches. A few are being filled by a small thread pool, in NumPy and PyTorch
calls that release the GIL, while one is consumed.

Legend: B rows of a batch, R rows, U units, D = d_in.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise
from types import SimpleNamespace

import numpy as np

from .shard import Chunks
from .split import Deal

READERS = 2
BLOCK_BYTES = 4 << 20
AHEAD_BYTES = 32 << 20
LOAD_BYTES = 4 << 20
RUN_BYTES = 1 << 20  # about the size of a core's own cache

Buffer = tuple[list[Future[None]], np.ndarray]  # the tasks that fill it, and its rows, (R, D)


@dataclass(frozen=True)
class Part:
    """One of several equal, contiguous parts, each for another process; numbered from 0."""

    number: int = 0
    parts: int = 1

    def of(self, count: int) -> tuple[int, int]:
        return count * self.number // self.parts, count * (self.number + 1) // self.parts


WHOLE = Part()


@dataclass(frozen=True)
class Source:
    """Wanted rows of a store, as batches of float32 or of the storage dtype."""

    store: Chunks
    counts: np.ndarray  # (chunks,) number of wanted rows in each chunk
    kept: Callable[
        [int], np.ndarray | None
    ]  # chunk number -> ascending indices of its wanted rows; None for all
    dtype: np.dtype
    reused: bool  # whether each batch is valid until the next only, as its memory is used again


def in_order(source: Source, batch_size: int, part: Part) -> Iterator[np.ndarray]:
    """The wanted rows in stored order, (B, D)."""
    ends = np.cumsum(source.counts)
    total = int(ends[-1])
    first, stop = (min(total, batch_size * batch) for batch in part.of(-(-total // batch_size)))
    buffers = _Buffers(source, batch_size, stop - first)

    def fill(begin: int, end: int, out: np.ndarray) -> None:
        at, chunk = begin, int(np.searchsorted(ends, begin, side="right"))
        while at < end:
            before, until = int(ends[chunk] - source.counts[chunk]), min(end, int(ends[chunk]))
            if until > at:
                wanted, rows, kept = (
                    slice(at - before, until - before),
                    source.store.chunk(chunk),
                    source.kept(chunk),
                )
                _decode(
                    rows[wanted] if kept is None else rows[kept[wanted]],
                    out[at - begin : until - begin],
                )
            at, chunk = until, chunk + 1

    def blocks(pool: ThreadPoolExecutor) -> Iterator[Buffer]:
        for begin in range(first, stop, buffers.rows):
            yield buffers.fill(pool, fill, begin, min(begin + buffers.rows, stop))

    return _read_ahead(blocks, buffers.ahead, batch_size, source.reused)


def shuffled(
    source: Source, deal: Deal, batch_size: int, part: Part, row_bytes: int, first: int = 0
) -> Iterator[np.ndarray]:
    """The wanted rows once each, shuffled, (B, D) of the source's dtype.

    Without the `first` batches, which are not read. From the page cache, batches are gathered. Otherwise a window's
    rows are read forward through the store into memory and yielded while the next window is filled. Both give the same
    order, fitted to `row_bytes`.
    """
    run = max(1, RUN_BYTES // row_bytes)
    own_size = part.of(batch_size)[1] - part.of(batch_size)[0]
    buffers = _Buffers(source, own_size, int(source.counts.sum()), run)

    def leaving_here(pool: ThreadPoolExecutor) -> Iterator[np.ndarray]:
        """The rows of this part of each batch, in the order in which they leave."""
        for leaving in _leaving(deal, batch_size, run, pool, first):
            whole = len(leaving) - len(leaving) % batch_size
            (begin, end), (of_rest, stop) = part.of(batch_size), part.of(len(leaving) - whole)
            yield (
                leaving
                if part.parts == 1
                else np.concatenate(
                    [
                        leaving[:whole].reshape(-1, batch_size)[:, begin:end].ravel(),
                        leaving[whole:][of_rest:stop],
                    ]
                )
            )

    def gathered(pool: ThreadPoolExecutor) -> Iterator[Buffer]:
        for leaving in leaving_here(pool):
            gather = _gatherer(source.store)

            def decode(
                begin: int,
                end: int,
                out: np.ndarray,
                leaving: np.ndarray = leaving,
                gather: Callable[[np.ndarray, np.ndarray], None] = gather,
            ) -> None:
                """Decode rows `begin` to `end` of a window's order, run by run, so that they stay in the cache."""
                if source.dtype == source.store.storage:
                    gather(leaving[begin:end], out)
                    return
                scratch = np.empty((min(run, end - begin), source.store.d_in), source.store.storage)
                for start in range(begin, end, run):
                    stop = min(start + run, end)
                    gather(leaving[start:stop], scratch[: stop - start])
                    _decode(scratch[: stop - start], out[start - begin : stop - begin])

            for begin in range(0, len(leaving), buffers.rows):
                yield buffers.fill(pool, decode, begin, min(begin + buffers.rows, len(leaving)))

    def from_windows(pool: ThreadPoolExecutor) -> Iterator[Buffer]:
        memory = [np.empty((0, source.store.d_in), source.store.storage)] * 2
        window = memory[0]
        for turn, leaving in enumerate(chain(leaving_here(pool), [np.empty(0, np.int64)])):
            if len(leaving) > len(memory[turn % 2]):
                memory[turn % 2] = np.empty((len(leaving), source.store.d_in), source.store.storage)
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
                loaded += [
                    pool.submit(load)
                    for load in loads[len(loaded) : len(loads) * number // len(begins)]
                ]
                yield block
            loaded += [pool.submit(load) for load in loads[len(loaded) :]]
            for done in (*loaded, *decoded):
                done.result()
            window = following

    return _read_ahead(
        lambda pool: (gathered if source.store.in_memory() else from_windows)(pool),
        buffers.ahead,
        own_size,
        source.reused,
    )


def numbers_shuffled(
    deal: Deal, batch_size: int, row_bytes: int, first: int = 0
) -> Iterator[np.ndarray]:
    """The numbers within the store, (B,), of the rows of each batch that `shuffled` yields."""
    with ThreadPoolExecutor(1) as pool:
        for leaving in _leaving(deal, batch_size, max(1, RUN_BYTES // row_bytes), pool, first):
            yield from (
                leaving[begin : begin + batch_size] for begin in range(0, len(leaving), batch_size)
            )


def _leaving(
    deal: Deal, batch_size: int, run: int, pool: ThreadPoolExecutor, first: int
) -> Iterator[np.ndarray]:
    """The rows of each window in the order in which they leave, (R,) numbers, from batch `first` on; dealt ahead. Rows
    that do not fill a batch leave with the next window. Runs of `run` rows within a batch are sorted, to be read
    forward."""
    dealt = deque(pool.submit(deal.window, number) for number in range(min(2, deal.windows)))
    rest, passed = np.empty(0, np.int64), first * batch_size
    for number in range(deal.windows):
        rows = np.concatenate([rest, dealt.popleft().result()])
        dealt.extend(
            pool.submit(deal.window, later) for later in range(number + 2, deal.windows)[:1]
        )
        whole = len(rows) - (len(rows) % batch_size if number + 1 < deal.windows else 0)
        rows, rest = rows[min(passed, whole) : whole], rows[whole:]
        passed -= whole - len(rows)
        for batch in range(0, len(rows), batch_size):
            for begin in range(batch, batch + batch_size, run):
                rows[begin : min(begin + run, batch + batch_size)].sort()
        yield rows


def _gatherer(store: Chunks) -> Callable[[np.ndarray, np.ndarray], None]:
    """A function that copies rows, (R,) numbers, into an array as stored, (R, D), where `in_memory`.

    It gathers from all shards in one call, without the GIL: from one array over all addresses from the first shard
    to the last, with a row at every `step` bytes, most of which overlap or lie outside the shards.
    """
    import torch

    starts, size, addresses = store.shard_starts, store.meta.row_bytes, store.addresses()
    lowest = int(addresses.min())
    step = math.gcd(size, *(addresses - lowest).tolist())
    firsts = (addresses - lowest - starts[:-1] * size) // step
    shape = (int((firsts + starts[1:] * (size // step)).max()), size)
    memory = torch.from_numpy(_at(lowest, shape, (step, 1), "|u1"))

    def gather(rows: np.ndarray, out: np.ndarray) -> None:
        places = firsts[np.searchsorted(starts, rows, side="right") - 1] + rows * (size // step)
        torch.index_select(
            memory, 0, torch.from_numpy(places), out=torch.from_numpy(out.view(np.uint8))
        )

    return gather


def _loads(source: Source, leaving: np.ndarray, out: np.ndarray) -> list[Callable[[], None]]:
    """Tasks that copy rows, (R,) numbers, into out, (R, D), in any order; each reads forward."""
    order = np.argsort(leaving)
    whole = np.dtype(
        (np.void, source.store.meta.row_bytes)
    )  # NumPy copies a row faster as one value
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
    """Copy rows as stored, (R, D), into out, of their own dtype or float32, both contiguous."""
    if rows.dtype == out.dtype:
        np.copyto(out, rows)
        return
    import torch  # here, since listing and writing stores do not need it

    bits, kind = rows.view(np.int16), torch.float16 if rows.dtype == np.float16 else torch.bfloat16
    if not bits.flags.writeable:  # PyTorch would warn, although it only reads
        bits = _at(bits.__array_interface__["data"][0], bits.shape, None, bits.dtype.str)
    torch.from_numpy(out).copy_(torch.from_numpy(bits).view(kind))


def _at(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, kind: str
) -> np.ndarray:
    """The memory at an address as an array that PyTorch takes; the caller keeps that memory."""
    interface = {
        "version": 3,
        "data": (address, False),
        "shape": shape,
        "strides": strides,
        "typestr": kind,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


class _Buffers:
    """The memory of a stream's blocks, used in turn; blocks are of whole batches, filled in parts of whole runs."""

    def __init__(self, source: Source, batch_size: int, total: int, run: int = 1) -> None:
        row_bytes = source.dtype.itemsize * source.store.d_in
        batch_bytes = row_bytes * batch_size
        self.rows = batch_size * max(1, BLOCK_BYTES // batch_bytes)
        self.ahead = max(1, min(READERS + 2, AHEAD_BYTES // (self.rows * row_bytes)))
        self._part = (
            self.rows if batch_bytes <= BLOCK_BYTES else run * -(-self.rows // (READERS * run))
        )
        shape = (min(self.rows, total), source.store.d_in)
        # One more than are being filled: the one that the consumer holds.
        self._blocks = [np.empty(shape, source.dtype) for _ in range(self.ahead + 1)]
        self._turn = 0

    def fill(
        self,
        pool: ThreadPoolExecutor,
        fill: Callable[[int, int, np.ndarray], None],
        begin: int,
        end: int,
    ) -> Buffer:
        """Have `fill` write rows `begin` to `end` into the next block."""
        self._turn += 1
        out = self._blocks[self._turn % len(self._blocks)][: end - begin]
        return [
            pool.submit(
                fill,
                part,
                min(part + self._part, end),
                out[part - begin : part - begin + self._part],
            )
            for part in range(begin, end, self._part)
        ], out


def _read_ahead(
    blocks: Callable[[ThreadPoolExecutor], Iterator[Buffer]],
    ahead: int,
    batch_size: int,
    reused: bool,
) -> Iterator[np.ndarray]:
    """Yield blocks batch by batch, with `ahead` of them being filled; a task's error is raised here."""
    pool = _reading_pool()
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
                batch = block[start : start + batch_size]
                yield batch if reused else batch.copy()
    finally:
        pool.shutdown(cancel_futures=True)


def _reading_pool() -> ThreadPoolExecutor:
    """A pool of threads that each compute alone, where PyTorch would start helpers for each."""
    import torch

    threads, all_begun = torch.get_num_threads(), threading.Barrier(READERS + 1)

    def begin() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # now, as a thread's first call takes the number of that moment
        all_begun.wait()

    pool = ThreadPoolExecutor(READERS, "sae-read", begin)
    for _ in range(READERS):  # each starts a thread, as the others wait
        pool.submit(int)
    all_begun.wait()
    torch.set_num_threads(threads)  # a number set in one thread holds for all that start later
    return pool
