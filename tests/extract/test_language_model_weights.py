"""Models whose later blocks are not loaded, against whole ones, for real architectures."""

from functools import partial
from pathlib import Path

import pytest
import torch
from homes import CommandLine
from safetensors.torch import load_file, save_file
from test_families import MIDDLE, tiny_config
from tiny_models import LAYERS, VOCABULARY, loaded, save_model, save_tokenizer
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from saecli.base.errors import ModelError
from saecli.extract import model_source
from saecli.extract.language_model import LanguageModel
from saecli.extract.model_source import find_model
from saecli.extract.options import SITES, TINY_GEMMA2, HookPoint
from saecli.store.reader import ActivationStore

FAMILIES = (
    "gemma2 llama gpt2 gpt_neox gemma3_text mistral opt phi qwen2 qwen3".split()  # of test_families
)
CPU = torch.device("cpu")


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_model(tmp_path / request.param, tiny_config(request.param))


def first_blocks(folder: Path, last: int, dtype: str = "auto") -> LanguageModel:
    return LanguageModel(find_model(str(folder)), CPU, dtype=dtype, last=last)


@pytest.mark.slow
def test_activations_without_later_blocks_equal_the_whole_models(folder: Path):
    whole, cut = loaded(folder), first_blocks(folder, 0)
    assert (len(cut.blocks), len(whole.blocks)) == (1, 2)
    assert cut.size == whole.size == AutoModel.from_pretrained(folder).num_parameters()
    sites = SITES if hasattr(whole.blocks[0], "mlp") else ("resid_pre", "resid_post")
    if not MIDDLE.get(folder.name, "a norm"):
        sites = {*sites} - {"resid_mid"}
    places = [HookPoint(0, site) for site in sites]
    token_ids = torch.randint(3, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(token_ids)
    mask[1, 6:] = 0
    found, expected = (model.read(token_ids, mask, places, torch.clone) for model in (cut, whole))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_those_of_the_library_in_every_precision(tmp_path: Path, dtype: str):
    folder = save_model(tmp_path / "gemma2", "gemma2")
    expected = AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype)).state_dict()
    for name, weight in first_blocks(folder, 1, dtype).model.state_dict().items():
        assert torch.equal(weight, expected[name]) and weight.dtype == expected[name].dtype


def test_loading_draws_no_random_numbers_and_says_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
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


def test_missing_weights_are_refused_where_needed(tmp_path: Path):
    folder = save_model(tmp_path / "llama", "llama")
    without(folder, "model.layers.1.mlp.up_proj.weight")
    for load in (partial(first_blocks, last=1), loaded):
        with pytest.raises(ModelError, match=r"no weights for layers\.1\.mlp\.up_proj\.weight"):
            load(folder)
    first_blocks(folder, 0)
    without(folder, "lm_head.weight")
    with pytest.raises(ModelError, match=r"no weights for lm_head\.weight and 1 more"):
        loaded(folder, head=True)


def test_blocks_that_share_weights_with_earlier_ones_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = save_model(tmp_path / "llama", "llama")
    made = AutoModel.from_config

    def sharing(config: object, **settings: object) -> PreTrainedModel:
        model = made(config, **settings)
        last: nn.Module = model.layers[LAYERS - 1]
        last.mlp = model.layers[0].mlp
        return model

    assert len(first_blocks(folder, 0).blocks) == 1
    monkeypatch.setattr(AutoModel, "from_config", sharing)
    assert len(first_blocks(folder, 0).blocks) == LAYERS


@pytest.mark.parametrize("native", [True, False])
def test_a_cpu_takes_the_precision_that_it_multiplies_in(
    native: bool, sae: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whatever the CPU that runs this test."""
    monkeypatch.setattr(model_source, "multiplies_bf16", lambda device: native)
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
        assert str(model.dtype) == f"torch.{dtype}"
