"""Effects of a splice, computed in parts, against plain transformers with an own hook in float64."""

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import CommandLine, random_sae
from plain_hooks import assert_same_effects, effects_by_hooks, replaced
from tiny_models import loaded, save_model
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, Gemma3nTextConfig

from saecli.extract import passes as measured
from saecli.extract.language_model import LanguageModel
from saecli.extract.model_source import find_model
from saecli.extract.options import BUNDLED, TINY_GEMMA2, HookPoint
from saecli.extract.passes import CleanPass, Passes, effects
from saecli.extract.splice import StoredWindow

SITES = {"resid_post": "", "mlp_out": "post_feedforward_layernorm", "resid_pre": ""}
PLACES = [(2, "resid_post"), (1, "mlp_out"), (0, "resid_post"), (0, "resid_pre"), (3, "resid_pre")]


@pytest.fixture(scope="module")
def gemma() -> LanguageModel:
    return LanguageModel(find_model(TINY_GEMMA2), torch.device("cpu"), head=True, dtype="float32")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that end within the windows."""
    monkeypatch.setattr(measured, "BLOCK_LOGITS", 50 * 4096)
    monkeypatch.setattr(measured, "CACHED_LOGITS", 7 * 4096)


def windows_of(model: LanguageModel, texts: list[str]) -> list[StoredWindow]:
    found = []
    for number, text in enumerate(texts):
        token_ids = np.array(model.tokenizer(text)["input_ids"][: 20 + 7 * number])
        replaced = np.random.default_rng(number).random(len(token_ids)) < 0.9
        replaced[0] = False
        found.append(StoredWindow(token_ids, replaced))
    return found


@pytest.fixture(scope="module")
def windows(gemma: LanguageModel) -> list[StoredWindow]:
    return windows_of(gemma, [inspect.getdoc(thing) for thing in (dict, list, str, json.dumps)])


def exact_model() -> Any:
    settings = {"dtype": torch.float64, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(BUNDLED[TINY_GEMMA2], **settings)


@pytest.mark.parametrize(("layer", "site"), PLACES)
def test_effects_are_those_of_a_hook_in_float64(
    layer: int, site: str, gemma: LanguageModel, windows: list[StoredWindow], small_blocks: None
):
    saes = [random_sae(d_in=gemma.source.d_model, seed=seed) for seed in (0, 1)]
    place = (HookPoint(layer, site),)
    found = effects([Passes(gemma)], windows, place, [place], saes, lambda tokens: None)
    model = exact_model()
    module = model.model.layers[layer].get_submodule(SITES[site])
    side = "in" if site == "resid_pre" else "out"
    for (got,), sae in zip(found, saes, strict=True):
        expected = effects_by_hooks(model, module, windows, sae.copy_to(torch.float64), side)
        assert_same_effects(got, expected, rel=1e-5)


@pytest.mark.parametrize("objective", ["kl", "ce"])
def test_the_gradient_is_that_of_plain_torch(
    objective: str, gemma: LanguageModel, windows: list[StoredWindow], small_blocks: None
):
    place = (HookPoint(2, "resid_post"),)
    clean = CleanPass(Passes(gemma), windows, place, place)
    y_hat = (clean.x + 0.3 * torch.randn_like(clean.x)).requires_grad_()
    states = clean.spliced(y_hat)
    value, slope = clean.descent(states.detach(), objective)
    states.backward(slope)
    model = exact_model()
    exact = y_hat.detach().double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    given = iter(exact.split([int(window.replaced.sum()) for window in windows]))
    for window in windows:
        token_ids, rows = map(torch.from_numpy, window)
        own = next(given)
        with torch.no_grad():
            p = model(input_ids=token_ids[None]).logits[0].log_softmax(-1)
        replace = lambda x, own=own, rows=rows: x[0].index_put((rows,), own)[None]  # noqa: E731
        with replaced(model.model.layers[2], replace):
            q = model(input_ids=token_ids[None]).logits[0].log_softmax(-1)
        if objective == "kl":
            total = total + (p.exp() * (p - q)).sum(-1)[rows].sum()
        else:
            nll = functional.nll_loss(q[:-1], token_ids[1:], reduction="none")
            total = total + nll[rows[:-1]].sum()
    total.backward()
    assert float(value) == pytest.approx(float(total.detach()), rel=1e-5)
    torch.testing.assert_close(y_hat.grad.double(), exact.grad, rtol=1e-3, atol=1e-5)


def test_blocks_below_the_hook_point_run_once(gemma: LanguageModel, windows: list[StoredWindow]):
    runs = dict.fromkeys(range(gemma.source.layers), 0)

    def count(layer: int, module: nn.Module, args: Any) -> None:
        runs[layer] += 1

    place, passes = (HookPoint(1, "resid_post"),), Passes(gemma)
    passes.repeatable(place, torch.from_numpy(windows[0].token_ids)[None])
    passes.logits(torch.zeros(1, 128))
    handles = [
        block.self_attn.register_forward_hook(
            lambda module, args, output, layer=layer: count(layer, module, args)
        )
        for layer, block in enumerate(gemma.blocks)
    ]
    effects([passes], windows, place, [place], [random_sae(d_in=128)], lambda tokens: None)
    for handle in handles:
        handle.remove()
    assert runs == {0: 1, 1: 1} | dict.fromkeys(range(2, gemma.source.layers), 3)


def test_layers_that_share_keys_and_values_are_all_run(tmp_path: Path):
    sizes = {"vocab_size": 128, "hidden_size": 16, "intermediate_size": 32, "head_dim": 8}
    per_layer = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_kv_shared_layers": 2}
    config = Gemma3nTextConfig(
        **sizes,
        **per_layer,
        **heads,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
        laurel_rank=4,
    )
    found = loaded(save_model(tmp_path, config), head=True)
    passes = Passes(found)
    token_ids = torch.randint(3, 64, (2, 9))
    mask = torch.ones_like(token_ids)
    point = HookPoint(2, "mlp_in")
    hooks = {point: lambda _, activations: activations * 0.5}
    blocks = passes.repeatable([point], token_ids)
    _, kept = passes.states(token_ids, mask, keep={blocks} - {0})
    states, _ = passes.states(token_ids, mask, hooks, below=kept.get(blocks))
    with found.modules.intercepted(HookPoint(2, "mlp_in"), lambda activations: activations * 0.5):
        whole = found.logits(token_ids, mask)
    torch.testing.assert_close(passes.logits(states.flatten(0, 1)), whole.flatten(0, 1))


@pytest.mark.parametrize("kind", ["bert", "esm"])
def test_a_model_that_sees_later_tokens_is_refused(kind: str, sae: CommandLine, tmp_path: Path):
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, num_hidden_layers=2, num_attention_heads=2, **sizes)
    folder = save_model(tmp_path / "model", config, loader=AutoModelForMaskedLM)
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join("abcdefghij" * 3 for _ in range(60)))
    words = ("--dataset", text, "--context", "12", "--layer", "1")
    assert sae("extract", "--model", folder, *words).status == 0
    assert sae("train", "--act", "topk", "--k", "2", "--d-sae", "8", "--epochs", "1").status == 0
    steer = ("steer", "--latent", "1", "--scale", "1", "--prompt", "abc")
    report = ("report", "--out", tmp_path / "pages")
    for command in (("eval",), ("finetune",), steer, report):
        done = sae(*command, "--model", folder)
        assert done.status == 1
        assert "expected a causal language model" in done.err.splitlines()[-1]
    assert not (tmp_path / "pages").exists()
