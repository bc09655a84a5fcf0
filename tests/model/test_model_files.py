"""Adapters, other weights and damage in a model's folder; the bundled model, and the script that made it."""

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch
import transformers
from homes import CommandLine
from launching import captured
from model_hub import ModelHub, files_of
from safetensors.torch import load_file, save_file
from tiny_models import loaded, save_model
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from saecli.base.errors import ModelError
from saecli.extract.readers import STDLIB_DOCS
from saecli.extract.texts import TextSource
from saecli.model.source import find_model

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "llama", "llama")


@pytest.mark.parametrize("beside", [True, False])
def test_an_adapter_is_refused_with_weights_or_alone(sae: CommandLine, folder: Path, beside: bool):
    described = {"peft_type": "LORA", "base_model_name_or_path": str(folder), "r": 2}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    if not beside:
        (folder / WEIGHTS).unlink()
        (folder / "config.json").unlink()
    said = "holds an adapter (adapter_config.json): expected a whole model"
    assert sae("extract", "--model", folder).fails(1, said).err.count("\n") == 1


def test_an_adapter_on_the_hub_is_refused(hub: ModelHub, folder: Path):
    files = files_of(folder) | {"adapter_config.json": b"{}"}
    hub.add("some/adapter", files)
    with pytest.raises(ModelError, match="some/adapter holds an adapter"):
        find_model("some/adapter")


def test_weights_of_another_shape_are_named(folder: Path):
    other = {"model.layers.1.self_attn.q_proj.weight": torch.ones(8, 16)}
    save_file(load_file(folder / WEIGHTS) | other, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelError, match=r"no weights of shape \(16, 16\) for .*q_proj\.weight;"):
        loaded(folder)


ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "saecli" / "assets" / "tiny-gemma2"
RECORD = json.loads((FOLDER / "training.json").read_text())


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.mark.long
@torch.no_grad()
def test_held_out_cross_entropy_is_as_recorded(model, tokenizer):
    texts = [text for _, text, *_ in TextSource(STDLIB_DOCS).documents()]
    held_out = [text for text in texts if hashlib.sha256(text.encode()).digest()[0] <= 25]
    losses = []
    for text in held_out[:80]:
        ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :128]
        logits = model(ids).logits[0, :-1]
        losses.append(functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
    mean = torch.cat(losses).mean()
    assert mean < RECORD["unigram_cross_entropy"] - 2.5
    # only the first window of some documents, perhaps of another Python: near the record, not on it
    assert mean == pytest.approx(RECORD["held_out_cross_entropy"], abs=0.4)


def test_the_bundle_is_small_and_as_recorded(model, tokenizer):
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 3_000_000
    assert sum(parameter.numel() for parameter in model.parameters()) == RECORD["parameters"]
    for text in ("Return x.\n\n    >>> f(1)\n", "naïve 日本 \t", ""):
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.slow
def test_every_auto_class_loads_it_offline_without_a_warning():
    program = (
        "import warnings; warnings.simplefilter('error')\n"
        "from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer\n"
        "from transformers.utils import logging; logging.disable_progress_bar()\n"
        f"for auto in (AutoTokenizer, AutoModel, AutoModelForCausalLM): auto.from_pretrained({str(FOLDER)!r})"
    )
    result = captured([sys.executable, "-c", program], env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.long
def test_the_script_writes_the_same_weights_from_the_same_seed(tmp_path):
    written = []
    for seed in ("3", "3", "4"):
        words = f"examples/train_tiny_gemma2.py --steps 3 --seed {seed} --out {tmp_path}".split()
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        captured([sys.executable, *words], cwd=ROOT, env=environment, check=True)
        written.append((tmp_path / "model.safetensors").read_bytes())
    assert written[0] == written[1] != written[2]


def test_transformers_that_reads_gguf_files_wrongly_is_refused(sae: CommandLine, tmp_path: Path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    sae.monkeypatch.setattr(transformers, "__version__", "5.17.0")
    sae("extract --model", model).fails(1, "5.17.0 reads some GGUF files", "5.23 or newer")
