"""Conversations through a tokenizer's chat template.

A message's span is found by rendering the conversation with another content in its place. The assistant's includes the
token that ends its turn, or is what the template has in {% generation %}.
"""

import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any

from ..base.errors import ModelError, one_line
from ..model.tokenizer import special_ids
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
# With jinja's own; tokenizers written in Python need not have each method.
REFUSALS = (ImportError, LookupError, TypeError, ValueError, NotImplementedError)
OTHER = "\ue000"  # a content unlike any other
REPEATED = "begins with BOS, or what stands for it, as every window does anyway; it is there once"


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
