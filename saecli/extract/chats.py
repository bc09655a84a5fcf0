"""Conversations through a tokenizer's chat template: their tokens, who says them, and where turns begin.

The assistant says what a template has in {% generation %}, else what follows a generation prompt, to the end of the
turn. What others say is found by rendering the conversation up to there with another content.
"""

import re
from bisect import bisect_left, bisect_right
from typing import Any

from ..base.errors import ModelError, one_line
from .texts import value_of

ROLES = ("template", "system", "user", "assistant", "tool")
ASSISTANT = ROLES.index("assistant")
NUMBERS = {role: number for number, role in enumerate(ROLES)} | {
    "developer": 1,
    "model": ASSISTANT,
    "function": 4,
}
SHAREGPT = {"human": "user", "gpt": "assistant"}
DATE = (
    "26 Jul 2024"  # for templates that name today's, as Llama's do: rows must not depend on the day
)
OTHER = "\ue000"  # a content unlike any other


class Conversation(str):
    """A conversation's text, with the `Chats` that rendered it, its messages, and words for its row."""

    origin: tuple["Chats", Any, str]


class Chats:
    """Renders conversations by a template, by default the tokenizer's own; `name` is the model's."""

    def __init__(self, tokenizer: Any, template: str | None, name: str) -> None:
        try:
            self._template = tokenizer.get_chat_template(template)
        except ValueError as error:
            raise ModelError(
                f"the tokenizer of {name} has no chat template; expected one, to render messages by; name "
                "a jinja file with --chat-template, or a model that was trained on chats"
            ) from error
        self._tokenizer, self._marks = (
            tokenizer,
            bool(re.search(r"{%-?\s*generation\s*-?%}", self._template)),
        )

    def read(self, row: Any, column: str, where: str) -> str:
        """The conversation in a column of a row, blank without messages; `where` names the row in errors."""
        if not (messages := messages_of(row, column, where)):
            return ""
        found = Conversation(self._applied(messages, where))
        found.origin = self, messages, where
        return found

    def _applied(self, messages: Any, where: str, tokenize: bool = False, **options: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._template,
                date_string=DATE,
                tokenize=tokenize,
                **options,
            )
        except (
            TemplateError,
            ImportError,
            LookupError,
            TypeError,
            ValueError,
            NotImplementedError,
        ) as error:
            raise ModelError(
                f"{where} does not fit the chat template: {one_line(error)}; correct it, or name another "
                "template with --chat-template"
            ) from error

    def tokens(
        self, chat: Conversation, prefix: list[int], assistant: bool = False
    ) -> tuple[list[int], list[int], list[int]]:
        """A conversation's tokens after the prefix, the role of each, a number in `ROLES`, and the first tokens of
        turns. If the `assistant`'s are needed and cannot be found, a ModelError."""
        _, messages, where = chat.origin
        found = self._applied(
            messages,
            where,
            True,
            return_dict=True,
            return_assistant_tokens_mask=self._marks,
            tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
        )
        begins, ends = ([place[side] for place in found["offset_mapping"]] for side in (0, 1))
        roles, turns, at = [0] * len(begins), [], 0
        for count, message in enumerate(messages, 1):
            role = NUMBERS.get(message["role"], 0)
            if place := self._place(chat, count, role == ASSISTANT, at):
                begin, end, at = place
                turns.append(bisect_left(begins, at))
                own = slice(bisect_right(ends, begin), bisect_left(begins, end))
                roles[own] = [role * (role != ASSISTANT or not self._marks)] * len(roles[own])
            elif assistant and role == ASSISTANT and not self._marks:
                raise ModelError(
                    f"the chat template changes what the assistant says in {where}; expected it as it is; "
                    "name a template with {% generation %} with --chat-template"
                )
        if self._marks:
            roles = [
                ASSISTANT * says or role
                for says, role in zip(found["assistant_masks"], roles, strict=True)
            ]
        skipped = len(prefix) * (found["input_ids"][: len(prefix)] == prefix)
        return found["input_ids"][skipped:], roles[skipped:], [turn - skipped for turn in turns]

    def _place(
        self, chat: Conversation, count: int, answers: bool, at: int
    ) -> tuple[int, int, int] | None:
        """Where the last of the first `count` messages begins and ends, and its turn ends, `at` or later; None if the
        template takes no conversation that ends there, or then says it otherwise."""
        *before, last = chat.origin[1][:count]
        try:
            whole, other = (
                self._applied([*before, one], "") for one in (last, {**last, "content": OTHER})
            )
            others = [
                one for one in before if one["role"] != "system"
            ]  # whom Mistral's cites after a user alone
            prompts = [
                self._applied(some, "", add_generation_prompt=True)
                for some in (before, others)[: 1 + (len(others) < len(before))]
                if answers and some
            ]
        except ModelError:
            return None
        head, found, tail = other.partition(OTHER)
        for start in (*prompts, head) if found else ():
            turn = whole.removeprefix(start)
            said = turn.rstrip() if answers else turn.removesuffix(tail)
            begin = len(start) if chat.startswith(whole.rstrip()) else chat.find(turn.rstrip(), at)
            if whole.startswith(start) and begin >= 0:
                return (
                    begin,
                    begin + len(said),
                    begin + len(turn if chat.startswith(turn, begin) else turn.rstrip()),
                )
        return None


def messages_of(row: Any, column: str, where: str) -> list[dict[str, Any]]:
    """The messages in a column of a row as templates take them, without entries of None."""
    given, found = value_of(row, column, where) or [], []
    for number, one in enumerate(given if isinstance(given, list) else [given], 1):
        fields = (
            {key: value for key, value in one.items() if value is not None}
            if isinstance(one, dict)
            else {}
        )
        role, content = (
            fields.pop(ours, fields.pop(theirs, ""))
            for ours, theirs in zip(("role", "content"), ("from", "value"), strict=True)
        )
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, dict) else part for part in content]
            texts = [part for part in parts if isinstance(part, str)]
            content = "".join(texts) if texts or not parts else None
        if not (role and isinstance(role, str) and isinstance(content, str)):
            got = ", ".join(one) if isinstance(one, dict) else repr(one)
            raise ModelError(
                f"message {number} of {where} has no {'text' if role else 'role'}; expected role and "
                f"content, or from and value, got {got:.60}; correct it"
            )
        found.append({**fields, "role": SHAREGPT.get(role, role), "content": content})
    return found
