"""Continuations of a prompt by a language model."""

import torch
from torch import Tensor
from transformers import GenerationConfig

from .language_model import LanguageModel


@torch.no_grad()
def continuation(model: LanguageModel, token_ids: Tensor, most: int, temperature: float, seed: int) -> list[int]:
    """The tokens that a model puts after a prompt.

    Args:
        model: loaded with its head.
        token_ids: the prompt, with the special tokens that begin a text, (1, T), int64.
        most: number of tokens to stop at; it also ends at the model's end-of-text token.
        temperature: of sampling from all tokens; 0 for the likeliest token each time.
        seed: of sampling; torch's own generators are left as they were.

    Returns:
        The new tokens' ids, at least one.
    """
    given = model.model.generation_config
    # All that could come from the model's own defaults, such as top-k, is set.
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {
        "do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    config = GenerationConfig(max_new_tokens=most, num_beams=1, repetition_penalty=1.0, bos_token_id=given.bos_token_id,
                              eos_token_id=given.eos_token_id,
                              pad_token_id=0 if given.pad_token_id is None else given.pad_token_id, **sampling)
    token_ids = token_ids.to(model.device)
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        with model.told():
            found = model.model.generate(token_ids, attention_mask=torch.ones_like(token_ids), generation_config=config)
    return found[0, token_ids.shape[1]:].tolist()
