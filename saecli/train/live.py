"""Rows streamed from a model while an SAE is trained on them.

Rows go through windows of equal size. While one is trained on, shuffled, a thread computes the next one's rows. Memory
also keeps the previous window: decoder steps take rows from both.

Legend: N training rows, W rows of a window, B rows of a batch, D = d_in.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from threading import Event
from typing import Self

import numpy as np

from ..base.console import Listener
from ..base.errors import ConfigError
from ..extract.forward import Ahead
from ..extract.streaming import Streamed
from ..store.opening import note_massive
from ..store.reader import RowSource
from ..store.split import Split
from ..store.stream import WHOLE, Part
from ..store.values import DTYPES, Statistics
from .options import TRAINED
from .rows import ArrayRows

WINDOW_BYTES = (
    512 << 20
)  # as stored: two then hold 25 rows per latent of 4 d_in for Gemma-2-2B; decoder steps want 32
MOST_TEST_ROWS = MEASURED_ROWS = 16_384
PATIENCE = 10.0  # seconds for which leaving waits for the batch that the model is computing


class _LeftError(Exception):
    """Training is over, or has failed, and no more rows are wanted."""


class LiveRows(RowSource):
    """Training rows as a model gives them, each once.

    A context manager: within it rows are computed; an error of the model or its text is raised when the next window is
    needed. Documents are held out, and of training from an SAE kept out, by the same hash as in a store. The held-out
    rows of the first window, else the next ones, are the test rows; later ones are dropped.

    Args:
        rows: N; the attribute is corrected once the text has ended.
        split_seed: of the choice of held-out documents.
        least: least rows of a window.
        window_bytes: of a window, as stored.
        begun: training begins from an SAE.
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
        window_bytes: int = WINDOW_BYTES,
        begun: bool = False,
    ) -> None:
        self.rows = self._wanted = rows
        self.d_in, self.ended_early = (
            source.d_in,
            False,
        )  # whether the text ended after the first window
        self._source, self._listener = source, listener
        self._stored = DTYPES[source.meta.dtype]
        most = max(window_bytes // source.meta.row_bytes, 2 * least)
        self._window_rows = math.ceil(rows / math.ceil(rows / most))
        self._kept = np.empty(
            (min(rows, 2 * self._window_rows), self.d_in), self._stored.storage
        )  # in turn
        self._waiting = self._window = self._kept[
            :0
        ]  # the rest of a block that a window's end cut, and the window
        self._splits = [Split("test", seed=split_seed)]
        if begun:
            self._splits.append(Split("train", TRAINED, split_seed, rest=True))
        self._apart: list[list[np.ndarray]] | None = [[] for _ in self._splits]  # None once taken
        self._taken = self._windows = 0  # rows and windows so far
        self._seen = 0  # rows that the model has given
        self._left = Event()

    def __enter__(self) -> Self:
        ahead = Ahead(
            self._source.blocks(self._go_on),
            max(1, self._window_rows // self._source.block_rows),
            PATIENCE,
        )
        with ExitStack() as opened:
            with self._listener.progress(
                "reading the first rows", self._window_rows, "rows"
            ) as self._show:
                self._train = self._without_those_apart(iter(opened.enter_context(ahead)))
                opened.callback(self._left.set)  # before the thread is waited for
                self._fill()
            self.rows = self.rows if len(self._window) == self._window_rows else self._taken
            self.test_rows, self.kept_out = self._taken_apart()
            self._opened = opened.pop_all()
        first = next(self.sequential(MEASURED_ROWS)).astype(np.float64)
        note_massive(self.name, Statistics.of(first), self._listener)
        if self.ready < self.rows:
            self._listener.note(f"rows are normalised as the first {self.ready:,} are")
        return self

    def __exit__(self, *failure: object) -> None:
        self._opened.close()

    @property
    def ready(self) -> int:
        """Rows in memory, of the last two windows."""
        return min(self._taken, len(self._kept))

    @property
    def warnings(self) -> tuple[str, ...]:
        return (
            (
                f"the text ended after {self.rows:,} of {self._wanted:,} training rows, before the learning rate had "
                f"fallen; use --rows {self.rows}, or a longer text",
            )
            if self.ended_early
            else ()
        )

    def batches(
        self, batch_size: int, *, seed: int, epoch: int, part: Part = WHOLE, first: int = 0
    ) -> Iterator[np.ndarray]:
        """Shuffled batches, (B, D) float32, a pure function of the rows, seed, epoch and batch size.

        Epoch 0 passes once over all rows, another one over those in memory. Before the second window the pass can be
        restarted.
        """
        assert part == WHOLE, "one process runs the model"
        assert not first, "rows that a model gives come once"
        return (
            self._passing(batch_size, seed)
            if epoch == 0
            else self._in_memory(batch_size, (seed, epoch))
        )

    def sequential(self, batch_size: int, part: Part = WHOLE) -> Iterator[np.ndarray]:
        """The rows in memory, (B, D) float32."""
        for begin in range(0, self.ready, batch_size):
            yield self._decoded(self._kept[begin : min(begin + batch_size, self.ready)])

    def _passing(self, batch_size: int, seed: int) -> Iterator[np.ndarray]:
        carried = self._window[
            :0
        ]  # rows that do not fill a batch at a window's end leave with the next window
        while True:
            window, last = self._window, self._taken == self.rows or self.ended_early
            if last:
                self._left.set()
            order = np.random.default_rng((seed, self._windows - 1)).permutation(len(window))
            missing = -len(carried) % batch_size
            if len(carried):
                yield self._decoded(np.concatenate([carried, window[order[:missing]]]))
            stop = len(order) if last else len(order) - (len(order) - missing) % batch_size
            for begin in range(missing, stop, batch_size):
                yield self._decoded(window[order[begin : min(begin + batch_size, stop)]])
            if last:
                self.rows = self._taken
                return
            carried = window[order[stop:]]
            self._fill()

    def _in_memory(self, batch_size: int, seed: tuple[int, int]) -> Iterator[np.ndarray]:
        order = np.random.default_rng(seed).permutation(self.ready)
        for begin in range(0, len(order), batch_size):
            yield self._decoded(self._kept[order[begin : begin + batch_size]])

    def _decoded(self, rows: np.ndarray) -> np.ndarray:
        out = np.empty(rows.shape, np.float32)
        self._stored.decode_rows(rows, out)
        return out

    def _fill(self) -> None:
        """Read the next window, over the last but one."""
        begin = self._windows % 2 * self._window_rows
        window, filled = (
            self._kept[begin : begin + min(self._window_rows, self.rows - self._taken)],
            0,
        )
        while filled < len(window):
            if not len(self._waiting):
                if (found := next(self._train, None)) is None:
                    break
                self._waiting = found
            rows, self._waiting = np.split(self._waiting, [len(window) - filled])
            window[filled : filled + len(rows)] = rows
            filled += len(rows)
        self.ended_early = self._windows > 0 and filled < len(window)
        self._window = window[:filled]
        self._taken, self._windows = self._taken + filled, self._windows + 1

    def _without_those_apart(
        self, blocks: Iterator[tuple[np.ndarray, np.ndarray]]
    ) -> Iterator[np.ndarray]:
        """The training rows of blocks; the other rows of the first window are kept."""
        for rows, documents in blocks:
            train = np.ones(len(rows), bool)
            for number, split in enumerate(self._splits):
                chosen = split.keeps(documents)
                train &= ~chosen
                if self._apart is not None:
                    self._apart[number].append(rows[chosen])
            yield rows[train]

    def _taken_apart(self) -> tuple[ArrayRows, ArrayRows | None]:
        """Test rows, the held-out rows seen so far, else the next ones; and those kept out, else the test rows."""
        apart = self._apart or [[]]
        while not sum(map(len, apart[0])) and (found := next(self._train, None)) is not None:
            self._waiting = np.concatenate([self._waiting, found])
        rows, *kept_out = [
            np.concatenate([self._kept[:0], *part])[:MOST_TEST_ROWS] for part in apart
        ]
        self._apart = None
        if not len(rows) or not self.rows:
            raise ConfigError(
                "--dataset has too few documents: expected training rows and held-out ones, got "
                f"{self.rows:,} and {len(rows):,}; name a text of more documents, raise --rows, or use "
                "another --split-seed"
            )
        test = ArrayRows(self._decoded(rows))
        compared = [ArrayRows(self._decoded(one)) if len(one) else test for one in kept_out]
        return test, compared[0] if compared else None

    def _go_on(self, tokens: int, rows: int) -> None:
        """Show the progress of the first window; called in the model's thread."""
        if self._left.is_set():
            raise _LeftError
        self._seen += rows
        if self._windows == 0:
            self._show(self._seen)
