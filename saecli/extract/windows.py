"""Cutting documents into windows of tokens, and gathering windows into blocks.

A window has around it what the tokenizer puts around a text, and begins with BOS even where that is nothing. By default
windows never mix documents, and a document's last is short. Packed, documents fill windows, separated by the special
tokens around a text; tokens then attend across documents, as in SAELens and TransformerLens.

An interrupted extraction resumes at the beginning of a block, with any batch size.

Shapes: T tokens of a window, W windows of a block, R their rows.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from ..base.errors import ConfigError
from ..model.tokenizer import affixes, special_ids, text_ids
from ..store.blocks import Windows
from .texts import ASSISTANT, Conversation, Document, Mark

BLOCK_TOKENS = 1 << 14  # of a block, about
SPARE_ROWS = 2_048  # of a block that makes up for rows that were not stored


class Cursor(NamedTuple):
    """Where a block begins."""

    document: int = 0
    token: int = 0  # of that document
    mark: Mark | None = None  # to read the document from
    offered: int = 0  # rows of earlier blocks
    size: int = 0  # tokens of a block, about

    def to_json(self) -> dict[str, Any]:
        more = {"_size": self.size} | ({} if self.mark is None else {"_mark": self.mark})
        return {"document": self.document, "token": self.token, "offered": self.offered, **more}

    @classmethod
    def from_json(cls, cursor: dict[str, Any] | None) -> Self:
        if cursor is None:
            return cls()
        mark, size = cursor.get("_mark"), cursor.get("_size", BLOCK_TOKENS)
        return cls(cursor["document"], cursor["token"], mark, cursor["offered"], size)

    @property
    def order(self) -> tuple[int, int, int]:
        """To compare by, without the mark, which two passes may set differently."""
        return self.offered, self.document, self.token


START = Cursor()
TOKEN = np.dtype(
    [
        ("token_id", np.int64),
        ("document", np.int64),  # its number
        ("source", np.int64),  # number of the document's source in a mixture
        ("role", np.int64),  # number in `tokenizer.ROLES`; 0 in texts
        ("special", bool),
        ("is_row", bool),
    ],
    align=True,  # as torch wants it
)


class Window(NamedTuple):
    tokens: np.ndarray  # (T,), of `TOKEN`
    after: Cursor  # where the next one begins

    @property
    def token_ids(self) -> np.ndarray:
        return self.tokens["token_id"]

    @property
    def is_row(self) -> np.ndarray:
        return self.tokens["is_row"]


class Cutter:
    """Cuts documents into windows of at most `context` tokens, including `prefix` and `suffix`.

    Rows are `all` tokens that are not special, only the `last` of them in each document's first window, or those of the
    `assistant`. Unless packed, a chat is cut where turns begin, if it can. Where `control` is "keep", only added tokens
    are special. `left_out` counts documents skipped, by reason, and as `repeated_bos` those with their own BOS.
    """

    def __init__(
        self,
        tokenizer: Any,
        context: int,
        positions: str = "all",
        packed: bool = False,
        control: str | None = None,
        prepend_bos: bool = True,
    ) -> None:
        self._tokenizer, self._positions, self._packed = tokenizer, positions, packed
        ends = affixes(tokenizer, prepend_bos)
        self.prefix, self.suffix, self._drops_first = ends
        self._room = ends.room(context)
        eos = tokenizer.eos_token_id
        self._separator = [*self.suffix, *self.prefix] or ([] if eos is None else [eos])
        special = special_ids(tokenizer, control is not None)
        self._special = set() if control == "keep" else special
        self.control = sorted(special - self._special)
        self.left_out: Counter[str] = Counter()
        if packed and not self._separator:
            raise ConfigError(
                "--packed needs a token to separate documents, and this tokenizer has neither BOS nor EOS; leave it out"
            )

    def pop_left_out(self) -> Counter[str]:
        """What was left out since the last call."""
        left_out, self.left_out = self.left_out, Counter()
        return left_out

    def rows(self, document: Document) -> int:
        """The number of rows of a document, packed or not."""
        return sum(int(window.is_row.sum()) for window in self._each_alone([document], 0))

    def cut(self, documents: Iterable[Document], token: int = 0) -> Iterator[Window]:
        """The windows from a token of the first document on."""
        return (self._joined if self._packed else self._each_alone)(documents, token)

    def _each_alone(self, documents: Iterable[Document], begin: int) -> Iterator[Window]:
        for document in documents:
            tokens, turns = self._tokens(document)
            while begin < len(tokens):
                begin += self._repeated_prefix(tokens[begin:])
                end = min(begin + self._room, len(tokens))
                if end < len(tokens):
                    within = turns[bisect_right(turns, begin) : bisect_right(turns, end)]
                    end = max(within, default=end)
                is_last = self._positions == "last" or end == len(tokens)
                prefix, suffix = _added(self.prefix, document), _added(self.suffix, document)
                parts = [prefix, tokens[begin:end], suffix]
                yield self._window(parts, _after(document, end, is_last))
                begin = len(tokens) if is_last else end
            begin = 0

    def _joined(self, documents: Iterable[Document], begin: int) -> Iterator[Window]:
        parts: list[np.ndarray] = []  # of a window
        room = 0
        for document in documents:
            tokens, _ = self._tokens(document)
            while begin < len(tokens):
                if not parts:
                    parts, room = [_added(self.prefix, document)], self._room
                    begin += self._repeated_prefix(tokens[begin:])
                elif begin == 0:
                    parts.append(_added(self._separator, document))
                    room -= len(self._separator)
                end = min(begin + room, len(tokens))
                parts.append(tokens[begin:end])
                room -= end - begin
                is_last = end == len(tokens)
                # Full, or without room for a separator and a token; yielded before another document is read.
                if room <= (len(self._separator) if is_last else 0):
                    parts.append(_added(self.suffix, document))
                    yield self._window(parts, _after(document, end, is_last))
                    parts = []
                begin = end
            begin = 0
        if parts:
            parts.append(_added(self.suffix, document))
            yield self._window(parts, _after(document, 0, is_last=True))

    def _tokens(self, document: Document) -> tuple[np.ndarray, list[int]]:
        """A text's tokens, of `TOKEN`, and where turns begin; none if left out."""
        text, token_ids, roles, turns = document.text, list[int](), list[int](), list[int]()
        if isinstance(text, Conversation):
            token_ids, roles, turns = text.tokens(self.prefix, self._positions == "assistant")
        elif text and text.strip():
            token_ids, is_repeated = text_ids(self._tokenizer, text, self.prefix)
            if is_repeated:
                self.left_out["repeated_bos"] += 1
        if not token_ids:
            self.left_out["unreadable_texts" if text is None else "empty_texts"] += 1
            return np.empty(0, TOKEN), []
        tokens = np.zeros(len(token_ids), TOKEN)
        tokens["token_id"] = token_ids
        tokens["document"] = document.number
        tokens["source"] = document.source
        tokens["role"] = roles or 0
        tokens["special"] = [token in self._special for token in token_ids]
        return tokens, turns

    def _repeated_prefix(self, tokens: np.ndarray) -> int:
        """The number of tokens that stand for the prefix: a second BOS would be a second attention sink."""
        count = len(self.prefix)
        return count if tokens["token_id"][:count].tolist() == self.prefix else 0

    def _window(self, parts: list[np.ndarray], after: Cursor) -> Window:
        tokens = np.concatenate(parts)
        tokens["special"][:1] |= self._drops_first
        is_row = ~tokens["special"]
        if self._positions == "assistant":
            is_row &= tokens["role"] == ASSISTANT
        if self._positions == "last":
            is_row[np.flatnonzero(is_row)[:-1]] = False
        tokens["is_row"] = is_row
        return Window(tokens, after)


def _after(document: Document, end: int, is_last: bool) -> Cursor:
    """Where the next window begins after one that ends at a token of a document."""
    number, token = (document.number + 1, 0) if is_last else (document.number, end)
    return Cursor(number, token, document.mark)


def _added(token_ids: list[int], document: Document) -> np.ndarray:
    tokens = np.zeros(len(token_ids), TOKEN)
    tokens["token_id"] = token_ids
    tokens["document"] = document.number
    tokens["special"] = True
    return tokens


class Block:
    """Windows in document order, from `cursor` to `end`.

    `columns` are `token_id`, `position` (in the window, including the prefix), `document`, `source` and `role` of each
    row, (R,). `before` has for each special token, and each document left out by reason, the number of the block's rows
    before it. `skipped` counts the documents left out before each window, and after the last.
    """

    def __init__(
        self, windows: list[Window], cursor: Cursor, skipped: Sequence[Mapping[str, int]]
    ) -> None:
        self.cursor = cursor
        tokens = np.concatenate([np.empty(0, TOKEN), *(window.tokens for window in windows)])
        is_row = tokens["is_row"]
        self.rows = int(is_row.sum())
        self.lengths = np.array([len(window.tokens) for window in windows], np.int64)
        token_ids = np.ascontiguousarray(tokens["token_id"])
        self.windows = Windows.of(self.lengths, token_ids, is_row)
        positions = np.arange(len(tokens)) - np.repeat(self.windows.offset[:-1], self.lengths)
        self.columns = {
            name: tokens[name][is_row] for name in ("token_id", "document", "source", "role")
        } | {"position": positions[is_row]}
        starts = np.array([*self.windows.first, self.rows])
        self.before = {"special": np.cumsum(is_row)[tokens["special"]]} | {
            reason: np.repeat(starts, [counts.get(reason, 0) for counts in skipped])
            for reason in sorted({reason for counts in skipped for reason in counts})
        }
        after = windows[-1].after if windows else cursor
        self.end = after._replace(offered=cursor.offered + self.rows, size=cursor.size)

    @property
    def offered(self) -> int:
        """Rows of this block and all before it."""
        return self.end.offered


def in_blocks(
    documents_from: Callable[[Cursor], Iterable[Document]],
    cutter: Cutter,
    rows: int,
    cursor: Cursor = START,
    size: int = BLOCK_TOKENS,
) -> Generator[Block, None, None]:
    """The blocks of a text, from a cursor on; `documents_from` opens the text at a cursor's document.

    A block has about `size` tokens, at most `BLOCK_TOKENS`, or a stored cursor's: the same blocks come again on another
    device. It ends early at the last of `rows` rows.
    """
    cursor = cursor._replace(size=cursor.size or min(size, BLOCK_TOKENS))
    gathered: list[Window] = []
    skipped: list[Counter[str]] = []
    tokens = rows_gathered = 0
    for window in cutter.cut(documents_from(cursor), cursor.token):
        gathered.append(window)
        skipped.append(cutter.pop_left_out())
        tokens += len(window.tokens)
        rows_gathered += int(window.is_row.sum())
        most_rows = rows - cursor.offered if cursor.offered < rows else SPARE_ROWS
        if tokens >= cursor.size or rows_gathered >= most_rows:
            block = Block(gathered, cursor, [*skipped, cutter.pop_left_out()])
            yield block
            cursor = block.end
            gathered, skipped = [], []
            tokens = rows_gathered = 0
    if gathered or cutter.left_out:
        yield Block(gathered, cursor, [*skipped, cutter.pop_left_out()])
