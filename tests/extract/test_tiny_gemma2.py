"""The bundled model as anyone's transformers loads it, and the script that made it."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launching import captured
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from saecli.extract.texts import STDLIB_DOCS, TextSource

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
    windows = [tokenizer(text, return_tensors="pt")["input_ids"][:, :128] for text in held_out[:80]]
    losses = torch.cat(
        [
            functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
            for ids in windows
        ]
    )
    assert losses.mean() < RECORD["unigram_cross_entropy"] - 2.5
    # only the first window of some documents, perhaps of another Python: near the record, not on it
    assert losses.mean() == pytest.approx(RECORD["held_out_cross_entropy"], abs=0.4)


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
        command = (
            f"{sys.executable} examples/train_tiny_gemma2.py --steps 3 --seed {seed} --out".split()
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [*command, str(tmp_path)], cwd=ROOT, env=environment, check=True, capture_output=True
        )
        written.append((tmp_path / "model.safetensors").read_bytes())
    assert written[0] == written[1] != written[2]
