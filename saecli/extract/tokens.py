"""Continuations of a prompt, and the next tokens that a direction promotes or suppresses.

Shapes: R directions, T tokens, D = d_in, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationConfig

from ..base.errors import ModelError
from .language_model import LanguageModel

BLOCK_LOGITS = 1 << 24  # logits in memory: 64 MB in float32
LOGIT_BINS = 40


class OutputTokens(NamedTuple):
    """Tokens and the changes of their logits, largest first, (R, count) each, on the CPU."""

    promoted: Tensor
    promoted_logits: Tensor
    suppressed: Tensor
    suppressed_logits: Tensor
    counts: Tensor  # (R, LOGIT_BINS), all tokens by change, in equal bins from the lowest to the highest


class Unembedding:
    """A model's final norm and unembedding, as one linear map from directions to logits; needs a model with its head.

        logits(d) = W_U (norm(u) - norm(0)) / sqrt(D),  u = sqrt(D) d / ||d||,

    minus their mean over the vocabulary, which affects no probability. At a mean square of 1 RMSNorm only multiplies
    by its weight; LayerNorm also centres, and divides by the standard deviation that is left.
    """

    def __init__(self, model: LanguageModel) -> None:
        head = model.model.get_output_embeddings()
        if head is None or not hasattr(head, "weight"):
            raise ModelError(
                f"{model.source.name}, a {type(model.model).__name__}, has no unembedding; leave --model "
                f"out"
            )
        # A head padded to a round number has more rows than its tokenizer has tokens.
        self._W_U = head.weight[: len(model.tokenizer)]
        self._mean = self._W_U.mean(0, dtype=torch.float32)
        self._norm = _final_norm(model, head)

    @torch.no_grad()
    def output_tokens(
        self, directions: Tensor, count: int, show: Callable[[int], None]
    ) -> OutputTokens:
        """The `count` tokens whose logits a unit step in each direction, (R, D), raises and lowers most; `show` is
        called with the number of directions done. Cost: `2 R D V` operations, `BLOCK_LOGITS` logits held at a time."""
        count = min(count, len(self._W_U))
        parts: list[tuple[Tensor, ...]] = []
        done = 0
        for part in directions.split(max(1, BLOCK_LOGITS // len(self._W_U))):
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
    """The norm before the head, the last module whose output is the head's input; the identity if there is none."""
    outputs: list[tuple[nn.Module, Tensor]] = []
    taken: list[Tensor] = []

    def note(module: nn.Module, args: tuple, output: object) -> None:
        if isinstance(output, Tensor):
            outputs.append((module, output))

    with ExitStack() as hooks:
        for module in model.model.modules():
            if "norm" in type(module).__name__.lower():
                hooks.enter_context(module.register_forward_hook(note))
        take = head.register_forward_pre_hook(lambda module, args: taken.append(args[0]))
        hooks.enter_context(take)
        token_ids = torch.zeros(1, 1, dtype=torch.int64)
        model.logits(token_ids, torch.ones_like(token_ids))
    norms = [module for module, output in outputs if taken and torch.equal(output, taken[0])]
    return norms[-1] if norms else nn.Identity()


@torch.no_grad()
def continuation(
    model: LanguageModel, token_ids: Tensor, most: int, temperature: float, seed: int
) -> list[int]:
    """The ids of the next tokens, 1 to `most`, after a prompt, (1, T), that begins with the special tokens of a text.

    The model must be loaded with its head; its end-of-text token ends the continuation. A `temperature` of 0 takes the
    likeliest token each time. `seed` is for sampling; torch's own generators are left unchanged.
    """
    given = model.model.generation_config
    # All that could come from the model's own defaults, such as top-k, is set.
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature
        else {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    )
    config = GenerationConfig(
        max_new_tokens=most,
        num_beams=1,
        repetition_penalty=1.0,
        bos_token_id=given.bos_token_id,
        eos_token_id=given.eos_token_id,
        pad_token_id=0 if given.pad_token_id is None else given.pad_token_id,
        **sampling,
    )
    token_ids = token_ids.to(model.device)
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        with model.reporting():
            generated = model.model.generate(
                token_ids, attention_mask=torch.ones_like(token_ids), generation_config=config
            )
    return generated[0, token_ids.shape[1] :].tolist()


def first_tokens(tokens: Tensor, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The indices of each text's first token among those of a forward pass, (B, T), by its arguments: none where the
    cache holds tokens before them."""
    texts = torch.arange(len(tokens), device=tokens.device)
    # transformers named the argument past_key_values, later cache
    caches = [value for value in arguments.values() if isinstance(value, Cache)]
    if any(cache.get_seq_length() for cache in caches):
        return texts[:0], texts[:0]
    mask = arguments.get("attention_mask")  # 0 at padding, perhaps on the left
    if isinstance(mask, Tensor) and mask.shape == tokens.shape:
        return texts, mask.to(tokens.device).long().argmax(1)
    positions = arguments.get("position_ids")
    if mask is None or positions is None or positions.shape != tokens.shape:
        return texts, torch.zeros_like(texts)
    # A static cache's mask has other shapes. The first token is the last at position 0, which padding may have too.
    at_end = (positions.to(tokens.device) == 0).flip(1).long().argmax(1)
    return texts, tokens.shape[1] - 1 - at_end
