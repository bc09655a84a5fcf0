"""What `sae eval`, `sae sparsity` and `sae geometry` add to a bare pass over a store, and the memory that they take.

    PYTHONPATH=. python tests/benchmarks/evaluation_speed.py [--d-in 512] [--d-sae 4096] [--rows 8192] [--turns 7]

The bare pass encodes and decodes the batches that `sae eval` reads, with the same SAE, and measures nothing. Of `sae
geometry` only what streams is timed: cells, margins and samples, gathered from one pass. The passes take turns; shown
are each one's median seconds, and the median over the turns of its ratio to the bare pass of the same turn, in seconds
and in processor time, which other programs disturb less, the less so with --threads 1. relu is measured twice, with
half of the latents active, where products are dense, and with few. Memory is the largest resident one of a process
that runs the whole command over the rows, and over four times as many; what is mapped of the store counts in it. That
of `sae geometry`, which keeps a sample of rows, is shown by `geometry_scale.py`. Rows and weights are random. Timings
need a quiet machine. A larger size: --d-in 2304 --d-sae 16384 --rows 2048 --turns 5.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from geometry_scale import make_home, random_sae

from saecli.activations import Activation, Relu, TopK
from saecli.console import Silent
from saecli.evaluation.sae_and_rows import Measured, measured
from saecli.home import Home
from saecli.metrics import firing, reconstruction
from saecli.spline.partition import cells_of
from saecli.spline.survey import batch_size, gather

CASES: dict[str, tuple[Activation, float]] = {  # with the bias of every latent
    "topk 32": (TopK(k=32), 0.0), "relu, dense": (Relu(), 0.0), "relu, sparse": (Relu(), -6.0)}


@torch.no_grad()
def bare(one: Measured) -> None:
    """Encode and decode."""
    for x in one.batches(Silent()):
        one.sae.decode(one.sae.encode(x))


def passes(one: Measured) -> dict[str, Callable[[], object]]:
    """The passes by name, the bare one first."""
    cells = cells_of(one.sae)
    batches = batch_size(one.sae.d_sae)
    return {"bare": lambda: bare(one), "eval": lambda: reconstruction(one.sae, one.batches(Silent())),
            "sparsity": lambda: firing(one.sae, one.batches(Silent())),
            "geometry": lambda: gather(cells, map(torch.from_numpy, one.rows.sequential(batches)))}


def seconds(work: Callable[[], object]) -> np.ndarray:
    """Those that some work takes, and those of processor time."""
    started, worked = time.perf_counter(), time.process_time()
    work()
    return np.array([time.perf_counter() - started, time.process_time() - worked])


def timed(home: Path, turns: int) -> tuple[float, dict[str, tuple[float, float, float]]]:
    """The mean L0, and of each pass the median seconds and the median ratios to the bare one."""
    one = measured(Home(home), "one", None, "all", "cpu", Silent())
    works = passes(one)
    found = [{name: seconds(work) for name, work in works.items()} for _ in range(turns + 1)][1:]
    return firing(one.sae, one.batches(Silent())).result()["l0"], {
        name: (float(np.median([turn[name][0] for turn in found])),
               *np.median([turn[name] / turn["bare"] for turn in found], axis=0).tolist()) for name in works}


def peak(home: Path, command: str, threads: int) -> float:
    """MiB of the largest resident memory of a command."""
    words = [sys.executable, "-m", "saecli", "--home", home, command, "one", "--split", "all", "--json"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               env=os.environ | {"OMP_NUM_THREADS": str(threads)})
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"sae {command} ended with {process.returncode}")
    return usage.ru_maxrss / 1024


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d-in", type=int, default=512)
    parser.add_argument("--d-sae", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    print(f"{chosen.rows:,} rows, d_in {chosen.d_in}, d_sae {chosen.d_sae}, {chosen.threads} threads, "
          f"torch {torch.__version__}\n")
    print("| SAE | L0 | pass | seconds | over bare | over bare, processor |\n|---|---|---|---|---|---|")
    memory = []
    for case, (activation, bias) in CASES.items():
        sae = random_sae(activation, chosen.d_in, chosen.d_sae, bias)
        with tempfile.TemporaryDirectory() as folder:
            homes = [Path(folder) / str(times) for times in (1, 4)]
            make_home(homes[0], chosen.rows, sae)
            l0, found = timed(homes[0], chosen.turns)
            for name, (taken, ratio, of_processor) in found.items():
                print(f"| {case} | {l0:.0f} | {name} | {taken:.2f} | {ratio:.2f} | {of_processor:.2f} |", flush=True)
            make_home(homes[1], 4 * chosen.rows, sae)
            for command in ("eval", "sparsity"):
                once, fourfold = (peak(home, command, chosen.threads) for home in homes)
                memory.append(f"| {case} | {command} | {once:,.0f} | {fourfold:,.0f} |")
    print(f"\n| SAE | command | MiB at {chosen.rows:,} rows | MiB at {4 * chosen.rows:,} rows |\n|---|---|---|---|")
    print("\n".join(memory))


if __name__ == "__main__":
    main()
