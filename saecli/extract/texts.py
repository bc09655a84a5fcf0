"""Documents: rows of a source by its column of texts or messages, or of several sources in proportion.

All are numbered, blank ones too, so that a later pass resumes where an earlier one stopped.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

from ..base.errors import ModelError, one_line
from .readers import Mark, Reader, Row, UnreachableError, parts_of, reader_of

CHAT_COLUMNS = ("messages", "conversations")
BAD_SHARE = 0.01  # most of a source's rows that may be left out as bad
FIRST_ROWS = 1000  # of which that share may be bad before a source's length is known

Text = Any  # a string, or a `tokenizer.Conversation`; None for a bad row
Read = Callable[[Any, str, str], Text]  # from a row, a column, and words for the row in errors
Say = Callable[[str], None]


class Document(NamedTuple):
    number: int
    text: Text
    mark: Mark | None  # from which to read it again; None for the beginning
    source: int = 0  # its number


def value_of(row: Any, column: str, where: str) -> Any:
    """The value in a column of a row, nested in one such as content.text; `where` names the row in errors."""
    if not isinstance(row, dict):
        raise ModelError(
            f"{where} has no columns; expected a JSON object, got {type(row).__name__}; correct it"
        )
    value: Any = row
    for name in [column] if column in row else column.split("."):
        if value is None:
            break
        if not isinstance(value, dict) or name not in value:
            raise ModelError(
                f"{where} has no column {column!r}; expected one of its columns, {', '.join(row) or 'none'}; "
                "name one with --text-column"
            )
        value = value[name]
    return value


def text_of(row: Any, column: str, where: str) -> str:
    """The text in a column; those of several, as in prompt+completion, each begin a line."""
    if isinstance(row, str):  # without columns, such as an entry of a JSON list of texts
        return row
    names = parts_of(column, row) if isinstance(row, dict) else [column]
    texts = [value_of(row, name, where) for name in names]
    for name, text in zip(names, texts, strict=True):
        if text is not None and not isinstance(text, str):
            columns = ", ".join(other for other in row if isinstance(row[other], str)) or "none"
            raise ModelError(
                f"{where} holds no text in column {name!r}; expected a string, got {type(text).__name__}; "
                f"name a column that holds text with --text-column ({columns} here)"
            )
    return "\n".join(filter(None, texts))


@dataclass(frozen=True)
class TextSource:
    """Where documents come from; a hub dataset has config, split and revision."""

    dataset: str  # `stdlib-docs`, a file's path, or a Hugging Face dataset id
    config: str | None = None
    split: str = "train"
    column: str = "text"  # that holds the text
    revision: str | None = None  # commit, branch or tag; None for the newest state
    chat: bool = False  # whether the column holds messages, or until `recognised` may
    asked: str | None = None  # the column before `recognised`
    unread: str | None = None  # why `recognised` could not read it

    @property
    def name(self) -> str:
        """The dataset, and what differs from the default."""
        split = "" if self.split == "train" else self.split
        column = "" if self.column == "text" else self.column
        return " ".join(filter(None, [self.dataset, self.config, split, column]))

    @cached_property
    def reader(self) -> Reader:
        return reader_of(self.dataset, self.config, self.split, self.revision)

    def pinned(self) -> Self:
        return replace(self, revision=self.reader.commit())

    def recognised(self) -> Self:
        """The source with the column of its messages, if its first row has one; if it cannot be reached, as it is, with
        the reason."""
        if not self.chat:
            return self
        try:
            rows = (row.value for row in self.reader.rows(self.column, None))
            row = next((row for row in rows if isinstance(row, dict)), {})
        except UnreachableError as error:
            return replace(self, asked=self.column, unread=str(error))
        names = (self.column, *CHAT_COLUMNS) if self.column == "text" else (self.column,)
        column = next((name for name in names if name in row), self.column)
        try:
            messages = value_of(row, column, "")
        except ModelError:
            messages = None
        is_chat = isinstance(messages, list) and all(isinstance(each, dict) for each in messages)
        return replace(
            self, asked=self.column, column=column if is_chat else self.column, chat=is_chat
        )

    def identity(self, asked: bool = False) -> dict[str, Any]:
        """What determines the documents; if `asked`, as before `recognised`: the same without a network."""
        return self.reader.identity((self.asked if asked else None) or self.column)

    def documents(
        self,
        start: int = 0,
        mark: Mark | None = None,
        warn: Say = lambda _: None,
        read_chat: Read = text_of,
    ) -> Iterator[Document]:
        """The documents from number `start` on, read from a mark at or before it; messages by `read_chat`.

        A bad row, which cannot be read or holds no text, has the text None; `warn` tells of the first. ModelError if
        more than `BAD_SHARE` of the rows are bad.
        """
        read = read_chat if self.chat else text_of
        first: ModelError | None = None
        count = good = bad = 0
        warned = False
        for row in self.reader.rows(self.column, mark):
            count = row.number + 1
            try:
                text = _text(row, read, self.column)
                good += 1
            except ModelError as error:
                text, first, bad = None, first or error, bad + 1
                if bad > BAD_SHARE * max(count, FIRST_ROWS):
                    break
            if first and good and not warned:
                warn(f"{first}; it is left out, as up to {BAD_SHARE:.0%} of the rows may be")
                warned = True
            if row.number >= start:
                yield Document(row.number, text, row.mark)
        if first and bad > BAD_SHARE * count:
            raise first.within(
                after=f"{bad} of {count} rows are bad, and at most {BAD_SHARE:.0%} may be"
            )
        if not count and not start:
            raise ModelError(f"there is no text in {self.dataset}; name another file or dataset")


def _text(row: Row, read: Read, column: str) -> Text:
    if isinstance(row.value, Exception):
        raise ModelError(
            f"{row.where} cannot be read: {one_line(row.value)}; correct it"
        ) from row.value
    text = read(row.value, column, row.where)
    try:
        str(text).encode()
    except UnicodeEncodeError as error:
        raise ModelError(
            f"{row.where} holds bytes that are not UTF-8, or half of a surrogate pair; convert the file to "
            "UTF-8, or correct the line"
        ) from error
    return text


@dataclass(frozen=True)
class Mixture:
    """One source, or several, interleaved: each document comes from the source with the fewest rows over its share, the
    first of equals. When one ends, the others go on."""

    sources: tuple[TextSource, ...]
    names: tuple[str, ...] = ()  # of several
    shares: tuple[float, ...] = ()  # of the rows; they sum to 1

    def pinned(self) -> Self:
        return replace(self, sources=tuple(source.pinned().recognised() for source in self.sources))

    def check_readable(self) -> None:
        """ModelError if a source could not be reached."""
        reasons = [source.unread for source in self.sources if source.unread]
        if reasons:
            raise ModelError(reasons[0])

    @property
    def chat(self) -> bool:
        return any(source.chat for source in self.sources)

    def identity(self, asked: bool = False) -> dict[str, Any]:
        parts = [source.identity(asked) for source in self.sources]
        if not self.names:
            return parts[0]
        mixture = [{"share": share, **part} for share, part in zip(self.shares, parts, strict=True)]
        return {"dataset": " + ".join(part["dataset"] for part in parts), "mixture": mixture}

    def documents(
        self,
        start: int = 0,
        mark: Mark | None = None,
        warn: Say = lambda _: None,
        read_chat: Read = text_of,
        rows_of: Callable[[Document], int] = lambda _: 1,
    ) -> Iterator[Document]:
        """The documents, as of one source, of `rows_of` rows each. A mixture's marks have each source's next number and
        mark, and its rows before. `warn` also tells of a source that ends before others."""
        if not self.names:
            yield from self.sources[0].documents(start, mark, warn, read_chat)
            return
        number, states = (
            (mark["document"], mark["sources"]) if mark else (0, [(0, None, 0)] * len(self.sources))
        )
        following, marks, counts = map(list, zip(*states, strict=True))
        waiting = {
            index: source.documents(following[index], marks[index], warn, read_chat)
            for index, source in enumerate(self.sources)
        }
        while waiting:
            index = min(waiting, key=lambda source: counts[source] / self.shares[source])
            if (document := next(waiting[index], None)) is None:
                del waiting[index]
                if waiting:
                    warn(f"{self.names[index]} ends after {counts[index]:,} rows; others go on")
                continue
            marks[index] = document.mark
            before = {"document": number, "sources": [*zip(following, marks, counts, strict=True)]}
            following[index] = document.number + 1
            counts[index] += rows_of(document)
            if number >= start:
                yield Document(number, document.text, before, index)
            number += 1
