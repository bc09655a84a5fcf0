"""Training an SAE on, on rows of another kind of text: FVU and L0 on held-out rows of that text, in Markdown.

    PYTHONPATH=. python tests/benchmarks/train_on.py

An SAE is trained on 60,000 rows of one text (d_sae 512, L0 16). For 20,000 rows of the other it is then taken as it is,
refitted, and trained on by `init`; the last column is an SAE trained on these rows from the start. Defaults throughout.
Texts are those of `features.py`. ± half of the 95% interval over seeds: of the mean in a column, of the mean paired
difference in the last two.
"""

import argparse
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from features import CELLS, SOLVERS, fill, stores
from scipy.stats import t

ACTS = {"topk": {"k": 16}, "batchtopk": {"k": 16}, "jumprelu": {"target_l0": 16}, "relu": {}}
WAYS = ("as it is", "refit", "trained on", "from the start")
NEW = 1 / 3  # fraction of the training rows, of the other text


class Job(NamedTuple):
    first: str
    second: str
    act: str
    solver: str
    seed: int


def run(job: Job, home: Path) -> list[tuple[float, float]]:
    """FVU and L0 of each of `WAYS`."""
    import saecli

    first, second = (saecli.open_store(name, home) for name in (job.first, job.second))
    rows, options = second.split("train", fraction=NEW), {"solver": job.solver, "fraction": NEW}
    seeds = {"seed": job.seed, "shuffle_seed": job.seed}
    anew = {"act": job.act, "d_sae": 512, **ACTS[job.act], **seeds}
    old = saecli.fit(first, solver=job.solver, **anew)
    saes = (
        old,
        saecli.refit(old, rows),
        saecli.fit(second, init=old, **options, **seeds),
        saecli.fit(second, **options, **anew),
    )
    measured = [saecli.evaluate(sae, second) for sae in saes]
    return [(one["fvu"], one["l0"]) for one in measured]


def mean(values: np.ndarray, digits: int = 4, sign: str = "") -> str:
    half = (
        t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
        if len(values) > 1
        else np.nan
    )
    return f"{values.mean():{sign}.{digits}f} ± {half:.{digits}f}"


def line(jobs: list[Job], results: dict[Job, list[tuple[float, float]]]) -> str:
    found = np.array([results[job] for job in jobs])  # (seeds, ways, 2)
    fvu, l0 = found[..., 0], found[..., 1].mean(0)
    job, l0s = jobs[0], ", ".join(f"{one:.1f}" for one in l0)
    cells = [
        f"{job.first} to {job.second}, {job.act}, {job.solver}",
        *map(mean, fvu.T),
        l0s,
        mean(fvu[:, 2] - fvu[:, 1], sign="+"),
        mean(fvu[:, 2] - fvu[:, 3], sign="+"),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", default="docs,code", help="first and second")
    parser.add_argument("--acts", default="topk", help=f"out of {', '.join(ACTS)}")
    parser.add_argument("--seeds", default="1,2,3,4,5", help="defaults were chosen with seed 0")
    parser.add_argument(
        "--out", type=Path, default=Path("feature-benchmark"), help="folder of stores"
    )
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    chosen = parser.parse_args()
    first, second = chosen.texts.split(",")
    home = stores([first, second], chosen.out)
    cells = [
        [
            Job(CELLS[first].store, CELLS[second].store, act, solver, int(seed))
            for seed in chosen.seeds.split(",")
        ]
        for act, solver in product(chosen.acts.split(","), SOLVERS)
    ]
    results = fill(
        run,
        [job for cell in cells for job in cell],
        chosen.out / "train-on.jsonl",
        chosen.jobs,
        home,
    )
    heads = ["FVU", *WAYS, "L0 of each", "trained on less refit", "less from the start"]
    print(
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
        *(line(cell, results) for cell in cells),
        sep="\n",
    )


if __name__ == "__main__":
    main()
