"""Trains tiny-gemma2, the language model that comes with saecli, on the standard library's docstrings.

    python examples/train_tiny_gemma2.py

A Gemma-2 of a million parameters with its own byte-level BPE tokenizer: small enough to sit in the package,
enough of a language model for `sae demo` and the tests to run the whole chain offline. It reads text as
`sae extract` feeds it, each document alone and cut into windows that begin with <bos>. A tenth of the
documents, chosen by a hash of their text, is held out.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import random
import time
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # before torch is loaded: threads that wait sleep

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    PreTrainedTokenizerFast,
)

from saecli.extract.readers import STDLIB_DOCS
from saecli.extract.texts import TextSource

OUT = Path(__file__).parents[1] / "saecli" / "assets" / "tiny-gemma2"
CONTEXT = 128
VOCABULARY = 2048
PAD, EOS, BOS = 0, 1, 2  # Gemma's own numbers
TOKENS_PER_BATCH = 2048


def is_held_out(text: str) -> bool:
    """Says whether a document is in the tenth held out, by its text and not by its place."""
    return hashlib.sha256(text.encode()).digest()[0] < 256 / 10


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE that puts <bos> before every text, as Gemma's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<eos>", "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        model_input_names=["input_ids", "attention_mask"],
    )


def build_model() -> Gemma2ForCausalLM:
    """Builds the untrained model."""
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=64,
        max_position_embeddings=CONTEXT,
        initializer_range=128
        ** -0.5,  # 0.02, made for wide models, takes thrice as long to leave the unigrams
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=BOS,
        attn_implementation="eager",
    )
    return Gemma2ForCausalLM(config)


def add_dropout(model: Gemma2ForCausalLM, rate: float) -> None:
    """Drops entries of what is added to the residual stream; Gemma-2 itself only knows attention dropout."""

    def drop(
        module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor:
        return functional.dropout(output, rate, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.post_attention_layernorm.register_forward_hook(drop)
        layer.post_feedforward_layernorm.register_forward_hook(drop)


def windows(document: list[int], first: int = CONTEXT - 1) -> Iterator[list[int]]:
    """Cuts a document into windows of <bos> and up to 127 tokens, the first of them with `first` tokens."""
    cuts = [0, *range(first, len(document), CONTEXT - 1), len(document)]
    for start, end in pairwise(cuts):
        yield [BOS, *document[start:end]]


def padded_batches(sequences: list[list[int]]) -> Iterator[torch.Tensor]:
    """Pads sequences, longest first, into (B, T) batches; T is a multiple of 32, for few shapes run faster."""
    sequences = sorted(sequences, key=len, reverse=True)
    start = 0
    while start < len(sequences):
        length = math.ceil(len(sequences[start]) / 32) * 32
        chosen = sequences[start : start + TOKENS_PER_BATCH // length]
        yield torch.tensor([row + [PAD] * (length - len(row)) for row in chosen])
        start += len(chosen)


def epoch_batches(documents: list[list[int]], rng: random.Random) -> list[torch.Tensor]:
    """Makes one epoch's batches in random order; long documents are cut at other places each time."""
    sequences: list[list[int]] = []
    for document in documents:
        first = rng.randrange(1, CONTEXT) if len(document) >= CONTEXT else CONTEXT - 1
        sequences += windows(document, first)
    rng.shuffle(sequences)
    batches = list(padded_batches(sequences))
    rng.shuffle(batches)
    return batches


def summed_loss(model: Gemma2ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Sums the cross-entropies, in nats, of all tokens but the first of each row and the padding."""
    logits = model(
        ids[:, :-1], use_cache=False
    ).logits  # (B, T-1, V); causal, so padding needs no mask
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), ids[:, 1:].flatten(), ignore_index=PAD, reduction="sum"
    )


def token_count(ids: torch.Tensor) -> int:
    """Counts the tokens whose losses `summed_loss` sums."""
    return int((ids[:, 1:] != PAD).sum())


@torch.no_grad()
def cross_entropy(model: Gemma2ForCausalLM, documents: list[list[int]]) -> float:
    """Measures the mean cross-entropy, in nats a token, on documents cut as `sae extract` cuts them."""
    model.eval()
    batches = list(
        padded_batches([window for document in documents for window in windows(document)])
    )
    return sum(summed_loss(model, ids).item() for ids in batches) / sum(map(token_count, batches))


def unigram_cross_entropy(train: list[list[int]], held_out: list[list[int]]) -> float:
    """Measures the held-out tokens under the training tokens' frequencies, one added to each count."""
    counts = torch.bincount(torch.tensor(list(chain(*train))), minlength=VOCABULARY).double() + 1
    log_frequency = (counts / counts.sum()).log()
    return -log_frequency[torch.tensor(list(chain(*held_out)))].mean().item()


def lr_factor(step: int, steps: int) -> float:
    """Warms up over the first fiftieth of the steps, then falls along a cosine to zero."""
    warm_up = max(steps // 50, 1)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


def train(
    model: Gemma2ForCausalLM,
    documents: list[list[int]],
    held_out: list[list[int]],
    options: argparse.Namespace,
) -> None:
    """Trains the model in place and prints the losses now and then."""
    rng = random.Random(options.seed)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    gains = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: lr_factor(step, options.steps)
    )
    batches: list[torch.Tensor] = []
    began = time.monotonic()
    for step in range(1, options.steps + 1):
        batches = batches or epoch_batches(documents, rng)
        ids = batches.pop()
        model.train()
        with torch.autocast("cpu", torch.bfloat16):  # twice as fast where the processor has it
            loss = summed_loss(model, ids) / token_count(ids)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 250 == 0:
            seconds = time.monotonic() - began
            held = cross_entropy(model, held_out)
            print(
                f"step {step}: train {loss.item():.2f}, held out {held:.3f} nats a token, {seconds:.0f} s",
                flush=True,
            )


def save(
    model: Gemma2ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path
) -> Gemma2ForCausalLM:
    """Saves both, the weights in bfloat16, and returns the model as read back in float32."""
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    config = json.loads((out / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = (
        "PreTrainedTokenizerFast"  # transformers 4 does not know the name that 5 writes
    )
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)


def main() -> None:
    """Trains, saves, and measures what was saved."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=int, default=1, help="The sums round otherwise with another number."
    )
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)

    texts = [document.text for document in TextSource(STDLIB_DOCS).documents()]
    tokenizer = train_tokenizer([text for text in texts if not is_held_out(text)])
    encoded = [
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts
    ]
    documents = [ids for ids, text in zip(encoded, texts, strict=True) if not is_held_out(text)]
    held_out = [ids for ids, text in zip(encoded, texts, strict=True) if is_held_out(text)]
    model = build_model()
    add_dropout(model, options.dropout)
    train(model, documents, held_out, options)
    saved = save(model, tokenizer, options.out)
    record = {
        "parameters": saved.num_parameters(),
        "held_out_cross_entropy": round(cross_entropy(saved, held_out), 4),
        "unigram_cross_entropy": round(unigram_cross_entropy(documents, held_out), 4),
        "train_documents": len(documents),
        "train_tokens": sum(map(len, documents)),
        "held_out_documents": len(held_out),
        "held_out_tokens": sum(map(len, held_out)),
        "steps": options.steps,
        "seed": options.seed,
        "python": platform.python_version(),
    }
    (options.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
