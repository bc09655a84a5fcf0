"""Reading and splicing real architectures, against plain hooks and layers computed by hand (see also test_families.py);
tokens that a latent's decoder vector raises and lowers, against float64 numpy."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import CONFIGS, LAYERS, VOCABULARY, loaded, save_model
from torch import Tensor

from saecli.base.errors import ModelError
from saecli.extract.language_model import LanguageModel, load_tokenizer
from saecli.extract.model_source import find_model
from saecli.extract.options import SITES, TINY_GEMMA2, HookPoint
from saecli.extract.tokenizer import TokenTexts
from saecli.extract.tokens import LOGIT_BINS, Unembedding


@pytest.fixture(scope="module", params=CONFIGS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> LanguageModel:
    folder = tmp_path_factory.mktemp("models") / request.param
    return loaded(save_model(folder, request.param), head=True)


@pytest.fixture
def tokens() -> tuple[Tensor, Tensor]:
    token_ids = torch.randint(3, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(token_ids)
    mask[1, 6:] = 0
    return token_ids, mask


def sites(model: LanguageModel) -> list[str]:
    """Those of its blocks: in Pythia attention and MLP are side by side."""
    parallel = model.source.config.model_type == "gpt_neox"
    return [site for site in SITES if site != "resid_mid" or not parallel]


def read(model: LanguageModel, tokens: tuple[Tensor, Tensor], layer: int, site: str) -> Tensor:
    return model.read(*tokens, [HookPoint(layer, site)], torch.clone)[0]


def test_forward_pass_stops_at_the_site(model, tokens):
    ran = []
    handles = [
        block.register_forward_hook(lambda *_, index=index: ran.append(index))
        for index, block in enumerate(model.blocks)
    ]
    for site in sites(model):
        read(model, tokens, 1, site)
    for handle in handles:
        handle.remove()
    assert 2 not in ran
    assert ran.count(0) == len(sites(model))


def test_hook_points_read_together_equal_those_read_alone(model, tokens):
    points = [HookPoint(layer, site) for layer in range(LAYERS) for site in sites(model)]
    together = model.read(*tokens, points, torch.clone)
    for point, activations in zip(points, together, strict=True):
        torch.testing.assert_close(activations, read(model, tokens, *point[:2]), rtol=0, atol=0)


def test_the_middle_layer_is_the_default_and_12_for_gemma_2_2b():
    source = find_model(TINY_GEMMA2)
    assert (source.layers, source.default_layer()) == (4, 1)
    source.config.num_hidden_layers = 26
    assert source.default_layer() == 12


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere", "no network|cannot be reached"),
        ("./missing", "no model ../missing'"),
        *((name, f"no model '{name}'") for name in ("a/b/c", "gpt2/", "-a", "a b")),
        ("google/gemma-2-2b", "accepted at https://huggingface.co/google/gemma-2-2b, and `hf auth"),
        (".", "give the files of a Hugging Face causal language model"),
    ],
)
def test_a_missing_model_is_refused(name, sentence, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=sentence):
        find_model(name)


# Where each architecture keeps its final norm, whether that is a LayerNorm, and what is added to its parameter.
NORMS = {
    "gemma2": ("model.norm", False, 1.0),
    "llama": ("model.norm", False, 0.0),
    "gpt2": ("transformer.ln_f", True, 0.0),
    "gpt-neox": ("gpt_neox.final_layer_norm", True, 0.0),
}


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
    ordered = np.sort(logits, axis=1)
    assert outputs.promoted_logits.numpy() == pytest.approx(ordered[:, :-4:-1], rel=1e-4)
    assert outputs.suppressed_logits.numpy() == pytest.approx(ordered[:, :3], rel=1e-4)
    for counts, own in zip(outputs.counts.numpy(), logits, strict=True):
        assert counts.sum() == len(own)
        # Rounding may move one over an edge.
        assert np.abs(counts - np.histogram(own, LOGIT_BINS)[0]).sum() <= 4
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
