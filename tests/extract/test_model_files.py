"""What stands in a model's folder besides the model that a command wants: adapters, other weights, damaged files."""

import json
from pathlib import Path

import pytest
import torch
from homes import CommandLine, change_json
from model_hub import ModelHub, files_of
from safetensors.torch import load_file, save_file
from tiny_models import LAYERS, loaded, save_model

from saecli.base.errors import ModelError
from saecli.extract.model_source import find_model

WEIGHTS = "model.safetensors"
TEXT = "\n\n".join("abcdefghijk" * length for length in range(1, 9))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "llama", "llama")


def changed(folder: Path, **weights: torch.Tensor) -> None:
    """Write a model's weights again, with some replaced or added: x__y for x.y."""
    more = {f"model.layers.{name.replace('__', '.')}": one for name, one in weights.items()}
    save_file(load_file(folder / WEIGHTS) | more, folder / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize("beside", [True, False])
def test_an_adapter_is_refused_beside_base_weights_and_alone(
    sae: CommandLine, folder: Path, beside: bool
):
    described = {"peft_type": "LORA", "base_model_name_or_path": str(folder), "r": 2}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    if not beside:
        (folder / WEIGHTS).unlink()
        (folder / "config.json").unlink()
    result = sae("extract", "--model", folder)
    assert result.status == 1 and result.err.count("\n") == 1
    assert "holds an adapter (adapter_config.json): expected a whole model" in result.err


def test_an_adapter_on_the_hub_is_refused(hub: ModelHub, folder: Path):
    files = files_of(folder) | {"adapter_config.json": b"{}"}
    hub.add("some/adapter", files)
    with pytest.raises(ModelError, match="some/adapter holds an adapter"):
        find_model("some/adapter")


def test_weights_that_the_architecture_does_not_take_are_refused(folder: Path):
    changed(folder, **{f"{LAYERS - 1}__self_attn__q_proj__bias": torch.ones(16)})
    for head in (False, True):
        with pytest.raises(ModelError, match=r"does not take 1 weight .*\.2\.self_attn\.q_proj"):
            loaded(folder, head)


def test_constants_and_blocks_above_the_configured_ones_are_not_missed(folder: Path):
    changed(
        folder,
        **{
            "0__self_attn__rotary_emb__inv_freq": torch.ones(4),
            f"{LAYERS}__mlp__up_proj__weight": torch.ones(24, 16),
        },
    )
    assert len(loaded(folder).blocks) == LAYERS


def test_weights_of_another_shape_are_named(folder: Path):
    changed(folder, **{"1__self_attn__q_proj__weight": torch.ones(8, 16)})
    with pytest.raises(ModelError, match=r"shape \(16, 16\) for .*q_proj\.weight, got \(8, 16\)"):
        loaded(folder)


def test_of_several_weights_those_that_are_read_are_told(
    sae: CommandLine, folder: Path, text: Path
):
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    result = sae("extract", "--model", folder, "--layer", "0", "--dataset", text).succeeds()
    assert f"weights are read from {WEIGHTS}, not from pytorch_model.bin" in result.err


def test_a_tokenizer_of_another_model_is_told_by_its_bos(sae: CommandLine, folder: Path, text):
    quiet = sae("extract", "--model", folder, "--layer", "0", "--dataset", text).succeeds()
    assert "BOS" not in quiet.err
    change_json(folder / "config.json", bos_token_id=7)
    result = sae("extract", "--model", folder, "--layer", "0", "--dataset", text).succeeds()
    assert "BOS is token 1 of its tokenizer and 7 in config.json" in result.err
