"""Streams of a store's rows, in stored order or shuffled, read ahead by threads in constant memory.

A stream is a series of blocks of whole batches. A few blocks are being filled by a small thread pool, in NumPy calls
that release the GIL, while one is consumed.

Legend: B rows of a batch, R rows, D = d_in.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise

import numpy as np

from .chunks import Chunks
from .split import Deal
from .values import DTYPES

READERS = 2
BLOCK_BYTES = 4 << 20
AHEAD_BYTES = 32 << 20
LOAD_BYTES = 4 << 20
RUN_BYTES = 1 << 20


@dataclass(frozen=True)
class Part:
    """One of several equal, contiguous parts, each for another process; numbered from 0."""

    number: int = 0
    parts: int = 1

    def of(self, count: int) -> tuple[int, int]:
        """This part's first and last + 1 of `count` items."""
        return count * self.number // self.parts, count * (self.number + 1) // self.parts


WHOLE = Part()


@dataclass(frozen=True)
class Source:
    """Wanted rows of a store, as batches of float32 or of the storage dtype."""

    store: Chunks
    counts: np.ndarray  # (chunks,) number of wanted rows in each chunk
    # chunk number -> ascending indices of its wanted rows; None for all
    kept: Callable[[int], np.ndarray | None]
    dtype: np.dtype

    def decode(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy rows as stored, (R, D), into `out`, of their own dtype or float32, both contiguous."""
        if rows.dtype == out.dtype:
            np.copyto(out, rows)
        else:
            DTYPES[self.store.dtype].decode_rows(rows, out)


def in_order(source: Source, batch_size: int, part: Part) -> Iterator[np.ndarray]:
    """The wanted rows in stored order, (B, D)."""
    ends = np.cumsum(source.counts)
    total = int(ends[-1])
    first, stop = (min(total, batch_size * batch) for batch in part.of(-(-total // batch_size)))
    sizes = _Blocks(source, batch_size)

    def read(begin: int, end: int, out: np.ndarray) -> None:
        """Decode wanted rows `begin` to `end`, chunk by chunk."""
        row, chunk = begin, int(np.searchsorted(ends, begin, side="right"))
        while row < end:
            before = int(ends[chunk] - source.counts[chunk])
            until = min(end, int(ends[chunk]))
            if until > row:
                wanted = slice(row - before, until - before)
                rows, kept = source.store.chunk(chunk), source.kept(chunk)
                rows = rows[wanted] if kept is None else rows[kept[wanted]]
                source.decode(rows, out[row - begin : until - begin])
            row, chunk = until, chunk + 1

    def blocks(pool: ThreadPoolExecutor) -> Iterator[_Block]:
        for begin in range(first, stop, sizes.rows):
            yield sizes.fill(pool, read, begin, min(begin + sizes.rows, stop))

    return _read_ahead(blocks, sizes.ahead, batch_size)


def shuffled(
    source: Source, deal: Deal, batch_size: int, part: Part, row_bytes: int, first: int = 0
) -> Iterator[np.ndarray]:
    """The wanted rows once each, shuffled, (B, D) of the source's dtype.

    Without the `first` batches, which are not read. A window's rows are read forward through the store into memory, and
    decoded while the next window is read. The order is fitted to `row_bytes`.
    """
    begin, end = part.of(batch_size)
    sizes = _Blocks(source, end - begin)

    def blocks(pool: ThreadPoolExecutor) -> Iterator[_Block]:
        memory = [np.empty((0, source.store.d_in), source.store.storage)] * 2
        window = memory[0]
        orders = _orders(deal, batch_size, row_bytes, pool, first)
        own = (_of_part(order, batch_size, part) for order in orders)
        for turn, order in enumerate(chain(own, [np.empty(0, np.int64)])):
            if len(order) > len(memory[turn % 2]):
                memory[turn % 2] = np.empty((len(order), source.store.d_in), source.store.storage)
            following = memory[turn % 2][: len(order)]
            yield from _decoding(pool, sizes, source, window, _loads(source, order, following))
            window = following

    return _read_ahead(blocks, sizes.ahead, end - begin)


def numbers_shuffled(
    deal: Deal, batch_size: int, row_bytes: int, first: int = 0
) -> Iterator[np.ndarray]:
    """The numbers within the store, (B,), of the rows of each batch that `shuffled` yields."""
    with ThreadPoolExecutor(1) as pool:
        for order in _orders(deal, batch_size, row_bytes, pool, first):
            for begin in range(0, len(order), batch_size):
                yield order[begin : begin + batch_size]


def _orders(
    deal: Deal, batch_size: int, row_bytes: int, pool: ThreadPoolExecutor, first: int
) -> Iterator[np.ndarray]:
    """The order in which rows leave with each window, (R,) numbers, from batch `first` on; the next window is dealt
    meanwhile. Rows that do not fill a batch leave with the next window. Runs of 1 MiB within a batch are ascending, so
    that whoever gathers them reads forward."""
    run = max(1, RUN_BYTES // row_bytes)
    rest, passed = np.empty(0, np.int64), first * batch_size
    dealt = pool.submit(deal.window, 0)
    for number in range(deal.windows):
        rows = np.concatenate([rest, dealt.result()])
        whole = len(rows)
        if number + 1 < deal.windows:
            dealt = pool.submit(deal.window, number + 1)
            whole -= len(rows) % batch_size
        rows, rest = rows[min(passed, whole) : whole], rows[whole:]
        passed -= whole - len(rows)
        for batch in range(0, len(rows), batch_size):
            for begin in range(batch, batch + batch_size, run):
                rows[begin : min(begin + run, batch + batch_size)].sort()
        yield rows


def _of_part(order: np.ndarray, batch_size: int, part: Part) -> np.ndarray:
    """The rows of a part of each batch, the last of which may be short."""
    if part == WHOLE:
        return order
    whole = len(order) - len(order) % batch_size
    batches, rest = order[:whole].reshape(-1, batch_size), order[whole:]
    (begin, end), (of_rest, stop) = part.of(batch_size), part.of(len(rest))
    return np.concatenate([batches[:, begin:end].ravel(), rest[of_rest:stop]])


def _loads(source: Source, order: np.ndarray, out: np.ndarray) -> list[Callable[[], None]]:
    """Tasks that copy rows, (R,) numbers, into out, (R, D), in any order; each reads forward."""
    store, forward = source.store, np.argsort(order)
    # NumPy copies a row faster as one value.
    whole_row = np.dtype((np.void, store.meta.row_bytes))
    targets = out.view(whole_row)[:, 0]

    def load(places: np.ndarray) -> None:
        chunks, within = store.locate(order[places])
        ends = (np.flatnonzero(np.diff(chunks, append=-1)) + 1).tolist()
        for end in ends:  # all at once, so as not to wait for each
            store.expect(int(chunks[end - 1]))
        for begin, end in pairwise([0, *ends]):
            rows = store.chunk(int(chunks[begin])).take(within[begin:end], axis=0)
            targets[places[begin:end]] = rows.view(whole_row)[:, 0]

    step = max(1, LOAD_BYTES // store.meta.row_bytes)
    return [partial(load, forward[begin : begin + step]) for begin in range(0, len(forward), step)]


@dataclass(frozen=True)
class _Block:
    rows: np.ndarray  # (R, D)
    tasks: list[Future[None]]  # which fill it


def _decoding(
    pool: ThreadPoolExecutor,
    sizes: "_Blocks",
    source: Source,
    window: np.ndarray,
    loads: list[Callable[[], None]],
) -> Iterator[_Block]:
    """The blocks of a window, while the next one is loaded, evenly between them; returns once both are done."""

    def decode(begin: int, end: int, out: np.ndarray) -> None:
        source.decode(window[begin:end], out)

    count = -(-len(window) // sizes.rows)
    tasks = [] if count else [pool.submit(load) for load in loads]
    for number in range(count):
        begin = number * sizes.rows
        block = sizes.fill(pool, decode, begin, min(begin + sizes.rows, len(window)))
        due = loads[len(loads) * number // count : len(loads) * (number + 1) // count]
        tasks += [*block.tasks, *(pool.submit(load) for load in due)]
        yield block
    for task in tasks:
        task.result()


class _Blocks:
    """The sizes of a stream's blocks, which are of whole batches, and how many are filled ahead."""

    def __init__(self, source: Source, batch_size: int) -> None:
        row_bytes = source.dtype.itemsize * source.store.d_in
        self.rows = batch_size * max(1, BLOCK_BYTES // (row_bytes * batch_size))
        self.ahead = max(1, min(READERS + 2, AHEAD_BYTES // (self.rows * row_bytes)))
        # A block of one large batch is filled by all readers.
        self._task_rows = -(-self.rows // READERS) if self.rows == batch_size else self.rows
        self._d_in, self._dtype = source.store.d_in, source.dtype

    def fill(
        self,
        pool: ThreadPoolExecutor,
        fill: Callable[[int, int, np.ndarray], None],
        begin: int,
        end: int,
    ) -> _Block:
        """Have `fill` write rows `begin` to `end` into a block."""
        rows = np.empty((end - begin, self._d_in), self._dtype)
        tasks = []
        for start in range(0, len(rows), self._task_rows):
            part = rows[start : start + self._task_rows]
            tasks.append(pool.submit(fill, begin + start, begin + start + len(part), part))
        return _Block(rows, tasks)


def _read_ahead(
    blocks: Callable[[ThreadPoolExecutor], Iterator[_Block]], ahead: int, batch_size: int
) -> Iterator[np.ndarray]:
    """Yield blocks batch by batch, with `ahead` of them being filled; a task's error is raised here."""
    pool = ThreadPoolExecutor(READERS, "sae-read")
    try:
        series = blocks(pool)
        under_way = deque(islice(series, ahead))
        while under_way:
            block = under_way.popleft()
            for task in block.tasks:
                task.result()
            under_way.extend(islice(series, 1))
            for start in range(0, len(block.rows), batch_size):
                yield block.rows[start : start + batch_size]
    finally:
        pool.shutdown(cancel_futures=True)
