"""Error, effect on the model and features found, of both solvers at their defaults: data of several kinds, worlds of
known features.

    PYTHONPATH=. python tests/benchmarks/features.py [--data docs,world] [--seeds 5] [--out FOLDER]
                                                     [--saelens-python PYTHON]

Every run is a training on one thread, with equal passes and steps for both solvers, and is written to FOLDER/runs.jsonl
when it ends; the same command resumes. The table has means over seeds, and the mean difference of PAM-SGD and SGD with
the half width of its 95% interval; processor time is PAM-SGD's over the other's.

--saelens-python, of an environment that has sae-lens 6.54.12, also trains `SAELENS_CASES` of SAELens at
`SAELENS_RATES` on the same rows, normalised alike, with the same batches and steps; see `saelens_training.py`. Its SAEs
are read by `load_sae` and measured by the same `evaluate`. The table has the best of them, by mean mcc where there is
one, else by mean FVU, which flatters it. Its processor time is of its training alone.
"""

import argparse
import json
import multiprocessing
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.stats import t

from tests.benchmarks.saelens import every_row, trained

if TYPE_CHECKING:
    from saecli import ActivationStore

MODEL = "tiny-gemma2"
CODE, REFERENCE = "stdlib-code.jsonl", "python-reference.jsonl"  # see `write_text`
SOLVERS = ("sgd", "pam-sgd")
MEASURES = ("seconds", "l0", "fvu", "ce_recovered", "kl", "mcc", "f1")
SAELENS_CASES, SAELENS_RATES = ("batchtopk", "matryoshka"), ("3e-4", "1e-3", "2e-3", "3e-3", "6e-3")
CEILING_EPOCHS, CEILING_RATE, CEILING_ROWS = 20, 0.02, 30_000

Making = tuple[str, dict[str, Any]]  # the library's function that fills a store, with its arguments
STORES: dict[str, Making] = {
    "docs": ("extract", {"model": MODEL, "dataset": "stdlib-docs", "rows": 66_667}),
    "docs-6000": ("extract", {"model": MODEL, "dataset": "stdlib-docs", "rows": 6_700}),
    "code": ("extract", {"model": MODEL, "dataset": CODE, "rows": 66_667}),
    "reference": ("extract", {"model": MODEL, "dataset": REFERENCE, "rows": 250_000}),
    "digits": ("import_array", {"file": "digits"}),
    "patches": ("import_array", {"file": "patches"}),
    "world": ("import_synthetic", {"rows": 111_000, "seed": 5}),
    "world-20k": ("import_synthetic", {"rows": 22_200, "seed": 5}),
    "world-correlated": ("import_synthetic", {"rows": 111_000, "correlation": 0.75, "seed": 7}),
    "flat": (
        "import_synthetic",
        {"rows": 111_000, "features": 1536, "d_in": 192, "l0": 23.0, "hierarchy": False, "seed": 6},
    ),
}


@dataclass(frozen=True)
class Cell:
    """What is trained on one of `STORES`."""

    store: str
    options: dict[str, Any]

    @property
    def model(self) -> str | None:
        """The language model to splice into, where rows are its activations."""
        return STORES[self.store][1].get("model")


TOPK, BATCHTOPK = (
    {"act": "topk", "k": 16, "d_sae": 512},
    {"act": "batchtopk", "k": 16, "d_sae": 512},
)
WORLD = {"act": "batchtopk", "k": 10, "d_sae": 1024}
CELLS = {
    "docs": Cell("docs", TOPK),
    "docs-batchtopk": Cell("docs", BATCHTOPK),
    "docs-jumprelu": Cell("docs", {"act": "jumprelu", "target_l0": 16, "d_sae": 512}),
    "docs-gated": Cell("docs", {"act": "gated", "target_l0": 16, "d_sae": 512}),
    "docs-pursuit": Cell("docs", TOPK | {"act": "matching-pursuit"}),
    "docs-6000": Cell("docs-6000", TOPK),
    "docs-6000-batchtopk": Cell("docs-6000", BATCHTOPK),
    "code": Cell("code", TOPK),
    "code-batchtopk": Cell("code", BATCHTOPK),
    "digits": Cell("digits", {"act": "topk", "k": 15, "d_sae": 256}),
    "patches": Cell("patches", {"act": "topk", "k": 32, "d_sae": 512}),
    "world": Cell("world", WORLD),
    "world-jumprelu": Cell("world", {"act": "jumprelu", "target_l0": 10, "d_sae": 1024}),
    "flat": Cell("flat", {"act": "batchtopk", "k": 23, "d_sae": 1536}),
    "world-20k": Cell("world-20k", WORLD),
    "world-correlated": Cell("world-correlated", WORLD),
    "reference": Cell("reference", TOPK),
}
BySeed = Mapping[str, Mapping[str, Any]]
Results = Mapping["Job", Mapping[str, Any]]


class Job(NamedTuple):
    """A training: of a cell, by a solver or one of SAELens' cases, at a learning rate, with a seed, as written."""

    cell: str
    solver: str
    rate: str
    seed: str


def run(job: Job, home: Path, saelens: Path | None) -> dict[str, Any]:
    """Train and measure on the held-out rows; its measures and seconds of processor time."""
    import saecli

    cell, seed = CELLS[job.cell], int(job.seed)
    store = saecli.open_store(cell.store, home)
    if job.solver in SAELENS_CASES:
        assert saelens is not None
        case, count = f"{job.solver}-{cell.options['k']}", steps(store, cell.options)
        sae, known = trained(saelens, store, case, cell.options["d_sae"], count, job.rate, seed)
    else:
        began = time.process_time()
        sae = saecli.fit(store, solver=job.solver, seed=seed, shuffle_seed=seed, **cell.options)
        known = {"seconds": time.process_time() - began}
    found = saecli.evaluate(sae, store, model=cell.model)
    return known | {name: found[name] for name in MEASURES if name in found}


def ceiling(cell: Cell, home: Path) -> dict[str, Any]:
    """What a linear encoder can reach: the measures of one trained on the true features by logistic regression, with
    for each the threshold of the largest F1 on training rows, and with the true directions as its decoder."""
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits

    import saecli
    from saecli.sae.activations import Relu
    from saecli.sae.dictionary import SAE
    from saecli.store.worlds import directions_of
    from saecli.train.rows import fit_normalisation, on_raw_rows

    store = saecli.open_store(cell.store, home)
    train, directions = store.split("train"), torch.from_numpy(directions_of(store))
    normalisation = fit_normalisation("scale", train.spread(), torch.float32)
    x = normalisation(every_row(train))
    true = torch.cat(
        [torch.from_numpy(codes.toarray() > 0) for codes in train.codes(2048)]
    )  # (N, G)
    linear = torch.nn.Linear(x.shape[1], len(directions))
    count = CEILING_EPOCHS * len(x) // 512
    optimizer = torch.optim.Adam(linear.parameters(), lr=CEILING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, count)
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        chosen = torch.randint(len(x), (512,), generator=generator)
        loss = (
            binary_cross_entropy_with_logits(
                linear(x[chosen]), true[chosen].float(), reduction="sum"
            )
            / 512
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        logits, order = linear(x[:CEILING_ROWS]).sort(0, descending=True)
        hits = true[:CEILING_ROWS].gather(0, order).cumsum(0)
        f1 = 2 * hits / (torch.arange(1, len(logits) + 1)[:, None] + hits[-1])
        b_enc = linear.bias - logits.gather(0, f1.argmax(0, keepdim=True))[0] + 1e-6
    sae = SAE(linear.weight.T.contiguous(), b_enc, directions, torch.zeros(x.shape[1]), Relu())
    found = saecli.evaluate(on_raw_rows(sae, normalisation), store)
    return {name: found[name] for name in ("l0", "f1", "precision", "recall")}


def steps(store: "ActivationStore", options: Mapping[str, Any]) -> int:
    """Optimiser steps that either solver takes by default."""
    from saecli.sae.activations import ACTIVATIONS
    from saecli.train import SOLVERS
    from saecli.train.options import TrainingConfig
    from saecli.train.plan import Plan

    rows = store.split("train")
    plan = Plan.resolve(
        rows,
        None,
        TrainingConfig(d_sae=options["d_sae"]),
        SOLVERS["sgd"](),
        ACTIVATIONS[options["act"]](k=options["k"]),
    )
    return plan.steps


def fill(
    run: Callable[..., Any], jobs: Sequence[Any], log: Path, processes: int, *given: Any
) -> dict[Any, Any]:
    """`run(job, *given)` of each job, a tuple: read from the log, a line of JSON each, or run in a process of one
    thread and added."""
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True) if log.exists() else []
    entries = [
        json.loads(line) for line in lines if line.endswith("\n")
    ]  # a kill cuts the last one short
    log.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries), encoding="utf-8")
    results = {tuple(entry["words"]): entry["result"] for entry in entries}
    missing = [job for job in jobs if job not in results]
    os.environ["OMP_NUM_THREADS"] = "1"  # spawned processes read it when they load torch
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(run, job, *given): job for job in missing}
        for number, future in enumerate(as_completed(running), 1):
            job = running[future]
            results[job] = future.result()
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"words": job, "result": results[job]}) + "\n")
            print(f"{number} of {len(missing)}", file=sys.stderr, flush=True)
    return {job: results[job] for job in jobs}


def stores(cells: Sequence[str], out: Path) -> Path:
    """Fill the cells' stores, if they are not there; their home."""
    import saecli

    home = out.resolve() / "home"
    home.mkdir(parents=True, exist_ok=True)
    for name in {CELLS[cell].store for cell in cells}:
        function, arguments = STORES[name]
        if (dataset := arguments.get("dataset")) in (CODE, REFERENCE):
            arguments = arguments | {"dataset": str(write_text(home / dataset))}
        getattr(saecli, function)(**arguments, name=name, home=home)
    return home


def write_text(file: Path) -> Path:
    """Write the sources of Python's standard library, or the sections of its reference, a line of JSON each."""
    if not file.exists():
        texts = (
            [
                path.read_text(encoding="utf-8")
                for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
            ]
            if file.name == CODE
            else topics.values()
        )
        file.write_text("".join(f"{json.dumps({'text': x})}\n" for x in texts), encoding="utf-8")
    return file


def table(results: Results) -> str:
    """A row per cell and measure, in Markdown; with SAELens' columns where results have it."""
    saelens = any(job.solver in SAELENS_CASES for job in results)
    heads = ["data", "measure", "sgd", "pam-sgd", "difference", "processor time"]
    heads += ["SAELens", "difference", "processor time"] if saelens else []
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for cell in CELLS:
        ours = by_rate(results, cell, ["pam-sgd"]).get(("pam-sgd", "auto"))
        if not ours:
            continue
        known = [measure for measure in MEASURES if all(measure in one for one in ours.values())]
        sgd = by_rate(results, cell, ["sgd"])["sgd", "auto"]
        heading, others = f"{cell}, {len(ours)} seed{'s' * (len(ours) != 1)}", [sgd]
        rivals = by_rate(results, cell, SAELENS_CASES)
        if rivals:
            (case, rate), theirs = best(rivals, "mcc" if "mcc" in known else "fvu")
            heading, others = f"{heading}, SAELens' {case} at {rate}", [sgd, theirs]
        for measure in known:
            columns = [column for other in others for column in compared(ours, other, measure)]
            columns.insert(1, f"{np.mean([one[measure] for one in ours.values()]):.4f}")
            columns += [""] * 3 if saelens and not rivals else []
            lines.append(f"| {' | '.join([heading, measure, *columns])} |")
    return "\n".join(lines)


def by_rate(results: Results, cell: str, solvers: Sequence[str]) -> dict[tuple[str, str], BySeed]:
    """A cell's results of some solvers, by solver and rate, then by seed."""
    found: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for job, one in results.items():
        if job.cell == cell and job.solver in solvers:
            found.setdefault((job.solver, job.rate), {})[job.seed] = one
    return found


def best(rates: Mapping[tuple[str, str], BySeed], measure: str) -> tuple[tuple[str, str], BySeed]:
    """The solver and rate of the best mean of a measure, the least fvu or the greatest other; its results."""
    sign = 1 if measure == "fvu" else -1
    return min(
        rates.items(), key=lambda rate: sign * np.mean([one[measure] for one in rate[1].values()])
    )


def compared(ours: BySeed, theirs: BySeed, measure: str) -> tuple[str, str, str]:
    """The others' mean, the mean difference from it to ours with half of its 95% interval, and the mean ratio of
    processor time."""
    seeds = sorted(ours)
    pairs = np.array([(theirs[seed][measure], ours[seed][measure]) for seed in seeds])
    difference = pairs[:, 1] - pairs[:, 0]
    error = difference.std(ddof=1) / len(seeds) ** 0.5 if len(seeds) > 1 else np.nan
    half = t.ppf(0.975, len(seeds) - 1) * error
    seconds = np.mean([ours[seed]["seconds"] / theirs[seed]["seconds"] for seed in seeds])
    return f"{pairs[:, 0].mean():.4f}", f"{difference.mean():+.4f} ± {half:.4f}", f"{seconds:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default=",".join(CELLS), help=f"out of {', '.join(CELLS)}")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--out", type=Path, default=Path("feature-benchmark"), help="stores, runs")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--ceiling", action="store_true", help="what a linear encoder can reach")
    parser.add_argument("--saelens-python", type=Path, help="Python with sae-lens: train it too")
    chosen = parser.parse_args()
    cells = chosen.data.split(",")
    unknown = set(cells) - CELLS.keys()
    if unknown:
        parser.error(f"--data: some of {', '.join(CELLS)}, got {', '.join(sorted(unknown))}")
    home = stores(cells, chosen.out)
    if chosen.ceiling:
        for cell in cells:
            print(cell, ceiling(CELLS[cell], home))
        return
    ways = [(solver, "auto") for solver in SOLVERS]
    ways += product(SAELENS_CASES, SAELENS_RATES) if chosen.saelens_python else []
    jobs = [
        Job(cell, *way, str(seed))
        for seed in range(chosen.seeds)
        for cell in cells
        for way in ways
        if way[0] not in SAELENS_CASES or "k" in CELLS[cell].options
    ]

    print(
        table(fill(run, jobs, chosen.out / "runs.jsonl", chosen.jobs, home, chosen.saelens_python))
    )


if __name__ == "__main__":
    main()
