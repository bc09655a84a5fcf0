"""What a tokenizer does: the special tokens around a text, conversations through its chat template, ids as text.

The tokenizer itself is asked. Which tokens are added is no property of their ids: a chat's turns may begin with BOS.
What a message says is found by rendering the conversation with another content in its place. The assistant also says
the token that ends its turn, or says what a template has in {% generation %}.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..base.errors import ConfigError, ModelError, one_line
from .texts import value_of

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
KNOWN = "a"  # at worst an unknown word, which is no special token around a text
OTHER = "\ue000"  # a content unlike any other
BROKEN = "\N{REPLACEMENT CHARACTER}"  # in the text of a token that is a part of a character
LONGEST_CHARACTER = 4  # bytes, so at most 4 tokens
REPEATED = "begins with BOS, or what stands for it, as every window does anyway; it is there once"


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
    mask = tokenizer(KNOWN, return_special_tokens_mask=True)
    own = [number for number, added in enumerate(mask["special_tokens_mask"]) if not added]
    ids = mask["input_ids"]
    prefix, suffix = (ids[: own[0]], ids[own[-1] + 1 :]) if own else ([], [])
    if prefix or not prepend_bos:
        return Affixes(prefix, suffix, False)
    beginnings = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id)
    first = next((token for token in beginnings if token is not None), None)
    return Affixes([] if first is None else [first], suffix, first is None)


def text_ids(tokenizer: Any, text: str, prefix: list[int]) -> tuple[list[int], bool]:
    """A text's tokens after those of the prefix, which a window begins with; and whether the text itself begins with
    it, as a chat rendered beforehand does: a second BOS would be a second attention sink."""
    token_ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    start = 0
    while prefix and token_ids[start : start + len(prefix)] == prefix:
        start += len(prefix)
    return token_ids[start:], start > 0


def special_ids(tokenizer: Any, control: bool) -> set[int]:
    """The tokens that are special where a text holds them; of chats with all `control` tokens, some of which are only
    added tokens (Llama's)."""
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
    """The texts of a tokenizer's tokens, as within a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        # Some tokenizers drop the space before the first token of a text.
        self._before: list[int] = tokenizer(KNOWN, add_special_tokens=False)["input_ids"]

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __getitem__(self, token: int) -> str:
        """The text of one token, with U+FFFD for a part of a character."""
        return self._known.get(token) or self._known.setdefault(token, self.joined([token]))

    def joined(self, tokens: Sequence[int]) -> str:
        """The text of consecutive tokens; numbers if the tokenizer does not know one of them."""
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
    """The pieces of text that tokens make, and the number of tokens in each: one, unless a character spans several;
    `texts` are `TokenTexts`, or have the same two methods."""
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


class Chats:
    """Renders conversations by a template, by default the tokenizer's own; `name` is the model's."""

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
        """The conversation in a column of a row, blank without messages; `where` names the row in errors."""
        messages = messages_of(row, column, where)
        if not messages:
            return ""
        return Conversation(self, messages, where, self.apply(messages, where, tokenize=False))

    def apply(self, messages: list[dict[str, Any]], where: str, **options: Any) -> Any:
        """transformers' `apply_chat_template`; a ModelError if the template refuses the messages."""
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, date_string=DATE, **options
            )
        except (
            TemplateError,
            ImportError,
            LookupError,
            TypeError,
            ValueError,
            NotImplementedError,  # of tokenizers written in Python, which need not have each method
        ) as error:
            raise ModelError(
                f"{where} does not fit the chat template: {one_line(error)}; correct it, or, to store it, name "
                "another template with --chat-template"
            ) from error


@dataclass(frozen=True)
class Conversation:
    """Messages and their rendering; `where` names their row in errors."""

    chats: Chats
    messages: list[dict[str, Any]]
    where: str
    rendered: str

    def __str__(self) -> str:
        return self.rendered

    def tokens(
        self, prefix: list[int], needs_assistant: bool = False
    ) -> tuple[list[int], list[int], list[int]]:
        """The tokens after the prefix, the role of each, a number in `ROLES`, and the first tokens of turns. A
        ModelError if what the assistant says is needed and cannot be found."""
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
        """The characters of a message's content in the rendering; None if the template refuses another content there,
        or then says more than that otherwise."""
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
    """The messages in a column of a row as templates take them, without entries of None."""
    value = value_of(row, column, where) or []
    values = value if isinstance(value, list) else [value]
    return [_message(each, number, where) for number, each in enumerate(values, 1)]


def _message(value: Any, number: int, where: str) -> dict[str, Any]:
    """A message with role and content, or ShareGPT's from and value; of a content in parts the texts."""
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
