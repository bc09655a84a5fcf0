"""What a command says: tables or one JSON document on stdout, notes and progress on stderr."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .errors import printable
from .files import to_json

PLAIN_INTERVAL = 15.0  # seconds between progress lines where stderr is no terminal
UNITS = ("B", "kB", "MB", "GB", "TB")
PIPE_WIDTH = 140  # characters in a line of a table that goes into a file or a pipe, where COLUMNS says nothing else
PHRASE = 24  # characters; cells of several words that are longer may fold between these for a place beside others
LONG_WORD = 12  # characters; figures are shorter, and longer words, such as paths, are broken before names are
FRAME = 3  # characters of a column's padding and of the line before it; one more ends the table


def number(value: float | int | None) -> str:
    """A figure as tables show it: counts whole, measures to four significant digits, nothing as a dash."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}"


def counted(count: int, word: str) -> str:
    """So many of something, as in "1 row" and "2,000 rows"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def size_words(count: float) -> str:
    """A number of bytes as people read it: 1.3 GB."""
    for unit in UNITS:
        if count < 1000 or unit == UNITS[-1]:
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def table(title: str | None, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> RenderableType:
    """A table under its title, the first column names, the others right-aligned figures or words.

    Where the columns do not fit side by side they are stacked in bands, each of which begins with the names. What folds
    is, in this order, headers; long cells of several words, between these; words that are too long beside the whole
    name, such as paths; and a name that leaves no room for a figure beside it.

    Args:
        title: the line above it; None for none.
        columns: the headers.
        rows: one cell a column; numbers are shown as `number` shows them, strings as they are.
    """
    cells = [[cell if isinstance(cell, Text) else Text(printable(cell) if isinstance(cell, str) else number(cell))
              for cell in row] for row in rows]
    shown = _Table([_Column(Text(head), [row[place] for row in cells]) for place, head in enumerate(columns)])
    return Group(Text(title, style="bold"), shown) if title else shown


@dataclass(frozen=True)
class _Column:
    """A column of a table.

    Args:
        head: its header.
        cells: what stands below, a row each.
    """

    head: Text
    cells: Sequence[Text]

    @property
    def word(self) -> int:
        """Characters of its longest word."""
        return _longest(word for text in (self.head, *self.cells) for word in text.plain.split())

    @property
    def whole(self) -> int:
        """Characters that it takes where nothing but the header folds."""
        lines = [line for cell in self.cells for line in cell.plain.splitlines()]
        return _longest([*self.head.plain.split(), *lines])

    @property
    def least(self) -> int:
        """Characters that it takes where long cells fold between words too."""
        return max(self.word, min(self.whole, PHRASE))


def _longest(parts: Iterable[str]) -> int:
    return max(map(cell_len, parts), default=0)


@dataclass(frozen=True)
class _Table:
    """A table as wide as the console that it is printed on, or less wide.

    Args:
        columns: its columns, the names first.
    """

    columns: Sequence[_Column]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        names, *others = self.columns
        word = max((column.word for column in others), default=0)
        first = names.whole
        if first + min(word, LONG_WORD) > width - 2 * FRAME - 1:
            first = min(first, width // 2)
        room = max(1, width - 2 * FRAME - 1 - first)
        bands: list[list[tuple[_Column, int]]] = [[]]
        left = room + FRAME
        for column in others:
            size = min(column.least, room)
            if bands[-1] and size + FRAME > left:
                bands.append([])
                left = room + FRAME
            bands[-1].append((column, size))
            left -= size + FRAME
        for band in bands:
            yield _band([(names, first), *band], width)


def _band(columns: Sequence[tuple[_Column, int]], width: int) -> Table:
    """Columns side by side, each with the characters that it takes at least: what is left goes to long cells, then to
    headers."""
    (names, first), *others = columns
    sizes = [first]
    left = max(0, width - 1 - sum(size + FRAME for _, size in columns))
    for column, size in others:
        sizes.append(size + min(left, max(0, column.whole - size)))
        left -= sizes[-1] - size
    unfolded = [max(size, cell_len(column.head.plain)) for size, (column, _) in zip(sizes, columns, strict=True)]
    if sum(unfolded) - sum(sizes) <= left:
        sizes = unfolded
    result = Table(header_style="bold")
    for size, (column, _) in zip(sizes, columns, strict=True):
        justify = "left" if column is names or size < column.whole else "right"
        result.add_column(column.head, justify=justify, overflow="fold", width=size)
    for row in zip(*(column.cells for column, _ in columns), strict=True):
        result.add_row(*row)
    return result


class Step(Protocol):
    """Moves a progress display: how much is done, and a few words beside the bar."""

    def __call__(self, done: float, words: str = "") -> None: ...


class Report:
    """The one output sink of a command.

    Args:
        as_json: print one JSON document instead of tables.
    """

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self._out = self._console(stderr=False)
        self._err = self._console(stderr=True)

    @staticmethod
    def _console(stderr: bool) -> Console:
        # Names are printed as they are, those with square brackets or ":cat:" in them too.
        console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
        if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
            console.width = PIPE_WIDTH
        return console

    def note(self, text: str) -> None:
        """Say something beside the result, on stderr."""
        self._err.print(printable(text), soft_wrap=True)

    def result(self, document: dict[str, Any], *shown: RenderableType) -> None:
        """Print the command's result: the document with `--json`, else what is shown to people."""
        if self.as_json:
            print(to_json(document))
            return
        for renderable in shown:
            self._out.print(renderable, soft_wrap=isinstance(renderable, str))

    @contextmanager
    def progress(self, label: str, total: float | None, unit: str) -> Iterator[Step]:
        """Show how far long work has come, with its rate and the time left.

        Args:
            label: what is being done.
            total: how many units make the whole, or None where no one knows.
            unit: what is counted.

        Yields:
            A function that is told how many units are done.
        """
        started = time.monotonic()

        def rate(done: float) -> str:
            return f"{done / max(time.monotonic() - started, 1e-9):,.0f} {unit}/s"

        if not self._err.is_terminal:
            yield self._plain_lines(label, total, unit, rate)
            return
        name, speed, more = (TextColumn(f"{{task.{field}}}", markup=False)
                             for field in ("description", "fields[rate]", "fields[words]"))
        columns = (name, BarColumn(bar_width=16), speed, TimeRemainingColumn(), more)
        with Progress(*columns, console=self._err, transient=True) as bar:
            task = bar.add_task(label, total=total, rate="", words="")
            yield lambda done, words="": bar.update(task, completed=done, words=words, rate=rate(done))

    def _plain_lines(self, label: str, total: float | None, unit: str, rate: Any) -> Step:
        last = started = time.monotonic()

        def left(done: float) -> str:
            if not total or not done:
                return ""
            seconds = (time.monotonic() - started) * max(0.0, total - done) / done
            return f", {timedelta(seconds=round(seconds))} left"

        def step(done: float, words: str = "") -> None:
            nonlocal last
            if time.monotonic() - last >= PLAIN_INTERVAL:
                last = time.monotonic()
                share = f"{done:,.0f} of {total:,.0f}" if total else f"{done:,.0f}"
                self.note(f"{label}: {share} {unit}, {rate(done)}{left(done)}  {words}".rstrip())

        return step
