"""Test error of the solvers on small data: PAM-SGD at its defaults against the best of several runs of SGD.

    PYTHONPATH=. python tests/benchmarks/solvers.py [--data digits] [--activations relu,topk-4%] [--out FOLDER]

Needs no network. Every run is one `sae train` on one thread, with as many passes over the rows for either solver. It is
written to FOLDER/runs.jsonl as it ends, and run just once: the same command goes on where it was stopped, and another
choice of cells adds what is missing. Where the code has changed, take the runs it concerns out of that file, or give
another folder. Tables (Markdown, CSV) and the picture show the chosen cells whose runs are all there.

SGD is run tied and untied, at each of several learning rates; the way of the least mean test FVU is shown, which
flatters it, since it is chosen on the test rows. PAM-SGD is not tuned. relu trains without a penalty; relu-l1 sweeps
the L1 penalty and compares L0 at equal test FVU, between frontiers: of SGD that of all its ways together. The ratio of
L0 is averaged geometrically over the errors that both frontiers cover. The deviation is over seeds, which decide
initial weights and the order of rows; the rows and their split are always the same.

PAM-SGD may take several steps on a batch. --equal-steps also gives SGD, at its best rate and weights, as many steps by
more passes over the rows (not with relu-l1).
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from solver_grid import RELU, RELU_L1, STORES, TOPK, Grid, Log, fill
from solver_report import compare, write_tables


def listed(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """A parser of values between commas."""
    def parse(text: str) -> tuple[Any, ...]:
        return tuple(kind(part.strip()) for part in text.split(","))

    return parse


def data(text: str) -> str:
    if text not in STORES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(STORES)}, got {text}")
    return text


def activation(text: str) -> str:
    if text not in (RELU, RELU_L1) and not TOPK.fullmatch(text):
        raise argparse.ArgumentTypeError(f"expected {RELU}, {RELU_L1} or topk-X%, got {text}")
    return text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=listed(data), default=tuple(STORES), help="out of " + ",".join(STORES))
    parser.add_argument("--activations", type=listed(activation), help="relu, relu-l1, topk-X%% of d_sae",
                        default=(RELU, RELU_L1, "topk-1%", "topk-4%", "topk-8%"))
    parser.add_argument("--fractions", type=listed(float), default=(0.05, 0.1, 0.25, 0.45, 0.7, 1.0),
                        help="shares of the training rows")
    parser.add_argument("--widths", type=listed(int), default=(1, 4, 16), help="latents for each dimension")
    parser.add_argument("--seeds", type=int, default=2, help="how many")
    parser.add_argument("--epochs-for", type=int, default=2000, help="as many epochs as make so many batches")
    parser.add_argument("--most-epochs", type=int, default=50, help="but at most so many")
    parser.add_argument("--rates", type=listed(float), default=Grid.rates, help="SGD's learning rates")
    parser.add_argument("--l1-rates", type=listed(float), default=Grid.l1_rates, help="SGD's rates with relu-l1")
    parser.add_argument("--l1-weights", type=listed(float), default=Grid.l1_weights,
                        help="the sweep of relu-l1, in units of `sae train`'s default weight")
    parser.add_argument("--equal-steps", action="store_true", help="also SGD with as many steps as PAM-SGD took")
    parser.add_argument("--out", type=Path, default=Path("solver-benchmark"), help="folder of runs, tables, picture")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; 0: only report on the runs that are there")
    return parser.parse_args()


def report(grid: Grid, cells: list, log: Log, folder: Path) -> None:
    """Write and print what the runs so far say of the cells."""
    from solver_picture import draw

    found = [compare(measured) for cell in cells if (measured := grid.measured(cell, log.results)) is not None]
    if found:
        print(write_tables(folder, found))
        draw(folder / "solvers.png", found)
    print(f"{len(found)} of {len(cells)} cells are complete; {len(log.results):,} runs in {log.path}", file=sys.stderr)


def benchmark(chosen: argparse.Namespace) -> None:
    grid = Grid(chosen.activations, chosen.fractions, chosen.widths, chosen.seeds, chosen.epochs_for,
                chosen.most_epochs, chosen.rates, chosen.l1_rates, chosen.l1_weights, chosen.equal_steps)
    home = chosen.out.resolve() / "home"
    home.mkdir(parents=True, exist_ok=True)
    cells, log = grid.cells(home, chosen.data), Log(chosen.out / "runs.jsonl")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` ends a piece as Ctrl-C does
    stopped = False
    try:
        if chosen.jobs:
            fill(grid, cells, log, home, chosen.jobs)
    except KeyboardInterrupt:
        stopped = True
    report(grid, cells, log, chosen.out)
    if stopped:
        sys.stdout.flush()
        os._exit(130)  # does not wait for the runs under way, which end with this process


if __name__ == "__main__":
    benchmark(arguments())
