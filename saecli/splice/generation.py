"""Continuations of a prompt; T tokens."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig

from ..model.language_model import LanguageModel


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
