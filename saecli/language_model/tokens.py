"""Token ids as text."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from .model import load_tokenizer
from .source import find_model


class TokenTexts:
    """The texts of a tokenizer's tokens, as they stand inside a text.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    @classmethod
    def of_model(cls, name: str) -> "TokenTexts":
        """Those of a model's tokenizer; loads no weights.

        Raises:
            ModelError: there is no such model, or its tokenizer cannot be loaded.
        """
        return cls(load_tokenizer(find_model(name)))

    @cached_property
    def _before(self) -> list[int]:
        # Some tokenizers leave out the space before the first token of a text.
        return self._tokenizer("a", add_special_tokens=False)["input_ids"]

    def __len__(self) -> int:
        """How many tokens there are."""
        return len(self._tokenizer)

    def __getitem__(self, token: int) -> str:
        """The text of one token; with U+FFFD in it where the token is a part of a character."""
        if token not in self._known:
            self._known[token] = self.joined([token])
        return self._known[token]

    def joined(self, tokens: Sequence[int]) -> str:
        """The text of tokens that follow each other; ids that the tokenizer does not know are written as numbers."""
        if any(not 0 <= token < len(self) for token in tokens):
            return "".join(f"[{token}]" for token in tokens)
        head, whole = (self._tokenizer.decode(ids, clean_up_tokenization_spaces=False, skip_special_tokens=False)
                       for ids in (self._before, [*self._before, *tokens]))
        return whole[len(head):]
