"""A tokenizer's special tokens around a text, and its ids as text.

Which tokens are added is no property of their ids: a chat's turns may begin with BOS.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..base.errors import ConfigError
from ..base.words import counted, demand_text

KNOWN = "a"  # at worst an unknown word, which is no special token around a text
BROKEN = "\N{REPLACEMENT CHARACTER}"  # in the text of a token that is a part of a character
LONGEST_CHARACTER = 4  # bytes, so at most 4 tokens


class Affixes(NamedTuple):
    """Special tokens around a window's text."""

    prefix: list[int]
    suffix: list[int]
    drops_first: bool  # with no token to begin with, a window's first token counts as special

    def room(self, context: int) -> int:
        around = len(self.prefix) + len(self.suffix)
        if context <= around:
            raise ConfigError(
                f"--context must be above {around}, the number of special tokens around a text, got {context}"
            )
        return context - around


def affixes(tokenizer: Any, prepend_bos: bool = True) -> Affixes:
    """What the tokenizer puts around a text; where that begins with nothing, with `prepend_bos` BOS, else EOS, else the
    separator of documents."""
    mask = tokenizer(KNOWN, return_special_tokens_mask=True)
    of_text = [number for number, added in enumerate(mask["special_tokens_mask"]) if not added]
    ids = mask["input_ids"]
    prefix, suffix = (ids[: of_text[0]], ids[of_text[-1] + 1 :]) if of_text else ([], [])
    if prefix or not prepend_bos:
        return Affixes(prefix, suffix, False)
    beginnings = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id)
    first = next((token for token in beginnings if token is not None), None)
    return Affixes([] if first is None else [first], suffix, first is None)


def text_ids(tokenizer: Any, text: str, prefix: list[int]) -> tuple[list[int], bool]:
    """A text's tokens after those of the prefix, and whether it begins with them, as a rendered chat does: a second BOS
    would be a second attention sink."""
    token_ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    start = 0
    while prefix and token_ids[start : start + len(prefix)] == prefix:
        start += len(prefix)
    return token_ids[start:], start > 0


def one_token(tokenizer: Any, option: str, text: str) -> int:
    """The token of a text, or of the text with or without a space before it; ConfigError if it has several."""
    if text.strip() or not text:  # a space or a line end is a token
        demand_text(option, text)
    for spelt in (text, text[1:] if text.startswith(" ") else f" {text}"):
        token_ids = tokenizer(spelt, add_special_tokens=False)["input_ids"]
        is_unknown = token_ids == [tokenizer.unk_token_id] and spelt != tokenizer.unk_token
        if len(token_ids) == 1 and not is_unknown:
            return token_ids[0]
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = TokenTexts(tokenizer)
    parts = ", ".join(repr(texts[token]) for token in token_ids)
    raise ConfigError(
        f"{option} must be one token, got {text!r}, which is {counted(len(token_ids), 'token')}: {parts}; give one"
    )


def special_ids(tokenizer: Any, control: bool) -> set[int]:
    """The tokens that are special within a text; of chats with `control` tokens, some of which are only added tokens
    (Llama's)."""
    added = tokenizer.added_tokens_decoder.items() if control else ()
    special = {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}
    if _pads_with_word(tokenizer):
        special.remove(tokenizer.pad_token_id)
    return special


def _pads_with_word(tokenizer: Any) -> bool:
    others = ("bos", "eos", "unk", "sep", "cls", "mask")
    pad = tokenizer.pad_token_id
    if pad is None or pad in [getattr(tokenizer, f"{name}_token_id") for name in others]:
        return False
    plain = tokenizer(tokenizer.pad_token, add_special_tokens=False, split_special_tokens=True)
    return plain["input_ids"] == [pad]


class TokenTexts:
    """Tokens as they read within a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        # Some tokenizers drop the space before the first token of a text.
        self._before: list[int] = tokenizer(KNOWN, add_special_tokens=False)["input_ids"]

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __getitem__(self, token: int) -> str:
        """With U+FFFD for a part of a character."""
        return self._known.get(token) or self._known.setdefault(token, self.joined([token]))

    def joined(self, tokens: Sequence[int]) -> str:
        """The text of consecutive tokens; numbers if one is unknown."""
        if any(not 0 <= token < len(self) for token in tokens):
            return "".join(f"[{token}]" for token in tokens)
        head, whole = (
            self._tokenizer.decode(
                ids, clean_up_tokenization_spaces=False, skip_special_tokens=False
            )
            for ids in (self._before, [*self._before, *tokens])
        )
        return whole[len(head) :]


def characters(texts: Any, tokens: Sequence[int]) -> list[tuple[str, int]]:
    """The pieces of text that tokens make, with the number of tokens in each: one, unless a character spans several;
    `texts` has the methods of `TokenTexts`."""
    groups: list[list[int]] = []
    broken = False  # whether the last group may go on
    for token in tokens:
        part = BROKEN in texts[token]
        if part and broken:
            groups[-1].append(token)
        else:
            groups.append([token])
        broken = part and len(groups[-1]) < LONGEST_CHARACTER and BROKEN in texts.joined(groups[-1])
    return [
        (texts[group[0]] if len(group) == 1 else texts.joined(group), len(group))
        for group in groups
    ]
