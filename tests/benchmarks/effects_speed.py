"""Tokens per second of the effects of SAEs on a language model, against one plain forward pass with cross-entropy.

    python tests/benchmarks/effects_speed.py MODEL --layer 12 --text news.jsonl --saes 1 10

Each round runs both over the same windows, in batches of the same tokens. Times are processor time, which other work on
the machine hardly changes; the ratio is of the medians of all rounds.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from saecli.extract.effects import ZERO_TOKENS, effects
from saecli.extract.forward import CPU_TOKENS
from saecli.extract.language_model import LanguageModel
from saecli.extract.model_source import find_model
from saecli.extract.options import HookPoint
from saecli.extract.passes import Passes
from saecli.extract.splice import StoredWindow
from saecli.sae.activations import TopK
from saecli.sae.dictionary import SAE

CONTEXT = 128
TARGET = 2.5  # times the cost of a plain pass, of one SAE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--layer", type=int, required=True)
    parser.add_argument("--text", type=Path, required=True, help='lines {"text": ...}')
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument(
        "--default-tokens", type=int, default=16_384, help="decides zeroing's share"
    )
    parser.add_argument("--saes", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    model = LanguageModel(
        find_model(options.model), torch.device("cpu"), head=True, dtype=options.dtype
    )
    windows = windows_of(model, options.text, options.tokens)
    passes = Passes(model)
    print(f"{options.model}: {model.dtype}, {torch.get_num_threads()} threads")
    for count in options.saes:
        saes = [random_sae(model.source.d_model, seed) for seed in range(count)]
        seconds: list[tuple[float, float]] = []
        for _ in range(options.rounds):
            began = time.process_time()
            plain = plain_cross_entropy(model, windows)
            between = time.process_time()
            found = spliced(passes, windows, saes, options)
            seconds.append((between - began, time.process_time() - between))
        without, with_saes = map(statistics.median, zip(*seconds, strict=True))
        print(
            f"{count} SAEs: plain {options.tokens / without:,.0f} tokens/s (ce {plain:.4f}), effects "
            f"{options.tokens / with_saes:,.0f} (ce {found['ce_clean']:.4f}); "
            f"ratio {with_saes / without:.2f}" + (f", target {TARGET}" if count == 1 else ""),
            flush=True,
        )


def windows_of(model: LanguageModel, path: Path, tokens: int) -> list[StoredWindow]:
    """Windows of `CONTEXT` tokens, all of them rows."""
    token_ids: list[int] = []
    with path.open() as lines:
        for line in lines:
            token_ids += model.tokenizer(
                json.loads(line)["text"], add_special_tokens=False
            ).input_ids
            if len(token_ids) >= tokens:
                break
    parts = np.array(token_ids[: tokens // CONTEXT * CONTEXT]).reshape(-1, CONTEXT)
    return [StoredWindow(part, np.ones(CONTEXT, bool)) for part in parts]


def random_sae(d_in: int, seed: int) -> SAE:
    draw = torch.Generator().manual_seed(seed)
    W_dec = functional.normalize(torch.randn(4 * d_in, d_in, generator=draw))
    return SAE(W_dec.T.contiguous(), torch.zeros(4 * d_in), W_dec, torch.zeros(d_in), TopK(k=32))


@torch.no_grad()
def plain_cross_entropy(model: LanguageModel, windows: list[StoredWindow]) -> float:
    """As it is commonly written, logits of a batch at once."""
    total = predictions = 0.0
    token_ids = torch.from_numpy(np.stack([window.token_ids for window in windows]))
    for batch in token_ids.split(CPU_TOKENS // CONTEXT):
        logits = model.model(input_ids=batch, use_cache=False).logits[:, :-1].flatten(0, 1)
        total += float(
            functional.cross_entropy(logits.float(), batch[:, 1:].flatten(), reduction="sum")
        )
        predictions += len(logits)
    return total / predictions


def spliced(
    passes: Passes, windows: list[StoredWindow], saes: list[SAE], options: argparse.Namespace
) -> dict:
    place = (HookPoint(options.layer, "resid_post"),)
    share = ZERO_TOKENS / options.default_tokens
    return effects([passes], windows, place, [place], saes, lambda tokens: None, share)[0][0]


if __name__ == "__main__":
    main()
