"""Weights with which a model's later blocks read the residual stream, of tiny models of many families."""

from pathlib import Path

import pytest
import torch
from test_families import MASK, TOKENS, cases, tiny_config
from tiny_models import loaded, save_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from saecli.model.blocks import weights_read
from saecli.store.origin import HookPoint

NORMS = {
    "input_layernorm post_attention_layernorm": "llama gemma phi3 mixtral gpt_neox bloom stablelm",
    "input_layernorm pre_feedforward_layernorm": "gemma2 gemma3_text",
    "input_layernorm pre_ff_layernorm": "jamba falcon_h1",
    "input_layernorm": "phi cohere2",
    "ln_1 ln_2": "gpt2 gpt_neo",
    "ln_1": "gptj",
    "norm_1 norm_2": "mpt",
    "self_attn_layer_norm final_layer_norm": "opt",
    "operator_norm ffn_norm": "lfm2",
    "": "olmo2 exaone4",
}
FAST = ("llama", "gemma2", "gpt2", "olmo2")


def save_with_random_norms(folder: Path, family: str) -> None:
    save_model(folder, tiny_config(family))
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(3)
    with torch.no_grad():
        for module in model.modules():
            if "norm" in type(module).__name__.lower():
                for parameter in module.parameters():
                    parameter.uniform_(0.5, 2)
    model.save_pretrained(folder)


def measured_factor(norm: nn.Module) -> Tensor:
    """What a norm multiplies each dimension of its normalised input by, (D,)."""
    x = torch.randn(200, 32, dtype=torch.float32, generator=torch.Generator().manual_seed(1))
    x = x - x.mean(1, keepdim=True)
    normalised = x / x.square().mean(1, keepdim=True).sqrt()
    with torch.no_grad():
        return ((norm(x) - norm(-x)) / 2 / normalised).median(0).values


@pytest.mark.parametrize(("family", "names"), cases(NORMS, FAST))
def test_norms_of_later_blocks_read_the_residual_stream(family: str, names: str, tmp_path: Path):
    save_with_random_norms(tmp_path, family)
    model = loaded(tmp_path, head=True)
    block = model.blocks[1]
    norms = {name: getattr(block, name) for name in names.split()}
    stream = model.modules.streams[1]
    assert (*stream.before, *stream.after) == tuple(norms)
    inputs: dict[str, Tensor] = {}
    hooks = [
        norm.register_forward_pre_hook(
            lambda _, args, name=name: inputs.__setitem__(name, args[0].reshape(3, 9, 32))
        )
        for name, norm in norms.items()
    ]
    model.forward(TOKENS, MASK)
    for hook in hooks:
        hook.remove()
    (stream,) = model.read(TOKENS, MASK, [HookPoint(1, "resid_pre")], torch.clone)
    for x in inputs.values():  # the stream itself, or with the little that attention adds
        assert torch.nn.functional.cosine_similarity(x, stream, dim=-1)[MASK == 1].mean() > 0.5

    reads = model.reads(HookPoint(0, "resid_post"))
    if not names:
        assert reads is None
        return
    expected = torch.stack([measured_factor(norm) for norm in norms.values()])
    torch.testing.assert_close(reads, expected.square().mean(0).sqrt(), rtol=1e-3, atol=1e-3)
    assert torch.equal(model.reads(HookPoint(0, "mlp_out")), reads)
    assert torch.equal(model.reads(HookPoint(1, "resid_pre")), reads)
    own = [getattr(model.blocks[0], name) for name in model.modules.streams[0].after]
    expected = torch.stack([*expected, *map(measured_factor, own)])
    for site in ("attn_out", "resid_mid"):  # the block's own MLP reads them first
        found = model.reads(HookPoint(0, site))
        torch.testing.assert_close(found, expected.square().mean(0).sqrt(), rtol=1e-3, atol=1e-3)
    assert not torch.equal(model.reads(HookPoint(0, "resid_pre")), reads)
    assert model.reads(HookPoint(0, "mlp_in")) is None
    assert model.reads(HookPoint(1, "resid_post")) is None


@pytest.mark.parametrize("weight", [0.0, torch.inf, torch.nan])
def test_norms_that_let_nothing_through_say_nothing_about_reads(weight: float):
    norms = [nn.RMSNorm(4), nn.LayerNorm(4)]
    for norm in norms:
        nn.init.constant_(norm.weight, weight)
    assert weights_read(norms) is None
    nn.init.constant_(norms[0].weight, 1e-30)
    nn.init.constant_(norms[1].weight, 2.0)
    assert (weights_read(norms) > 0).all()
