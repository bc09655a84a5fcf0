"""What a tokenizer puts around a text, and which tokens within a text are special.

The tokenizer itself is asked, by a text that it knows: it may know no letter. Which tokens are
added is no property of their ids: a chat's turns may begin with BOS.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..base.errors import ConfigError, ModelError


class Affixes(NamedTuple):
    """The special tokens that every window has around its part of a text."""

    prefix: list[int]
    suffix: list[int]
    drops_first: bool  # with no token to begin with, a window's first token counts as special

    def room(self, context: int) -> int:
        """Tokens of a text in a window of `context` tokens."""
        around = len(self.prefix) + len(self.suffix)
        if context <= around:
            raise ConfigError(
                f"--context must be above {around}, the number of special tokens around a text, got "
                f"{context}"
            )
        return context - around


def affixes(tokenizer: Any, prepend_bos: bool = True) -> Affixes:
    """What the tokenizer puts around a text; where it puts nothing before one, with `prepend_bos` its BOS, else its
    EOS, else its separator of documents."""
    mask = tokenizer(known_text(tokenizer), return_special_tokens_mask=True)
    own = [number for number, added in enumerate(mask["special_tokens_mask"]) if not added]
    ids = mask["input_ids"]
    prefix, suffix = (ids[: own[0]], ids[own[-1] + 1 :]) if own else ([], [])
    if prefix or not prepend_bos:
        return Affixes(prefix, suffix, False)
    beginnings = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id)
    first = next((token for token in beginnings if token is not None), None)
    return Affixes([] if first is None else [first], suffix, first is None)


def known_text(tokenizer: Any) -> str:
    """A text of which the tokenizer makes a token: "a" if it has that, else a word of its vocabulary."""
    for text in _words(tokenizer):
        if tokenizer(text, add_special_tokens=False)["input_ids"]:
            return text
    raise ModelError(
        "the tokenizer makes no token of any text; expected one that knows words, got one of special "
        "tokens alone; use the tokenizer that the model was trained with"
    )


def _words(tokenizer: Any) -> Iterator[str]:
    special = set(tokenizer.all_special_ids)
    if tokenizer.convert_tokens_to_ids("a") not in (None, *special):
        yield "a"
    for number in range(len(tokenizer)):
        if number not in special:
            yield tokenizer.decode([number])


def special_ids(tokenizer: Any, control: bool) -> set[int]:
    """The tokens that are special where a text holds them; of chats with all `control` tokens, some of which are only
    added tokens (Llama's)."""
    added = tokenizer.added_tokens_decoder.items() if control else ()
    special = {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}
    if _pads_with_word(tokenizer):
        special.remove(tokenizer.pad_token_id)
    return special


def _pads_with_word(tokenizer: Any) -> bool:
    """Whether the padding token is a word, which texts may hold."""
    others = ("bos", "eos", "unk", "sep", "cls", "mask")
    pad = tokenizer.pad_token_id
    if pad is None or pad in [getattr(tokenizer, f"{name}_token_id") for name in others]:
        return False
    plain = tokenizer(tokenizer.pad_token, add_special_tokens=False, split_special_tokens=True)
    return plain["input_ids"] == [pad]
