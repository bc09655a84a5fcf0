"""Tokens that a latent's decoder vector raises and lowers, against float64 numpy, and texts of tokens put together."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import loaded, save_model

from saecli.extract.language_model import load_tokenizer
from saecli.extract.model_source import find_model
from saecli.extract.options import TINY_GEMMA2
from saecli.extract.tokens import LOGIT_BINS, TokenTexts, Unembedding

# Where each architecture keeps its final norm, whether that is a LayerNorm, and what is added to its parameter.
NORMS = {"gemma2": ("model.norm", False, 1.0), "llama": ("model.norm", False, 0.0),
         "gpt2": ("transformer.ln_f", True, 0.0), "gpt-neox": ("gpt_neox.final_layer_norm", True, 0.0)}


@pytest.mark.parametrize("architecture", NORMS)
def test_output_tokens_match_final_norm_and_unembedding(tmp_path: Path, architecture: str):
    place, centred, offset = NORMS[architecture]
    model = loaded(save_model(tmp_path, architecture), head=True)
    norm = model.model.get_submodule(place)
    generator = torch.Generator().manual_seed(0)
    norm.weight.copy_(torch.randn(norm.weight.shape, generator=generator))
    directions = torch.randn(5, model.source.d_model, generator=generator)
    outputs = Unembedding(model).output_tokens(directions, 3, lambda done: None)

    unit = directions.double().numpy()
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    unit -= unit.mean(1, keepdims=True) if centred else 0
    W_U = model.model.get_output_embeddings().weight.double().numpy()
    logits = (unit * (offset + norm.weight.double().numpy())) @ W_U.T
    logits -= logits.mean(1, keepdims=True)
    assert (outputs.promoted.numpy() == np.argsort(-logits, axis=1)[:, :3]).all()
    assert (outputs.suppressed.numpy() == np.argsort(logits, axis=1)[:, :3]).all()
    assert outputs.promoted_logits.numpy() == pytest.approx(-np.sort(-logits, axis=1)[:, :3], rel=1e-4)
    assert outputs.suppressed_logits.numpy() == pytest.approx(np.sort(logits, axis=1)[:, :3], rel=1e-4)
    for counts, own in zip(outputs.counts.numpy(), logits, strict=True):
        assert counts.sum() == len(own)
        assert np.abs(counts - np.histogram(own, LOGIT_BINS)[0]).sum() <= 4  # rounding may move one over an edge
        assert counts[0] > 0 < counts[-1]


def test_texts_of_tokens_put_together_are_the_text():
    tokenizer = load_tokenizer(find_model(TINY_GEMMA2))
    texts = TokenTexts(tokenizer)
    text = "def f(x):\n    return naïve 🙂 שלום"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert texts.joined(ids) == text
    whole = [texts[token] for token in ids if "\ufffd" not in texts[token]]
    assert "".join(whole).startswith("def f(x):\n    return na")
    assert texts.joined([5, 10**6]) == "[5][1000000]"
