"""Effects of a splice, in parts and by `sae eval`, against plain transformers with an own hook; changes at copies of
tokens."""

import inspect
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import CommandLine, make_run, random_sae
from plain_hooks import assert_same_effects, blocks, effects_by_hooks, log_p_with, noted, replaced
from tiny_models import DEEP, VOCABULARY, WIDTH, loaded, random_letters, save_model
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    Gemma3nTextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import saecli
from saecli.extract.texts import Document
from saecli.extract.windows import Cutter
from saecli.model import BUNDLED, TINY_GEMMA2
from saecli.model.language_model import LanguageModel
from saecli.model.source import find_model
from saecli.model.windows import stored_windows
from saecli.sae.activations import Relu, TopK
from saecli.sae.dictionary import SAE
from saecli.splice import passes as measured
from saecli.splice.copies import effects_at_copies, longest_window, slopes_at_copies
from saecli.splice.effects import effects
from saecli.splice.passes import CleanPass, Passes
from saecli.store.origin import HookPoint
from saecli.store.values import TextWindow

SITES = {"resid_post": "", "mlp_out": "post_feedforward_layernorm", "resid_pre": ""}
PLACES = [(2, "resid_post"), (1, "mlp_out"), (0, "resid_post"), (0, "resid_pre"), (3, "resid_pre")]


@pytest.fixture(scope="module")
def gemma() -> LanguageModel:
    return LanguageModel(find_model(TINY_GEMMA2), torch.device("cpu"), head=True, dtype="float32")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that end within the windows."""
    monkeypatch.setattr(measured, "LOGITS_AT_ONCE", 50 * 4096)
    monkeypatch.setattr(measured, "CACHED_LOGITS", 7 * 4096)


def windows_of(model: LanguageModel, texts: list[str]) -> list[TextWindow]:
    found = []
    for number, text in enumerate(texts):
        token_ids = np.array(model.tokenizer(text)["input_ids"][: 20 + 7 * number])
        replaced = np.random.default_rng(number).random(len(token_ids)) < 0.9
        replaced[0] = False
        found.append(TextWindow(token_ids, replaced))
    return found


@pytest.fixture(scope="module")
def windows(gemma: LanguageModel) -> list[TextWindow]:
    return windows_of(gemma, [inspect.getdoc(thing) for thing in (dict, list, str, json.dumps)])


def exact_model() -> Any:
    settings = {"dtype": torch.float64, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(BUNDLED[TINY_GEMMA2], **settings)


@pytest.mark.parametrize(("layer", "site"), PLACES)
def test_effects_are_those_of_a_hook_in_float64(layer, site, gemma, windows, small_blocks):
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
def test_the_gradient_is_that_of_plain_torch(objective, gemma, windows, small_blocks):
    place = (HookPoint(2, "resid_post"),)
    clean = CleanPass(Passes(gemma), windows, place, place)
    y_hat = (clean.x + 0.3 * torch.randn_like(clean.x)).requires_grad_()
    states = clean.spliced(y_hat)
    value, slope = clean.descent(states.detach(), objective)
    states.backward(slope)
    model = exact_model()
    exact = y_hat.detach().double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    given = iter(exact.split([int(window.is_row.sum()) for window in windows]))
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


def test_blocks_below_the_hook_point_run_once(gemma: LanguageModel, windows: list[TextWindow]):
    runs: Counter[int] = Counter()
    place, passes = (HookPoint(1, "resid_post"),), Passes(gemma)
    passes.repeatable(place, torch.from_numpy(windows[0].token_ids)[None])
    passes.logits(torch.zeros(1, 128))
    handles = [
        block.self_attn.register_forward_hook(lambda *_, layer=layer: runs.update([layer]))
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
    hooks = {point: lambda _, x: x * 0.5}
    blocks = passes.repeatable([point], token_ids)
    with passes.recording({blocks} - {0}) as recorded:
        passes.states(token_ids, mask)
    states = passes.states(token_ids, mask, hooks, recorded.get(blocks))
    with found.modules.intercepted(point, lambda x: x * 0.5):
        whole = found.logits(token_ids, mask)
    torch.testing.assert_close(passes.logits(states.flatten(0, 1)), whole.flatten(0, 1))


@pytest.mark.parametrize("kind", ["bert", pytest.param("esm", marks=pytest.mark.slow)])
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
        sae(*command, "--model", folder).fails(1, "expected a causal language model")
    assert not (tmp_path / "pages").exists()


CONTEXT, LAYER = 12, 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    return loaded(folder, head=True)


def documents() -> list[Document]:
    """Sixty texts of up to 40 random letters, each of them a token."""
    draw = np.random.default_rng(0)
    return [Document(n, random_letters(draw, draw.integers(1, 40)), None) for n in range(60)]


def extracted(home: Path, model: Path | list[str], **options: Any) -> Any:
    """The stores of all rows of the documents, or some."""
    home.mkdir(exist_ok=True)
    text = home / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": document.text}) for document in documents()))
    options = {"layer": LAYER, "name": "store", "context": CONTEXT, "dtype": "float32"} | options
    model = str(model) if isinstance(model, Path) else model
    return saecli.extract(model, dataset=str(text), home=home, **options)


def cut(model: LanguageModel, texts: list[Document]) -> list[TextWindow]:
    """The windows that extraction makes of texts."""
    windows = Cutter(model.tokenizer, CONTEXT).cut(texts)
    return [TextWindow(window.token_ids, window.is_row) for window in windows]


def test_an_exact_crosscoder_of_unlike_widths_changes_nothing(sae: CommandLine, tmp_path: Path):
    wide = save_model(tmp_path / "wide", LlamaConfig(**DEEP, head_dim=12))
    stores = extracted(sae.home, wide, site=["attn_z", "resid_post"])
    widths = tuple(store.d_in for store in stores)
    assert widths == (24, WIDTH)
    eye, zeros = torch.eye(sum(widths)), torch.zeros(sum(widths))
    exact = SAE(eye, zeros, eye.clone(), zeros.clone(), TopK(k=sum(widths)), widths=widths)
    measures = saecli.evaluate(exact, saecli.join(*stores), model=str(wide), home=sae.home)
    for effect in (measures, *measures["hook_points"]):
        assert effect["ce_spliced"] == pytest.approx(effect["ce_clean"], rel=1e-6)
        assert effect["kl"] == pytest.approx(0, abs=1e-6)
    places = tuple(HookPoint(LAYER, site) for site in ("attn_z", "resid_post"))
    model = loaded(wide, head=True)
    clean = CleanPass(Passes(model), cut(model, documents()[:9]), places, places)
    torch.testing.assert_close(clean.spliced(clean.x), clean.states)


@pytest.mark.slow
def test_a_crosscoder_of_two_is_spliced_into_each(sae: CommandLine, folder: Path, tmp_path: Path):
    llamas = [LlamaForCausalLM.from_pretrained(folder) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in llamas[1].parameters():
            parameter *= 1 + 0.5 * torch.randn(parameter.shape, generator=generator)
    shutil.copytree(folder, tmp_path / "other")
    llamas[1].save_pretrained(tmp_path / "other")
    names = [str(folder), str(tmp_path / "other")]
    stores = extracted(sae.home, names)
    widths = {"activation": Relu(), "widths": (WIDTH, WIDTH)}
    W_enc, b_dec = torch.randn(2 * WIDTH, 9, generator=generator), torch.zeros(2 * WIDTH)
    W_dec = torch.randn(9, 2 * WIDTH, generator=generator)
    cross = SAE(W_enc, torch.zeros(9), W_dec, b_dec, **widths)
    joined = saecli.join(*stores)
    options = {"split": "all", "tokens": 10**6, "home": sae.home}
    measures = saecli.evaluate(cross, joined, model=names[::-1], progress=True, **options)
    assert "kl" not in measures and [each["model"] for each in measures["hook_points"]] == names
    assert None in [each["ce_recovered"] for each in measures["hook_points"]]
    assert "ce_recovered is not defined" in sae.capsys.readouterr().err
    stored = stored_windows(stores[0].split("all"), 10**9)
    windows = list(stored)
    llamas = [llama.double() for llama in llamas]
    exact = cross.copy_to(torch.float64)

    predicted = []
    for window in windows:
        ids = torch.from_numpy(window.token_ids)[None]
        with torch.no_grad():
            outputs = [llama(ids, output_hidden_states=True).hidden_states for llama in llamas]
        predicted.append(exact(torch.cat([states[LAYER + 1][0, 1:] for states in outputs], 1)))
    effects_alone = zip(llamas, cross.hook_columns, measures["hook_points"], strict=True)
    for llama, place, effect in effects_alone:
        y_hat = iter([rows[:, place] for rows in predicted])

        def spliced(x: Tensor, y_hat: Iterator[Tensor] = y_hat) -> Tensor:
            return next(y_hat)

        expected = effects_by_hooks(llama, llama.model.layers[LAYER], windows, spliced)
        assert_same_effects(effect, expected)
    for wrong in (names[:1], [*names[:1], *names[:1]]):
        with pytest.raises(saecli.SaeError, match="model must be given once for each model that"):
            saecli.evaluate(cross, joined, model=wrong, home=sae.home)
    saecli.save_sae(cross, tmp_path / "saved", store=joined)
    with pytest.raises(saecli.SaeError, match="in another order than it was trained on; name"):
        saecli.evaluate(tmp_path / "saved", saecli.join(*stores[::-1]), home=sae.home)


def test_windows_are_taken_until_they_hold_the_tokens_asked_for(sae: CommandLine, folder: Path):
    rows = extracted(sae.home, folder).split("all")
    counts = [window.is_row.sum() for window in stored_windows(rows, 50)]
    assert sum(counts) >= 50 > sum(counts[:-1])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_hidden_layers": 1}, "expected a layer 1, got layers 0 to 0"),
        ({"hidden_size": 32}, "expected activations of 16 dimensions, got 32"),
        ({"max_position_embeddings": 8}, "expected windows of 12 tokens, got at most 8"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_measuring(
    sae: CommandLine,
    folder: Path,
    tmp_path: Path,
    model: LanguageModel,
    changes: dict,
    sentence: str,
    monkeypatch,
):
    extracted(sae.home, folder)
    make_run(sae.home, "random", random_sae(d_in=WIDTH), data="store")
    other = tmp_path / "other"
    config = LlamaConfig(**{**model.source.config.to_dict(), "head_dim": None, **changes})
    LlamaForCausalLM(config).save_pretrained(other)
    model.tokenizer.save_pretrained(other)
    reconstruction = "saecli.measure.evaluate.reconstruction"
    monkeypatch.setattr(reconstruction, lambda *_: pytest.fail("measured first"))
    sae("eval", "--model", other).fails(2, sentence)


@pytest.mark.slow
def test_a_transcoder_acts_as_a_hook_does(sae: CommandLine, folder: Path, model: LanguageModel):
    x, y = extracted(sae.home, folder, site=["resid_pre", "mlp_out"])
    options = {"act": "topk", "k": 4, "d_sae": 24, "epochs": 3, "batch_size": 64, "skip": True}
    stores = saecli.join(x, target=y)
    transcoder = saecli.fit(stores, **options)
    measures = saecli.evaluate(
        transcoder, stores, model=str(folder), split="all", tokens=10**6, home=sae.home
    )
    transcoder = transcoder.copy_to(torch.float64)
    llama = LlamaForCausalLM.from_pretrained(folder).double()
    block = llama.model.layers[LAYER]
    with noted(block, "in") as seen:
        expected = effects_by_hooks(
            llama, block.mlp, cut(model, documents()), lambda y: transcoder(seen[-1][0, 1:])
        )
    assert_same_effects(measures, expected)


TOKENS = torch.randint(4, VOCABULARY, (9,), generator=torch.Generator().manual_seed(0))
AT = torch.tensor([1, 5, 5, 8, 3])


@pytest.mark.parametrize("site", ["resid_post", "mlp_out"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt-neox", "gemma2"])
def test_a_change_at_a_copy_is_a_change_at_the_last_token(tmp_path: Path, kind: str, site: str):
    model = loaded(save_model(tmp_path / kind, kind), head=True)
    passes, point = Passes(model), HookPoint(1, site)
    token_ids = TOKENS[: longest_window(passes, len(TOKENS))]
    at = AT.clamp(max=len(token_ids) - 1)
    draw = torch.Generator().manual_seed(1)
    changes = torch.randn(len(at), WIDTH, generator=draw)
    changes[2] = 0
    followed = torch.randint(0, VOCABULARY, (len(at), 3), generator=draw)
    kl, rise = effects_at_copies(passes, point, token_ids, at, changes, followed)
    block: Any = blocks(model.model)[1]
    after_mlp = "post_feedforward_layernorm" if kind == "gemma2" else "mlp"
    module = block if site == "resid_post" else getattr(block, after_mlp)
    for number, place in enumerate(at.tolist()):
        clean, changed = (
            log_p_with(model.model, module, token_ids[: place + 1], change)
            for change in (torch.zeros(WIDTH), changes[number])
        )
        expected = (clean.exp() * (clean - changed)).sum()
        assert float(kl[number]) == pytest.approx(float(expected), rel=1e-3, abs=2e-6)
        moved = (changed - clean)[followed[number]].mean()
        assert float(rise[number]) == pytest.approx(float(moved), rel=1e-3, abs=1e-5)
    assert kl[0] > 0.01 and abs(kl[2]) < 1e-6
    alone = effects_at_copies(passes, point, token_ids, at, changes, followed[:, :0])
    assert torch.equal(alone[0], kl) and not alone[1].any()


def test_slopes_are_derivatives_of_log_probabilities(tmp_path: Path):
    folder = save_model(tmp_path / "gpt2", "gpt2")
    passes = Passes(loaded(folder, head=True))
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    directions = torch.randn(len(AT), WIDTH, generator=torch.Generator().manual_seed(1))
    found = slopes_at_copies(passes, HookPoint(1, "resid_post"), TOKENS, AT, directions)
    for place, direction, slopes in zip(AT.tolist(), directions.double(), found, strict=True):
        upto, step = TOKENS[: place + 1], 1e-4 * direction
        up, down = (log_p_with(exact, blocks(exact)[1], upto, change) for change in (step, -step))
        torch.testing.assert_close(slopes.double(), (up - down) / 2e-4, rtol=0.01, atol=2e-3)


def test_windows_that_a_mask_of_copies_does_not_fit_are_refused(tmp_path: Path):
    passes = Passes(loaded(save_model(tmp_path / "gemma2", "gemma2"), head=True))
    sliding = passes.model.source.config.sliding_window
    assert longest_window(passes, len(TOKENS)) == sliding < len(TOKENS)
    assert longest_window(passes, 2) == 2
    nothing = torch.zeros(1, WIDTH), torch.zeros(1, 0, dtype=torch.int64)
    with pytest.raises(saecli.SaeError, match="cannot be changed at single tokens"):
        effects_at_copies(passes, HookPoint(1, "resid_post"), TOKENS, AT[:1], *nothing)
