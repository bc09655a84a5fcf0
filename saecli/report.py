"""What a command says: tables or one JSON document on stdout, notes and progress on stderr."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .errors import printable
from .files import to_json

PLAIN_INTERVAL = 15.0  # seconds between progress lines where stderr is no terminal
UNITS = ("B", "kB", "MB", "GB", "TB")
PIPE_WIDTH = 140  # columns of a table that goes into a file or a pipe


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
    """A table under its title, the first column text, the others right-aligned figures or words."""
    result = Table(header_style="bold")
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        result.add_row(*(cell if isinstance(cell, str | Text) else number(cell) for cell in row))
    return Group(Text(title, style="bold"), result) if title else result


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
        console = Console(stderr=stderr, highlight=False)
        return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=PIPE_WIDTH)

    def note(self, text: str) -> None:
        """Say something beside the result, on stderr."""
        self._err.print(printable(text), markup=False, soft_wrap=True)

    def result(self, document: dict[str, Any], *shown: RenderableType) -> None:
        """Print the command's result: the document with `--json`, else what is shown to people."""
        if self.as_json:
            print(to_json(document))
            return
        for renderable in shown:
            self._out.print(renderable, markup=False, soft_wrap=isinstance(renderable, str))

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
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=16), TextColumn("{task.fields[rate]}"),
                   TimeRemainingColumn(), TextColumn("{task.fields[words]}"))
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
