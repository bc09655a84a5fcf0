"""Fine-tuning through the model: FVU, L0, KL and the gap in cross-entropy on held-out text, before and after.

    PYTHONPATH=. python tests/benchmarks/finetune.py [--texts docs,code] [--acts topk,batchtopk] [--seeds 1,2,3]

Each SAE (d_sae 512, L0 about 16) is trained on 60,000 rows of a text, and fine-tuned on the same text, both at their
defaults. Prints a line of JSON per SAE, then a table in Markdown: means over seeds of the measures before and after,
and of the relative changes, ± half of their 95% interval. `--gemma` times instead a window of 128 tokens, a 24th of a
step, through Gemma-2-2B at random weights: layer 12, d_sae 16,384, topk 32, on a CPU in float32; and prints the peak of
the memory.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from features import CELLS, MODEL, SOLVERS, stores
from scipy.stats import t

ACTS: dict[str, dict[str, Any]] = {"topk": {"k": 16}, "batchtopk": {"k": 16}, "jumprelu": {"target_l0": 16},
                                   "relu": {"sparsity_weight": 1.2}}
MEASURES = ("fvu", "l0", "kl", "gap")  # gap: cross-entropy spliced less clean, nats per token


class Job(NamedTuple):
    text: str
    act: str
    solver: str
    seed: int


def run(job: Job, home: Path, tokens: int) -> dict[str, dict[str, float]]:
    """`MEASURES` before and after; of the fine-tuned SAE even where the other is kept."""
    import saecli

    sae = saecli.fit(saecli.open_store(CELLS[job.text].store, home), solver=job.solver, act=job.act, d_sae=512,
                     seed=job.seed, shuffle_seed=job.seed, **ACTS[job.act])
    tuned = saecli.finetune(sae, MODEL, data=CELLS[job.text].store, home=home, tokens=tokens, seed=job.seed).metadata
    return {when: {name: one[name] for name in MEASURES[:3]} | {"gap": one["ce_spliced"] - one["ce_clean"]}
            for when, one in ((when, tuned[when]) for when in ("before", "after"))}


def line(jobs: list[Job], results: dict[Job, dict[str, dict[str, float]]]) -> str:
    cells = [f"{jobs[0].text}, {jobs[0].act}, {jobs[0].solver}"]
    for name in MEASURES:
        before, after = (np.array([results[job][when][name] for job in jobs]) for when in ("before", "after"))
        change = 100 * (after / before - 1)
        spread = (f" ± {t.ppf(0.975, len(jobs) - 1) * change.std(ddof=1) / len(jobs) ** 0.5:.1f}" if len(jobs) > 1
                  else "")
        digits = 2 if name == "l0" else 4
        cells.append(f"{before.mean():.{digits}f}, {after.mean():.{digits}f} ({change.mean():+.1f}{spread}%)")
    return f"| {' | '.join(cells)} |"


def gemma() -> None:
    import torch
    from transformers import Gemma2Config

    from saecli.extract.language_model import LanguageModel
    from saecli.extract.model_source import find_model
    from saecli.extract.options import BUNDLED, HookPoint
    from saecli.extract.splice import Hooked
    from saecli.sae.activations import TopK
    from saecli.sae.dictionary import SAE
    from saecli.train import through
    from saecli.train.loop import Record, start_training
    from saecli.train.options import Finetune, TrainingConfig
    from saecli.train.plan import Plan
    from saecli.train.start import Start

    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(BUNDLED[MODEL], scratch, dirs_exist_ok=True, ignore=lambda _, names: [
            name for name in names if "safetensors" in name])
        Gemma2Config().save_pretrained(scratch)  # whose defaults are Gemma-2-2B's sizes
        model = LanguageModel(find_model(scratch), torch.device("cpu"), head=True, weights_seed=0)
    W_dec = torch.nn.functional.normalize(torch.randn(16_384, model.source.d_model))
    sae = SAE(W_dec.T.contiguous(), torch.zeros(16_384), W_dec, torch.zeros(model.source.d_model), TopK(k=32))
    points = (HookPoint(12, "resid_post"),)
    windows = torch.randint(100, 2000, (2, 128)).tolist()
    through.STEP_TOKENS = 128
    passes = through.Through(model, Hooked("sae", sae, None, points, points), torch.tensor([2]), windows, windows)
    rows = through.Sampled(passes, passes.activations(windows, 256))
    plan = Plan.resolved(rows, rows, TrainingConfig(steps=3, smoothing=0.0), Finetune(), sae.activation,
                         Start("sae", "", sae))
    training = start_training(through.FinetunePlan(rows, rows, plan.training, plan.solver, plan.activation, plan.start,
                                                   through=passes), Record())
    for batch in islice(training.rows.shuffled(0), 3):
        began = time.perf_counter()
        training.solver.step(batch)
        print(f"{time.perf_counter() - began:.1f} s for {batch.size} tokens", flush=True)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", default="docs,code")
    parser.add_argument("--acts", default=",".join(ACTS))
    parser.add_argument("--solvers", default=",".join(SOLVERS))
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--tokens", type=int, default=500_000)
    parser.add_argument("--out", type=Path, default=Path("feature-benchmark"), help="folder of stores")
    parser.add_argument("--gemma", action="store_true", help="measure the cost of a step through Gemma-2-2B")
    parser.add_argument("--jobs", type=int, default=2, help="SAEs at a time")
    chosen = parser.parse_args()
    if chosen.gemma:
        gemma()
    else:
        compare(chosen)


def compare(chosen: argparse.Namespace) -> None:
    texts = chosen.texts.split(",")
    home = stores(texts, chosen.out)
    cells = [[Job(*cell, int(seed)) for seed in chosen.seeds.split(",")]
             for cell in product(texts, chosen.acts.split(","), chosen.solvers.split(","))]
    jobs = [job for cell in cells for job in cell]
    os.environ["OMP_NUM_THREADS"] = "1"  # spawned processes read it when they load torch
    results = {}
    with ProcessPoolExecutor(chosen.jobs, multiprocessing.get_context("spawn")) as pool:
        for job, found in zip(jobs, pool.map(run, jobs, [home] * len(jobs), [chosen.tokens] * len(jobs)), strict=True):
            results[job] = found
            print(json.dumps([job, found]), flush=True)
    heads = ["before, after", "FVU", "L0", "KL", "CE gap"]
    print(f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(line(cell, results) for cell in cells), sep="\n")


if __name__ == "__main__":
    main()
