"""How much of training is spent waiting for rows.

    PYTHONPATH=. python tests/benchmarks/store_waiting.py [--gib 1] [--d-in 2304] [--d-sae 4096] [--batch-size 2048]
                                                          [--epochs 1] [--cold]

Writes a bfloat16 store of random rows, trains on it with each solver, and times each `next()` of the store's streams,
shuffled and sequential, from the trainer's side; `first` is the share of the first `next()` of each. From the page
cache, and from disk: the store dropped from it before training, and with `--cold` before each stream, as every epoch
finds a store that is larger than memory. PyTorch takes all cores. PAM-SGD makes one encoder step
a batch, and a decoder step after the epoch.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from store_speed import drop, write

from saecli.activations import ACTIVATIONS
from saecli.console import listening
from saecli.home import now
from saecli.solvers import SOLVERS
from saecli.store import ActivationStore, Rows
from saecli.training import Loop, Plan, Run, RunRecord, Trainer, TrainingConfig


class Waiting(Rows):
    """Rows whose streams note how long each `next()` took.

    Args:
        rows: which rows.
        cold: drop the store from the page cache before each stream.

    Attributes:
        seconds: how long they took together.
        first: how long the first of each stream took together, which are among those.
    """

    seconds = first = 0.0

    def __init__(self, rows: Rows, cold: bool) -> None:
        super().__init__(rows.store, rows.split, rows._counts)
        self._cold = cold

    def batches(self, *arguments: int, **named: int) -> Iterator[np.ndarray]:
        """See `Rows.batches`."""
        return self._noted(super().batches(*arguments, **named))

    def sequential(self, batch_size: int) -> Iterator[np.ndarray]:
        """See `Rows.sequential`."""
        return self._noted(super().sequential(batch_size))

    def _noted(self, batches: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        batch, begun = None, False
        if self._cold:
            self.store._shards._maps.clear()  # what is mapped cannot be dropped
            drop((self.store.path / "shards").iterdir())
        while True:
            started = time.perf_counter()
            batch = next(batches, None)
            waited = time.perf_counter() - started
            self.seconds += waited
            self.first += 0 if begun else waited
            begun = True
            if batch is None:
                return
            yield batch


def train(path: Path, solver: str, settings: dict[str, int], cold: bool) -> None:
    """Train once, and print what share of the time was spent waiting."""
    store = ActivationStore.open(path)
    training = TrainingConfig(**settings)
    activation = ACTIVATIONS["topk"](k=32)
    chosen = SOLVERS[solver](**({"inner_steps": 1} if solver == "pam-sgd" else {}))
    rows = Waiting(training.rows_of(store), cold)
    plan = Plan.resolved(rows, training.test_rows_of(store), training, chosen, activation)
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop([Trainer(plan, RunRecord(Run(store, plan, now()), Path(folder), listening(False)))])
        started = time.perf_counter()
        loop.results(loop.train())
        seconds = time.perf_counter() - started
    print(f"{solver:9} {rows.rows:9,} {seconds:9.1f} {rows.seconds:9.3f} {rows.seconds / seconds:8.2%} "
          f"{rows.first / seconds:8.2%}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1)
    parser.add_argument("--d-in", type=int, default=2304)
    parser.add_argument("--d-sae", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    settings = {"d_sae": arguments.d_sae, "batch_size": arguments.batch_size, "epochs": arguments.epochs}
    print(f"PyTorch on {torch.get_num_threads()} threads")
    print(f"{'from':10} {'solver':9} {'rows':>9} {'seconds':>9} {'waiting':>9} {'share':>8} {'first':>8}")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "store"
        write(path, "bfloat16", arguments.d_in, int(arguments.gib * 2**30))
        for place in ("page cache", "disk", *["disk, cold"] * arguments.cold):
            for solver in ("sgd", "pam-sgd"):
                if place != "page cache":
                    drop((path / "shards").iterdir())
                print(f"{place:10}", end=" ", flush=True)
                train(path, solver, settings, place == "disk, cold")


if __name__ == "__main__":
    main()
