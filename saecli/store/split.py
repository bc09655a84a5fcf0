"""Which rows: train and test, by a hash of each document; and streams of them, in stored order or shuffled.

A document belongs to a fraction if its hash is below it. So smaller fractions are subsets of larger ones, and held-out
rows depend on none. A fraction without a document, as in a small store, takes the one with the lowest hash; so does the
held-out part of each source of a mixture.

A stream is a series of blocks of whole batches, a few of which a small thread pool fills ahead.

Legend: B rows of a batch, R rows, D = d_in.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, cycle, islice, pairwise
from typing import Literal, Self, TypeAlias, get_args

import numpy as np

from ..base.errors import ConfigError
from ..base.words import unknown_choice
from .shard import Chunks
from .values import DTYPES

Which = Literal["train", "test", "all"]
Stream: TypeAlias = Generator[np.ndarray, None, None]  # batches of rows
TEST_FRACTION = 0.1
WINDOW_BYTES, LARGEST_WINDOW_BYTES = 256 << 20, 1 << 30
# Random reads of this size reach about half a disk's speed, or more where others are near.
UNIT_BYTES = 64 << 10
READERS = 2
BLOCK_BYTES = 4 << 20
AHEAD_BYTES = 32 << 20
LOAD_BYTES = 4 << 20
RUN_BYTES = 1 << 20

# Odd constants of splitmix64 (Steele, Lea and Flood 2014).
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_TEST_STREAM, _TRAIN_STREAM = 1, 2


def splitmix64(values: np.ndarray) -> np.ndarray:
    values = values + _STEP
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def _hashes(ids: np.ndarray, seed: int, stream: int) -> np.ndarray:
    """Hashes of 53 bits, as a float64's mantissa has."""
    key = splitmix64(splitmix64(np.array([seed % 2**64], np.uint64)) ^ np.uint64(stream))
    return splitmix64(splitmix64(ids.astype(np.uint64)) ^ key) >> np.uint64(11)


def _limit(fraction: float) -> int:
    return round(fraction * 2**53)


class _Group:
    """The document of a source that has the lowest hash, and whether there are others."""

    def __init__(self) -> None:
        self.lowest = self.highest = self.document = -1

    def update(self, ids: np.ndarray, hashes: np.ndarray) -> None:
        if not len(ids):
            return
        at = int(hashes.argmin())
        if self.lowest < 0 or hashes[at] < self.lowest:
            self.lowest, self.document = int(hashes[at]), int(ids[at])
        self.highest = max(self.highest, int(hashes.max()))

    def has_below(self, limit: int) -> bool:
        return 0 <= self.lowest < limit

    @property
    def has_several(self) -> bool:
        return self.lowest < self.highest


def is_test(ids: np.ndarray, *, seed: int = 0, test_fraction: float = TEST_FRACTION) -> np.ndarray:
    """Which ids of documents, (R,) integers, are held out by their hash, (R,) bool."""
    return _hashes(ids, seed, _TEST_STREAM) < np.uint64(_limit(test_fraction))


@dataclass(frozen=True)
class Split:
    """A choice of rows; see `ActivationStore.split`. The documents `also_test` are held out, and `also_train` trained
    on, whatever their hash."""

    which: Which
    fraction: float = 1.0
    seed: int = 0
    test_fraction: float = TEST_FRACTION
    also_test: tuple[int, ...] = ()
    also_train: tuple[int, ...] = ()
    rest: bool = False

    def __post_init__(self) -> None:
        if self.which not in get_args(Which):
            raise unknown_choice("split", str(self.which), get_args(Which))
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"--fraction must be above 0 and at most 1, got {self.fraction:g}")
        if not 0 <= self.test_fraction < 1:
            raise ConfigError(
                f"--test-fraction must be at least 0 and below 1, got {self.test_fraction:g}"
            )

    def fitted(self, parts: Callable[[], Iterator[tuple[np.ndarray, np.ndarray | None]]]) -> Self:
        """This split for rows of these ids and sources, read up to the first document in the fraction."""
        split = self
        if self.which != "all" and self.test_fraction > 0:
            split = replace(split, also_test=self._lowest_of_each_source(parts()))
        if self.which == "train" and self.fraction < 1:
            rest = _Group()
            for ids, _ in parts():
                ids = ids[~split._held_out(ids)]
                rest.update(ids, _hashes(ids, self.seed, _TRAIN_STREAM))
                if rest.has_below(_limit(self.fraction)):
                    return split
            split = replace(split, also_train=(rest.document,) if rest.lowest >= 0 else ())
        return split

    def _lowest_of_each_source(
        self, parts: Iterator[tuple[np.ndarray, np.ndarray | None]]
    ) -> tuple[int, ...]:
        """What to hold out of sources without a document in the test fraction, unless they have one only; where all
        have one only, the lowest of all."""
        limit, groups, whole = _limit(self.test_fraction), dict[int, _Group](), _Group()
        for ids, sources in parts:
            hashes = _hashes(ids, self.seed, _TEST_STREAM)
            whole.update(ids, hashes)
            if sources is None:
                if whole.has_below(limit):
                    return ()
                continue
            for source in np.unique(sources).tolist():
                rows = sources == source
                groups.setdefault(source, _Group()).update(ids[rows], hashes[rows])
        lowest = [
            group.document
            for group in groups.values()
            if group.has_several and not group.has_below(limit)
        ]
        if not lowest and whole.has_several and not whole.has_below(limit):
            lowest = [whole.document]
        return tuple(sorted(lowest))

    def keeps(self, ids: np.ndarray) -> np.ndarray:
        """Whether rows belong to it, (R,) bool, by their ids, (R,) integers."""
        if self.which == "all":
            return np.ones(len(ids), bool)
        held_out = self._held_out(ids)
        if self.which == "test":
            return held_out
        if self.fraction == 1:
            return ~held_out
        chosen = _hashes(ids, self.seed, _TRAIN_STREAM) < np.uint64(_limit(self.fraction))
        return ~held_out & (_or_among(chosen, ids, self.also_train) != self.rest)

    def _held_out(self, ids: np.ndarray) -> np.ndarray:
        chosen = is_test(ids, seed=self.seed, test_fraction=self.test_fraction)
        return _or_among(chosen, ids, self.also_test)


def _or_among(chosen: np.ndarray, ids: np.ndarray, others: tuple[int, ...]) -> np.ndarray:
    return chosen | np.isin(ids, others) if others else chosen


@dataclass(frozen=True)
class Source:
    store: Chunks
    split: Split
    counts: np.ndarray  # (chunks,) number of chosen rows in each chunk
    dtype: np.dtype

    @cached_property
    def rows(self) -> int:
        return int(self.counts.sum())

    def within(self, chunk: int) -> np.ndarray | None:
        """Ascending indices of the chosen rows of a chunk; None for all."""
        rows = self.store.rows_of(chunk)
        if self.counts[chunk] == len(rows):
            return None
        return np.flatnonzero(self.split.keeps(self.store.row_ids(rows)))

    def keeps(self, rows: np.ndarray) -> np.ndarray | None:
        """Whether rows, by their ascending numbers, are chosen, (R,) bool; None for all."""
        return None if self.rows == self.store.rows else self.split.keeps(self.store.row_ids(rows))

    def decode(self, rows: np.ndarray, out: np.ndarray) -> None:
        if rows.dtype == out.dtype:
            np.copyto(out, rows)
        else:
            DTYPES[self.store.dtype].decode_rows(rows, out)


class Deal:
    """Deals the wanted rows of a store to the windows of an epoch, and orders each window.

    Rows are dealt in units, short runs of neighbours, each window's from all over the store. A window of units of n
    rows is ordered in n turns: every unit gives one row to each turn, at the same position in all. A turn has at least
    twice `batch_size` rows. So two rows of a unit, which are of one document, never share a batch, and the disk is read
    in runs. `window_bytes` of wanted rows are in a window, up to whole units.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        seed: tuple[int, ...],
        window_bytes: int | None = None,
    ) -> None:
        self._source, self.batch_size, self._seed = source, batch_size, seed
        row_bytes = source.store.meta.row_bytes
        # Rows that leave in ascending order, so that they are read forward.
        self.run = max(1, RUN_BYTES // row_bytes)
        # Large enough for whole units with such batches, within bounds.
        fitting = min(max(WINDOW_BYTES, 2 * batch_size * UNIT_BYTES), LARGEST_WINDOW_BYTES)
        window_rows = (window_bytes or fitting) // row_bytes
        self.windows = -(-source.rows // max(window_rows, batch_size))
        self._unit = 1
        if self.windows > 1:
            self._unit = max(1, min(UNIT_BYTES // row_bytes, window_rows // (2 * batch_size)))
        units = -(-source.store.rows // self._unit)
        self._dealt = np.random.default_rng(seed).permutation(units)  # 8 bytes per unit
        self._units = -(-units // self.windows)

    def window(self, number: int) -> np.ndarray:
        """The rows of a window in order, (R,) int64 numbers. Cost: about 30 ns per stored row."""
        first = number * self._units
        units = np.sort(self._dealt[first : first + self._units])  # so that `keeps` goes forward
        rows = (units[:, None] * self._unit + np.arange(self._unit)).ravel()
        stored = self._source.store.rows
        kept = rows < stored  # the last unit may be short
        if (wanted := self._source.keeps(np.minimum(rows, stored - 1))) is not None:
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
class Part:
    """One of several equal, contiguous parts, numbered from 0."""

    number: int = 0
    parts: int = 1

    def of(self, count: int) -> tuple[int, int]:
        return count * self.number // self.parts, count * (self.number + 1) // self.parts


WHOLE = Part()


_Block = tuple[np.ndarray, list[Future[None]]]  # rows, (R, D), and the tasks that fill them


def in_order(source: Source, batch_size: int, part: Part) -> Stream:
    """The wanted rows in stored order, (B, D)."""
    ends = np.cumsum(source.counts)
    total = int(ends[-1])
    first, stop = (min(total, batch_size * batch) for batch in part.of(-(-total // batch_size)))
    sizes = _Blocks(source, batch_size)

    def read(begin: int, end: int, out: np.ndarray) -> None:
        row, chunk = begin, int(np.searchsorted(ends, begin, side="right"))
        while row < end:
            before = int(ends[chunk] - source.counts[chunk])
            until = min(end, int(ends[chunk]))
            if until > row:
                numbers, chosen = np.arange(row - before, until - before), source.within(chunk)
                numbers = numbers if chosen is None else chosen[numbers]
                part = out[row - begin : until - begin]
                if part.dtype == source.store.storage:
                    source.store.read_rows(chunk, numbers, part)
                else:
                    source.decode(source.store.read_rows(chunk, numbers), part)
            row, chunk = until, chunk + 1

    def blocks(pool: ThreadPoolExecutor) -> Iterator[_Block]:
        for begin in range(first, stop, sizes.rows):
            yield sizes.fill(pool, read, begin, min(begin + sizes.rows, stop))

    return _read_ahead(blocks, sizes.ahead, batch_size)


def shuffled(source: Source, deal: Deal, part: Part, first: int) -> Stream:
    """The wanted rows shuffled, (B, D), without the `first` batches; a window is decoded while the next is read."""
    begin, end = part.of(deal.batch_size)
    sizes = _Blocks(source, end - begin)

    def blocks(pool: ThreadPoolExecutor) -> Iterator[_Block]:
        buffers = cycle([_Buffer(source.store), _Buffer(source.store)])
        window = next(buffers).rows(0)
        nothing = np.empty(0, np.int64)  # read while the last window is decoded
        for order in chain(_orders(deal, pool, first), [nothing]):
            numbers = _of_part(order, deal.batch_size, part)
            following = next(buffers).rows(len(numbers))
            yield from _decoding(pool, sizes, source, window, _loads(source, numbers, following))
            window = following

    return _read_ahead(blocks, sizes.ahead, end - begin)


class _Buffer:
    """Memory for the rows of a window as stored, used again and again."""

    def __init__(self, store: Chunks) -> None:
        self._memory = np.empty((0, store.d_in), store.storage)

    def rows(self, count: int) -> np.ndarray:
        if count > len(self._memory):
            self._memory = np.empty((count, self._memory.shape[1]), self._memory.dtype)
        return self._memory[:count]


def _orders(deal: Deal, pool: ThreadPoolExecutor, first: int) -> Iterator[np.ndarray]:
    """The rows of each window in the order of batches, (R,) numbers, from batch `first` on; those that do not fill a
    batch leave with the next window."""
    batch_size = deal.batch_size
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
            for begin in range(batch, batch + batch_size, deal.run):
                rows[begin : min(begin + deal.run, batch + batch_size)].sort()
        yield rows


def _of_part(order: np.ndarray, batch_size: int, part: Part) -> np.ndarray:
    """The rows of a part of each batch; the last batch may be short."""
    whole = len(order) - len(order) % batch_size
    batches, rest = order[:whole].reshape(-1, batch_size), order[whole:]
    (begin, end), (of_rest, stop) = part.of(batch_size), part.of(len(rest))
    return np.concatenate([batches[:, begin:end].ravel(), rest[of_rest:stop]])


def _loads(source: Source, order: np.ndarray, out: np.ndarray) -> list[Callable[[], None]]:
    """Tasks that copy rows, (R,) numbers, into out, (R, D)."""
    store, forward = source.store, np.argsort(order)
    # NumPy copies a row faster as one value.
    whole_row = np.dtype((np.void, store.meta.row_bytes))
    targets = out.view(whole_row)[:, 0]

    def load(numbers: np.ndarray) -> None:
        chunks, within = store.locate(order[numbers])
        ends = (np.flatnonzero(np.diff(chunks, append=-1)) + 1).tolist()
        for end in ends:  # all at once, so as not to wait for each
            store.prefetch(int(chunks[end - 1]))
        for begin, end in pairwise([0, *ends]):
            rows = store.read_rows(int(chunks[begin]), within[begin:end])
            targets[numbers[begin:end]] = rows.view(whole_row)[:, 0]

    step = max(1, LOAD_BYTES // store.meta.row_bytes)
    return [partial(load, forward[begin : begin + step]) for begin in range(0, len(forward), step)]


def _decoding(
    pool: ThreadPoolExecutor,
    sizes: "_Blocks",
    source: Source,
    window: np.ndarray,
    loads: list[Callable[[], None]],
) -> Iterator[_Block]:
    """The blocks of a window, while the next one is loaded, evenly between them."""

    def decode(begin: int, end: int, out: np.ndarray) -> None:
        source.decode(window[begin:end], out)

    count = -(-len(window) // sizes.rows)
    tasks = [] if count else [pool.submit(load) for load in loads]
    for number in range(count):
        begin = number * sizes.rows
        rows, filling = sizes.fill(pool, decode, begin, min(begin + sizes.rows, len(window)))
        due = loads[len(loads) * number // count : len(loads) * (number + 1) // count]
        tasks += [*filling, *(pool.submit(load) for load in due)]
        yield rows, filling
    for task in tasks:
        task.result()


class _Blocks:
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
        rows = np.empty((end - begin, self._d_in), self._dtype)
        tasks = []
        for start in range(0, len(rows), self._task_rows):
            part = rows[start : start + self._task_rows]
            tasks.append(pool.submit(fill, begin + start, begin + start + len(part), part))
        return rows, tasks


def _read_ahead(
    blocks: Callable[[ThreadPoolExecutor], Iterator[_Block]], ahead: int, batch_size: int
) -> Stream:
    """Yield blocks batch by batch, with `ahead` of them being filled; a task's error is raised here."""
    pool = ThreadPoolExecutor(READERS, "sae-read")
    try:
        series = blocks(pool)
        under_way = deque(islice(series, ahead))
        while under_way:
            rows, tasks = under_way.popleft()
            for task in tasks:
                task.result()
            under_way.extend(islice(series, 1))
            for start in range(0, len(rows), batch_size):
                yield rows[start : start + batch_size]
    finally:
        pool.shutdown(cancel_futures=True)
