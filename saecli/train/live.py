"""Rows streamed from a model while an SAE is trained on them, in windows of equal size.

While one window is trained on, shuffled, a thread computes the next. Decoder steps take rows of the last two windows.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing
from threading import Event
from typing import Self

import numpy as np

from ..base.console import Listener
from ..base.errors import ConfigError
from ..extract.extraction import Streamed
from ..extract.filling import ahead
from ..extract.windows import BLOCK_TOKENS
from ..store.opening import warn_of_massive
from ..store.reader import RowSource
from ..store.split import WHOLE, Part, Split, Stream
from ..store.values import DTYPES, Norms, row_norms
from .options import MEASURED_ROWS, TRAINED
from .rows import ArrayRows

# As stored: two windows then hold 25 rows per latent of 4 d_in for Gemma-2-2B; decoder steps want 32.
LIVE_WINDOW_BYTES = 512 << 20


class _ClosedError(Exception):
    """No more rows are wanted."""


class LiveRows(RowSource):
    """Training rows as a model gives them, each once, within a context; `rows` is corrected once the text has ended.

    An error of the model or its text is raised when the next window is needed. Documents are held out, and with
    `from_sae` kept out, by the same hash as in a store. Test rows are the held-out rows of the first window, else the
    next ones; later ones are dropped. A window has at least `least` rows.
    """

    name = "rows of a model"
    passes = 1

    def __init__(
        self,
        source: Streamed,
        rows: int,
        split_seed: int,
        least: int,
        listener: Listener,
        window_bytes: int = LIVE_WINDOW_BYTES,
        from_sae: bool = False,
    ) -> None:
        self.rows = self._wanted = rows
        self.d_in = source.d_in
        self.reads = np.array(source.meta.reads) if source.meta.reads else None
        self.ended_early = False  # whether the text ended after the first window
        self._source, self._listener = source, listener
        self._stored = DTYPES[source.meta.dtype]
        most = max(window_bytes // source.meta.row_bytes, 2 * least)
        self._window_rows = math.ceil(rows / math.ceil(rows / most))
        memory_rows = min(rows, 2 * self._window_rows)
        self._memory = np.empty((memory_rows, self.d_in), self._stored.storage)  # two windows
        self._window = self._memory[:0]
        self._left_over = self._memory[:0]  # rows of the last block, for the next window
        self._splits = [Split("test", seed=split_seed)]
        if from_sae:
            self._splits.append(Split("train", TRAINED, split_seed, rest=True))
        # Blocks of the rows of each split; None once they are taken.
        self._of_splits: list[list[np.ndarray]] | None = [[] for _ in self._splits]
        self._rows_read = self._windows_read = self._rows_computed = 0
        self._closed = Event()

    def __enter__(self) -> Self:
        blocks_ahead = max(1, self._window_rows // BLOCK_TOKENS)
        # Leaving waits for the batch that the model is computing.
        blocks = closing(ahead(self._source.blocks(self._go_on), blocks_ahead))
        with ExitStack() as opened:
            with self._listener.progress(
                "reading the first rows", self._window_rows, "rows"
            ) as self._show:
                self._train = self._training_rows(opened.enter_context(blocks))
                opened.callback(self._closed.set)  # before the thread is waited for
                self._fill()
            if len(self._window) < self._window_rows:
                self.rows = self._rows_read
            self.test_rows, self.kept_out = self._take_rows_of_splits()
            first = next(self.sequential(MEASURED_ROWS))
            warn_of_massive(self.name, Norms.of(row_norms(first)), self._listener)
            if self.ready < self.rows:
                self._listener.note(f"rows are normalised as the first {self.ready:,} are")
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *failure: object) -> None:
        self._opened.close()

    @property
    def ready(self) -> int:
        """Rows in memory, of the last two windows."""
        return min(self._rows_read, len(self._memory))

    @property
    def warnings(self) -> tuple[str, ...]:
        if not self.ended_early:
            return ()
        return (
            f"the text ended after {self.rows:,} of {self._wanted:,} training rows, before the learning rate had "
            f"fallen; use --rows {self.rows}, or a longer text",
        )

    def batches(
        self, batch_size: int, *, seed: int, epoch: int, part: Part = WHOLE, first: int = 0
    ) -> Stream:
        """Shuffled batches, float32, a pure function of the rows, seed, epoch and batch size.

        Epoch 0 passes once over all rows, and can be restarted before the second window; others over those in memory.
        """
        assert part == WHOLE, "one process runs the model"
        assert not first, "rows that a model gives come once"
        if epoch == 0:
            yield from self._pass_once(batch_size, seed)
            return
        order = np.random.default_rng((seed, epoch)).permutation(self.ready)
        for begin in range(0, len(order), batch_size):
            yield self._stored.decode_rows(self._memory[order[begin : begin + batch_size]])

    def sequential(self, batch_size: int, part: Part = WHOLE) -> Stream:
        """The rows in memory, float32."""
        for begin in range(0, self.ready, batch_size):
            yield self._stored.decode_rows(
                self._memory[begin : min(begin + batch_size, self.ready)]
            )

    def _pass_once(self, batch_size: int, seed: int) -> Stream:
        """Rows that do not fill a batch at a window's end go with the next window."""
        carried = self._window[:0]
        while True:
            window = self._window
            is_last = self._rows_read == self.rows or self.ended_early
            if is_last:
                self._closed.set()
            order = np.random.default_rng((seed, self._windows_read - 1)).permutation(len(window))
            missing = -len(carried) % batch_size
            if len(carried):
                yield self._stored.decode_rows(np.concatenate([carried, window[order[:missing]]]))
            stop = len(order)
            if not is_last:
                stop -= (len(order) - missing) % batch_size
            for begin in range(missing, stop, batch_size):
                yield self._stored.decode_rows(window[order[begin : min(begin + batch_size, stop)]])
            if is_last:
                self.rows = self._rows_read
                return
            carried = window[order[stop:]]
            self._fill()

    def _fill(self) -> None:
        """Read the next window, in place of the last but one."""
        begin = self._windows_read % 2 * self._window_rows
        window_rows = min(self._window_rows, self.rows - self._rows_read)
        window = self._memory[begin : begin + window_rows]
        filled = 0
        while filled < len(window):
            if not len(self._left_over):
                block = next(self._train, None)
                if block is None:
                    break
                self._left_over = block
            rows, self._left_over = np.split(self._left_over, [len(window) - filled])
            window[filled : filled + len(rows)] = rows
            filled += len(rows)
        self.ended_early = self._windows_read > 0 and filled < len(window)
        self._window = window[:filled]
        self._rows_read += filled
        self._windows_read += 1

    def _training_rows(self, blocks: Iterator[tuple[np.ndarray, np.ndarray]]) -> Stream:
        """The training rows of blocks; rows of the splits are kept until they are taken."""
        for rows, documents in blocks:
            train = np.ones(len(rows), bool)
            for number, split in enumerate(self._splits):
                chosen = split.keeps(documents)
                train &= ~chosen
                if self._of_splits is not None:
                    self._of_splits[number].append(rows[chosen])
            yield rows[train]

    def _take_rows_of_splits(self) -> tuple[ArrayRows, ArrayRows | None]:
        """Test rows, and rows kept out, if there are any."""
        of_splits = self._of_splits or [[]]
        while not any(map(len, of_splits[0])):
            block = next(self._train, None)
            if block is None:
                break
            self._left_over = np.concatenate([self._left_over, block])
        self._of_splits = None
        test, *kept_out = [
            np.concatenate([self._memory[:0], *blocks])[:MEASURED_ROWS] for blocks in of_splits
        ]
        if not len(test) or not self.rows:
            raise ConfigError(
                f"--dataset has too few documents: expected training rows and held-out ones, got {self.rows:,} and "
                f"{len(test):,}; name a text of more documents, raise --rows, or use another --split-seed"
            )
        test_rows, *compared = [
            ArrayRows(self._stored.decode_rows(part)) for part in (test, *kept_out) if len(part)
        ]
        return test_rows, compared[0] if compared else None

    def _go_on(self, tokens: int, rows: int) -> None:
        """Called in the model's thread."""
        if self._closed.is_set():
            raise _ClosedError
        self._rows_computed += rows
        if self._windows_read == 0:
            self._show(self._rows_computed)
