"""Cutting documents into windows of tokens, as the model reads them.

A window begins with the special tokens that the model's tokenizer puts before a text (Gemma's BOS). By default windows
never mix documents, and a document's last window is short. Packed, documents are concatenated into full windows, each
but a window's first after a separator: the special tokens that begin a text, or without these (GPT-2) the end-of-text
token. A token then attends to all before it in its window, including other documents', as in SAELens and
TransformerLens.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..base.errors import ConfigError
from .steady import Document


class Spot(NamedTuple):
    """A position in the text.

    Args:
        document: number of a document.
        token: number of one of its tokens.
        mark: from where its source can be read to reach it; see `texts.Document`.
    """

    document: int
    token: int
    mark: dict[str, Any] | None


@dataclass(frozen=True)
class Window:
    """A window of tokens, as the model reads it. Shapes: T tokens.

    Args:
        token_ids: the prefix's and the documents' tokens, (T,), int64.
        documents: number of each token's document, (T,), int64.
        kept: which tokens are stored, (T,), bool.
        special: which tokens are special, (T,), bool.
        after: where the next window begins.
    """

    token_ids: np.ndarray
    documents: np.ndarray
    kept: np.ndarray
    special: np.ndarray
    after: Spot


class Windows:
    """Cuts documents into windows.

    Args:
        tokenizer: the model's.
        context: most tokens in a window, including the prefix.
        positions: keep `all` tokens that are not special; or only the `last` of them in each document's first window,
            which is then its only one.
        packed: concatenate documents into full windows.
        min_tokens: documents of fewer tokens are skipped.

    Attributes:
        prefix: the special tokens before a text.
        special: ids of all special tokens.
        left_out: number of documents skipped since the last block, by reason.

    Raises:
        ConfigError: the context leaves no room for a token, or packed documents have no separator.
    """

    def __init__(self, tokenizer: Any, context: int, positions: str = "all", packed: bool = False,
                 min_tokens: int = 1) -> None:
        self._tokenizer, self._last, self._packed, self._min_tokens = tokenizer, positions == "last", packed, min_tokens
        with_special = tokenizer("a")["input_ids"]
        plain = tokenizer("a", add_special_tokens=False)["input_ids"]
        self.prefix: list[int] = with_special[: with_special.index(plain[0])]
        self._separator = self.prefix or [token for token in [tokenizer.eos_token_id] if token is not None]
        self._context, self._room = context, context - len(self.prefix)
        self.special = torch.tensor(sorted(tokenizer.all_special_ids))
        self._special = frozenset(tokenizer.all_special_ids)
        self.left_out: Counter[str] = Counter()
        if self._room < 1:
            raise ConfigError(f"--context must be above {len(self.prefix)}, the number of tokens that the model "
                              f"wants before a text, got {context}", option="context")
        if packed and not self._separator:
            raise ConfigError("--packed needs a token to separate documents: expected a tokenizer with BOS or EOS, "
                              "got one without; leave it out", option="packed")

    def cut(self, documents: Iterable[Document], token: int = 0) -> Iterator[Window]:
        """The windows of documents, including blank ones, in order, from a token of the first on."""
        return self._pack(documents, token) if self._packed else self._part(documents, token)

    def rows(self, document: Document) -> int:
        """Number of rows of a document, packed or not."""
        return sum(int(window.kept.sum()) for window in self._part([document], 0))

    def _part(self, documents: Iterable[Document], token: int) -> Iterator[Window]:
        for document in documents:
            token_ids = self._tokens(document.text)
            for start in range(token, len(token_ids), self._room):
                part = token_ids[start : start + self._room]
                ended = self._last or start + len(part) == len(token_ids)
                after = Spot(document.number + ended, 0 if ended else start + len(part), document.mark)
                yield self._window([*self.prefix, *part], [document.number] * (len(self.prefix) + len(part)), after)
                if ended:
                    break
            token = 0

    def _pack(self, documents: Iterable[Document], token: int) -> Iterator[Window]:
        token_ids, numbers = [*self.prefix], [-1] * len(self.prefix)
        for document in documents:
            waiting = self._tokens(document.text)
            while token < len(waiting):
                between = self._separator if token == 0 and len(token_ids) > len(self.prefix) else []
                part = waiting[token : token + self._context - len(token_ids) - len(between)]
                token_ids += [*between, *part]
                numbers += [document.number] * (len(between) + len(part))
                token += len(part)
                ended = token == len(waiting)
                after = Spot(document.number + ended, 0 if ended else token, document.mark)
                # Full, or without room for a separator and a token; yielded before another document is read.
                if self._context - len(token_ids) <= (len(self._separator) if ended else 0):
                    yield self._window(token_ids, numbers, after)
                    token_ids, numbers = [*self.prefix], [-1] * len(self.prefix)
            token, end = 0, Spot(document.number + 1, 0, document.mark)
        if len(token_ids) > len(self.prefix):
            yield self._window(token_ids, numbers, end)

    def _tokens(self, text: str) -> list[int]:
        token_ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text.strip() else []
        if len(token_ids) >= self._min_tokens:
            return token_ids
        self.left_out["short_texts" if token_ids else "empty_texts"] += 1
        return []

    def _window(self, token_ids: list[int], documents: list[int], after: Spot) -> Window:
        ids = np.array(token_ids, np.int64)
        special = np.fromiter((token in self._special for token in token_ids), bool, len(ids))  # np.isin is slower
        kept = ~special
        if self._last:
            kept = np.zeros_like(special)
            kept[np.flatnonzero(~special)[-1:]] = True
        return Window(ids, np.array(documents, np.int64), kept, special, after)
