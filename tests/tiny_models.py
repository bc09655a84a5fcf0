"""Small random language models of several architectures, saved as Hugging Face folders."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from saecli.base.devices import device_named
from saecli.model.language_model import LanguageModel
from saecli.model.source import find_model
from saecli.store.reader import ActivationStore

LAYERS, WIDTH, VOCABULARY = 3, 16, 64
BOS, EOS = 1, 2
SHARED = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"hidden_size": WIDTH, "intermediate_size": 24}
DEEP = {**SIZES, "num_hidden_layers": LAYERS, "num_attention_heads": 2, **SHARED}
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}

CONFIGS: dict[str, Any] = {
    "gemma2": lambda: Gemma2Config(
        **DEEP,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=4,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=5.0,
    ),
    "llama": lambda: LlamaConfig(**DEEP, num_key_value_heads=2),
    "gpt2": lambda: GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=2, n_positions=64, **SHARED),
    "gpt-neox": lambda: GPTNeoXConfig(**DEEP, max_position_embeddings=64),
}


def random_letters(draw: np.random.Generator, count: int) -> str:
    """A text of that many tokens."""
    return "".join(map(chr, draw.integers(97, 157, count)))


def save_tokenizer(folder: Path, bos: bool) -> None:
    """A tokenizer of single characters, which puts <bos> before a text or does not."""
    characters = [chr(code) for code in range(97, 97 + VOCABULARY - 4)]
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *characters]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 1)]
        )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(folder)


def save_model(
    folder: Path, architecture: Any, bos: bool = True, loader: Any = AutoModelForCausalLM
) -> Path:
    """A random model, by its name above or its configuration, with weights large enough for its blocks to matter."""
    torch.manual_seed(0)
    config = CONFIGS[architecture]() if isinstance(architecture, str) else architecture
    model = loader.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder, bos)
    return folder


def open_model(folder: Path, kind: str = "llama") -> PreTrainedModel:
    """A random model as transformers loads it."""
    place = save_model(folder / kind, kind)
    return AutoModelForCausalLM.from_pretrained(place, attn_implementation="eager")


def prompt() -> Tensor:
    """Two texts of seven tokens, an <eos> in the second, (2, 7)."""
    token_ids = torch.randint(4, 60, (2, 7), generator=torch.Generator().manual_seed(2))
    token_ids[:, 0], token_ids[1, 4] = BOS, EOS
    return token_ids


def loaded(folder: Path, head: bool = False) -> LanguageModel:
    """The model in a folder, as the commands load it."""
    return LanguageModel(find_model(str(folder)), device_named("cpu"), head)


def stored(folder: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The rows of a store of `sae extract`, and their columns."""
    rows = ActivationStore.open(folder).split("all")
    names = ("token_id", "position", "document")
    columns = {name: np.concatenate(list(rows.column(name, 512))) for name in names}
    return np.concatenate([batch.copy() for batch in rows.sequential(512)]), columns
