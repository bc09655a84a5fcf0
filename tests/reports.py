"""Reports for tests: a store of nasty texts with the tokenizer that reads them, and what the pages' data say."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from homes import D, make_run, random_sae
from storing import make_store
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from saecli.sae.activations import Activation
from saecli.sae.dictionary import SAE

NASTY = ["</script><img src=x onerror=fail()>", *"<!-- ]]> &amp; שלום".split(), "\u202eover"]
NASTY += ["long" * 250, *"🙂 {{ data }}".split(), "\u2028", *"'\"` ${1} \\u003c".split()]
WORDS = ["<unk>", *NASTY, *(f"w{number}" for number in range(30))]


def save_model(folder: Path, words: Sequence[str] = WORDS) -> Path:
    """A Llama of random weights, `D` wide, whose tokens are the words."""
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": D, "intermediate_size": 8, "num_hidden_layers": 1}
    tokens = {"vocab_size": len(words), "bos_token_id": None, "eos_token_id": None}
    config = LlamaConfig(**sizes, **tokens, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Texts:
    """A store's rows and columns."""

    rows: np.ndarray
    columns: dict[str, np.ndarray]


def make_text_store(
    home: Path, name: str, model: str | None, rows: int = 2000, **source: Any
) -> Texts:
    """Random rows of documents of 30 random tokens."""
    rng = np.random.default_rng(0)
    numbers = np.arange(rows)
    columns = {
        "document": numbers // 30,
        "position": numbers % 30 + 1,
        "token_id": rng.integers(1, len(WORDS), rows),
    }
    texts = Texts((rng.normal(size=(rows, D)) + 1.5).astype(np.float32), columns)
    origin = {"layer": 0, "site": "resid_post", "context": 31, **source}
    origin |= {} if model is None else {"model": model}
    path = home / "activations" / name
    make_store(path, texts.rows, columns=columns, source=origin, shard_rows=700, windows=True)
    return texts


def make_text_run(
    home: Path, model: str | None, activation: Activation | None = None
) -> tuple[Texts, SAE]:
    """A store `texts`, and a run `run` of a random SAE on it."""
    texts, sae = make_text_store(home, "texts", model), random_sae(activation)
    make_run(home, "run", sae, data="texts")
    return texts, sae


def index_of(folder: Path) -> dict[str, Any]:
    """The data in `index.html`, as a browser takes them out."""
    page = (folder / "index.html").read_text(encoding="utf-8")
    script = r'<script type="application/json" id="data">(.*?)</script>'
    return json.loads(re.search(script, page, re.DOTALL)[1])


def pages_of(folder: Path) -> dict[int, dict[str, Any]]:
    """The pages of latents by their number; examples have their texts and codes put in."""
    pages = {}
    for number, path in enumerate(sorted((folder / "latents").iterdir())):
        script = path.read_text(encoding="utf-8")
        content = json.loads(re.fullmatch(rf"saeLatents\({number},(.*)\);\n", script, re.DOTALL)[1])
        for page in content["latents"]:
            for example in page["examples"] + page["samples"]:
                if "tokens" in example:
                    example["tokens"] = [content["strings"][token] for token in example["tokens"]]
                    fires = dict(zip(example["fires"][::2], example["fires"][1::2], strict=True))
                    example["codes"] = [
                        fires.get(at, 0) * page["scale"] for at in range(len(example["tokens"]))
                    ]
            pages[page["latent"]] = page
    return pages
