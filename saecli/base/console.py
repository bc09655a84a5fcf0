"""A command's output: tables or one JSON document on stdout, notes and progress on stderr."""

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Protocol

import rich.console
from rich.segment import Segment
from rich.text import Text

from .files import to_json
from .words import printable

PLAIN_INTERVAL = 15.0  # seconds between progress lines if stderr is not a terminal
PIPE_WIDTH = 140  # width of tables in a file or pipe, unless COLUMNS is set


class Step(Protocol):
    """Updates a progress display: units done, and some words."""

    def __call__(self, done: float, words: str = "") -> None: ...


class Listener(Protocol):
    """Receives notes, warnings on what decides a result, and the progress of long work of `total` units."""

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def progress(
        self, label: str, total: float | None, unit: str
    ) -> AbstractContextManager[Step]: ...


class Silent:
    """Discards notes and progress; warns as Python does, unless warnings are given elsewhere."""

    def __init__(self, warns: bool = True) -> None:
        self._warns = warns

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None:
        if self._warns:
            warnings.warn(text, stacklevel=2)

    @contextmanager
    def progress(self, label: str, total: float | None, unit: str) -> Iterator[Step]:
        yield lambda done, words="": None


def listening(progress: bool | Listener) -> Listener:
    if isinstance(progress, bool):
        return Console() if progress else Silent()
    return progress


class _PrintableConsole(rich.console.Console):
    """A console that texts of others, wherever in a table, cannot control."""

    def render(self, *renderable: Any) -> Iterator[Segment]:
        for segment in super().render(*renderable):
            if segment.control:
                yield segment
            else:
                text = "\n".join(map(printable, segment.text.split("\n")))
                yield Segment(text, segment.style)


class Console:
    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self._out = self._stream(stderr=False)
        self._err = self._stream(stderr=True)
        self._warned: set[str] = set()

    @staticmethod
    def _stream(stderr: bool) -> rich.console.Console:
        # Names are printed as they are, even with square brackets or ":cat:" in them.
        console = _PrintableConsole(stderr=stderr, highlight=False, markup=False, emoji=False)
        if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
            console.width = PIPE_WIDTH
        return console

    def note(self, text: str) -> None:
        self._err.print(printable(text), soft_wrap=True)

    def warn(self, text: str) -> None:
        if text not in self._warned:  # of a store that several runs share
            self._warned.add(text)
            self.note(text)

    def print_result(self, document: dict[str, Any], *shown: rich.console.RenderableType) -> None:
        """Print the document with `--json`, else `shown`; a terminal cuts a line that does not wrap."""
        if self.as_json:
            print(to_json(document).replace("\x7f", "\\u007f"))  # JSON escapes all other controls
            return
        for renderable in shown:
            is_line = isinstance(renderable, Text) and renderable.no_wrap
            if is_line and self._out.is_terminal:
                self._out.print(renderable, no_wrap=True, overflow="ellipsis")
            else:
                soft_wrap = is_line or isinstance(renderable, str)
                self._out.print(renderable, soft_wrap=soft_wrap, crop=self._out.is_terminal)

    @contextmanager
    def progress(self, label: str, total: float | None, unit: str) -> Iterator[Step]:
        started = time.monotonic()

        def rate(done: float) -> str:
            return f"{done / max(time.monotonic() - started, 1e-9):,.0f} {unit}/s"

        if not self._err.is_terminal:
            yield self._plain_lines(label, total, unit, rate)
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        name, speed, more = (
            TextColumn(f"{{task.{field}}}", markup=False)
            for field in ("description", "fields[rate]", "fields[words]")
        )
        columns = (name, BarColumn(bar_width=16), speed, TimeRemainingColumn(), more)
        with Progress(*columns, console=self._err, transient=True) as bar:
            task = bar.add_task(label, total=total, rate="", words="")
            yield lambda done, words="": bar.update(
                task, completed=done, words=words, rate=rate(done)
            )

    def _plain_lines(self, label: str, total: float | None, unit: str, rate: Any) -> Step:
        last = started = time.monotonic()

        def step(done: float, words: str = "") -> None:
            nonlocal last
            if (now := time.monotonic()) - last >= PLAIN_INTERVAL:
                last, count, left = now, f"{done:,.0f}", ""
                if total:
                    count += f" of {total:,.0f}"
                    seconds = (now - started) * max(0.0, total - done) / max(done, 1e-9)
                    left = f", {timedelta(seconds=round(seconds))} left" if done else ""
                self.note(f"{label}: {count} {unit}, {rate(done)}{left}  {words}".rstrip())

        return step
