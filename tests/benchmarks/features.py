"""Error, effect on the model and features found, of both solvers at their defaults: data of several kinds, worlds of
known features.

    PYTHONPATH=. python tests/benchmarks/features.py [--data docs,world] [--seeds 5] [--rates 1e-3,3e-3] [--out FOLDER]

Needs no network. Every run is a training on one thread, with as many passes and steps for either solver, and is written
to FOLDER/runs.jsonl as it ends; the same command resumes. --rates also trains SGD at these learning rates, and compares
with the one of its least mean FVU, which flatters it. The table has means over seeds, and the mean difference of
PAM-SGD and SGD with the half width of its 95% interval over seeds, which decide weights and the order of rows.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t
from solver_grid import Log, workers

MODEL = "tiny-gemma2"
MEASURES = ("fvu", "ce_recovered", "kl", "mcc", "f1")


@dataclass(frozen=True)
class Cell:
    """What is trained on a store: `make` names the library's function that fills it, with its arguments."""

    make: tuple[str, dict[str, Any]]
    options: dict[str, Any]
    model: str | None = None


CELLS = {
    "docs": Cell(("extract", {"model": MODEL, "dataset": "stdlib-docs", "rows": 66_667}),
                 {"act": "topk", "k": 16, "d_sae": 512}, MODEL),
    "docs-batchtopk": Cell(("extract", {"model": MODEL, "dataset": "stdlib-docs", "rows": 66_667}),
                           {"act": "batchtopk", "k": 16, "d_sae": 512}, MODEL),
    "docs-6000": Cell(("extract", {"model": MODEL, "dataset": "stdlib-docs", "rows": 6_700}),
                      {"act": "topk", "k": 16, "d_sae": 512}, MODEL),
    "digits": Cell(("import_array", {"file": "digits"}), {"act": "topk", "k": 15, "d_sae": 256}),
    "patches": Cell(("import_array", {"file": "patches"}), {"act": "topk", "k": 32, "d_sae": 512}),
    "world": Cell(("import_synthetic", {"rows": 111_000, "seed": 5}), {"act": "batchtopk", "k": 10, "d_sae": 1024}),
    "flat": Cell(("import_synthetic", {"rows": 111_000, "features": 1536, "d_in": 192, "l0": 23.0, "hierarchy": False,
                                       "seed": 6}), {"act": "batchtopk", "k": 23, "d_sae": 1536}),
}


class Job(NamedTuple):
    """A training: of a cell, by a solver, at a learning rate, with a seed, as written."""

    cell: str
    solver: str
    lr: str
    seed: str


def run(job: Job, home: Path) -> dict[str, Any]:
    """Train and measure on the held-out rows; its measures and seconds of processor time."""
    import saecli

    cell, seed = CELLS[job.cell], int(job.seed)
    store = saecli.open_store(job.cell, home)
    lr = job.lr if job.lr == "auto" else float(job.lr)
    began = time.process_time()
    sae = saecli.fit(store, solver=job.solver, lr=lr, seed=seed, shuffle_seed=seed, **cell.options)
    seconds = time.process_time() - began
    found = saecli.evaluate(sae, store, model=cell.model)
    return {"seconds": seconds, "l0": found["l0"]} | {name: found[name] for name in MEASURES if name in found}


def fill(jobs: Sequence[Job], home: Path, log: Log, processes: int) -> dict[Job, dict[str, Any]]:
    """The results of all jobs; those that the log has are not run again."""
    missing = [job for job in jobs if job not in log.results]
    with workers(processes) as pool:
        running = {pool.submit(run, job, home): job for job in missing}
        for number, future in enumerate(as_completed(running), 1):
            log.add(running[future], future.result())
            print(f"{number} of {len(missing)}", file=sys.stderr, flush=True)
    return {job: log.results[job] for job in jobs}


def table(results: Mapping[Job, Mapping[str, Any]]) -> str:
    """A row per cell and measure, in Markdown."""
    lines = ["| data | measure | sgd | pam-sgd | difference | processor time |", "|---|---|---|---|---|---|"]
    for cell in CELLS:
        ours = {job.seed: one for job, one in results.items() if (job.cell, job.solver) == (cell, "pam-sgd")}
        theirs: dict[str, dict[str, Mapping[str, Any]]] = {}
        for job, one in results.items():
            if (job.cell, job.solver) == (cell, "sgd"):
                theirs.setdefault(job.lr, {})[job.seed] = one
        if not ours:
            continue
        best = min(theirs, key=lambda lr: np.mean([one["fvu"] for one in theirs[lr].values()]))
        seeds = sorted(ours)
        time_ratio = np.mean([ours[seed]["seconds"] / theirs[best][seed]["seconds"] for seed in seeds])
        for measure in MEASURES:
            if measure not in ours[seeds[0]]:
                continue
            pairs = np.array([(theirs[best][seed][measure], ours[seed][measure]) for seed in seeds])
            difference = pairs[:, 1] - pairs[:, 0]
            error = difference.std(ddof=1) / len(seeds) ** 0.5 if len(seeds) > 1 else np.nan
            half = t.ppf(0.975, len(seeds) - 1) * error
            means = pairs.mean(0)
            lines.append(f"| {cell}, {len(seeds)} seed{"s" * (len(seeds) != 1)}, sgd at {best} | {measure} | {means[0]:.4f} | {means[1]:.4f} | "
                         f"{difference.mean():+.4f} ± {half:.4f} | {time_ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=",".join(CELLS), help=f"out of {', '.join(CELLS)}")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--rates", default="", help="further learning rates for sgd, with commas between")
    parser.add_argument("--out", type=Path, default=Path("feature-benchmark"), help="folder of stores and runs")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    chosen = parser.parse_args()
    cells = chosen.data.split(",")
    unknown = set(cells) - CELLS.keys()
    if unknown:
        parser.error(f"--data: expected some of {', '.join(CELLS)}, got {', '.join(sorted(unknown))}")
    import saecli

    home = chosen.out.resolve() / "home"
    home.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        function, arguments = CELLS[cell].make
        getattr(saecli, function)(**arguments, name=cell, home=home)
    rates = [rate for rate in chosen.rates.split(",") if rate]
    jobs = [Job(cell, solver, lr, str(seed)) for seed in range(chosen.seeds) for cell in cells
            for solver, lr in [("sgd", "auto"), ("pam-sgd", "auto"), *(("sgd", rate) for rate in rates)]]
    print(table(fill(jobs, home, Log(chosen.out / "runs.jsonl"), chosen.jobs)))


if __name__ == "__main__":
    main()
