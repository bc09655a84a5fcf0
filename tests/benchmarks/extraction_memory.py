"""How much memory `sae extract` takes with a large model: a random Gemma-2-2B to layer 12, its weights in bfloat16.

    PYTHONPATH=. python tests/benchmarks/extraction_memory.py [--layer 12] [--rows 512] [--shrink 1]

The model is made from its configuration class, with the bundled tokenizer, 5.2 GB on disk, in a temporary folder that
is removed at the end; --shrink divides its widths, for a quick look. The peak is VmHWM, pages of mapped files included.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from extraction import CONTEXT, peak_memory, write_text
from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

from saecli.language_model import BUNDLED, TINY_GEMMA2


def gemma2(folder: Path, shrink: int) -> int:
    """Save a random Gemma-2, of 2.6 billion parameters if not shrunk; their number."""
    config = Gemma2Config(dtype="bfloat16", vocab_size=256_000 // shrink, hidden_size=2304 // shrink,
                          intermediate_size=9216 // shrink)
    with torch.device("meta"):  # never held in float32
        model = Gemma2ForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu").tie_weights()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02, generator=generator)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUNDLED[TINY_GEMMA2]).save_pretrained(folder)
    return model.num_parameters()


def main() -> None:
    """Print the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", type=int, default=12)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--shrink", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        parameters = gemma2(folder / "model", arguments.shrink)
        write_text(folder / "text.jsonl")
        peak = peak_memory(folder / "text.jsonl", arguments.rows, folder, folder / "model",
                           ["--layer", arguments.layer, "--context", CONTEXT])
        print(f"peak memory of sae extract: {peak:,.0f} MB for {parameters:,} parameters to layer {arguments.layer}")


if __name__ == "__main__":
    main()
