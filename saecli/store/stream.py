"""Streams of rows, in stored order or shuffled, read ahead by threads in constant memory.

A stream is a series of blocks, each some whole batches, filled by tasks of a small thread pool: reading,
gathering and decoding are NumPy calls that let other threads run. A few blocks are under way while one is
consumed, in buffers that take turns.

Legend: B rows of a batch, R rows, D = d_in.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from .dtypes import PIECE_BYTES, StoredType

READERS = 2
BLOCK_BYTES = 4 << 20
AHEAD_BYTES = 32 << 20


@dataclass(frozen=True)
class Source:
    """Chunks to read rows from.

    Args:
        d_in: dimensions of a row.
        stored: how the rows are stored.
        counts: (chunks,) how many rows of each chunk are wanted.
        chunk: chunk number -> (R, D) its rows as stored.
        kept: chunk number -> indices of the rows that are wanted, ascending; None for all of them.
    """

    d_in: int
    stored: StoredType
    counts: np.ndarray
    chunk: Callable[[int], np.ndarray]
    kept: Callable[[int], np.ndarray | None]

    def rows(self, chunk: int, begin: int, end: int) -> np.ndarray:
        """Wanted rows of one chunk, counted among the wanted, as stored; a view where all are wanted."""
        rows, kept = self.chunk(chunk), self.kept(chunk)
        return rows[begin:end] if kept is None else rows[kept[begin:end]]

    def load(self, chunk: int, out: np.ndarray) -> None:
        """Copy all wanted rows of one chunk, as stored."""
        rows, kept = self.chunk(chunk), self.kept(chunk)
        if kept is None:
            np.copyto(out, rows)
        else:
            np.take(rows, kept, axis=0, out=out, mode="clip")


def in_order(source: Source, batch_size: int) -> Iterator[np.ndarray]:
    """The wanted rows in stored order.

    Args:
        source: where they come from.
        batch_size: rows of a batch; the last may be short.

    Yields:
        (B, D) float32, valid until the next is asked for.
    """
    ends = np.cumsum(source.counts)
    total = int(ends[-1])
    buffers = _Buffers(source, batch_size, total)

    def fill(begin: int, end: int, out: np.ndarray) -> np.ndarray:
        at, chunk = begin, int(np.searchsorted(ends, begin, side="right"))
        while at < end:
            first, stop = int(ends[chunk] - source.counts[chunk]), min(end, int(ends[chunk]))
            if stop > at:
                rows = source.rows(chunk, at - first, stop - first)
                source.stored.decode_rows(rows, out[at - begin : stop - begin])
            at, chunk = stop, chunk + 1
        return out[: end - begin]

    def tasks(pool: ThreadPoolExecutor) -> Iterator[Future[np.ndarray]]:
        for begin in range(0, total, buffers.rows):
            yield pool.submit(fill, begin, min(begin + buffers.rows, total), buffers.next())

    return _read_ahead(tasks, buffers.ahead, batch_size)


def shuffled(source: Source, batch_size: int, seed: tuple[int, ...], window_bytes: int) -> Iterator[np.ndarray]:
    """The wanted rows once each, shuffled: random chunks fill a window, whose rows are mixed.

    While one window is handed out, the next is loaded, a little with every block. What does not fill a
    batch at a window's end is carried into the next.

    Args:
        source: where they come from.
        batch_size: rows of a batch; the last may be short.
        seed: decides the order.
        window_bytes: size of a window as float32.

    Yields:
        (B, D) float32, valid until the next is asked for.
    """
    rng = np.random.default_rng(seed)
    windows = _windows(source.counts, rng, max(batch_size, window_bytes // (4 * source.d_in)))
    capacity = max(window.rows for window in windows) + (batch_size - 1 if len(windows) > 1 else 0)
    mixed = [np.empty((capacity, source.d_in), source.stored.storage) for _ in windows[:2]]
    buffers = _Buffers(source, batch_size, int(source.counts.sum()))

    def gather(rows: np.ndarray, order: np.ndarray, out: np.ndarray) -> np.ndarray:
        _gather(source.stored, rows, order, out[: len(order)])
        return out[: len(order)]

    def tasks(pool: ThreadPoolExecutor) -> Iterator[Future[np.ndarray]]:
        loads = [pool.submit(load) for load in windows[0].loads(source, mixed[0])]
        gathers: list[Future[np.ndarray]] = []
        carried = 0
        for number, window in enumerate(windows):
            # All of this window must be there, and all be taken from the one whose memory comes next.
            for done in (*loads, *gathers):
                done.result()
            rows, order = mixed[number % 2], rng.permutation(carried + window.rows)
            following = windows[number + 1 : number + 2]
            carried = len(order) % batch_size if following else 0
            whole = len(order) - carried
            pending = [load for after in following
                       for load in after.loads(source, mixed[(number + 1) % 2], rows, order[whole:])]
            starts = range(0, whole, buffers.rows)
            loads, gathers = [], []
            for block, begin in enumerate(starts, 1):
                chosen = order[begin : min(begin + buffers.rows, whole)]
                gathers.append(pool.submit(gather, rows, chosen, buffers.next()))
                due = len(pending) * block // len(starts)
                loads += [pool.submit(load) for load in pending[len(loads) : due]]
                yield gathers[-1]
            loads += [pool.submit(load) for load in pending[len(loads) :]]

    return _read_ahead(tasks, buffers.ahead, batch_size)


@dataclass(frozen=True)
class _Window:
    """Chunks whose rows are mixed with each other, and how many of them are wanted of each."""

    chunks: np.ndarray
    counts: np.ndarray

    @property
    def rows(self) -> int:
        return int(self.counts.sum())

    def loads(self, source: Source, out: np.ndarray, last: np.ndarray | None = None,
              carried: np.ndarray | None = None) -> list[Callable[[], object]]:
        """What has to be done to fill `out`, in any order: rows carried from the last window, then the chunks."""
        todo: list[Callable[[], object]] = []
        at = 0
        if last is not None and carried is not None and len(carried):
            at = len(carried)
            todo.append(partial(np.take, last, carried, axis=0, out=out[:at], mode="clip"))
        for chunk, count in zip(self.chunks.tolist(), self.counts.tolist(), strict=True):
            todo.append(partial(source.load, chunk, out[at : at + count]))
            at += count
        return todo


def _windows(counts: np.ndarray, rng: np.random.Generator, rows: int) -> list[_Window]:
    """Deal the chunks, in random order, into as few windows of about equal size as `rows` allows."""
    order = rng.permutation(np.flatnonzero(counts))
    ends = np.cumsum(counts[order])
    number = -(-int(ends[-1]) // rows)
    window = (ends - counts[order]) * number // ends[-1]
    cuts = np.flatnonzero(np.diff(window)) + 1
    return [_Window(chunks, counts[chunks]) for chunks in np.split(order, cuts)]


def _gather(stored: StoredType, rows: np.ndarray, order: np.ndarray, out: np.ndarray) -> None:
    """out = rows[order], decoded, in pieces that stay in cache."""
    if stored.storage == out.dtype:
        np.take(rows, order, axis=0, out=out, mode="clip")
        return
    piece = max(1, PIECE_BYTES // rows[:1].nbytes)
    scratch = np.empty((min(piece, len(order)), rows.shape[1]), rows.dtype)
    for start in range(0, len(order), piece):
        chosen = order[start : start + piece]
        np.take(rows, chosen, axis=0, out=scratch[: len(chosen)], mode="clip")
        stored.decode(scratch[: len(chosen)], out[start : start + piece])


class _Buffers:
    """The memory of a stream's blocks, which take turns.

    Args:
        source: whose rows they take.
        batch_size: a block is a multiple of it.
        total: rows in the whole stream.
    """

    def __init__(self, source: Source, batch_size: int, total: int) -> None:
        batch_bytes = 4 * source.d_in * batch_size
        self.rows = batch_size * max(1, BLOCK_BYTES // batch_bytes)
        self.ahead = max(1, min(READERS + 2, AHEAD_BYTES // (self.rows * 4 * source.d_in)))
        shape = (min(self.rows, total), source.d_in)
        # One more than are under way: the one that the consumer holds.
        self._blocks = [np.empty(shape, np.float32) for _ in range(self.ahead + 1)]
        self._turn = 0

    def next(self) -> np.ndarray:
        """The next block, handed out again after `ahead` others."""
        self._turn += 1
        return self._blocks[self._turn % len(self._blocks)]


def _read_ahead(tasks: Callable[[ThreadPoolExecutor], Iterator[Future[np.ndarray]]], ahead: int,
                batch_size: int) -> Iterator[np.ndarray]:
    """Hand out blocks batch by batch, with `ahead` of them under way; a task's error is raised here."""
    pool = ThreadPoolExecutor(READERS, thread_name_prefix="sae-read")
    try:
        series = tasks(pool)
        under_way = deque(islice(series, ahead))
        while True:
            # Only now is the block before this one free: its last batch was valid until this was asked for.
            under_way.extend(islice(series, 1))
            if not under_way:
                return
            block = under_way.popleft().result()
            for start in range(0, len(block), batch_size):
                yield block[start : start + batch_size]
    finally:
        pool.shutdown(cancel_futures=True)
