"""Training an SAE on: with rows of another text (`--ways rows`), and through the model (`--ways model`).

    PYTHONPATH=. python tests/benchmarks/train_on.py [--ways rows,model] [--acts topk,jumprelu] [--seeds 1,2,3,4,5]

rows: an SAE of 60,000 rows of docstrings (d_sae 512, L0 16), for 20,000 rows of source code: FVU as it is, refitted,
trained on by `init`, and of an SAE of these rows alone. model: an SAE of `--texts`, fine-tuned on the same text: FVU,
KL and the gap in cross-entropy before and after. Texts are those of `features.py`; defaults throughout. Each training
is a line of JSON in `--out`, from which the same command resumes. ± is half of the 95% interval over seeds.
"""

import argparse
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t

from tests.benchmarks.features import CELLS, MODEL, SOLVERS, fill, stores

ACTS: dict[str, dict[str, Any]] = {
    "topk": {"k": 16},
    "batchtopk": {"k": 16},
    "jumprelu": {"target_l0": 16},
    "relu": {"sparsity_weight": 1.2},
}
NEW = 1 / 3  # fraction of the other text's training rows
HEADS = {
    "rows": ["as it is", "refit", "trained on", "from the start"],
    "model": ["FVU before", "after", "KL before", "after", "CE gap before", "after"],
}


class Job(NamedTuple):
    way: str
    text: str
    act: str
    solver: str
    seed: int


def run(job: Job, home: Path) -> list[float]:
    """The figures of `HEADS`."""
    import saecli

    seeds = {"seed": job.seed, "shuffle_seed": job.seed}
    new = {"act": job.act, "d_sae": 512, **ACTS[job.act], **seeds}
    store = saecli.open_store(CELLS[job.text].store, home)
    sae = saecli.fit(store, solver=job.solver, **new)
    if job.way == "model":
        tuned = saecli.finetune(sae, MODEL, data=store.name, home=home, seed=job.seed)
        measured = [saecli.evaluate(one, store, model=MODEL) for one in (sae, tuned)]
        gaps = [one["ce_spliced"] - one["ce_clean"] for one in measured]
        return [*(one[name] for name in ("fvu", "kl") for one in measured), *gaps]
    other = saecli.open_store("code", home)
    given = {"solver": job.solver, "fraction": NEW}
    saes = [
        sae,
        saecli.refit(sae, other.split("train", fraction=NEW)),
        saecli.fit(other, init=sae, **given, **seeds),
        saecli.fit(other, **given, **new),
    ]
    return [saecli.evaluate(one, other)["fvu"] for one in saes]


def line(name: str, values: np.ndarray) -> str:
    """The means of columns (seeds, figures), in Markdown."""
    count = len(values)
    halves = np.full(values.shape[1], np.nan)
    if count > 1:
        halves = t.ppf(0.975, count - 1) * values.std(0, ddof=1) / count**0.5
    cells = [f"{mean:.4f} ± {half:.4f}" for mean, half in zip(values.mean(0), halves, strict=True)]
    return f"| {' | '.join([name, *cells])} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", default="rows,model")
    parser.add_argument("--texts", default="docs,reference", help="of --ways model")
    parser.add_argument("--acts", default="topk,jumprelu", help=f"out of {', '.join(ACTS)}")
    parser.add_argument("--solvers", default=",".join(SOLVERS))
    parser.add_argument("--seeds", default="1,2,3,4,5", help="defaults were chosen with seed 0")
    parser.add_argument("--out", type=Path, default=Path("feature-benchmark"))
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    chosen = parser.parse_args()
    seeds = [int(seed) for seed in chosen.seeds.split(",")]
    for way in chosen.ways.split(","):
        texts = ["docs"] if way == "rows" else chosen.texts.split(",")
        home = stores(["docs", "code"] if way == "rows" else texts, chosen.out)
        cells = [*product([way], texts, chosen.acts.split(","), chosen.solvers.split(","))]
        jobs = [Job(*cell, seed) for cell, seed in product(cells, seeds)]
        results = fill(run, jobs, chosen.out / "train-on.jsonl", chosen.jobs, home)
        print(f"| | {' | '.join(HEADS[way])} |", "|---" * (len(HEADS[way]) + 1) + "|", sep="\n")
        for cell in cells:
            found = np.array([results[Job(*cell, seed)] for seed in seeds])
            print(line(", ".join(cell[1:]), found))


if __name__ == "__main__":
    main()
