"""Tokens that a direction of the residual stream promotes, by the model's final norm and unembedding.

Shapes: R directions, D = d_in, V vocabulary.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..base.errors import ModelError
from .language_model import LanguageModel

HELD_LOGITS = 1 << 24  # logits in memory: 64 MB in float32
LOGIT_BINS = 40


class OutputTokens(NamedTuple):
    """Tokens and changes of their logits, largest first, (R, count) each, on the CPU."""

    promoted: Tensor
    promoted_logits: Tensor
    suppressed: Tensor
    suppressed_logits: Tensor
    counts: Tensor  # (R, LOGIT_BINS), all tokens by change, in equal bins from lowest to highest


class Unembedding:
    """A model's final norm and unembedding as a linear map from directions to logits; needs the head.

        logits(d) = W_U (norm(u) - norm(0)) / sqrt(D),  u = sqrt(D) d / ||d||,

    minus their mean over the vocabulary, which affects no probability. At a mean square of 1 RMSNorm multiplies by its
    weight; LayerNorm also centres and divides by the remaining standard deviation.
    """

    def __init__(self, model: LanguageModel) -> None:
        head = model.model.get_output_embeddings()
        if head is None or not hasattr(head, "weight"):
            raise ModelError(
                f"{model.source.name}, a {type(model.model).__name__}, has no unembedding; leave --model out"
            )
        # A head padded to a round number has more rows than its tokenizer has tokens.
        self._W_U = head.weight[: len(model.tokenizer)]
        self._mean = self._W_U.mean(0, dtype=torch.float32)
        self._norm = _final_norm(model, head)

    @torch.no_grad()
    def output_tokens(
        self, directions: Tensor, count: int, show: Callable[[int], None]
    ) -> OutputTokens:
        """The `count` tokens whose logits a unit step in each direction, (R, D), raises and lowers most; `show` takes
        the number of directions done. Cost: `2 R D V` operations, `HELD_LOGITS` logits in memory."""
        count = min(count, len(self._W_U))
        parts: list[tuple[Tensor, ...]] = []
        done = 0
        for part in directions.split(max(1, HELD_LOGITS // len(self._W_U))):
            unit = nn.functional.normalize(part.to(self._W_U.device), dim=1)
            scale = math.sqrt(unit.shape[1])
            step = (scale * unit).to(self._W_U)
            scaled = (self._norm(step) - self._norm(torch.zeros_like(step))).float() / scale
            logits = (scaled.to(self._W_U) @ self._W_U.T).float() - (scaled @ self._mean)[:, None]
            up, promoted = logits.topk(count, dim=1)
            down, suppressed = logits.topk(count, dim=1, largest=False)
            ranges = zip(logits, down[:, 0].tolist(), up[:, 0].tolist(), strict=True)
            counts = torch.stack([torch.histc(row, LOGIT_BINS, *ends) for row, *ends in ranges])
            columns = (promoted, up, suppressed, down, counts.long())
            parts.append(tuple(column.cpu() for column in columns))
            done += len(part)
            show(done)
        return OutputTokens(*map(torch.cat, zip(*parts, strict=True)))


@torch.no_grad()
def _final_norm(model: LanguageModel, head: Any) -> nn.Module:
    """The norm whose output the head reads; the identity if there is none."""
    outputs: list[tuple[nn.Module, Tensor]] = []
    head_inputs: list[Tensor] = []

    def note(module: nn.Module, args: tuple, output: object) -> None:
        if isinstance(output, Tensor):
            outputs.append((module, output))

    with ExitStack() as hooks:
        for module in model.model.modules():
            if "norm" in type(module).__name__.lower():
                hooks.enter_context(module.register_forward_hook(note))
        take = head.register_forward_pre_hook(lambda module, args: head_inputs.append(args[0]))
        hooks.enter_context(take)
        token_ids = torch.zeros(1, 1, dtype=torch.int64)
        model.logits(token_ids, torch.ones_like(token_ids))
    norms = [
        module for module, output in outputs if head_inputs and torch.equal(output, head_inputs[0])
    ]
    return norms[-1] if norms else nn.Identity()
