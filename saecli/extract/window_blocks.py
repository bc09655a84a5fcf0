"""Blocks of token windows, which are run sorted by length and stored in document order.

Where a block ends depends only on the text and the request, not on the batch size: an interrupted extraction resumes at
the beginning of a block, with any batch size. Shapes: W windows, N tokens in all, R rows, B windows of a batch, T its
longest window's tokens.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from .steady import Document
from .token_windows import Spot, Window, Windows

LOOK_AHEAD = 1 << 15  # about the tokens in a block
LEAST_AHEAD = 1 << 12
WORK_AHEAD = 1 << 42  # for larger models, parameters times tokens of a block: about a minute on two cores
FIRST_ROWS = 10_000  # about the rows of the first block: a wrong model or dtype shows early
BEGINNING = Spot(0, 0, None)
SPARE_ROWS = 2_048  # extra rows of the first block that makes up for rows not finite


@dataclass(frozen=True)
class Cursor:
    """Where a block begins.

    Args:
        spot: in the text.
        offered: rows of all blocks before it.
    """

    spot: Spot = BEGINNING
    offered: int = 0

    def to_json(self) -> dict[str, Any]:
        """The cursor as a store keeps it."""
        mark = {} if self.spot.mark is None else {"_mark": self.spot.mark}
        return {"document": self.spot.document, "token": self.spot.token, "offered": self.offered, **mark}

    @classmethod
    def from_json(cls, cursor: dict[str, Any] | None) -> Self:
        """The cursor that `to_json` made; the beginning for None."""
        if cursor is None:
            return cls()
        return cls(Spot(cursor["document"], cursor["token"], cursor.get("_mark")), cursor["offered"])

    @property
    def place(self) -> tuple[int, int, int]:
        """The key to order and compare cursors by; two passes may have different marks for one place."""
        return self.offered, self.spot.document, self.spot.token


@dataclass(frozen=True)
class Batch:
    """Windows as the model takes them. Shapes: K kept tokens, S special tokens.

    Args:
        token_ids: (B, T), padded on the right with token 0.
        mask: 1 at tokens, 0 at padding, (B, T).
        kept: indices of the kept tokens in the flattened batch, (K,).
        rows: their row numbers within the block, (K,).
        special: indices of the special tokens in the flattened batch, (S,).
        specials: their numbers among the block's special tokens, (S,).
    """

    token_ids: Tensor
    mask: Tensor
    kept: Tensor
    rows: Tensor
    special: Tensor
    specials: Tensor


class Block:
    """Windows in document order.

    Args:
        windows: the windows.
        cursor: where it begins.
        left_out: number of documents skipped since the previous block, by reason.

    Attributes:
        lengths: tokens of each window, (W,).
        columns: `token_id`, `position` (in the window, including the prefix) and `document` of each row, (R,).
        rows: number of rows.
        specials: number of special tokens.
        end: where the next block begins.
    """

    def __init__(self, windows: list[Window], cursor: Cursor, left_out: dict[str, int]) -> None:
        self.cursor, self.left_out = cursor, left_out
        self.lengths = np.array([len(window.token_ids) for window in windows], np.int64)
        self._starts = np.cumsum(self.lengths) - self.lengths
        self._token_ids = _joined([window.token_ids for window in windows], np.int64)
        self._kept = _joined([window.kept for window in windows], bool)
        self._special = _joined([window.special for window in windows], bool)
        positions = np.arange(len(self._token_ids)) - np.repeat(self._starts, self.lengths)
        documents = _joined([window.documents for window in windows], np.int64)
        self.columns = {"token_id": self._token_ids[self._kept], "position": positions[self._kept],
                        "document": documents[self._kept]}
        self.rows, self.specials = int(self._kept.sum()), int(self._special.sum())
        self.end = Cursor(windows[-1].after if windows else cursor.spot, cursor.offered + self.rows)

    @property
    def offered(self) -> int:
        """Rows of this block and all before it."""
        return self.end.offered

    def by_length(self) -> np.ndarray:
        """Numbers of the windows, longest first, so that one which does not fit in memory shows at once."""
        return np.argsort(-self.lengths, kind="stable")

    def batch(self, windows: np.ndarray) -> Batch:
        """A batch of windows, given their numbers, (B,)."""
        lengths = self.lengths[windows][:, None]
        offsets = np.arange(lengths.max())
        mask = offsets < lengths
        places = np.where(mask, self._starts[windows][:, None] + offsets, 0)
        kept, special = mask & self._kept[places], mask & self._special[places]
        found = (np.where(mask, self._token_ids[places], 0), mask.astype(np.int64),
                 np.flatnonzero(kept), (np.cumsum(self._kept) - 1)[places[kept]],
                 np.flatnonzero(special), (np.cumsum(self._special) - 1)[places[special]])
        return Batch(*map(torch.from_numpy, found))


def look_ahead(parameters: int) -> int:
    """About the number of tokens in a block; fewer for larger models, since rows are stored block by block, and an
    interrupted extraction loses those of the current one."""
    fitting = min(max(WORK_AHEAD // parameters, LEAST_AHEAD), LOOK_AHEAD)
    return 1 << (fitting.bit_length() - 1)


def in_blocks(documents_from: Callable[[Spot], Iterable[Document]], windows: Windows, rows: int,
              cursor: Cursor, ahead: int | None = None) -> Iterator[Block]:
    """The blocks of a text, from a cursor to the text's end.

    Args:
        documents_from: opens the text at the document of a spot.
        windows: cuts documents into windows.
        rows: the number of rows wanted; a block ends once that many have been offered.
        cursor: where to begin.
        ahead: about the number of tokens in a block; None for `LOOK_AHEAD`.
    """
    ahead = ahead or LOOK_AHEAD
    gathered: list[Window] = []
    tokens = found = 0
    most = _most_rows(cursor.offered, rows)
    for window in windows.cut(documents_from(cursor.spot), cursor.spot.token):
        gathered.append(window)
        tokens += len(window.token_ids)
        found += int(window.kept.sum())
        if tokens >= ahead or found >= most:
            block = _block(gathered, cursor, windows)
            yield block
            cursor = block.end
            gathered, tokens, found = [], 0, 0
            most = _most_rows(cursor.offered, rows)
    if gathered or windows.left_out:
        yield _block(gathered, cursor, windows)


def _block(gathered: list[Window], cursor: Cursor, windows: Windows) -> Block:
    left_out = dict(windows.left_out)
    windows.left_out.clear()
    return Block(gathered, cursor, left_out)


def _most_rows(offered: int, wanted: int) -> int:
    """The number of rows after which a block ends."""
    if not offered:
        return min(FIRST_ROWS, wanted)
    # Further blocks make up for rows that were not stored; each doubles the number of extra rows.
    return wanted - offered if offered < wanted else max(SPARE_ROWS, offered - wanted)


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
