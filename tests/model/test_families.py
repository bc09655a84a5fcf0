"""Sites of tiny models of many families against plain hooks and the sum of a block's parts; multimodal models; weights
with which later blocks read the residual stream."""

from ast import literal_eval
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import CommandLine
from tiny_models import loaded, save_model
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from saecli.base.errors import ConfigError
from saecli.model.blocks import weights_read
from saecli.model.language_model import LanguageModel, modules_of
from saecli.model.source import find_model
from saecli.splice.passes import Passes
from saecli.store.origin import SITES, HookPoint


def sized(names: dict[int, str]) -> dict[str, int]:
    """Settings of a configuration, from the words that name those of each value."""
    return {name: value for value, words in names.items() for name in words.split()}


# For all families; each takes what it knows.
TINY = {
    **sized(
        {
            128: "vocab_size",
            64: "max_position_embeddings n_positions mamba_d_ssm",
            48: "intermediate_size intermediate_size_mlp shared_intermediate_size ffn_dim",
            32: "hidden_size n_embd d_model word_embed_proj_dim",
            16: "moe_intermediate_size shared_expert_intermediate_size",
            8: "head_dim mamba_n_heads mamba_d_head mamba_d_state mamba_chunk_size linear_key_head_dim "
            "linear_value_head_dim",
            4: "num_attention_heads n_head n_heads sliding_window num_experts num_local_experts "
            "rotary_dim state_size linear_num_value_heads",
            2: "num_hidden_layers n_layer n_layers num_key_value_heads num_experts_per_tok "
            "interleave_moe_layer_step attn_layer_period linear_num_key_heads eos_token_id",
            1: "attn_layer_offset mamba_n_groups bos_token_id",
            0: "pad_token_id",
        }
    ),
    "partial_rotary_factor": 1.0,
    "attention_types": [[["global", "local"], 1]],
    "attn_layer_indices": [1],
    "use_mamba_kernels": False,
}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
OWN = {
    "qwen3_next": LINEAR,
    "qwen3_5_text": LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_local_experts": 0},
}
FAMILIES = {  # by the modules whose input is mlp_in, and whose outputs are mlp_out and attn_out
    "mlp mlp self_attn": "llama mistral qwen2 qwen3 gemma phi phi3 granite smollm3 starcoder2 stablelm ernie4_5 "
    "nemotron cohere2 mixtral qwen3_moe gpt_oss olmoe qwen3_next qwen3_5_text mamba",
    "mlp post_feedforward_layernorm post_attention_layernorm": "gemma2 gemma3_text olmo2 olmo3 exaone4",
    "mlp post_mlp_layernorm post_self_attn_layernorm": "glm4",
    "mlp post_mlp_layernorm post_attention_layernorm": "afmoe",
    "fc1 fc2 self_attn": "opt",
    "mlp mlp attn": "gpt2 gptj gpt_neo",
    "mlp mlp attention": "gpt_neox",
    "ffn ffn.down_proj attn": "mpt",
    "mlp mlp.dense_4h_to_h self_attention.dense": "bloom",
    "feed_forward feed_forward self_attn": "llama4_text lfm2 bamba jamba",
    "feed_forward feed_forward none": "falcon_h1",
    "block_sparse_moe block_sparse_moe self_attn": "granitemoe",
    "shared_mlp shared_mlp self_attn": "granitemoehybrid",
    "none none self_attn": "granitemoeshared",
}
# The module whose input is resid_mid: the norm between attention and MLP, or where norms follow them the MLP; "" where
# they are side by side.
MIDDLE = {
    **dict.fromkeys(("gemma2", "gemma3_text"), "pre_feedforward_layernorm"),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), "mlp"),
    **dict.fromkeys(("bamba", "jamba", "falcon_h1"), "pre_ff_layernorm"),
    **dict.fromkeys(("gpt2", "gpt_neo"), "ln_2"),
    **dict.fromkeys(("phi", "cohere2", "mamba", "gptj", "gpt_neox"), ""),
    "opt": "final_layer_norm",
    "afmoe": "pre_mlp_layernorm",
    "mpt": "norm_2",
    "lfm2": "ffn_norm",
}
PROJECTION = {  # of attention, whose input is attn_z
    **dict.fromkeys(("phi", "nemotron_h"), "self_attn.dense"),
    **dict.fromkeys(("opt", "lfm2"), "self_attn.out_proj"),
    **dict.fromkeys(("gptj", "mpt"), "attn.out_proj"),
    "gpt2": "attn.c_proj",
    "gpt_neo": "attn.attention.out_proj",
    "gpt_neox": "attention.dense",
    "bloom": "self_attention.dense",
}
INPUTS = ("mlp_in", "resid_mid", "attn_z")
# Names of norms before attention and the MLP, on norms after them; parallel blocks with two norms; BLOOM's second norm
# on the residual stream itself. With the module that has resid_mid, and its side.
DECEPTIVE = {
    "opt do_layer_norm_before=False": ("self_attn_layer_norm", "out"),
    "openai-gpt": ("ln_1", "out"),
    "bloom apply_residual_connection_post_layernorm=True": ("mlp", "in"),
    "gpt_neox use_parallel_residual=True": None,
    "stablelm use_parallel_residual=True": None,
    "gpt_neox use_parallel_residual=False": ("post_attention_layernorm", "in"),
    "granite residual_multiplier=0.3": ("post_attention_layernorm", "in"),
    "xglm": ("final_layer_norm", "in"),
    "ctrl": ("layernorm2", "in"),
}
READ = {"gpt_neox", "stablelm", "granite", "xglm", "ctrl"}  # by norms
QUICK = ("gpt2", "gpt_neox", "llama", "gemma2")
VISION = sized(
    {
        64: "intermediate_size",
        32: "hidden_size vision_output_dim projector_input_dim projector_output_dim out_hidden_size",
        28: "image_size",
        14: "patch_size",
        4: "num_attention_heads num_heads",
        2: "num_hidden_layers depth",
    }
) | {"deepstack_visual_indexes": [0]}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
TOKENS = torch.randint(3, 64, (3, 9), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(9) < torch.tensor([9, 6, 9])[:, None]).long()
NEWER = "a newer transformers has it"
WHOLE = {"attention_mask": MASK, "use_cache": False, "output_hidden_states": True}


def cases(families: Mapping[str, str], quick: Collection[str]) -> list[Any]:
    """Each family with the words that stand for it in the table; slow, unless quick."""
    params = []
    for words, names in families.items():
        for family in names.split():
            absent = pytest.mark.skipif(family not in CONFIG_MAPPING, reason=NEWER)
            marks = [absent] if family in quick else [absent, pytest.mark.slow]
            params.append(pytest.param(family, words, marks=marks))
    return params


def tiny_config(family: str) -> Any:
    return AutoConfig.for_model(family, **TINY | OWN.get(family, {}))


@pytest.mark.parametrize(("family", "paths"), cases(FAMILIES, QUICK))
def test_every_site_is_what_hooks_see_and_can_be_replaced(family: str, paths: str, tmp_path: Path):
    model, seen = loaded(save_model(tmp_path, tiny_config(family)), head=True), {}
    for layer, block in enumerate(model.blocks):

        def hook(_: Any, args: tuple, kwargs: dict, out: Any, layer: int, site: str) -> None:
            given = args[0] if args else kwargs["hidden_states"]
            found = given if site in INPUTS else out[0] if isinstance(out, tuple) else out
            if found.shape[:-1].numel() == TOKENS.numel():  # not one token of `Passes`
                seen[layer, site] = found.reshape(3, 9, -1).clone()

        mlp_in, mlp_out, attn_out = paths.split()
        modules = dict(block.named_modules())
        own_paths = {
            "mlp_in": mlp_in,
            "mlp_out": mlp_out,
            "attn_out": attn_out,
            "resid_post": "",
            "resid_mid": MIDDLE.get(family, "post_attention_layernorm") or "none",
            "attn_z": PROJECTION.get(family, "self_attn.o_proj"),
        }
        for site, path in own_paths.items():
            if path in modules:
                own = partial(hook, layer=layer, site=site)
                modules[path].register_forward_hook(own, with_kwargs=True)
    states = model.model(TOKENS, **WHOLE).hidden_states
    if family == "mamba":  # whose states are those after a block
        states = (model.model.get_input_embeddings()(TOKENS), *states)
    torch.testing.assert_close(states[1], seen[0, "resid_post"], rtol=0, atol=0)
    seen |= {(layer, "resid_pre"): states[layer] for layer in (0, 1)}
    clean, plain = model.logits(TOKENS, MASK), dict(seen)

    passes, repeated = Passes(model), 0

    def read(layer: int, site: str) -> torch.Tensor:
        return model.read(TOKENS, MASK, [HookPoint(layer, site)], torch.clone)[0][MASK == 1]

    for layer in (0, 1):
        for site in SITES:
            if (layer, site) in plain:
                assert torch.equal(read(layer, site), plain[layer, site][MASK == 1])
                with model.modules.intercepted(HookPoint(layer, site), torch.clone):
                    torch.testing.assert_close(model.logits(TOKENS, MASK), clean, rtol=0, atol=0)
                point = HookPoint(layer, site)
                with model.modules.intercepted(HookPoint(layer, site), torch.zeros_like):
                    zeroed = model.logits(TOKENS, MASK)
                assert not torch.allclose(zeroed, clean, atol=1e-3)
                blocks = passes.repeatable([point], TOKENS)
                with passes.recording({blocks} - {0}) as recorded:
                    passes.states(TOKENS, MASK)
                zeros = {point: lambda _, x: torch.zeros_like(x)}
                states = passes.states(TOKENS, MASK, zeros, recorded.get(blocks))
                in_parts = passes.logits(states.flatten(0, 1)).view_as(zeroed)
                torch.testing.assert_close(in_parts, zeroed, rtol=1e-4, atol=1e-4)
                repeated += blocks
            else:
                with pytest.raises(ConfigError, match="use resid_post or resid_pre"):
                    read(layer, site)
        if (layer, "resid_mid") in plain and (layer, "attn_out") in plain:
            middle = read(layer, "resid_pre") + read(layer, "attn_out")
            assert (middle - read(layer, "resid_mid")).abs().max() < 1e-3
            if (layer, "mlp_out") not in plain:
                continue
            other = torch.randn(3, 9, 32, generator=torch.Generator().manual_seed(layer))
            with model.modules.intercepted(HookPoint(layer, "resid_mid"), lambda _, x=other: x):
                after, added = read(layer, "resid_post"), read(layer, "mlp_out")
            assert (after - added - other[MASK == 1]).abs().max() < 1e-3
        if (layer, "mlp_out") in plain:
            with model.modules.intercepted(HookPoint(layer, "mlp_out"), torch.zeros_like):
                without = read(layer, "resid_post")
            assert (without + read(layer, "mlp_out") - read(layer, "resid_post")).abs().max() < 1e-3
            if (layer, "attn_out") in plain:
                added = read(layer, "resid_pre") + read(layer, "attn_out")
                assert (added - without).abs().max() < 1e-3
    assert repeated


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "llama4", "qwen3_vl"])
def test_a_multimodal_model_is_read_and_spliced(sae: CommandLine, tmp_path: Path, family: str):
    if family not in CONFIG_MAPPING:
        pytest.skip(NEWER)
    text_config = TINY | {"rope_parameters": ROPE}
    config = AutoConfig.for_model(family, text_config=text_config, vision_config=VISION)
    folder = save_model(tmp_path / family, config, loader=AutoModelForImageTextToText)
    model = loaded(folder, head=True)
    states = model.model(TOKENS, **WHOLE).hidden_states
    (found,) = model.read(TOKENS, MASK, [HookPoint(1, "resid_pre")], torch.clone)
    torch.testing.assert_close(found, states[1], rtol=0, atol=0)
    (tmp_path / "text.txt").write_text("\n\n".join("abcdefghij"[n % 7 :] for n in range(200)))
    line = f"extract --model {folder} --dataset {tmp_path}/text.txt --name rows"
    assert sae(line).status == 0
    assert sae("train --data rows --act topk --k 4 --steps 9 --name run").status == 0
    assert sae("eval", "run", "--model", folder, "--json").json["runs"][0]["kl"] > 0


@pytest.mark.parametrize("case", [*DECEPTIVE])
def test_the_middle_of_a_block_is_what_its_output_depends_on(case: str, tmp_path: Path):
    family, _, setting = case.partition(" ")
    config = tiny_config(family)
    if setting:
        name, value = setting.split("=")
        setattr(config, name, literal_eval(value))
    model, point = loaded(save_model(tmp_path, config), head=True), HookPoint(0, "resid_mid")
    point_post = HookPoint(0, "resid_post")
    assert (model.reads(point_post) is not None) == (family in READ)
    if DECEPTIVE[case] is None:
        with pytest.raises(ConfigError, match="--site resid_mid is unknown"):
            model.modules.at(point)
        return
    path, side = model.modules.at(point)
    assert (path.split(".0.")[1], side) == DECEPTIVE[case]
    x = [torch.randn(3, 9, 32, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    found = {}
    for number, middle in product((0, 1), (None, 2, 3)):
        with ExitStack() as hooks:
            at_input = model.modules.intercepted(HookPoint(0, "resid_pre"), lambda _: x[number])  # noqa: B023
            hooks.enter_context(at_input)
            own = lambda m: m if middle is None else x[middle]  # noqa: B023, E731
            hooks.enter_context(model.modules.intercepted(point, own))
            found[number, middle] = model.read(TOKENS, MASK, [point_post], torch.clone)[0][
                MASK == 1
            ]
    assert (found[0, None] - found[1, None]).abs().max() > 0.1
    assert (found[0, 2] - found[0, 3]).abs().max() > 0.1
    torch.testing.assert_close(found[0, 2], found[1, 2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["hyperclovax", "lfm3"])
def test_an_output_with_a_norm_before_it_is_added_is_no_addition(family: str, tmp_path: Path):
    if family not in CONFIG_MAPPING:
        pytest.skip(NEWER)
    model = loaded(save_model(tmp_path, tiny_config(family)))
    with pytest.raises(ConfigError, match="--site mlp_out is unknown in a"):
        model.modules.at(HookPoint(0, "mlp_out"))


@pytest.mark.parametrize(("family", "paths"), cases(FAMILIES, QUICK))
def test_first_blocks_have_rows_and_reads_of_the_whole(family: str, paths: str, tmp_path: Path):
    source = find_model(str(save_model(tmp_path, tiny_config(family))))
    cpu, point = torch.device("cpu"), HookPoint(0, "resid_post")
    whole, part = LanguageModel(source, cpu, head=True), LanguageModel(source, cpu, last=0)
    assert len(part.blocks) == 1
    points = [HookPoint(0, site) for site in {*part.modules.sites.values()}]
    rows = [model.read(TOKENS, MASK, points, torch.clone) for model in (whole, part)]
    torch.testing.assert_close(*rows, rtol=1e-5, atol=1e-5)
    reads = [model.reads(point) for model in (whole, part)]
    assert reads[0] is reads[1] is None or torch.equal(*reads)
    assert modules_of(source).streams == whole.modules.streams


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
