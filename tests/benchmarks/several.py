"""Several SAEs trained together, from one reading of the store, against the same trained one after the other.

    PYTHONPATH=. python tests/benchmarks/several.py [--runs 4] [--rows 100000] [--d-in 768] [--steps 400] [--rounds 3]

Writes a bfloat16 store of random rows, and trains SAEs of several seeds on it by `sae train`: all in one process, by
`--seed 0 --seed 1 ...`, and one process a seed. The two take turns; the least of each counts. "alone" is what one
process for one SAE takes, "each one more" what each further one adds to it, in wall-clock seconds.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from store_speed import write

CASES = {
    "sgd, topk 16 of 512": ("--solver", "sgd", "--act", "topk", "--k", "16", "--d-sae", "512"),
    "sgd, topk 32 of 4096": ("--solver", "sgd", "--act", "topk", "--k", "32", "--d-sae", "4096"),
    "pam-sgd, relu, 512": ("--solver", "pam-sgd", "--act", "relu", "--d-sae", "512"),
}


def seconds(home: Path, seeds: list[int], words: tuple[str, ...]) -> tuple[float, float]:
    """Wall-clock and processor seconds of one process that trains an SAE a seed."""
    chosen = [word for seed in seeds for word in ("--seed", str(seed))]
    before, started = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-m", "saecli", "--home", str(home), "train", *words, *chosen],
                   check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    taken, after = time.perf_counter() - started, os.times()
    return taken, after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--d-in", type=int, default=768)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    seeds = list(range(chosen.runs))
    print(f"{chosen.rows:,} rows, d_in {chosen.d_in}, {chosen.steps} steps of {chosen.batch_size} rows, {chosen.runs} "
          "SAEs; seconds, of the processor in brackets\n")
    print("| SAEs | alone | one after the other | together | of that | each one more |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write(home / "activations" / "rows", "bfloat16", chosen.d_in, 2 * chosen.rows * chosen.d_in)
        for name, words in CASES.items():
            words = (*words, "--steps", str(chosen.steps), "--batch-size", str(chosen.batch_size))
            apart, joined = [], []
            for _ in range(chosen.rounds):
                apart.append([sum(parts) for parts in zip(*(seconds(home, [seed], words) for seed in seeds),
                                                          strict=True)])
                joined.append(seconds(home, seeds, words))
            least = [[min(taken) for taken in zip(*rounds, strict=True)] for rounds in (apart, joined)]
            (wall, processor), (wall_joined, processor_joined) = least
            one, more = wall / chosen.runs, (wall_joined - wall / chosen.runs) / (chosen.runs - 1)
            print(f"| {name} | {one:.1f} | {wall:.1f} ({processor:.1f}) | {wall_joined:.1f} ({processor_joined:.1f}) | "
                  f"{wall_joined / wall:.2f} ({processor_joined / processor:.2f}) | {more:.1f} |", flush=True)


if __name__ == "__main__":
    main()
