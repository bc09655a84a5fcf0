"""The runs of the solver benchmark: which there are, and how each is run just once.

A run is known by the words that `sae train` is given, and its JSON document stands in `runs.jsonl` beside them. A cell
is one choice of data, activation, width and share of the training rows; its runs differ in solver, learning rate,
penalty and seed.
"""

import hashlib
import io
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

STORES = {
    "digits": ("import", "digits", "--name", "digits"),
    "patches": ("import", "patches", "--name", "patches"),
    "tiny-gemma2": ("extract", "--model", "tiny-gemma2", "--layer", "2", "--rows", "40000", "--name", "tiny-gemma2"),
}
RELU, RELU_L1, TOPK = "relu", "relu-l1", re.compile(r"topk-(\d+(?:\.\d+)?)%")
BATCH_ROWS = 256

Key = tuple[str, ...]
Results = dict[Key, dict[str, Any]]


class CommandError(RuntimeError):
    """A command ended with one sentence on what failed."""


def sae(home: Path, *words: str) -> dict[str, Any]:
    """Run a command in this process and return its JSON document."""
    from saecli.cli import main

    out, err, kept = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["sae", "--home", str(home), *words, "--json"]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as stop:
        if stop.code:
            raise CommandError(err.getvalue().strip()) from stop
    finally:
        sys.argv = kept
    return json.loads(out.getvalue())


@dataclass(frozen=True)
class Cell:
    """What solvers are compared on.

    Args:
        data: the store.
        act: "relu", "relu-l1" or "topk-X%".
        width: latents for each dimension of the data.
        fraction: share of the training rows.
        d_in: dimensions of the data.
        rows: training rows, of that share.
    """

    data: str
    act: str
    width: int
    fraction: float
    d_in: int
    rows: int

    @property
    def d_sae(self) -> int:
        return self.width * self.d_in

    def words(self, weight: float | None) -> Key:
        """The activation and its penalty, as options; a weight is in units of `sae train`'s default for L1."""
        if self.act == RELU:
            return ("--act", "relu", "--sparsity", "none")
        if weight is not None:
            return ("--act", "relu", "--sparsity", "l1", "--sparsity-weight", f"{weight * 0.1 * self.d_in**0.5:.6g}")
        share = float(TOPK.fullmatch(self.act)[1]) / 100
        return ("--act", "topk", "--k", str(max(1, round(share * self.d_sae))))


@dataclass(frozen=True)
class Trial:
    """A way to train in a cell, but for the seed.

    Args:
        epochs: passes over the training rows.
        weight: of the L1 penalty, in units of the default; None where there is none.
        lr: SGD's learning rate; None for PAM-SGD at its defaults.
        tied: SGD's weights.
    """

    epochs: int
    weight: float | None = None
    lr: float | None = None
    tied: bool = False

    @property
    def name(self) -> str:
        return "pam-sgd" if self.lr is None else f"{'tied' if self.tied else 'untied'}, {self.lr:g}"


def words(cell: Cell, trial: Trial, seed: int) -> Key:
    """A run as `sae train` is given it, which is also what it is known by."""
    solver = ("pam-sgd",) if trial.lr is None else ("sgd", "--lr", f"{trial.lr:g}", *(["--tied"] if trial.tied else []))
    return ("--data", cell.data, *cell.words(trial.weight), "--d-sae", str(cell.d_sae),
            "--fraction", f"{cell.fraction:g}", "--epochs", str(trial.epochs), "--seed", str(seed), "--solver", *solver)


@dataclass(frozen=True)
class Outcome:
    """What a run came to; infinite error where it failed."""

    fvu: float
    l0: float
    dead: float
    steps: int


@dataclass(frozen=True)
class Measured:
    """A cell whose runs are all there: the outcomes of each way to train, one a seed.

    Args:
        cell: the cell.
        pam: PAM-SGD's, one for each weight of the penalty.
        sgd: SGD's.
        equal: SGD's best way with as many steps as PAM-SGD took; None where it was not asked for.
    """

    cell: Cell
    pam: Mapping[Trial, tuple[Outcome, ...]]
    sgd: Mapping[Trial, tuple[Outcome, ...]]
    equal: tuple[Outcome, ...] | None = None

    def best(self) -> Trial:
        """SGD's way of the least mean test FVU, which flatters it: it is chosen on the test rows."""
        return min(self.sgd, key=lambda trial: sum(outcome.fvu for outcome in self.sgd[trial]))


@dataclass(frozen=True)
class Grid:
    """Which cells there are, and how each is trained on.

    Args:
        activations: as of `Cell.act`.
        fractions: shares of the training rows.
        widths: as of `Cell.width`.
        seeds: how many seeds.
        batches: the passes over the data are as many as make so many batches.
        most_epochs: the most passes.
        rates: SGD's learning rates.
        l1_rates: SGD's learning rates with relu-l1.
        l1_weights: of the penalty with relu-l1, in units of the default.
        equal_steps: also train SGD with as many steps as PAM-SGD took; not with relu-l1.
    """

    activations: tuple[str, ...]
    fractions: tuple[float, ...]
    widths: tuple[int, ...]
    seeds: int = 2
    batches: int = 2000
    most_epochs: int = 50
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    l1_rates: tuple[float, ...] = (3e-3, 1e-2)
    l1_weights: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    equal_steps: bool = False

    def cells(self, home: Path, data: tuple[str, ...]) -> list[Cell]:
        """All cells, the cheaper ones first; makes the stores that are missing."""
        from saecli.store import ActivationStore

        sizes: dict[tuple[str, float], tuple[int, int]] = {}
        for name in data:
            store = ActivationStore.open(Path(sae(home, *STORES[name])["path"]))
            sizes |= {(name, f): (store.d_in, store.split("train", fraction=f).rows) for f in self.fractions}
        return [Cell(name, act, width, fraction, *sizes[name, fraction]) for width in self.widths
                for act in self.activations for name in data for fraction in self.fractions]

    def trials(self, cell: Cell) -> list[Trial]:
        """PAM-SGD's ways and SGD's, but for those of equal steps."""
        epochs = min(self.most_epochs, math.ceil(self.batches / math.ceil(cell.rows / BATCH_ROWS)))
        rates = self.l1_rates if cell.act == RELU_L1 else self.rates
        ways = [Trial(epochs), *(Trial(epochs, None, lr, tied) for tied in (False, True) for lr in rates)]
        weights = self.l1_weights if cell.act == RELU_L1 else (None,)
        return [replace(way, weight=weight) for weight in weights for way in ways]

    def runs(self, cell: Cell, results: Results) -> list[Key]:
        """The runs of a cell as far as they are known: those of equal steps follow from the others' results."""
        trials = self.trials(cell)
        if self.equal_steps and (found := self._measured(cell, results)) is not None:
            trials += self._equal(found)
        return list(dict.fromkeys(words(cell, trial, seed) for trial in trials for seed in range(self.seeds)))

    def measured(self, cell: Cell, results: Results) -> Measured | None:
        """A cell's outcomes; None where runs are missing."""
        found = self._measured(cell, results)
        if found is None or not self.equal_steps:
            return found
        for trial in self._equal(found):
            if (outcomes := self._outcomes(cell, trial, results)) is None:
                return None
            found = replace(found, equal=outcomes)
        return found

    def _measured(self, cell: Cell, results: Results) -> Measured | None:
        outcomes = {trial: self._outcomes(cell, trial, results) for trial in self.trials(cell)}
        if None in outcomes.values():
            return None
        return Measured(cell, *({trial: found for trial, found in outcomes.items() if (trial.lr is None) is pam}
                                for pam in (True, False)))

    def _outcomes(self, cell: Cell, trial: Trial, results: Results) -> tuple[Outcome, ...] | None:
        found = [results.get(words(cell, trial, seed)) for seed in range(self.seeds)]
        return None if None in found else tuple(map(_outcome, found))

    def _equal(self, found: Measured) -> list[Trial]:
        """SGD's best way, with the passes that give it PAM-SGD's steps; none with relu-l1."""
        if found.cell.act == RELU_L1:
            return []
        steps = max(outcome.steps for outcomes in found.pam.values() for outcome in outcomes)
        per_epoch = math.ceil(found.cell.rows / BATCH_ROWS)
        best = found.best()
        return [replace(best, epochs=max(best.epochs, math.ceil(steps / per_epoch)))]


def _outcome(result: Mapping[str, Any]) -> Outcome:
    if "error" in result:
        return Outcome(math.inf, math.nan, math.nan, 0)
    final = result["final"]
    return Outcome(final["test_fvu"], final["test_l0"], final["dead_fraction"], result["steps"])


class Log:
    """`runs.jsonl`: what is there is read, what comes is appended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: Results = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for line in text.splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # a kill cut it short; its run is missing, then
                continue
            self.results[tuple(entry["words"])] = entry["result"]
        if text and not text.endswith("\n"):
            with path.open("a", encoding="utf-8") as file:
                file.write("\n")

    def add(self, key: Key, result: dict[str, Any]) -> None:
        self.results[key] = result
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"words": key, "result": result}) + "\n")


def workers(jobs: int) -> ProcessPoolExecutor:
    """Processes of one thread each, which end with this one."""
    os.environ["OMP_NUM_THREADS"] = "1"  # spawned workers read it when they load torch
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=_die_with_parent)


def fill(grid: Grid, cells: list[Cell], log: Log, home: Path, jobs: int) -> None:
    """Run what is missing, cell by cell, in worker processes of one thread each; a line on stderr for each run."""
    pool = workers(jobs)
    waiting = deque(_missing(grid, cells, log))
    running: dict[Future, tuple[Cell, Key]] = {}
    done = 0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell, key = waiting.popleft()
                running[pool.submit(_train, home, key)] = (cell, key)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                cell, key = running.pop(future)
                log.add(key, result := future.result())
                done += 1
                said = result.get("error") or f"FVU {result['final']['test_fvu']:.4f} in {result['seconds']:.0f} s"
                print(f"[{done}/{done + len(running) + len(waiting)}] {' '.join(key)}: {said}", file=sys.stderr)
                if grid.equal_steps:
                    known = {key for _, key in [*running.values(), *waiting]}
                    waiting.extendleft(item for item in _missing(grid, [cell], log) if item[1] not in known)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _missing(grid: Grid, cells: list[Cell], log: Log) -> Iterator[tuple[Cell, Key]]:
    return ((cell, key) for cell in cells for key in grid.runs(cell, log.results) if key not in log.results)


def _die_with_parent() -> None:
    """Leave it to the parent to stop, and stop with it, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _train(home: Path, key: Key) -> dict[str, Any]:
    """One run: its document, or the sentence it failed with; its folder is removed."""
    name = hashlib.sha256(" ".join(key).encode()).hexdigest()[:16]
    folder = home / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)  # a kill left it
    try:
        document = sae(home, "train", *key, "--name", name)
        return {field: value for field, value in document.items() if field not in ("run", "path")}
    except CommandError as error:
        return {"error": str(error)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
