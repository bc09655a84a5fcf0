"""Rows are those of a window alone, whatever is in its batch or ran before; and no token that is predicted is seen."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import DEEP, loaded, save_model
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Phi3Config

from saecli.base.errors import ModelError
from saecli.store.origin import HookPoint

LENGTHS = [10, 40, 25, 16, 40]
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 16,
    "factor": 4.0,
}
SHARED = {**DEEP, "num_key_value_heads": 2}
CONFIGS = {
    "dynamic": lambda: LlamaConfig(**SHARED, max_position_embeddings=16, rope_parameters=DYNAMIC),
    "longrope": lambda: Phi3Config(
        **SHARED,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters=LONG,
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_rows_of_a_batch_are_those_of_a_new_model_and_each_window_alone(kind: str, tmp_path: Path):
    folder = save_model(tmp_path, CONFIGS[kind]())
    model, point = loaded(folder), HookPoint(1, "resid_post")
    random = torch.Generator().manual_seed(0)
    token_ids = torch.randint(3, 60, (len(LENGTHS), 40), generator=random)
    mask = (torch.arange(40) < torch.tensor(LENGTHS)[:, None]).long()
    found = model.read(token_ids, mask, [point], torch.clone)[0]
    for row, length in enumerate(LENGTHS):
        new = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            states = new(token_ids[row : row + 1, :length], output_hidden_states=True).hidden_states
        torch.testing.assert_close(found[row, :length], states[2][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("more", [{"use_bidirectional_attention": True}, {}])
def test_a_model_that_sees_later_tokens_predicts_none(more: dict[str, Any], tmp_path: Path):
    sizes = {**DEEP, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4}
    folder = save_model(tmp_path, Gemma3TextConfig(**sizes, **more))
    if more:
        with pytest.raises(ModelError, match="one whose tokens see later ones"):
            loaded(folder, head=True)
    else:
        loaded(folder, head=True)
    loaded(folder).read(
        torch.ones(1, 3).long(), torch.ones(1, 3).long(), [HookPoint(0, "resid_post")], torch.clone
    )
