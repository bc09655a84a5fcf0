"""Documents: rows of a source by its column of texts or messages, or of several sources in proportion.

All are numbered, blank ones too, so that a later pass resumes where an earlier one stopped.

Conversations go through a tokenizer's chat template. A message's span is found by rendering the conversation with
another content in its place. The assistant's includes the token that ends its turn, or is what the template has in
{% generation %}.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

from ..base.errors import ModelError, one_line
from ..model.tokenizer import special_ids
from .readers import Mark, Reader, Row, UnreachableError, parts_of, reader_of

CHAT_COLUMNS = ("messages", "conversations")
BAD_SHARE = 0.01  # most of a source's rows that may be left out as bad
FIRST_ROWS = 1000  # of which that share may be bad before a source's length is known

Text = Any  # a string, or a `tokenizer.Conversation`; None for a bad row
Read = Callable[[Any, str, str], Text]  # from a row, a column, and words for the row in errors
Say = Callable[[str], None]
ROLES = ("template", "system", "user", "assistant", "tool")
ASSISTANT = ROLES.index("assistant")
NUMBERS = {role: number for number, role in enumerate(ROLES)} | {
    "developer": ROLES.index("system"),
    "model": ASSISTANT,
    "function": ROLES.index("tool"),
}
SHAREGPT = {"human": "user", "gpt": "assistant"}
# For templates that name today's, as Llama's do: rows must not depend on the day.
DATE = "26 Jul 2024"
# With jinja's own; tokenizers written in Python need not have each method.
REFUSALS = (ImportError, LookupError, TypeError, ValueError, NotImplementedError)
OTHER = "\ue000"  # a content unlike any other
REPEATED = "begins with BOS, or what stands for it, as every window does anyway; it is there once"


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
                f"{where} has no column {column!r}; expected one of {', '.join(row) or 'none'}; see --text-column"
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
            f"{row.where} holds bytes that are not UTF-8, or half of a surrogate pair; convert it"
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


class Chats:
    """Renders conversations by a template, by default the tokenizer's own."""

    def __init__(self, tokenizer: Any, template: str | None, name: str) -> None:
        try:
            self._template = tokenizer.get_chat_template(template)
        except ValueError as error:
            raise ModelError(
                f"the tokenizer of {name} has no chat template; expected one, to render messages by; name "
                "a model that was trained on chats, or, to store them, a jinja file with --chat-template"
            ) from error
        self._tokenizer = tokenizer
        self.control = special_ids(tokenizer, control=True)
        self.marks_assistant = bool(re.search(r"{%-?\s*generation\s*-?%}", self._template))

    def read(self, row: Any, column: str, where: str) -> "str | Conversation":
        """The conversation in a column of a row; blank without messages."""
        messages = messages_of(row, column, where)
        if not messages:
            return ""
        return Conversation(self, messages, where, self.apply(messages, where, tokenize=False))

    def apply(self, messages: list[dict[str, Any]], where: str, **options: Any) -> Any:
        """transformers' `apply_chat_template`; ModelError if the template refuses the messages."""
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, date_string=DATE, **options
            )
        except (TemplateError, *REFUSALS) as error:
            raise ModelError(
                f"{where} does not fit the chat template: {one_line(error)}; correct it, or, to store it, name "
                "another template with --chat-template"
            ) from error


@dataclass(frozen=True)
class Conversation:
    chats: Chats
    messages: list[dict[str, Any]]
    where: str
    rendered: str

    def __str__(self) -> str:
        return self.rendered

    def tokens(
        self, prefix: list[int], needs_assistant: bool = False
    ) -> tuple[list[int], list[int], list[int]]:
        """The tokens after the prefix, the number of each one's role, and where turns begin. ModelError if what the
        assistant says is needed and cannot be found."""
        tokenized = self.chats.apply(
            self.messages,
            self.where,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=self.chats.marks_assistant,
            tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
        )
        token_ids = tokenized["input_ids"]
        starts = [start for start, _ in tokenized["offset_mapping"]]
        ends = [end for _, end in tokenized["offset_mapping"]]
        roles, turns = [0] * len(token_ids), []
        for number, message in enumerate(self.messages):
            role = NUMBERS.get(message["role"], 0)
            marked = role == ASSISTANT and self.chats.marks_assistant
            span = self._content_span(number)
            if span is None:
                if needs_assistant and role == ASSISTANT and not marked:
                    raise ModelError(
                        f"the chat template changes what the assistant says in {self.where}; expected it "
                        "as it is; name a template with {% generation %} with --chat-template"
                    )
                continue
            first, last = bisect_right(ends, span[0]), bisect_left(starts, span[1])
            after = last
            if after < len(token_ids) and token_ids[after] in self.chats.control:
                after += 1  # ends the turn
                if role == ASSISTANT:
                    last += 1
            if not marked:
                roles[first:last] = [role] * (last - first)
            while after < len(token_ids) and self.rendered[starts[after] : ends[after]].isspace():
                after += 1
            turns.append(after)
        if self.chats.marks_assistant:
            said = zip(roles, tokenized["assistant_masks"], strict=True)
            roles = [ASSISTANT if is_assistant else role for role, is_assistant in said]
        skipped = len(prefix) if token_ids[: len(prefix)] == prefix else 0
        return token_ids[skipped:], roles[skipped:], [turn - skipped for turn in turns]

    def _content_span(self, number: int) -> tuple[int, int] | None:
        """The span of a message's content in the rendering; None if another content is refused, or changes more."""
        messages = [*self.messages]
        messages[number] = {**messages[number], "content": OTHER}
        try:
            other = self.chats.apply(messages, self.where, tokenize=False)
        except ModelError:
            return None
        before, found, after = other.partition(OTHER)
        span = len(before), len(self.rendered) - len(after)
        whole = self.rendered
        if found and span[0] <= span[1] and whole.startswith(before) and whole.endswith(after):
            return span
        return None


def messages_of(row: Any, column: str, where: str) -> list[dict[str, Any]]:
    """The messages in a column of a row as templates take them."""
    value = value_of(row, column, where) or []
    values = value if isinstance(value, list) else [value]
    return [_message(each, number, where) for number, each in enumerate(values, 1)]


def _message(value: Any, number: int, where: str) -> dict[str, Any]:
    """A message by role and content, or ShareGPT's from and value; a content in parts is its texts."""
    fields: dict[str, Any] = {}
    if isinstance(value, dict):
        fields = {name: entry for name, entry in value.items() if entry is not None}
    role = fields.pop("role", fields.pop("from", ""))
    content = fields.pop("content", fields.pop("value", ""))
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if texts or not parts else None
    if not (role and isinstance(role, str) and isinstance(content, str)):
        got = ", ".join(value) if isinstance(value, dict) else repr(value)
        raise ModelError(
            f"message {number} of {where} has no {'text' if role else 'role'}; expected role and "
            f"content, or from and value, got {got:.60}; correct it"
        )
    return {**fields, "role": SHAREGPT.get(role, role), "content": content}
