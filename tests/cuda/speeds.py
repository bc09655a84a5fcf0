"""What steps, rows and decoder steps cost, next to the device's own products and copies; extraction
as a user runs it."""

import json
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import numpy as np
import torch
from day import Day, Figures
from solver_problems import trained_on as trained
from storing import make_store
from training_speed import new_solver
from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

from saecli.base.devices import free_memory, multiplies_bf16, products_in
from saecli.model import BUNDLED, TINY_GEMMA2
from saecli.sae.activations import ACTIVATIONS
from saecli.sae.codes import Codes, at
from saecli.sae.dictionary import Batch
from saecli.train import SOLVERS
from saecli.train.ridge import StreamedCodes, Sums, Terms, choose_alpha, method_for, optimal_decoder

PRECISIONS = ("float32", "bf16")
K, LAYER = 32, 12
EPOCHS = 1, 9  # of the two trainings from a store
WIDEST_DENSE = 16_384  # d_sae up to which dense codes are summed, and alpha chosen


def sizes(day: Day) -> tuple[int, int, tuple[int, ...]]:
    """Rows of a batch, d_in, and numbers of latents."""
    return (4096, 2304, (4096, 16_384)) if day.full else (256, 64, (512,))


def machine(day: Day) -> Figures:
    """The device, its products in each precision, and copies to it."""
    B, D, widths = sizes(day)
    found: Figures = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if day.full else "cpu",
    }
    x, W = torch.randn(B, D, device=day.device), torch.randn(D, widths[-1], device=day.device)
    for precision in PRECISIONS:
        if precision == "float32" or multiplies_bf16(torch.device(day.device)):
            with products_in(precision):
                found[f"{precision} product, TFLOP/s"] = (
                    2 * x.numel() * widths[-1] / day.seconds(lambda: x @ W) / 1e12
                )
    wide = x.double(), W.double()
    found["float64 product, TFLOP/s"] = (
        2 * x.numel() * widths[-1] / day.seconds(lambda: wide[0] @ wide[1], 2) / 1e12
    )
    host = torch.randn(B, D)
    found["pageable copy, GB/s"] = (
        host.nbytes / day.seconds(lambda: host.to(day.device, copy=True)) / 1e9
    )
    if day.full:
        pinned = host.pin_memory()
        found["pinned copy, GB/s"] = (
            host.nbytes / day.seconds(lambda: pinned.to("cuda", non_blocking=True)) / 1e9
        )
        found["memory, GiB"] = torch.cuda.get_device_properties(0).total_memory / 2**30
    return found


def steps(day: Day) -> Figures:
    """Rows per second of training steps on rows that are there, in each precision."""
    B, D, widths = sizes(day)
    random_rows = torch.randn(B, D, generator=torch.Generator().manual_seed(0))
    rows, found = Batch.of(random_rows.to(day.device)), {}
    for F, act, solver in product(
        widths, ("relu", "topk", "batchtopk", "jumprelu"), ("sgd", "pam-sgd")
    ):
        activation = ACTIVATIONS[act](
            **({"k": K} if "topk" in act else {"target_l0": K} if act == "jumprelu" else {})
        )
        for precision in PRECISIONS:
            if precision != "float32" and not multiplies_bf16(rows.x.device):
                continue
            solving = new_solver(SOLVERS[solver](), activation, F, rows, precision)
            rate = B / day.seconds(
                lambda solving=solving: solving.descend(rows), 10 if day.full else 2
            )
            found[f"{act}, {solver}, d_sae {F:,}, {precision}: rows/s"] = rate
    return found | {"peak memory, GiB": day.peak()}


def rows(day: Day) -> Figures:
    """Rows per second from a bfloat16 store through a whole training step."""
    B, D, widths = sizes(day)
    count = 65_536 if day.full else 2048
    with tempfile.TemporaryDirectory() as folder:
        values = np.random.default_rng(0).standard_normal((count, D), np.float32)
        store = make_store(
            Path(folder) / "store", values, "bfloat16", block=2048, shard_rows=count, chunk_rows=256
        )
        options = {"k": K, "d_sae": widths[-1], "batch_size": B, "smoothing": 0.1}
        chosen = store.split("train")

        def seconds(epochs: int) -> float:
            given = options | {"epochs": epochs}
            return day.seconds(lambda: trained(day.device, "sgd", "topk", given, rows=chosen), 1)

        few, many = (seconds(epochs) for epochs in EPOCHS)
        # The difference leaves out a training's start and end.
        more_rows = (EPOCHS[1] - EPOCHS[0]) * chosen.rows
        return {
            "from a store: rows/s": more_rows / (many - few),
            "one epoch, start and end, s": few,
        }


def decoder(day: Day) -> Figures:
    """Seconds of a decoder step's parts, of topk 32 and of dense codes, as d_sae grows."""
    found: Figures = {}
    for F in (4096, 16_384, 32_768, 65_536) if day.full else (512,):
        try:
            figures = _decoder_step(day, F)
        except torch.OutOfMemoryError as error:  # what smaller ones found stays
            return found | {"FAILED": f"d_sae {F:,}: {error}"[:200]}
        found |= {f"d_sae {F:,}: {what}": figure for what, figure in figures.items()}
        if day.full:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return found


def _decoder_step(day: Day, d_sae: int) -> Figures:
    device, (B, D, _) = torch.device(day.device), sizes(day)
    direction = (
        torch.randn(d_sae, D, generator=torch.Generator().manual_seed(1)).to(device) / D**0.5
    )
    terms = Terms(
        W_t=torch.zeros_like(direction), b_t=direction.new_zeros(D), alpha=1.0, direction=direction
    )
    x, pre = (torch.randn(B, width, device=device) for width in (D, d_sae))
    codes, found = at(pre.relu(), pre.topk(K, sorted=False).indices), {}
    if method_for(B, d_sae, D).bytes < free_memory(device):
        sums = Sums(d_sae, D, device)
        found[f"sums of topk {K}, rows/s"] = B / day.seconds(lambda: sums.add(codes, x), 3)
        if d_sae <= WIDEST_DENSE:
            dense = Codes(pre.sub(1.5).relu())
            found["sums of dense codes, rows/s"] = B / day.seconds(lambda: sums.add(dense, x), 2)
            found["alpha chosen, s"] = day.seconds(
                lambda: choose_alpha(sums, terms, codes.dense(), x, None), 1
            )
        found["solved directly, s"] = day.seconds(lambda: optimal_decoder(sums, terms), 1)
    system = StreamedCodes(torch.zeros_like(direction), lambda: iter([codes]), 2.0**33)
    system.add(codes, x)
    found["solved iteratively, s"] = day.seconds(lambda: optimal_decoder(system, terms), 1)
    return found | {"peak memory, GiB": day.peak()}


def gemma2(folder: Path, shrink: int, device: str) -> int:
    """Save a random Gemma-2, of 2.6 billion parameters if not shrunk; their number."""
    config = Gemma2Config(
        dtype="bfloat16",
        vocab_size=256_000 // shrink,
        hidden_size=2304 // shrink,
        intermediate_size=9216 // shrink,
    )
    with torch.device("meta"):  # never held in float32
        model = Gemma2ForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device=device).tie_weights()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02, generator=generator)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUNDLED[TINY_GEMMA2]).save_pretrained(folder)
    return model.num_parameters()


def extraction(day: Day) -> Figures:
    """Extraction of a random Gemma-2-2B, at full size on a GPU, to layer 12: rows per second and memory."""
    rows, shrink = (100_000, 1) if day.full else (2000, 8)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        parameters = gemma2(home / "model", shrink, day.device)
        began = time.perf_counter()
        words = (
            f"--home {home} extract --model {home / 'model'} --dataset stdlib-docs --layer {LAYER}"
        )
        words += f" --rows {rows} --context 128 --device {day.device} --json"
        found = subprocess.run(
            [sys.executable, "-m", "saecli", *words.split()],
            check=True,
            text=True,
            stdout=subprocess.PIPE,
        )
        done = json.loads(found.stdout)
        seconds = time.perf_counter() - began
    found = {
        "parameters": parameters,
        "rows": done["rows"],
        "seconds, loading included": seconds,
        "rows/s, loading included": done["rows"] / seconds,
    }
    return found | ({"device": torch.cuda.get_device_name()} if day.full else {})
