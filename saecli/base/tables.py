"""Tables that fit the console's width."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from .errors import number, printable

PHRASE = 24  # characters; longer cells of several words may fold between words
LONG_WORD = 12  # characters; figures are shorter, and longer words, such as paths, are broken before names are
FRAME = 3  # characters of a column's padding and the line before it; one more ends the table


def table(title: str | None, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> RenderableType:
    """A table under its title: a column of names, then right-aligned figures or words.

    Columns that do not fit side by side are stacked in bands, each beginning with the names. Text folds in this order:
    headers; long cells, between words; long words, such as paths, beside a whole name; and names that leave no room for
    a figure.

    Args:
        title: the line above it; None for none.
        columns: the headers.
        rows: one cell per column; numbers are formatted by `number`.
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
        cells: the cells below it, one per row.
    """

    head: Text
    cells: Sequence[Text]

    @property
    def word(self) -> int:
        """Characters of its longest word."""
        return _longest(word for text in (self.head, *self.cells) for word in text.plain.split())

    @property
    def whole(self) -> int:
        """Its width if only the header folds."""
        lines = [line for cell in self.cells for line in cell.plain.splitlines()]
        return _longest([*self.head.plain.split(), *lines])

    @property
    def least(self) -> int:
        """Its width if long cells fold between words too."""
        return max(self.word, min(self.whole, PHRASE))


def _longest(parts: Iterable[str]) -> int:
    return max(map(cell_len, parts), default=0)


@dataclass(frozen=True)
class _Table:
    """A table no wider than the console that it is printed on.

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
    """Columns side by side, given their least widths; room left goes to long cells, then to headers."""
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


def html_table(title: str, entries: Mapping[str, Any]) -> str:
    """A table of names and values as HTML, for a notebook; values that are None or empty are left out."""
    rows = "".join(f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>"
                   f"{escape(number(value) if isinstance(value, float) else str(value))}</td></tr>"
                   for name, value in entries.items() if value not in (None, "", (), [], {}))
    return f"<table><caption><b>{escape(title)}</b></caption>{rows}</table>"
