"""Seconds of training until the error and sparsity that SAELens has after its full run, on the same rows.

    PYTHONPATH=. python tests/benchmarks/time_to_quality.py [--threads 2] [--saelens-python PYTHON]

SAELens' trainer, given normalised rows from memory, takes --steps steps at each of --rates. What no other rate beats in
both L0 and FVU is a target; with topk, whose L0 is k, that is the least FVU. `sae train` is then run on the same rows,
normalised alike, with batches of the same size, for `SHARES` of the steps, from a 32nd to all of them, its
schedules fitted to each length and its learning rate its own choice; with L1, at weights from a half of SAELens'
coefficient, which is the default of `sae train`, to 32 times that, by bisection: short runs need a larger one. A run
has reached a target if its FVU is at most the target's, at an L0 that is at most the target's too; with topk both keep
k. The first length that reaches it counts; "not reached" means not before a run took longer than SAELens.

Seconds are of training alone, as `sae train --json` has them, reading from the store included; for SAELens those of
`SAETrainer.fit`. Each side's are the least of three: SAELens' over its rates, which do the same work, ours over
repetitions. L0 and FVU are of the held-out rows; SAELens' SAEs are measured by its own encoding and decoding, with
which `saecli.metrics` must agree. The two never train at the same time. Timings need a quiet
machine. Without --saelens-python, an environment with sae-lens is made in a folder that is removed at the end.
"""

import argparse
import math
import tempfile
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from saelens_saes import trained_by_saelens
from solver_grid import STORES, sae
from training_speed import SAELENS, with_saelens

from saecli import ActivationStore

SHARES = (1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 1)
SOLVERS = ("pam-sgd", "sgd")
FACTORS = tuple(2 ** (place / 2) for place in range(-2, 11))  # of L1's weight against SAELens' coefficient
REPETITIONS = 3


@dataclass(frozen=True)
class Run:
    """What a training came to, on held-out rows."""

    way: str
    steps: int
    seconds: float
    l0: float
    fvu: float

    def reaches(self, other: "Run", at_any_l0: bool) -> bool:
        """Whether it is as good in FVU, and unless it does not matter in L0."""
        return self.fvu <= other.fvu and (at_any_l0 or self.l0 <= other.l0)


class Comparison:
    """Both sides on one store with one activation.

    Args:
        home: where stores and runs are.
        data: the store's name, one of `STORES`.
        case: "relu", with L1, or "topk-K".
        chosen: the command line's options.
    """

    def __init__(self, home: Path, data: str, case: str, chosen: argparse.Namespace) -> None:
        self.home, self.data, self.case, self.chosen = home, data, case, chosen
        self.store = ActivationStore.open(Path(sae(home, *STORES[data])["path"]))
        self.weight = 0.1 * math.sqrt(self.store.d_in)  # of L1, the default of `sae train`
        self._runs: dict[tuple[str, int, float | None], Run] = {}

    def theirs(self, python: Path, folder: Path) -> list[Run]:
        """SAELens' runs, one a rate."""
        chosen = self.chosen
        found = trained_by_saelens(python, self.store, folder, self.case, chosen.d_sae, chosen.steps, chosen.rates,
                                   chosen.batch, threads=chosen.threads, l1=self.weight)
        seconds = min(run["seconds"] for _, run in found)
        return [Run(f"lr {run['rate']}", chosen.steps, seconds, run["l0"], run["fvu"]) for _, run in found]

    def ours(self, solver: str, target: Run) -> Run | None:
        """The shortest length's run that reaches a target, at its fastest; None where none does in SAELens' seconds."""
        factors = FACTORS
        for share in SHARES:
            steps = round(share * self.chosen.steps)
            tried = self._towards(solver, steps, target, factors)
            for factor, run in tried.items():
                if run.reaches(target, self.case != "relu"):
                    again = [self._train(solver, steps, factor) for _ in range(REPETITIONS - 1)]
                    return min([run, *again], key=lambda one: one.seconds)
            if min(run.seconds for run in tried.values()) > target.seconds:
                break
            # Longer runs are the sparser: what was large enough a weight is so for them.
            enough = [factor for factor, run in tried.items() if factor and run.l0 <= target.l0]
            factors = tuple(factor for factor in factors if factor <= min(enough, default=math.inf))
        return None

    def _towards(self, solver: str, steps: int, target: Run, factors: tuple[float, ...]) -> dict[float | None, Run]:
        """Runs of one length, by their factors, out of those given; as soon as one reaches the target, no more."""
        if self.case != "relu":
            return {None: self._once(solver, steps, None)}
        tried: dict[float | None, Run] = {}
        low, high = 0, len(factors)
        while low < high:  # the larger the weight, the lower L0 and the larger the error
            middle = (low + high) // 2
            run = tried[factors[middle]] = self._once(solver, steps, factors[middle])
            if run.l0 > target.l0:
                low = middle + 1
            elif run.fvu > target.fvu:
                high = middle
            else:
                break
        return tried

    def _once(self, solver: str, steps: int, factor: float | None) -> Run:
        """A run that is trained but once."""
        if (solver, steps, factor) not in self._runs:
            self._runs[solver, steps, factor] = self._train(solver, steps, factor)
        return self._runs[solver, steps, factor]

    def _train(self, solver: str, steps: int, factor: float | None) -> Run:
        chosen = self.chosen
        words = ["--act", "topk", "--k", self.case.removeprefix("topk-")]
        if factor is not None:
            words = ["--act", "relu", "--sparsity", "l1", "--sparsity-weight", str(factor * self.weight)]
        done = sae(self.home, "train", "--data", self.data, "--solver", solver, *words, "--d-sae", str(chosen.d_sae),
                   "--steps", str(steps), "--batch-size", str(chosen.batch))
        way = "" if factor is None else f"weight {factor * self.weight:.2g}"
        return Run(way, steps, done["seconds"], done["final"]["test_l0"], done["final"]["test_fvu"])


def undominated(runs: list[Run], at_any_l0: bool) -> list[Run]:
    """The runs that no other reaches."""
    return [run for run in runs if not any(other.reaches(run, at_any_l0) for other in runs if other is not run)]


def benchmark(chosen: argparse.Namespace, python: Path) -> None:
    """Print a line for each target and solver, after one for each of SAELens' rates."""
    torch.set_num_threads(chosen.threads)
    print(f"d_sae {chosen.d_sae}, batch {chosen.batch}, {chosen.threads} threads; {SAELENS}, torch "
          f"{torch.__version__}\n\n| data, case | training | steps | seconds | L0 | FVU | of SAELens' seconds |\n"
          "|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for data in chosen.data:
            for case in chosen.cases:
                rows = Path(folder) / f"{data}-{case}"
                rows.mkdir()
                one = Comparison(chosen.home or Path(folder) / "home", data, case, chosen)
                theirs = one.theirs(python, rows)
                targets = undominated(theirs, case != "relu")
                for run in theirs:
                    note = "a target" if run in targets else ""
                    print(f"| {data}, {case} | SAELens, {run.way} | {_figures(run)} | {note} |", flush=True)
                for solver, target in product(SOLVERS, targets):
                    run = one.ours(solver, target)
                    training = ", ".join(filter(None, [solver, run and run.way, f"as SAELens, {target.way}"]))
                    figures = "| | | | not reached" if run is None else (
                        f"{_figures(run)} | {run.seconds / target.seconds:.2f}")
                    print(f"| {data}, {case} | {training} | {figures} |", flush=True)


def _figures(run: Run) -> str:
    return f"{run.steps} | {run.seconds:.2f} | {run.l0:.1f} | {run.fvu:.4f}"


def main() -> None:
    """Make the environment where none is given, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--home", type=Path, help="where stores and runs are made and kept; else they are removed")
    parser.add_argument("--data", nargs="+", choices=("tiny-gemma2", "patches"), default=["tiny-gemma2", "patches"])
    parser.add_argument("--cases", nargs="+", default=["relu", "topk-32"], help="relu, topk-K")
    parser.add_argument("--d-sae", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=1000, help="of SAELens")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rates", nargs="+", default=["3e-4", "1e-3", "3e-3"], help="of SAELens")
    parser.add_argument("--saelens-python", type=Path, help="Python of an environment that has sae-lens")
    chosen = parser.parse_args()
    with_saelens(chosen.saelens_python, partial(benchmark, chosen))


if __name__ == "__main__":
    main()
