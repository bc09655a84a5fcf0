"""A prompt continued token by token, plain and with codes changed, as two rows of one batch.

Between two steps the model is unchanged, so other texts may go through it. Shapes: T tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from ..model.language_model import LanguageModel
from ..splice.placement import Placement
from .steer import editing

STEERED = 1  # the row whose codes are changed


class Next(TypedDict):
    """Tokens, n of them, and their probabilities in either row."""

    tokens: list[int]
    plain: list[float]
    steered: list[float]


class Continuation:
    """A prompt's tokens, (1, T), with its special ones, and what follows them.

    Args:
        edit: changes codes, (1, T, F), in place; None for none.
        special: token ids whose activations stay.
        temperature: of sampling, by `seed`; 0 for the likeliest token.
    """

    def __init__(
        self,
        model: LanguageModel,
        token_ids: Tensor,
        sae_at: Placement,
        edit: Callable[[Tensor], Tensor] | None,
        special: Sequence[int],
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._model, self._at, self._edit, self._special = model, sae_at, edit, special
        self._temperature = temperature
        # Both rows draw the same numbers, so that they differ by the change of codes alone.
        self._draws = [torch.Generator().manual_seed(seed) for _ in range(2)]
        self._unread = token_ids.to(model.device).repeat(2, 1)
        self._length, self._cache = 0, model.new_cache()
        self._end = _ends(model)
        self.ended = [False, False]  # whether the row's text has come to its end

    @torch.no_grad()
    def step(self) -> tuple[list[int | None], Tensor]:
        """The next token of either row, None after its end, and log-probabilities, (2, V)."""
        self._length += self._unread.shape[1]
        mask = torch.ones(2, self._length, dtype=torch.int64)
        model = self._model
        with editing(model.model, self._at, self._edited, self._special, model.modules):
            logits = model.next_logits(self._unread, mask, self._cache)
        log_p = logits.log_softmax(-1).cpu()
        drawn = [self._drawn(row, log_p[row]) for row in range(2)]
        self._unread = torch.tensor(drawn, device=self._unread.device)[:, None]
        tokens: list[int | None] = []
        for row, token in enumerate(drawn):
            tokens.append(None if self.ended[row] else token)
            self.ended[row] |= token in self._end
        return tokens, log_p

    def _edited(self, z: Tensor) -> Tensor:
        if self._edit is not None:
            z[STEERED:] = self._edit(z[STEERED:])
        return z

    def _drawn(self, row: int, log_p: Tensor) -> int:
        if not self._temperature:
            return int(log_p.argmax())
        # In float64 and from 0 down, no temperature is too low.
        p = ((log_p - log_p.max()).double() / self._temperature).softmax(-1)
        return int(torch.multinomial(p, 1, generator=self._draws[row]))


def likeliest(log_p: Tensor, count: int) -> Next:
    """The tokens that are among the `count` likeliest of either row of log-probabilities, (2, V), by their sum."""
    p = log_p.exp()
    tokens = p.topk(count, dim=1).indices.unique()
    order = tokens[p[:, tokens].sum(0).argsort(descending=True)]
    plain, steered = p[:, order].tolist()
    return Next(tokens=order.tolist(), plain=plain, steered=steered)


def _ends(model: LanguageModel) -> set[int]:
    configured: Any = model.model.generation_config.eos_token_id
    if configured is None:
        configured = model.tokenizer.eos_token_id
    if configured is None:
        return set()
    return {configured} if isinstance(configured, int) else set(configured)
