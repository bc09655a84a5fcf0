"""Filling several stores in one pass over the text, preparing each block while the previous one is in use.

The stores hold the same tokens, row for row: a row that one of them drops is dropped from all. So every block is read
at all places, also at those whose stores already have its rows or are finished. Blocks do not depend on what is read:
stores that were interrupted at different shards get the same blocks again, each from its own cursor on.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

import numpy as np

from ..base.console import Step
from ..base.errors import StoreError
from ..base.wording import size_words
from ..store.writer import Admission, StoreWriter, jointly
from .forward import Forward, Found
from .places import Place
from .window_blocks import Block, Cursor

Item = TypeVar("Item")


class Ahead(Generic[Item]):
    """Runs an iterator in a thread, a little ahead of its consumer, which gets its errors.

    A context manager; leaving it early stops the thread at the next item, without waiting for that: the iterator may be
    waiting for the network, and the daemon thread ends with the process.

    Args:
        items: the iterator.
        count: most items waiting to be consumed.
        patience: seconds to wait for the thread on leaving.
    """

    def __init__(self, items: Iterator[Item], count: int = 1, patience: float = 1.0) -> None:
        self._items, self._patience = items, patience
        self._queue: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(count)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sae-ahead", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join(self._patience)

    def __iter__(self) -> Iterator[Item]:
        while True:
            item, error = self._queue.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item

    def _run(self) -> None:
        try:
            for item in self._items:
                self._put(item, None)
                if self._stopped.is_set():
                    break
            self._put(None, None)
        except BaseException as error:  # raised again in the consumer's thread
            self._put(None, error)
        finally:
            self._items.close()

    def _put(self, item: Item | None, error: BaseException | None) -> None:
        while not self._stopped.is_set():
            try:
                self._queue.put((item, error), timeout=0.1)
                return
            except queue.Full:
                continue


COLUMNS = ("token_id", "position", "document")
NONFINITE_ROWS = 10_000  # if none of the first 10,000 rows can be stored, none will


class Target:
    """A store to fill.

    Args:
        place: its layer and site.
        writer: writes it.

    Attributes:
        admission: decides which rows it can store.
    """

    def __init__(self, place: Place, writer: StoreWriter) -> None:
        self.place, self.admission, self.writer = place, writer.admission, writer
        self.cursor = Cursor.from_json(writer.cursor)

    @property
    def rows(self) -> int:
        """Rows stored, including the unfinished shard's."""
        return self.writer.rows

    @property
    def bytes(self) -> int:
        """Bytes of these rows."""
        return self.rows * self.writer.meta.row_bytes

    @property
    def full(self) -> bool:
        """Whether the store needs no more rows."""
        return self.writer.full

    def wants(self, block: Block) -> bool:
        """Whether the store needs rows of a block."""
        return not self.full and block.cursor.place >= self.cursor.place

    @property
    def dtype(self) -> str:
        """The stored type."""
        return self.writer.meta.dtype

    def append(self, block: Block, found: Found | None, verdict: np.ndarray | None) -> None:
        """Store a block's rows.

        Args:
            block: the block.
            found: its activations; None if it has no tokens.
            verdict: which of them all places can store, (R,); None if it has no tokens.

        Raises:
            StoreError: a write fails, or the text differs from an interrupted store's.
        """
        dropped = {reason: np.full(count, np.nan) for reason, count in block.left_out.items()}
        rows = np.empty((0, self.writer.meta.d_in), np.float32)
        if found is not None:
            rows, dropped = found.rows, dropped | {"special": found.special_norms}
        self.writer.append(rows, block.columns, block.cursor.to_json(), dropped, verdict)


class Progress:
    """Shows an extraction's progress; called after each batch.

    Args:
        show: moves the display.
        targets: the stores being filled.
        world_size: number of ranks that fill them, all assumed to be as far as this one.
    """

    def __init__(self, show: Step, targets: Sequence[Target], world_size: int) -> None:
        self._show, self._targets, self._world_size = show, targets, world_size
        self._tokens = self._rows = 0
        self._started = time.monotonic()

    def __call__(self, tokens: int, rows: int) -> None:
        self._tokens += tokens * self._world_size
        self._rows += rows * self._world_size
        rate = self._tokens / max(time.monotonic() - self._started, 1e-9)
        written = self._world_size * sum(target.rows for target in self._targets)
        size = size_words(self._world_size * sum(target.bytes for target in self._targets))
        self._show(self._rows, f"{rate:,.0f} tokens/s, {written:,} rows written, {size}")


def demand_some(stored: int, dtype: str, offered: int, places: int) -> None:
    """Raise a StoreError if `NONFINITE_ROWS` rows were offered, each at so many places, and none could be stored in
    that dtype."""
    if offered < NONFINITE_ROWS or stored:
        return
    if places > 1:
        raise StoreError(f"no row can be stored: expected rows that are finite in {dtype}, and within "
                         f"--max-norm-multiple where it is given, at all of the {places} places, got {offered:,} that "
                         f"are not and none that is; extract each place alone to see which of them drops its rows")
    remedy = ("the model itself gives them, so check its weights" if dtype == "float32" else
              f"use {' or '.join(f'--dtype {name}' for name in ('bfloat16', 'float32') if name != dtype)}")
    raise StoreError(f"no row can be stored: expected rows that are finite in {dtype}, got "
                     f"{offered:,} that are not and none that is; {remedy}")


def fill(targets: Sequence[Target], blocks: Iterator[Block], forward: Forward, rows: int,
         show: Callable[[int, int], None], beside: Mapping[Place, Admission] | None = None) -> None:
    """Fill stores until all are full or the text ends; a block is stored while the next is computed.

    Args:
        targets: the stores.
        blocks: the blocks from the stores' first cursor on.
        forward: computes a block's rows.
        rows: the number of rows of each store.
        show: called after each batch with its numbers of tokens and rows.
        beside: other places whose stores hold the same rows, and what decides which rows these can store.
    """
    admissions = {target.place: target.admission for target in targets} | dict(beside or {})
    with Ahead(blocks) as stream, ThreadPoolExecutor(1, thread_name_prefix="sae-write") as pool:
        under_way: Future[None] = pool.submit(lambda: None)
        for block in stream:
            if all(target.full for target in targets):
                break
            taking = [target for target in targets if target.wants(block)]
            found = forward(block, list(admissions), show) if taking and len(block.lengths) else []
            under_way.result()
            under_way = pool.submit(_append, taking, admissions, block, dict(zip(admissions, found, strict=False)))
            if block.offered >= rows:  # enough, unless some could not be stored
                under_way.result()
                if all(target.full for target in targets):
                    break
        under_way.result()


def _append(targets: Sequence[Target], admissions: Mapping[Place, Admission], block: Block,
            found: Mapping[Place, Found]) -> None:
    """Store a block's rows, given its activations at all places; at none if it has no tokens."""
    verdicts = jointly({place: admissions[place].judge(one.rows) for place, one in found.items()})
    for target in targets:
        target.append(block, found.get(target.place), verdicts.get(target.place))
        demand_some(target.rows, target.dtype, block.offered, len(admissions))
