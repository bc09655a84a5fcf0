"""Extraction, and training to a quality, as a user runs them."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from day import Day, Figures
from extraction import CONTEXT, write_text
from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

from saecli.extract.options import BUNDLED, TINY_GEMMA2

LAYER = 12


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


def sae(home: Path, *words: object) -> dict:
    """What a command prints with --json."""
    done = subprocess.run([sys.executable, "-m", "saecli", "--home", str(home), *map(str, words), "--json"], check=True,
                          text=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def quality(day: Day) -> Figures:
    """Seconds of training, and what they buy, in a world of known features; beside them the CPU's."""
    rows, epochs = (100_000, 10) if day.full else (5000, 2)
    found: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        sae(home, "import", "synthetic", "--rows", rows, "--name", "world")
        for solver, device in ((solver, device) for solver in ("sgd", "pam-sgd") for device in {day.device, "cpu"}):
            name = f"{solver}-{device}"
            done = sae(home, "train", "--data", "world", "--solver", solver, "--act", "batchtopk", "--k", 10, "--d-sae",
                       1024, "--epochs", epochs, "--device", device, "--name", name)
            (measured,) = sae(home, "eval", name, "--data", "world", "--device", device)["runs"]
            found[f"{solver} on {device}: seconds"] = done["seconds"]
            found[f"{solver} on {device}: FVU, mcc"] = f"{measured['fvu']:.4f}, {measured['mcc']:.3f}"
    return found


def extraction(day: Day) -> Figures:
    """Extraction of a random Gemma-2-2B, at full size on a GPU, to layer 12: rows per second and memory."""
    rows, shrink = (100_000, 1) if day.full else (2000, 8)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        parameters = gemma2(home / "model", shrink)
        write_text(home / "text.jsonl")
        began = time.perf_counter()
        done = sae(home, "extract", "--model", home / "model", "--dataset", home / "text.jsonl", "--layer", LAYER,
                   "--rows", rows, "--context", CONTEXT, "--device", day.device)
        seconds = time.perf_counter() - began
    found = {"parameters": parameters, "rows": done["rows"], "seconds, loading included": seconds,
             "rows/s, loading included": done["rows"] / seconds}
    return found | ({"device": torch.cuda.get_device_name()} if day.full else {})
