"""What each part of PAM-SGD is worth: test FVU with one part left out, and of SGD given the parts it can take.

    PYTHONPATH=. python tests/benchmarks/ablation.py [--seeds 3] [--epochs 50]

Rows of the table are ways to train, columns are cells: data, activation and training rows, d_sae four times d_in. All
ways make the same passes over the rows but for SGD "with its steps", which makes as many optimiser steps as PAM-SGD by
more passes. SGD is tied, at the better of two learning rates, chosen by its test FVU. Means over seeds. Only errors are
printed: nothing here measures time.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from solver_grid import BATCH_ROWS, STORES, sae

CELLS = {
    "digits, topk 10": ("digits", "0.25", ("--act", "topk", "--k", "10")),
    "digits, relu L1": ("digits", "0.25", ("--act", "relu")),
    "tiny-gemma2, topk 20": ("tiny-gemma2", "0.05", ("--act", "topk", "--k", "20")),
    "tiny-gemma2, relu L1": ("tiny-gemma2", "0.05", ("--act", "relu")),
}
PARTS = {
    "all of it": (),
    "without smoothing": ("--smoothing", "0"),
    "without inner steps": ("--inner-steps", "1"),
    "without revival": ("--no-revive",),
    "alpha fixed at 1e9: tied": ("--alpha", "1e9"),
    "alpha fixed at 1e-3": ("--alpha", "1e-3"),
    "free decoder": ("--decoder", "free"),
    "the paper's: free, alpha 1e-10, no other part": (
        "--decoder", "free", "--alpha", "1e-10", "--smoothing", "0", "--inner-steps", "1", "--no-revive"),
}
RATES = ("0.01", "0.03")


def mean(documents: list[dict[str, Any]], l1: bool) -> str:
    """Mean test FVU over seeds, with L0 where it is not fixed."""
    fvu, l0 = (statistics.mean(one["final"][name] for one in documents) for name in ("test_fvu", "test_l0"))
    return f"{fvu:.4f} at {l0:.1f}" if l1 else f"{fvu:.4f}"


def column(home: Path, data: str, fraction: str, act: tuple[str, ...], seeds: int, epochs: int) -> dict[str, str]:
    """A cell of the benchmark: what each way to train comes to."""
    l1 = "relu" in act

    def runs(*words: str, passes: int = epochs) -> list[dict[str, Any]]:
        shared = ("--data", data, "--fraction", fraction, *act, "--epochs", str(passes))
        return [sae(home, "train", *shared, "--seed", str(seed), *words) for seed in range(seeds)]

    def best_sgd(*words: str, passes: int = epochs) -> list[dict[str, Any]]:
        tried = [runs("--solver", "sgd", "--tied", "--lr", rate, *words, passes=passes) for rate in RATES]
        return min(tried, key=lambda documents: sum(one["final"]["test_fvu"] for one in documents))

    whole = runs()
    found = {name: mean(runs(*words) if words else whole, l1) for name, words in PARTS.items()}
    settings = json.loads((Path(whole[0]["path"]) / "run.json").read_text(encoding="utf-8"))
    width = str(settings["training"]["smoothing"])
    passes = max(epochs, round(whole[0]["steps"] / -(-whole[0]["rows_train"] // BATCH_ROWS)))
    found["SGD, tied"] = mean(best_sgd(), l1)
    found["SGD, tied, with its steps"] = mean(best_sgd(passes=passes), l1)
    found["SGD, tied, with its steps and smoothing"] = mean(best_sgd("--smoothing", width, passes=passes), l1)
    return found


def benchmark(seeds: int, epochs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for data in {cell[0] for cell in CELLS.values()}:
            sae(home, *STORES[data])
        columns = {name: column(home, *cell, seeds, epochs) for name, cell in CELLS.items()}
        print("| |", " | ".join(columns), "|")
        print("|---|" + "---|" * len(columns))
        for way in next(iter(columns.values())):
            print(f"| {way} |", " | ".join(cells[way] for cells in columns.values()), "|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=50)
    arguments = parser.parse_args()
    benchmark(arguments.seeds, arguments.epochs)
