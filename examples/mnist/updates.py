"""Several encoder updates on each batch, as the paper ablates them: test errors into `updates.json`; run by `run.sh`.

Each batch is descended on N times in a row, at the same learning rate; the decoder is solved after each epoch, as ever.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import saecli
from saecli.sae.dictionary import Batch
from saecli.train import SOLVERS
from saecli.train.options import Pam, Sgd
from saecli.train.pam import PamSolver
from saecli.train.solver import SgdSolver, Solver

UPDATES = (1, 3, 5, 10)
SETTINGS = {
    "act": "abs-topk",
    "k": 15,
    "d_sae": 256,
    "epochs": 10,
    "batch_size": 128,
    "lr": 0.003,
    "lr_warm_up": 0,
    "lr_decay": 0,
    "normalize": "none",
    "smoothing": 0,
}


def repeated(solver: type[Solver], updates: int) -> type[Solver]:
    """A solver that takes its step `updates` times on each batch, and counts one."""

    class Repeated(solver):  # type: ignore[valid-type,misc]
        def descend(self, batch: Batch) -> Any:
            for _ in range(updates - 1):
                super().descend(batch)
                self.steps -= 1
            return super().descend(batch)

    return Repeated


def registered(way: str, updates: int) -> tuple[str, dict[str, Any]]:
    """The name of such a solver, by which `saecli.fit` finds it, and its options."""
    kind, solver = {"sgd": (Sgd, SgdSolver), "paper": (Pam, PamSolver)}[way]

    @dataclass(frozen=True)
    class Chosen(kind):  # type: ignore[valid-type,misc]
        name: ClassVar[str] = f"{way}-{updates}"

        def build(self, initial: Any, task: Any, communicator: Any) -> Solver:
            return repeated(solver, updates)(initial, task, self, communicator)

    SOLVERS[Chosen.name] = Chosen
    options = {"sgd": {"tied": True, "revive": False}, "paper": {"alpha": 1e-6}}
    return Chosen.name, options[way]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the section, with its store")
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    path = given.out / "updates.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    known = {(line["way"], line["updates"], line["seed"]) for line in found}
    store = saecli.open_store("images", home=given.out / "home")
    for updates in UPDATES:
        for way in ("sgd", "paper"):
            name, options = registered(way, updates)
            for seed in range(given.seeds):
                if (way, updates, seed) in known:
                    continue
                sae = saecli.fit(store, solver=name, seed=seed, **SETTINGS, **options)
                fvu = saecli.evaluate(sae, store)["fvu"]
                found.append({"way": way, "updates": updates, "seed": seed, "test_fvu": fvu})
                path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
