"""Splicing an SAE into a language model, against plain torch on a small real model."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import CommandLine, make_run, random_sae
from plain_hooks import assert_same_effects, effects_by_hooks, noted
from tiny_models import DEEP, WIDTH, loaded, random_letters, save_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import saecli
from saecli.extract.language_model import LanguageModel
from saecli.extract.options import HookPoint
from saecli.extract.passes import CleanPass, Passes
from saecli.extract.splice import StoredWindow, stored_windows
from saecli.extract.texts import Document
from saecli.extract.windows import Windows
from saecli.sae.activations import Relu, TopK
from saecli.sae.dictionary import SAE

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
    return [
        Document(number, random_letters(draw, draw.integers(1, 40)), None) for number in range(60)
    ]


def extracted(home: Path, model: Path | list[str], **options: Any) -> Any:
    """The stores of all rows of the documents, or some."""
    home.mkdir(exist_ok=True)
    text = home / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": document.text}) for document in documents()))
    options = {"layer": LAYER, "name": "store", "context": CONTEXT, "dtype": "float32"} | options
    model = str(model) if isinstance(model, Path) else model
    return saecli.extract(model, dataset=str(text), home=home, **options)


def cut(model: LanguageModel, texts: list[Document]) -> list[StoredWindow]:
    """The windows that extraction makes of texts."""
    windows = Windows(model.tokenizer, CONTEXT).cut(texts)
    return [StoredWindow(window.token_ids, window.kept) for window in windows]


def test_an_exact_sae_changes_nothing(sae: CommandLine, folder: Path):
    extracted(sae.home, folder)
    eye, zeros = torch.eye(WIDTH), torch.zeros(WIDTH)
    exact = SAE(eye, zeros, eye.clone(), zeros.clone(), TopK(k=WIDTH))
    make_run(sae.home, "exact", exact, data="store")
    (measures,) = sae("eval", "--model", folder, "--json").json["runs"]
    assert measures["ce_spliced"] == pytest.approx(measures["ce_clean"], rel=1e-6)
    assert measures["kl"] == pytest.approx(0, abs=1e-6)
    effect = ["ce_clean", "ce_spliced", "ce_zero", "ce_recovered", "kl", "tokens", "unbeaten"]
    assert list(measures)[-7:] == effect


def test_an_exact_crosscoder_of_hook_points_of_unlike_widths_changes_nothing(
    sae: CommandLine, tmp_path: Path
):
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


def test_a_crosscoder_of_two_models_is_spliced_into_each(
    sae: CommandLine, folder: Path, tmp_path: Path
):
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
    measures = saecli.evaluate(cross, joined, model=names[::-1], **options)
    assert "kl" not in measures and [each["model"] for each in measures["hook_points"]] == names
    stored = stored_windows(stores[0].split("all"), 10**9)
    windows = list(stored)
    llamas = [llama.double() for llama in llamas]
    exact = cross.copy_to(torch.float64)

    def predictions(place: slice) -> Iterator[Tensor]:
        for window in windows:
            ids = torch.from_numpy(window.token_ids)[None]
            outputs = [llama(ids, output_hidden_states=True).hidden_states for llama in llamas]
            yield exact(torch.cat([states[LAYER + 1][0, 1:] for states in outputs], 1))[:, place]

    effects_alone = zip(llamas, cross.hook_columns, measures["hook_points"], strict=True)
    for llama, place, effect in effects_alone:
        with torch.no_grad():
            y_hat = iter([*predictions(place)])

        def spliced(x: Tensor, y_hat: Iterator[Tensor] = y_hat) -> Tensor:
            return next(y_hat)

        assert_same_effects(
            effect, effects_by_hooks(llama, llama.model.layers[LAYER], windows, spliced)
        )
    for wrong in (names[:1], [*names[:1], *names[:1]]):
        with pytest.raises(saecli.SaeError, match="model must be given once for each model that"):
            saecli.evaluate(cross, joined, model=wrong, home=sae.home)
    saecli.save_sae(cross, tmp_path / "saved", store=joined)
    with pytest.raises(saecli.SaeError, match="in another order than it was trained on; name"):
        saecli.evaluate(tmp_path / "saved", saecli.join(*stores[::-1]), home=sae.home)


def test_windows_are_taken_until_they_hold_the_tokens_asked_for(sae: CommandLine, folder: Path):
    rows = extracted(sae.home, folder).split("all")
    counts = [window.replaced.sum() for window in stored_windows(rows, 50)]
    assert sum(counts) >= 50 > sum(counts[:-1])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_hidden_layers": 1}, "expected a layer 1, got layers 0 to 0"),
        ({"vocab_size": 20}, "got token ids below 20"),
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
def test_the_effect_of_a_transcoder_is_that_of_a_hook_on_the_mlp(
    sae: CommandLine, folder: Path, model: LanguageModel
):
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
