"""Modules by name as hook points, from stores to effects in the model, against own hooks on transformers' models."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import CommandLine, random_sae, steerable
from plain_hooks import but_first, effects_by_hooks, noted, replaced
from tiny_models import LAYERS, VOCABULARY, open_model, save_model, stored
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import saecli
from saecli.base.errors import ConfigError, ModelError

TOKENS = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
TEXT = "\n\n".join("abcdefghijklmnop"[n % 9 :] for n in range(200))
DOWN = "model.layers.*.mlp.down_proj:in"


def own_hook(model: Any, path: str, side: str, ids: Tensor) -> Tensor:
    """What a plain hook sees there, (B, T, D)."""
    with noted(model.get_submodule(path), side) as seen:
        model(ids)
    return seen[0]


@pytest.mark.parametrize(
    ("architecture", "module", "side", "names"),
    [
        ("llama", "model.layers.*.mlp.down_proj", "in", "l{}-mlp.down_proj-in"),
        ("llama", "model.layers.*.self_attn.k_proj", "out", "l{}-self_attn.k_proj-out"),
        ("gemma2", "model.layers.*.self_attn", "out", "l{}-self_attn-out"),  # a tuple
        ("gpt2", "transformer.h.*.mlp.c_fc", "out", "l{}-mlp.c_fc-out"),
        ("gpt2", "transformer.ln_f", "in", "transformer.ln_f-in"),
        ("gpt-neox", "gpt_neox.layers.*.attention.dense", "in", "l{}-attn_z"),
    ],
)
def test_a_modules_store_is_what_hooks_see(sae, tmp_path, text, architecture, module, side, names):
    folder = save_model(tmp_path / "model", architecture)
    words = ("--model", folder, "--dataset", text, "--module", f"{module}:{side}")
    done = sae("extract --rows 500 --dtype float32 --context 12 --name s --json", *words)
    stores = done.json.get("stores", [done.json])
    layers = range(LAYERS) if "*" in module else [0]
    assert [store["name"] for store in stores] == (
        [f"s-{names.format(layer)}" for layer in layers] if "*" in module else ["s"]
    )
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    for layer, store in zip(layers, stores, strict=True):
        path = module.replace("*", str(layer))
        assert store["source"]["module"] == f"{path}:{side}"
        rows, columns = stored(sae.home / "activations" / store["name"])
        first = columns["document"] == 5
        ids = torch.tensor([[1, *columns["token_id"][first]]])
        expected = own_hook(model, path, side, ids)[0, 1:]
        torch.testing.assert_close(torch.from_numpy(rows[first]), expected, rtol=1e-4, atol=1e-5)
    again = sae("extract --rows 500 --dtype float32 --context 12 --name s --json", *words)
    assert all(store["cached"] for store in again.json.get("stores", [again.json]))


@pytest.mark.slow
def test_the_module_of_a_site_is_that_site(sae: CommandLine, tmp_path: Path, text: Path):
    folder = save_model(tmp_path / "gemma", "gemma2")
    words = ("extract --rows 200 --json", "--model", folder, "--dataset", text)
    for site, module in (
        ("resid_post", "model.layers.1"),
        ("resid_pre", "model.layers.1:in"),
        ("resid_mid", "layers.1.pre_feedforward_layernorm:in"),  # as in the model without a head
        ("attn_z", "model.layers.1.self_attn.o_proj:in"),
        ("mlp_out", "model.layers.1.post_feedforward_layernorm"),
    ):
        by_site = sae(*words, "--layer", "1", "--site", site).json
        by_name = sae(*words, "--module", module).json
        assert by_name["cached"] and by_name["name"] == by_site["name"]


def replaced_by_hand(model: Any, path: str, replace: Callable[[Tensor], Tensor]) -> Tensor:
    """The logits with a module's input replaced but for the first token."""
    with replaced(model.get_submodule(path), lambda x: but_first(x, replace(x)), "in"):
        return model(TOKENS).logits


def test_spliced_and_steering_act_at_a_module(tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path, "llama"))
    path, sae = "model.layers.1.mlp.down_proj", random_sae(d_in=24)
    expected = replaced_by_hand(model, path, sae)
    with saecli.spliced(model, {f"{path}:in": sae}, error=False) as codes:
        torch.testing.assert_close(model(TOKENS).logits, expected)
    assert torch.equal(codes[0], sae.encode(own_hook(model, path, "in", TOKENS)))
    sae = steerable(d_in=24)
    expected = replaced_by_hand(model, path, lambda x: x + 3 * sae.W_dec[4])
    with saecli.steering(model, sae, 4, scale=3, module=f"{path}:in"):
        torch.testing.assert_close(model(TOKENS).logits, expected)


@pytest.mark.slow
def test_from_a_store_of_a_module_to_its_effect(sae: CommandLine, tmp_path: Path, text: Path):
    folder = save_model(tmp_path / "model", "llama")
    words = ("--model", folder, "--dataset", text, "--module", DOWN.replace("*", "1"))
    assert sae("extract --rows 900 --context 12 --name rows", *words).status == 0
    assert sae("train --act topk --k 4 --d-sae 48 --steps 30 --name run").status == 0
    (measured,) = sae("eval run --json --model", folder).json["runs"]
    trained = saecli.load_sae("run", home=sae.home)
    assert trained.metadata["site"] == "mlp.down_proj:in" and trained.d_in == 24
    model = AutoModelForCausalLM.from_pretrained(folder)
    windows = [*saecli.open_store("rows", home=sae.home).split("test").windows()]
    module = model.get_submodule("model.layers.1.mlp.down_proj")
    expected = effects_by_hooks(model, module, windows, trained, "in")["kl"]
    assert measured["kl"] == pytest.approx(expected, rel=1e-3) and measured["kl"] > 0
    document = sae("read run --json --prompt abcabc").json
    assert (document["layer"], document["site"]) == (1, "mlp.down_proj:in")
    steered = sae("steer run --latent 3 --scale 9 --prompt abc --max-new-tokens 3")
    assert "layer 1, mlp.down_proj:in" in steered.out
    assert sae("finetune run --tokens 400 --name tuned").status == 0
    sae("finetune run --tokens 400 --name streamed --context 12 --dataset", text).succeeds()
    for tuned in ("tuned", "streamed"):
        assert saecli.load_sae(tuned, home=sae.home).metadata["site"] == "mlp.down_proj:in"
    reported = sae("report run --json --out", tmp_path / "page", "--model", folder).json
    assert "mlp.down_proj:in is not in the residual stream" in " ".join(reported["notes"])
    exported = sae("export run --to saelens --out", tmp_path / "out").succeeds()
    assert "run is written for layers.1.mlp.down_proj:in" in exported.err
    origin = saecli.load_sae(tmp_path / "out").metadata
    assert (origin["layer"], origin["site"]) == (1, "mlp.down_proj:in")


@pytest.mark.slow
def test_a_module_outside_of_blocks_is_trained_on(sae: CommandLine, tmp_path: Path, text: Path):
    folder = save_model(tmp_path / "model", "llama")
    words = ("--model", folder, "--dataset", text, "--module", "model.embed_tokens")
    train = "train --act topk --k 4 --d-sae 48 --name run --rows 900 --context 12"
    assert sae(train, *words).status == 0
    config = sae.home / "runs" / "run" / "config.toml"
    assert 'module = "model.embed_tokens:out"' in config.read_text()
    assert sae("train --name again --config", config).status == 0
    command = shlex.split(sae("eval", "run").err.split("`")[1])
    assert sae(*command[1:]).status == 0
    (measured,) = sae("eval run --json --model", folder).json["runs"]
    assert measured["kl"] > 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows, columns = stored(next((sae.home / "activations").iterdir()))
    expected = model.get_input_embeddings()(torch.from_numpy(columns["token_id"]).long())
    np.testing.assert_allclose(rows, expected.detach().numpy(), rtol=1e-2)
    wrong = sae(train.replace("run", "wrong"), *words[:-1], "model.layers.*.mlp")
    assert "must name one module here, got 3" in wrong.err
    assert "--site must be 'resid_post'" in sae(train, *words[:4], "--site", "mlp").err
    for line in ("sparsity run", "read run --prompt abc", "list"):
        assert sae(line).status == 0
    assert sae("export run --to saelens --out", tmp_path / "out").status == 0
    exported = saecli.load_sae(tmp_path / "out").metadata
    assert "layer" not in exported and exported["site"] == "model.embed_tokens:out"


def test_an_sae_of_no_hook_point_is_used_at_a_module(sae: CommandLine, tmp_path: Path, text: Path):
    model = save_model(tmp_path / "model", "llama")
    saecli.save_sae(random_sae(d_in=24), tmp_path / "sae")
    words = (tmp_path / "sae", "--model", model, "--module", "model.layers.2.mlp.down_proj:in")
    for line in (
        "read --prompt abc",
        "steer --latent 1 --prompt abc --scale 3 --max-new-tokens 2",
        f"finetune --tokens 200 --name tuned --dataset {text} --context 12",
    ):
        sae(line, *words).succeeds()
    wrong = sae("read --prompt abc --layer 1", *words)
    assert "cannot use both --module and --layer" in wrong.err
    wrong = sae("read --prompt abc", *words[:-1], "model.layers.2.mlp:in")
    assert "24" in wrong.err and "16" in wrong.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--module model.layers.1.self_attn.o_porj:in", "mean model.layers.1.self_attn.o_proj"),
        ("--module model.layers.*.mpl", "did you mean model.layers.*.mlp"),
        ("--module model.layers.1:up", "then :in or :out"),
        ("--module model.layers.7", "must be the name of a module"),
        ("--module model.layers.1.mlp --site mlp_in", "cannot use both --module and --layer or"),
        ("--module model.layers.1.mlp --layer 1", "cannot use both --module and --layer or"),
        ("--module model.embed_tokens:in", "model.embed_tokens:in is no hook point"),
        ("--module model.rotary_emb", "got float32 (1, "),
        ("--list-modules --rows 3", "--rows does nothing with --list-modules"),
        ("--list-modules --model tiny-gemma2", "--list-modules takes one --model, got 2"),
    ],
)
def test_modules_that_cannot_be_read_are_refused(sae, tmp_path, text, words, sentence):
    folder = save_model(tmp_path / "model", "llama")
    given = () if "--list" in words else ("--dataset", text, "--rows", "50")
    sae("extract --model", folder, *shlex.split(words), *given).fails(2, sentence)


def run_spliced(model: Any, module: str) -> None:
    with saecli.spliced(model, {module: random_sae(d_in=24)}):
        model(TOKENS)


def test_modules_without_a_tensor_or_that_never_run_are_refused(tmp_path: Path):
    model = open_model(tmp_path)
    with pytest.raises(ConfigError, match="got a BaseModelOutputWithPast"):
        run_spliced(model, "model:out")
    model.model.unused = torch.nn.Linear(24, 24)
    with pytest.raises(ModelError, match="unused:out never ran"):
        run_spliced(model, "model.unused")


@pytest.mark.slow
def test_a_module_of_a_compiled_model_is_refused(tmp_path: Path):
    model = open_model(tmp_path)
    model.model.layers[1].mlp.forward = lambda x, plain=model.model.layers[1].mlp.forward: plain(x)
    model.model.layers[1].self_attn.q_proj.forward = lambda input: input.expand(3, 2, 9, 16)[0]
    compiled = torch.compile(model, backend="eager")
    compiled(TOKENS)
    with pytest.raises(ModelError, match="by a model that is not compiled"):
        run_spliced(compiled, "_orig_mod.model.layers.1.mlp.down_proj:in")


def test_list_modules_names_modules_and_the_sites_among_them(sae: CommandLine, tmp_path: Path):
    folder = save_model(tmp_path, "gemma2")
    (folder / "model.safetensors").unlink()  # needs no weights
    listed = sae("extract --list-modules --json --model", folder).json["modules"]
    assert "model.layers" not in [line["module"] for line in listed]  # a list, which never runs
    for line in listed:
        assert line["layers"] == (list(range(LAYERS)) if "layers." in line["module"] else [])
    sites = {line[side]: f"{line['module']}:{side}" for line in listed for side in ("in", "out")}
    assert sites["attn_z"] == "model.layers.*.self_attn.o_proj:in"
    assert sites["mlp_out"] == "model.layers.*.post_feedforward_layernorm:out"
    assert sites["resid_mid"] == "model.layers.*.pre_feedforward_layernorm:in"
    shown = sae("extract --list-modules --model", folder).out
    assert "model.layers.*.mlp.gate_proj" in shown and "0 to 2" in shown


def test_a_loaded_model_is_read_at_its_modules(tmp_path: Path, text: Path):
    folder = save_model(tmp_path / "model", "llama")
    model, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    options = {"dataset": (str(text),), "rows": 100, "home": tmp_path, "dtype": "float32"}
    stores = saecli.extract(model, tokenizer=tokenizer, module=DOWN, **options)
    named = saecli.extract(str(folder), module=[DOWN], **options)
    for ours, theirs in zip(stores, named, strict=True):
        assert ours.meta.source["module"] == theirs.meta.source["module"]
        rows = [next(store.split("all").sequential(100)) for store in (ours, theirs)]
        np.testing.assert_array_equal(*rows)
