"""What extraction costs over a bare forward pass, how much memory it takes, and how much of a batch is padding.

    PYTHONPATH=. python tests/benchmarks/extraction.py [--rows 40000] [--large-rows 2500] [--repeats 5]

Models: tiny-gemma2 at layer 1 of 4, where a pass is so short that everything else shows, and a random Gemma-2 of
104 million parameters (d_in 768) at layer 5 of 12. Text: stdlib-docs, written to a .jsonl file beforehand. The bare
pass is the same model in plain transformers, cut off after the layer, on the same batches, which are ready in memory.
Both are timed in turn; a share is the median of the pairs' ratios, with the least and the largest. "processor" is time
summed over threads, which other programs on the machine disturb less: reading text and writing the store are in it,
though on a free core they take no time of their own. The files are removed at the end.
"""

import argparse
import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from store_speed import timed
from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

from saecli.extract.forward import Forward, fill, pass_tokens
from saecli.extract.language_model import LanguageModel
from saecli.extract.model_source import find_model
from saecli.extract.options import BUNDLED, COLUMNS, TINY_GEMMA2, HookPoint
from saecli.extract.texts import STDLIB_DOCS, Document, TextSource
from saecli.extract.windows import START, Block, Cursor, Windows, in_blocks
from saecli.store.schema import StoreMeta, rows_per_shard
from saecli.store.writer import StoreWriter

CONTEXT = 128
MEMORY_ROWS = 100_000  # more than the blocks that are held at a time


def large_model(folder: Path) -> Path:
    """A random Gemma-2 with the bundled model's tokenizer."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED[TINY_GEMMA2])
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        query_pre_attn_scalar=64,
    )
    Gemma2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_text(path: Path) -> None:
    """The standard library's docstrings as a .jsonl file."""
    texts = [text for _, text, *_ in TextSource(STDLIB_DOCS).documents()]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def all_blocks(
    model: LanguageModel, text: TextSource, rows: int, cursor: Cursor = START
) -> Iterator[Block]:
    """The blocks of an extraction."""

    def documents_from(begin: Cursor) -> Iterator[Document]:
        return text.documents(begin.document, begin.mark)

    return in_blocks(documents_from, Windows(model.tokenizer, CONTEXT), rows, cursor)


def extract(
    model: LanguageModel, text: TextSource, place: HookPoint, rows: int, folder: Path
) -> None:
    """Run an extraction, from opening the text to the finished store."""
    width = model.source.d_model
    meta = StoreMeta({}, "", "bfloat16", width, rows_per_shard(width, "bfloat16"), columns=COLUMNS)
    with StoreWriter.open(folder, meta, limit=rows) as writer:
        forward = Forward(model, "bfloat16", pass_tokens(model.device), print)
        fill(
            {place: writer},
            partial(all_blocks, model, text, rows),
            forward,
            rows,
            lambda tokens, rows: None,
        )


def recorded(
    model: LanguageModel, text: TextSource, place: HookPoint, rows: int, folder: Path
) -> list[dict[str, Any]]:
    """What the model was called with in an extraction."""
    batches = []
    handle = model.model.register_forward_pre_hook(
        lambda _, args, given: batches.append(dict(given)), with_kwargs=True
    )
    extract(model, text, place, rows, folder)
    handle.remove()
    return batches


@torch.no_grad()
def bare(plain: torch.nn.Module, batches: list[dict[str, Any]]) -> None:
    """Run the forward passes alone."""
    for batch in batches:
        plain(**batch)


def cut_off(model: LanguageModel, layer: int) -> torch.nn.Module:
    """The same model without the blocks after a layer."""
    plain = copy.copy(model.model)
    plain._modules = {**model.model._modules, "layers": model.model.layers[: layer + 1]}
    plain.config = copy.deepcopy(model.model.config)
    plain.config.num_hidden_layers = layer + 1
    return plain


def compare(
    name: str,
    model: LanguageModel,
    text: TextSource,
    place: HookPoint,
    rows: int,
    repeats: int,
    folder: Path,
) -> None:
    """Time both in turn, and say what share of the batches was padding."""
    plain, batches = (
        cut_off(model, place.layer),
        recorded(model, text, place, rows, folder / "recorded"),
    )
    slots = sum(batch["attention_mask"].numel() for batch in batches)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    pairs = []
    for repeat in range(repeats):
        alone = timed(lambda: bare(plain, batches))
        pairs.append(
            (
                alone,
                timed(
                    lambda repeat=repeat: extract(model, text, place, rows, folder / str(repeat))
                ),
            )
        )
    alone, whole = np.array(pairs).transpose(1, 2, 0)  # each (wall and processor, repeats)
    print(
        f"{name}, {rows:,} rows: {tokens:,} tokens in {len(batches)} batches, {1 - tokens / slots:.1%} padding\n"
        f"  bare pass {tokens / alone[0].min():,.0f} tokens/s, extraction {tokens / whole[0].min():,.0f}"
    )
    for what, ratio in zip(("time", "processor"), whole / alone - 1, strict=True):
        print(
            f"  {what} over a bare pass: {np.median(ratio):+.1%} ({ratio.min():+.1%} to {ratio.max():+.1%})"
        )


def peak_memory(text: Path, rows: int, home: Path) -> float:
    """Peak memory of `sae extract`, MB; read by the process itself, as a parent's counts what it was forked from."""
    words = [
        "sae",
        "--home",
        home,
        "extract",
        "--model",
        TINY_GEMMA2,
        "--dataset",
        text,
        "--rows",
        rows,
        "--json",
    ]
    script = (
        f"import re, sys; from saecli.cli.main import main; sys.argv = {[str(word) for word in words]!r}\n"
        "try: main()\nexcept SystemExit as stop: assert not stop.code\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[-1]) / 1e3


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--large-rows", type=int, default=2_500)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_text(folder / "text.jsonl")
        large = large_model(folder / "gemma2-104m")
        for model_name, layer, rows in (
            (TINY_GEMMA2, 1, arguments.rows),
            (str(large), 5, arguments.large_rows),
        ):
            model = LanguageModel(find_model(model_name), torch.device("cpu"))
            name = Path(model_name).name
            compare(
                name,
                model,
                TextSource(str(folder / "text.jsonl")),
                HookPoint(layer, "resid_post"),
                rows,
                arguments.repeats,
                folder / name,
            )
            del model
        peaks = [
            peak_memory(folder / "text.jsonl", rows, folder)
            for rows in (MEMORY_ROWS, 4 * MEMORY_ROWS)
        ]
        print(
            f"peak memory of sae extract: {peaks[0]:,.0f} MB for {MEMORY_ROWS:,} rows of {TINY_GEMMA2}, "
            f"{peaks[1]:,.0f} MB for four times the rows"
        )


if __name__ == "__main__":
    main()
