"""Language models against plain hooks and layers by hand; loaded in part and whole; a latent's output tokens."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from homes import CommandLine
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, VOCABULARY, loaded, save_model, save_tokenizer
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from saecli.base.errors import ModelError
from saecli.model import TINY_GEMMA2
from saecli.model import source as model_source
from saecli.model.language_model import LanguageModel, load_tokenizer
from saecli.model.source import find_model
from saecli.model.tokenizer import TokenTexts
from saecli.model.unembedding import LOGIT_BINS, Unembedding
from saecli.store.origin import SITES, HookPoint
from saecli.store.reader import ActivationStore


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
    assert len(model.modules.streams) == len(model.blocks)  # in a pass of its own
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


def test_the_middle_layer_is_the_default_and_12_for_gemma_2_2b():
    source = find_model(TINY_GEMMA2)
    assert (source.layers, source.default_layer()) == (4, 1)
    source.config.num_hidden_layers = 26
    assert source.default_layer() == 12


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere", "no network|cannot be reached"),
        ("none.gguf", "there is no file"),
        ("./missing", "cannot load the model ./missing: .*Repo id"),
        ("google/gemma-2-2b", "accepted at https://huggingface.co/google/gemma-2-2b, and `hf auth"),
        (".", "give the hub id, folder or GGUF file of a causal language model"),
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
    if centred:
        unit -= unit.mean(1, keepdims=True)
        unit /= np.sqrt(unit.shape[1]) * unit.std(1, keepdims=True)
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


CPU = torch.device("cpu")


def first_blocks(folder: Path, last: int, dtype: str = "auto") -> LanguageModel:
    return LanguageModel(find_model(str(folder)), CPU, dtype=dtype, last=last)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_those_of_the_library_in_every_precision(tmp_path: Path, dtype: str):
    folder = save_model(tmp_path / "gemma2", "gemma2")
    expected = AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype)).state_dict()
    for name, weight in first_blocks(folder, 1, dtype).model.state_dict().items():
        assert torch.equal(weight, expected[name]) and weight.dtype == expected[name].dtype


def test_loading_draws_and_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    folder = save_model(tmp_path / "llama", "llama")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    capfd.readouterr()
    first_blocks(folder, 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert capfd.readouterr() == ("", "")


def without(folder: Path, name: str) -> None:
    """Remove a weight from a model's file."""
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_missing_weights_are_refused(tmp_path: Path):
    folder = save_model(tmp_path / "llama", "llama")
    without(folder, "model.layers.1.mlp.up_proj.weight")
    for load in (partial(first_blocks, last=1), loaded):
        with pytest.raises(ModelError, match=r"no weights of shape .* for layers\.1\.mlp\.up_proj"):
            load(folder)
    without(folder, "lm_head.weight")
    with pytest.raises(ModelError, match=r" for lm_head\.weight and 1 more"):
        loaded(folder, head=True)


@pytest.mark.parametrize("native", [True, False])
def test_a_cpu_takes_the_precision_it_multiplies_in(native: bool, sae: CommandLine, tmp_path: Path):
    """Whatever the CPU that runs this test."""
    sae.monkeypatch.setattr(model_source, "multiplies_bf16", lambda device: native)
    single = save_model(tmp_path / "single", "llama")
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(single, dtype=torch.bfloat16).save_pretrained(half)
    save_tokenizer(half, bos=True)
    (tmp_path / "text.txt").write_text("\n\n".join("abcdefghij" for _ in range(20)))
    expected = {half: "bfloat16" if native else "float32", single: "float32"}
    for number, (folder, dtype) in enumerate((expected | {TINY_GEMMA2: "float32"}).items()):
        name = f"rows-{number}"
        words = ("--dataset", tmp_path / "text.txt", "--layer", "1", "--name", name)
        assert sae("extract", "--model", folder, *words).status == 0
        meta = ActivationStore.open(sae.home / "activations" / name).meta
        assert meta.source["model_dtype"] == dtype
        model = LanguageModel(find_model(str(folder)), torch.device("cpu"))
        assert str(model.model.dtype) == f"torch.{dtype}"
