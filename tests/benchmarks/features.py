"""Error, effect on the model and features found, of both solvers at their defaults: data of several kinds, worlds of
known features.

    PYTHONPATH=. python tests/benchmarks/features.py [--data docs,world] [--seeds 5] [--rates 1e-3,3e-3] [--out FOLDER]
                                                     [--change precision=bf16] [--saelens [--saelens-python PYTHON]]

Needs no network, but for --saelens without --saelens-python. Every run is a training on one thread, with as many passes
and steps for either solver, and is written to FOLDER/runs.jsonl as it ends; the same command resumes. --rates also
trains SGD at these learning rates, and compares with the one of its least mean FVU, which flatters it. The table has
means over seeds, and the mean difference of PAM-SGD and SGD with the half width of its 95% interval over seeds, which
decide weights and the order of rows; processor time is PAM-SGD's over the other's. --change also trains each solver
with an option of `sae train` changed, and prints what that does in a table of its own.

--saelens also trains `SAELENS_CASES` of SAELens at `SAELENS_RATES`, from memory, on the same rows, normalised alike, in
batches of as many rows, with as many steps as either solver takes; see `saelens_training.py`. Its SAEs are saved in its
own format, with the threshold it has found, read by `load_sae` and measured by the same `evaluate`. The table has the
best of them, by mean mcc where there is one, else by mean FVU, which flatters it. Its processor time is of its training
alone. Without --saelens-python, an environment with sae-lens is made, and removed at the end.
"""

import argparse
import json
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.stats import t
from workers import Log, workers

if TYPE_CHECKING:
    from saecli import SAE, ActivationStore

MODEL = "tiny-gemma2"
CODE = "stdlib-code.jsonl"  # see `write_code`
SOLVERS = ("sgd", "pam-sgd")
MEASURES = ("seconds", "l0", "fvu", "ce_recovered", "kl", "mcc", "f1")
SAELENS_CASES, SAELENS_RATES = ("batchtopk", "matryoshka"), ("3e-4", "1e-3", "2e-3", "3e-3", "6e-3")
SAELENS_DECAY = 1 / 3  # last fraction of its steps, over which its learning rate falls to zero


Making = tuple[str, dict[str, Any]]  # the library's function that fills a store, with its arguments
STORES: dict[str, Making] = {
    "docs": ("extract", {"model": MODEL, "dataset": "stdlib-docs", "rows": 66_667}),
    "docs-6000": ("extract", {"model": MODEL, "dataset": "stdlib-docs", "rows": 6_700}),
    "code": ("extract", {"model": MODEL, "dataset": CODE, "rows": 66_667}),
    "code-6000": ("extract", {"model": MODEL, "dataset": CODE, "rows": 6_700}),
    "digits": ("import_array", {"file": "digits"}),
    "patches": ("import_array", {"file": "patches"}),
    "world": ("import_synthetic", {"rows": 111_000, "seed": 5}),
    "world-10k": ("import_synthetic", {"rows": 11_100, "seed": 5}),
    "world-20k": ("import_synthetic", {"rows": 22_200, "seed": 5}),
    "world-1m": ("import_synthetic", {"rows": 1_111_000, "seed": 5}),
    "world-correlated": ("import_synthetic", {"rows": 111_000, "correlation": 0.75, "seed": 7}),
    "flat": ("import_synthetic", {"rows": 111_000, "features": 1536, "d_in": 192, "l0": 23.0, "hierarchy": False,
                                  "seed": 6}),
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


CELLS = {
    "docs": Cell("docs", {"act": "topk", "k": 16, "d_sae": 512}),
    "docs-batchtopk": Cell("docs", {"act": "batchtopk", "k": 16, "d_sae": 512}),
    "docs-6000": Cell("docs-6000", {"act": "topk", "k": 16, "d_sae": 512}),
    "docs-6000-batchtopk": Cell("docs-6000", {"act": "batchtopk", "k": 16, "d_sae": 512}),
    "code": Cell("code", {"act": "topk", "k": 16, "d_sae": 512}),
    "code-batchtopk": Cell("code", {"act": "batchtopk", "k": 16, "d_sae": 512}),
    "digits": Cell("digits", {"act": "topk", "k": 15, "d_sae": 256}),
    "patches": Cell("patches", {"act": "topk", "k": 32, "d_sae": 512}),
    "world": Cell("world", {"act": "batchtopk", "k": 10, "d_sae": 1024}),
    "world-jumprelu": Cell("world", {"act": "jumprelu", "target_l0": 10, "d_sae": 1024}),
    "flat": Cell("flat", {"act": "batchtopk", "k": 23, "d_sae": 1536}),
    "world-20k": Cell("world-20k", {"act": "batchtopk", "k": 10, "d_sae": 1024}),
    "world-correlated": Cell("world-correlated", {"act": "batchtopk", "k": 10, "d_sae": 1024}),
}
HEADLINES = tuple(CELLS)
CELLS |= {
    "world-10k": Cell("world-10k", {"act": "batchtopk", "k": 10, "d_sae": 1024}),
    "world-1m": Cell("world-1m", {"act": "batchtopk", "k": 10, "d_sae": 1024}),
    "world-half": Cell("world", {"act": "batchtopk", "k": 10, "d_sae": 512}),
    "world-twice": Cell("world", {"act": "batchtopk", "k": 10, "d_sae": 2048}),
    "world-topk": Cell("world", {"act": "topk", "k": 10, "d_sae": 1024}),
    "world-relu-topk": Cell("world", {"act": "relu-topk", "k": 10, "d_sae": 1024}),
    "world-abs-topk": Cell("world", {"act": "abs-topk", "k": 10, "d_sae": 1024}),
    "world-soft-topk": Cell("world", {"act": "soft-topk", "k": 10, "d_sae": 1024}),
    "world-relu": Cell("world", {"act": "relu", "d_sae": 1024}),
    "world-swish": Cell("world", {"act": "swish", "d_sae": 1024}),
}
CELLS |= {
    "docs-relu": Cell("docs", {"act": "relu", "d_sae": 512}),
    "code-6000": Cell("code-6000", {"act": "topk", "k": 16, "d_sae": 512}),
    "docs-jumprelu": Cell("docs", {"act": "jumprelu", "target_l0": 16, "d_sae": 512}),
    "code-jumprelu": Cell("code", {"act": "jumprelu", "target_l0": 16, "d_sae": 512}),
}
CELLS |= {f"{name}-{steps}": Cell(CELLS[name].store, CELLS[name].options | {"steps": steps})
          for name, steps in product(("docs", "world"), (500, 1000, 2000, 8000, 16000))}  # and so by processor time
BySeed = Mapping[str, Mapping[str, Any]]
Results = Mapping["Job", Mapping[str, Any]]


class Job(NamedTuple):
    """A training: of a cell, by a solver or one of SAELens' cases, in a way, with a seed, as written.

    The way is a learning rate, "auto" with all at its default, or "option=value" with this one changed.
    """

    cell: str
    solver: str
    way: str
    seed: str


def run(job: Job, home: Path, saelens: Path | None) -> dict[str, Any]:
    """Train and measure on the held-out rows; its measures and seconds of processor time."""
    import saecli

    cell, seed = CELLS[job.cell], int(job.seed)
    store = saecli.open_store(cell.store, home)
    if job.solver in SAELENS_CASES:
        sae, known = by_saelens(job, store, saelens)
    else:
        name, _, value = job.way.rpartition("=")
        changed = {name or "lr": number_or_word(value)}
        began = time.process_time()
        sae = saecli.fit(store, solver=job.solver, seed=seed, shuffle_seed=seed, **cell.options, **changed)
        known = {"seconds": time.process_time() - began}
    found = saecli.evaluate(sae, store, model=cell.model)
    return known | {name: found[name] for name in MEASURES if name in found}


def number_or_word(text: str) -> float | str:
    """An option's value, as `saecli.fit` takes it."""
    try:
        return float(text)
    except ValueError:
        return text


def by_saelens(job: Job, store: "ActivationStore", python: Path) -> tuple["SAE", dict[str, float]]:
    """SAELens' SAE, with its seconds of processor time and the fraction of its latents that it counts as dead."""
    from saelens_saes import trained_by_saelens

    options = CELLS[job.cell].options
    with tempfile.TemporaryDirectory() as folder:
        ((sae, found),) = trained_by_saelens(python, store, Path(folder), f"{job.solver}-{options['k']}",
                                             options["d_sae"], steps(store, options), [job.way], seed=int(job.seed),
                                             decay=SAELENS_DECAY)
    return sae, {"seconds": found["processor"], "dead": found["dead"]}


def steps(store: "ActivationStore", options: Mapping[str, Any]) -> int:
    """Optimiser steps that either solver takes by default."""
    from saecli.sae.activations import ACTIVATIONS
    from saecli.train.options import TrainingConfig
    from saecli.train.plan import Plan
    from saecli.train.solvers import SOLVERS

    rows = store.split("train")
    plan = Plan.resolved(rows, None, TrainingConfig(d_sae=options["d_sae"]), SOLVERS["sgd"](),
                         ACTIVATIONS[options["act"]](k=options["k"]))
    return plan.steps


def fill(function: Callable[[Any], dict[str, Any]], jobs: Sequence[Any], log: Log,
         processes: int) -> dict[Any, dict[str, Any]]:
    """The result of a function for each job, a tuple of words; those that the log has are not run again."""
    missing = [job for job in jobs if job not in log.results]
    with workers(processes) as pool:
        running = {pool.submit(function, job): job for job in missing}
        for number, future in enumerate(as_completed(running), 1):
            log.add(running[future], future.result())
            print(f"{number} of {len(missing)}", file=sys.stderr, flush=True)
    return {job: log.results[job] for job in jobs}


def stores(cells: Sequence[str], out: Path) -> Path:
    """Fill the cells' stores, if they are not there; their home."""
    import saecli

    home = out.resolve() / "home"
    home.mkdir(parents=True, exist_ok=True)
    for name in {CELLS[cell].store for cell in cells}:
        function, arguments = STORES[name]
        if arguments.get("dataset") == CODE:
            arguments = arguments | {"dataset": str(write_code(home / CODE))}
        getattr(saecli, function)(**arguments, name=name, home=home)
    return home


def write_code(file: Path) -> Path:
    """Write the sources of the modules of Python's standard library, a line of JSON each, if they are not there."""
    if not file.exists():
        sources = [path.read_text(encoding="utf-8") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
        file.write_text("".join(f"{json.dumps({'text': text})}\n" for text in sources), encoding="utf-8")
    return file


def table(results: Results) -> str:
    """A row per cell and measure, in Markdown; with SAELens' columns where results have it."""
    saelens = any(job.solver in SAELENS_CASES for job in results)
    heads = ["data", "measure", "sgd", "pam-sgd", "difference", "processor time"]
    heads += ["SAELens", "difference", "processor time"] if saelens else []
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for cell in CELLS:
        ours = by_way(results, cell, ["pam-sgd"]).get(("pam-sgd", "auto"))
        if not ours:
            continue
        known = [measure for measure in MEASURES if all(measure in one for one in ours.values())]
        (_, rate), sgd = best(by_way(results, cell, ["sgd"]), "fvu")
        heading, others = f"{cell}, {len(ours)} seed{'s' * (len(ours) != 1)}, sgd at {rate}", [sgd]
        rivals = by_way(results, cell, SAELENS_CASES)
        if rivals:
            (case, rate), theirs = best(rivals, "mcc" if "mcc" in known else "fvu")
            heading, others = f"{heading}, SAELens' {case} at {rate}", [sgd, theirs]
        for measure in known:
            columns = [column for other in others for column in compared(ours, other, measure)]
            columns.insert(1, f"{np.mean([one[measure] for one in ours.values()]):.4f}")
            columns += [""] * 3 if saelens and not rivals else []
            lines.append(f"| {' | '.join([heading, measure, *columns])} |")
    return "\n".join(lines)


def rates_table(results: Results) -> str:
    """A row per cell and solver, in Markdown: FVU and F1 of `--lr auto`, and of the best rate, auto included."""
    lines = ["| data | solver | fvu at auto | best | at | over it | f1 at auto | best | at | below it |",
             "|---" * 10 + "|"]
    for cell, solver in product(CELLS, SOLVERS):
        ways = by_way(results, cell, [solver])
        if not ways:
            continue
        columns = []
        for measure in ("fvu", "f1"):
            if not all(measure in one for seeds in ways.values() for one in seeds.values()):
                columns += [""] * 4
                continue
            (_, rate), found = best(ways, measure)
            auto, least = (np.mean([one[measure] for one in seeds.values()]) for seeds in
                           (ways[solver, "auto"], found))
            loss = f"{auto / least - 1:+.1%}" if measure == "fvu" else f"{least - auto:.3f}"
            columns += [f"{auto:.4f}", f"{least:.4f}", rate, loss]
        lines.append(f"| {' | '.join([cell, solver, *columns])} |")
    return "\n".join(lines)


def changes_table(results: Results, change: str) -> str:
    """A row per cell, solver and measure, in Markdown: at the defaults, and what one option changes."""
    lines = [f"| data | solver | measure | default | {change} | processor time |", "|---" * 6 + "|"]
    for cell, solver in product(CELLS, SOLVERS):
        ways = by_way(results, cell, [solver])
        if not ways:
            continue
        changed, default = ways[solver, change], ways[solver, "auto"]
        for measure in MEASURES:
            if all(measure in one for one in changed.values()):
                heading = f"{cell}, {len(changed)} seed{'s' * (len(changed) != 1)}"
                lines.append(f"| {' | '.join([heading, solver, measure, *compared(changed, default, measure)])} |")
    return "\n".join(lines)


def by_way(results: Results, cell: str, solvers: Sequence[str]) -> dict[tuple[str, str], BySeed]:
    """A cell's results of some solvers, by solver and way, then by seed."""
    found: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for job, one in results.items():
        if job.cell == cell and job.solver in solvers:
            found.setdefault((job.solver, job.way), {})[job.seed] = one
    return found


def best(ways: Mapping[tuple[str, str], BySeed], measure: str) -> tuple[tuple[str, str], BySeed]:
    """The solver and way of the best mean of a measure, the least fvu or the greatest other; its results."""
    sign = 1 if measure == "fvu" else -1
    return min(ways.items(), key=lambda way: sign * np.mean([one[measure] for one in way[1].values()]))


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=",".join(HEADLINES), help=f"out of {', '.join(CELLS)}")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--rates", default="", help="learning rates to train at too, with commas between")
    parser.add_argument("--change", metavar="OPTION=VALUE", help="also train with one option of `sae train` changed")
    parser.add_argument("--out", type=Path, default=Path("feature-benchmark"), help="folder of stores and runs")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--saelens", action="store_true", help="train SAELens too")
    parser.add_argument("--saelens-python", type=Path, help="Python of an environment that has sae-lens")
    chosen = parser.parse_args()
    cells = chosen.data.split(",")
    unknown = set(cells) - CELLS.keys()
    if unknown:
        parser.error(f"--data: expected some of {', '.join(CELLS)}, got {', '.join(sorted(unknown))}")
    home = stores(cells, chosen.out)
    ways = list(product(SOLVERS, ["auto", *filter(None, [*chosen.rates.split(","), chosen.change])]))
    ways += product(SAELENS_CASES, SAELENS_RATES) if chosen.saelens else []
    jobs = [Job(cell, *way, str(seed)) for seed in range(chosen.seeds) for cell in cells for way in ways
            if way[0] not in SAELENS_CASES or "k" in CELLS[cell].options]
    log = Log(chosen.out / "runs.jsonl")

    def report(python: Path | None) -> None:
        results = fill(partial(run, home=home, saelens=python), jobs, log, chosen.jobs)
        unchanged = {job: one for job, one in results.items() if job.way != chosen.change}
        print(table(unchanged))
        if chosen.rates:
            print(f"\n{rates_table(unchanged)}")
        if chosen.change:
            print(f"\n{changes_table(results, chosen.change)}")

    if chosen.saelens:
        from training_speed import with_saelens

        with_saelens(chosen.saelens_python, report)
    else:
        report(None)


if __name__ == "__main__":
    main()
