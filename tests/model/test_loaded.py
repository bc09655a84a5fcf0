"""`saecli.extract` of a loaded model and tokenizer: the rows of the same model by name, and what is refused."""

import os
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from storing import assert_same_pass
from tiny_models import CONFIGS, save_model, stored
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import saecli
from saecli.extract import extraction, windows
from saecli.store.reader import ActivationStore
from saecli.store.schema import read_meta

TEXT = "\n\n".join(
    " ".join("abcdefghijk"[n % 5 : n % 5 + 3 + n % 4] for n in range(30, 60 + n)) for n in range(60)
)


@pytest.fixture
def text(tmp_path: Path) -> dict[str, Any]:
    """The options of an extraction."""
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return {"dataset": (str(file),), "context": 16, "dtype": "float32", "home": tmp_path / "home"}


def opened(folder: Path) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", CONFIGS)
def test_rows_are_those_of_the_model_by_name(tmp_path: Path, text: dict[str, Any], kind: str):
    folder = save_model(tmp_path / kind, kind)
    model, tokenizer = opened(folder)
    tokenizer(["a", "a b"], padding=True)  # which the tokenizer remembers
    model.train()
    options = {"layer": 1, "rows": 2000, **text}
    by_name = saecli.extract(str(folder), name="named", **options)
    by_object = saecli.extract(model, tokenizer=tokenizer, name="loaded", **options)
    assert isinstance(by_object, ActivationStore) and not by_object.cached
    assert_same_pass(by_object.path, by_name.path, but_for=("source", "request_hash"))
    named, loaded = read_meta(by_name.path), read_meta(by_object.path)
    assert loaded.source["model"] == named.source["model"] == str(folder)
    assert loaded.source["loaded"] == type(model).__name__ and "loaded" not in named.source
    assert loaded.reads == named.reads and (loaded.reads or kind == "gemma2")
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    again = saecli.extract(model, tokenizer=AutoTokenizer.from_pretrained(folder), **options)
    assert not again.cached and Path(again.path).name.startswith(f"{kind}-l1-resid_post-")
    same = saecli.extract(opened(folder)[0], tokenizer=tokenizer, **options)
    assert same.cached and same.path == again.path
    with torch.no_grad():
        model.get_input_embeddings().weight[5] += 1
    other = saecli.extract(model, tokenizer=tokenizer, **options)
    assert not other.cached and other.path != again.path
    with pytest.raises(saecli.SaeError, match="made from something else"):
        saecli.extract(model, tokenizer=tokenizer, name="loaded", **options)


@pytest.mark.slow
def test_an_interrupted_store_is_resumed_by_the_same_weights_alone(tmp_path, text, monkeypatch):
    monkeypatch.setattr(windows, "BLOCK_TOKENS", 256)  # tokens per block, so that some are stored
    folder = save_model(tmp_path / "llama", "llama")
    model, tokenizer = opened(folder)
    options = {"tokenizer": tokenizer, "layer": 1, "rows": 2000, "shard_rows": 100, **text}
    options["batch_size"] = 5
    whole = saecli.extract(model, name="whole", **options)
    passes: list[int] = []
    forward = model.forward

    @wraps(forward)
    def stopping(*args: Any, **given: Any) -> Any:
        passes.append(1)
        if len(passes) == 20:
            raise KeyboardInterrupt
        return forward(*args, **given)

    model.forward = stopping  # a hook would make it another model
    with pytest.raises(KeyboardInterrupt):
        saecli.extract(model, name="stopped", **options)
    del model.forward
    begun = text["home"] / "activations" / "stopped"
    assert 0 < ActivationStore.open(begun).rows < whole.rows
    other, _ = opened(folder)
    other.lm_head.weight.data[0] += 1
    with pytest.raises(saecli.SaeError, match="made from something else"):
        saecli.extract(other, name="stopped", **options)
    resumed = saecli.extract(opened(folder)[0], name="stopped", **options)
    assert_same_pass(resumed.path, whole.path, but_for=("shards",))


def test_several_loaded_models_fill_stores_of_the_same_tokens(tmp_path: Path, text: dict[str, Any]):
    folders = [save_model(tmp_path / name, "llama") for name in ("base", "chat")]
    (base, tokenizer), (chat, _) = map(opened, folders)
    options = {"tokenizer": tokenizer, "layer": [0, 2], "rows": 500, **text}
    with pytest.raises(saecli.SaeError, match=r"names .* twice"):
        saecli.extract([base, base], **options)
    with torch.no_grad():
        chat.get_input_embeddings().weight.add_(0.1)
    stores = saecli.extract([base, chat], **options)
    models = [str(folder) for folder in folders for _ in range(2)]
    assert [store.meta.source["model"] for store in stores] == models
    alone = saecli.extract(chat, **{**options, "layer": 2})
    found, expected = (stored(store.path)[0] for store in (stores[3], alone))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_dtype": "bfloat16"}, "model_dtype does nothing with a loaded model"),
    ({"model_revision": "main"}, "model_revision does nothing with a loaded model"),
    ({"device": "cpu"}, "device does nothing with a loaded model"),
    ({"tokenizer": None}, "tokenizer must be the loaded model's, got NoneType"),
    ({"tokenizer": "gpt2"}, "tokenizer must be the loaded model's, got str"),
    ({"model": torch.nn.Linear(2, 2)}, "must be one of transformers, loaded, got Linear"),
    ({"model": "tiny-gemma2"}, "tokenizer does nothing with tiny-gemma2, which has its own"),
    ({"context": 1000}, "takes windows of at most"),
]


@pytest.mark.parametrize(("changed", "sentence"), REFUSED)
def test_what_a_loaded_model_cannot_be_given_is_refused(tmp_path, text, changed, sentence):
    model, tokenizer = opened(save_model(tmp_path / "gpt2", "gpt2"))
    options = {"model": model, "tokenizer": tokenizer, "rows": 100, **text, **changed}
    with pytest.raises(saecli.SaeError, match=sentence):
        saecli.extract(**options)


def test_models_are_all_loaded_or_all_named_and_each_on_one_device(tmp_path: Path, text: dict):
    model, tokenizer = opened(save_model(tmp_path / "gpt-neox", "gpt-neox"))
    options = {"tokenizer": tokenizer, "rows": 100, **text}
    with pytest.raises(saecli.SaeError, match="must be all loaded, or all named, got tiny-gemma2"):
        saecli.extract([model, "tiny-gemma2"], **options)
    with pytest.raises(saecli.SaeError, match=r"weights of float32, .*, got float64; convert them"):
        saecli.extract(model.double(), **options)
    model.get_output_embeddings().to("meta")
    with pytest.raises(saecli.SaeError, match="on one device, got weights on cpu and meta"):
        saecli.extract(model, **options)


def test_transformers_settings_stay_and_small_blocks_give_the_rows(tmp_path, text, monkeypatch):
    folder = str(save_model(tmp_path / "llama", "llama"))
    options = {"layer": "all", "rows": 300, **text}
    first = saecli.extract(folder, name="a", **options)
    assert logging.is_progress_bar_enabled()
    assert "DISABLE_SAFETENSORS_CONVERSION" not in os.environ
    monkeypatch.setattr(extraction, "EXTRACTED_BYTES", 0)
    for ours, theirs in zip(saecli.extract(folder, name="b", **options), first, strict=True):
        np.testing.assert_allclose(stored(ours.path)[0], stored(theirs.path)[0], atol=1e-5)
