"""What each part is worth: `pam-sgd` at its defaults with one part changed, and `sgd` likewise.

    PYTHONPATH=. python tests/benchmarks/ablation.py [--data docs,world] [--seeds 1] [--out FOLDER]

Cells, their stores and measures are those of `features.py`, whose FOLDER may be given. Runs are written to
FOLDER/ablation.jsonl as they end; the same command resumes. All ways take as many steps, but for "inner steps 1" where
batches are few. "tied, then untied" is the schedule of a released `pam-sgd` without its exact decoder steps: W_dec is
W_enc' for half of the steps, and from then on a parameter of its own. Means over seeds. Needs no network.
"""

import argparse
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from features import CELLS, MEASURES, fill, stores
from solver_grid import Log

import saecli
from saecli.batch import Batch
from saecli.dictionary import SAE, Coupled
from saecli.distributed import ALONE, Communicator
from saecli.solvers import SOLVERS, Solver, StepReport, Task
from saecli.solvers.pam_sgd import RELEASE
from saecli.solvers.sgd import Sgd, SgdSolver

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "pam-sgd": ("pam-sgd", {}),
    "held to the end": ("pam-sgd", {"release": 1.0}),
    "released half way in any case": ("pam-sgd", {"release": RELEASE}),
    "tied to the end": ("pam-sgd", {"alpha": 1e9, "release": 1.0}),
    "free decoder": ("pam-sgd", {"decoder": "free"}),
    "no revival": ("pam-sgd", {"revive": False}),
    "no smoothing": ("pam-sgd", {"smoothing": 0.0}),
    "inner steps 1": ("pam-sgd", {"inner_steps": 1}),
    "prefixes": ("pam-sgd", {"prefixes": "auto"}),
    "sgd": ("sgd", {}),
    "sgd, tied": ("sgd", {"tied": True}),
    "sgd, tied, then untied": ("tied-then-untied", {}),
    "sgd, no revival": ("sgd", {"revive": False}),
    "sgd, no smoothing": ("sgd", {"smoothing": 0.0}),
    "sgd, prefixes": ("sgd", {"prefixes": "auto"}),
}


@dataclass(frozen=True)
class TiedThenUntied(Sgd):
    """Options of the baseline that has the schedule of a released `pam-sgd`, and none of its decoder steps."""

    name: ClassVar[str] = "tied-then-untied"

    def build(self, initial: SAE, task: Task, communicator: Communicator = ALONE) -> Solver:
        return TiedThenUntiedSolver(initial, task, self, communicator)


class TiedThenUntiedSolver(SgdSolver):
    """Descent on an encoder whose transpose is the decoder, and after `RELEASE` of the steps on both."""

    def __init__(self, initial: SAE, task: Task, config: Sgd, communicator: Communicator) -> None:
        start = initial.sae()
        tied = Coupled(start, 1.0, torch.zeros_like(start.W_dec))
        Solver.__init__(self, tied, ["Delta"], task, config, math.ceil(task.steps / task.batches), communicator)

    def step(self, batch: Batch) -> list[StepReport]:
        """Untie the decoder when it is time, and take a step."""
        dictionary = self.dictionary
        if dictionary.c and self.steps >= RELEASE * self.task.steps:
            dictionary.untie()
            self.optimizer.include("Delta", dictionary.Delta.requires_grad_(True))
        return super().step(batch)


def run(job: tuple[str, str, str], home: Path) -> dict[str, Any]:
    """Train on a cell, in a way, with a seed; measures on the held-out rows, and seconds of processor time."""
    SOLVERS[TiedThenUntied.name] = TiedThenUntied
    cell, way, seed = job
    solver, changed = WAYS[way]
    store = saecli.open_store(CELLS[cell].store, home)
    began = time.process_time()
    sae = saecli.fit(store, solver=solver, seed=int(seed), shuffle_seed=int(seed), **CELLS[cell].options | changed)
    seconds = time.process_time() - began
    found = saecli.evaluate(sae, store, model=CELLS[cell].model)
    return {"seconds": seconds} | {name: found[name] for name in MEASURES if name in found}


def table(cell: str, results: Mapping[str, list[Mapping[str, Any]]]) -> str:
    """A row per way, in Markdown."""
    measures = [name for name in (*MEASURES, "seconds") if name in results["pam-sgd"][0]]
    lines = [f"| {cell} | {' | '.join(measures)} |", "|---" * (1 + len(measures)) + "|"]
    for way, found in results.items():
        means = [np.mean([one[name] for one in found]) for name in measures]
        lines.append(f"| {way} | {' | '.join(f'{mean:.4g}' for mean in means)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="docs,world", help=f"out of {', '.join(CELLS)}")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--out", type=Path, default=Path("feature-benchmark"), help="folder of stores and runs")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    chosen = parser.parse_args()
    cells = chosen.data.split(",")
    home = stores(cells, chosen.out)
    jobs = [(cell, way, str(seed)) for cell in cells for way in WAYS for seed in range(chosen.seeds)]
    results = fill(partial(run, home=home), jobs, Log(chosen.out / "ablation.jsonl"), chosen.jobs)
    for cell in cells:
        print(table(cell, {way: [results[cell, way, str(seed)] for seed in range(chosen.seeds)] for way in WAYS}), "\n")


if __name__ == "__main__":
    main()
