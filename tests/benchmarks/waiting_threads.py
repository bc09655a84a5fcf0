"""What threads that wait cost: a training alone, and beside other work on every core.

    PYTHONPATH=. python tests/benchmarks/waiting_threads.py [--steps 150] [--rounds 3]

OpenMP's threads spin for a while between two products, or sleep (`OMP_WAIT_POLICY=passive`, which saecli sets). Both
are run in turn, each time the same `sae train`; printed are medians of wall and processor seconds, start-up included.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np

POLICIES = ("active", "passive")
BUSY = "while True: pass"


@contextmanager
def other_work(processes: int) -> Iterator[None]:
    """Processes that keep cores busy."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def seconds(words: list[str], policy: str) -> tuple[float, float]:
    """Wall and processor seconds of `sae`; `active` is OpenMP's own default."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment["GOMP_SPINCOUNT" if policy == "active" else "OMP_WAIT_POLICY"] = (
        "300000" if policy == "active" else "passive")  # what libgomp takes where nothing is set
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, "-m", "saecli", *words], env=environment, check=True, capture_output=True)
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows.npy"
        np.save(rows, np.random.default_rng(0).standard_normal((20_000, 384), np.float32))
        home = ["--home", scratch]
        seconds([*home, "import", str(rows)], "passive")
        train = [*home, "train", "--d-sae", "1024", "--act", "topk", "--k", "32", "--steps", str(given.steps)]
        print(f"{'beside':>28} {'policy':>8} {'wall s':>8} {'processor s':>12}")
        for others in (0, cores):
            with other_work(others):
                found: dict[str, list[tuple[float, float]]] = {policy: [] for policy in POLICIES}
                for _ in range(given.rounds):
                    for policy in POLICIES:
                        found[policy].append(seconds(train, policy))
            for policy, pairs in found.items():
                wall, processor = (median(values) for values in zip(*pairs, strict=True))
                print(f"{others:>18} processes {policy:>8} {wall:>8.1f} {processor:>12.1f}")


if __name__ == "__main__":
    main()
