"""From documents to rows of activations: tokens, windows, batches, and the blocks that a store's writer takes.

A document's tokens are cut into windows of at most `context` tokens, each beginning with the special tokens that
the model's tokenizer puts before a text (Gemma's BOS); windows never mix documents. Shapes: B windows, T tokens
of the longest, D the site's width.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import ConfigError
from .language_model import LanguageModel

POSITIONS = ("all", "last")
COLUMNS = ("token_id", "position", "document")


@dataclass(frozen=True)
class Window:
    """Some of a document's tokens, as the model reads them.

    Args:
        document: number of the document.
        index: number of the window within its document.
        token_ids: the prefix' and the document's tokens.
    """

    document: int
    index: int
    token_ids: list[int]

    @property
    def cursor(self) -> dict[str, int]:
        """Where a later pass would begin with this window."""
        return {"document": self.document, "window": self.index}


@dataclass(frozen=True)
class Block:
    """The rows of one batch of windows.

    Args:
        activations: (R, D), float32.
        columns: `token_id`, `position` (in the window, the prefix counted) and `document`, (R,) each.
        cursor: the first window's.
        dropped: norms at the positions left out, by reason, (n,) float64 each.
    """

    activations: np.ndarray
    columns: dict[str, np.ndarray]
    cursor: dict[str, int]
    dropped: dict[str, np.ndarray]


class Windows:
    """Cuts documents into windows.

    Args:
        tokenizer: the model's.
        context: tokens in a window at most, the prefix counted.
        first_only: only each document's first window.

    Raises:
        ConfigError: the context leaves no room for a token.
    """

    def __init__(self, tokenizer: Any, context: int, first_only: bool = False) -> None:
        self._tokenizer, self._first_only = tokenizer, first_only
        with_special = tokenizer("a")["input_ids"]
        plain = tokenizer("a", add_special_tokens=False)["input_ids"]
        self.prefix: list[int] = with_special[: with_special.index(plain[0])]
        self._room = context - len(self.prefix)
        self.special = torch.tensor(sorted(tokenizer.all_special_ids))
        if self._room < 1:
            raise ConfigError(f"--context must be above {len(self.prefix)}, the number of tokens that the model wants "
                              f"before a text, got {context}")

    def cut(self, documents: Iterable[tuple[int, str]]) -> Iterator[Window]:
        """The windows of numbered documents, in their order."""
        for number, text in documents:
            token_ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            starts = range(0, len(token_ids), self._room)
            for index, start in enumerate(starts[:1] if self._first_only else starts):
                yield Window(number, index, self.prefix + token_ids[start : start + self._room])


def batches(windows: Iterable[Window], size: int) -> Iterator[list[Window]]:
    """The windows in lists of `size`, the last perhaps shorter."""
    pending: list[Window] = []
    for window in windows:
        pending.append(window)
        if len(pending) == size:
            yield pending
            pending = []
    if pending:
        yield pending


def padded(windows: list[Window]) -> tuple[Tensor, Tensor]:
    """Token ids and mask of some windows, (B, T) each, padded on the right with token 0 under mask 0."""
    length = max(len(window.token_ids) for window in windows)
    token_ids = torch.zeros(len(windows), length, dtype=torch.int64)
    mask = torch.zeros(len(windows), length, dtype=torch.int64)
    for row, window in enumerate(windows):
        token_ids[row, : len(window.token_ids)] = torch.tensor(window.token_ids)
        mask[row, : len(window.token_ids)] = 1
    return token_ids, mask


def is_plain(token_ids: Tensor, mask: Tensor, special: Tensor) -> Tensor:
    """Where there is a token that is neither padding nor special, (B, T), bool."""
    return (mask == 1) & ~torch.isin(token_ids, special)


def harvest(model: LanguageModel, windows: Iterable[Window], cutter: Windows, layer: int, site: str, positions: str,
            batch_size: int) -> Iterator[Block]:
    """Run the model over windows and yield the rows that are to be stored, a block a batch.

    Args:
        model: the language model.
        windows: what `cutter` cut.
        cutter: knows the special tokens.
        layer: block to read, from 0.
        site: where in it.
        positions: `all` tokens but the special ones, or of each window only the `last` of these.
        batch_size: windows in a batch.
    """
    for batch in batches(windows, batch_size):
        token_ids, mask = padded(batch)
        plain = is_plain(token_ids, mask, cutter.special)
        special = (mask == 1) & ~plain
        if positions == "last":
            index = torch.arange(plain.shape[1])
            last = torch.where(plain, index, -1).amax(1, keepdim=True)
            plain &= index == last
        found = model.read(token_ids, mask, layer, site)
        dropped = {"special": found[special.to(model.device)].cpu().double().norm(dim=1).numpy()}
        activations = found[plain.to(model.device)]
        row, position = plain.nonzero(as_tuple=True)
        documents = torch.tensor([window.document for window in batch])
        columns = {"token_id": token_ids[plain], "position": position, "document": documents[row]}
        yield Block(activations.float().cpu().numpy(), {name: value.numpy() for name, value in columns.items()},
                    batch[0].cursor, dropped)


def resumed(windows: Iterable[Window], cursor: dict[str, int] | None) -> Iterator[Window]:
    """The windows from a cursor on, given those of its document and the ones after."""
    for window in windows:
        if cursor is None or (window.document, window.index) >= (cursor["document"], cursor["window"]):
            yield window
