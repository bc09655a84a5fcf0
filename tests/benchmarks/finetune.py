"""Fine-tuning through the model: FVU, L0, KL and the gap in cross-entropy on held-out text, before and after.

    PYTHONPATH=. python tests/benchmarks/finetune.py [--texts docs,code] [--acts topk,transcoder] [--seeds 1,2,3]

Each SAE (d_sae 512, L0 about 16) is trained on a text's rows, and fine-tuned on the same text, both at their defaults;
docs are the standard library's docstrings, which tiny-gemma2 was trained on, code its sources, reference the sections
of Python's reference. Transcoders read `mlp_in` and predict `mlp_out` of layer 2, crosscoders `resid_post` of layers 1
and 3, with topk. Adds a line of JSON per SAE to a log in `--out`, from which the same command resumes, then prints a
table in Markdown: means over seeds of the measures before and after, and of the relative changes, ± half of their 95%
interval.
`--features` adds what latents became: their stability over the seeds, and the AUC of probes on 16 latents less that of
dense ones, over a fifth of the sets of sae-probes (first seed). `--gemma` times instead a window of 128 tokens, a 24th
of a step, through Gemma-2-2B at random weights (layer 12, d_sae 16,384, topk 32, float32 on a CPU), with its memory.
"""

import argparse
import math
import resource
import shutil
import tempfile
import time
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from features import CELLS, MODEL, SOLVERS, STORES, fill, stores
from scipy.stats import t

ACTS: dict[str, dict[str, Any]] = {
    "topk": {"k": 16},
    "batchtopk": {"k": 16},
    "jumprelu": {"target_l0": 16},
    "relu": {"sparsity_weight": 1.2},
    "transcoder": {"act": "topk", "k": 16},
    "crosscoder": {"act": "topk", "k": 16},
}
# The hook points of its stores, by extraction.
HOOK_POINTS: dict[str, dict[str, Any]] = {
    "transcoder": {"layer": 2, "site": ["mlp_in", "mlp_out"]},
    "crosscoder": {"layer": [1, 3]},
}
PROBED = "*5_*,*0_*"  # about a fifth of the sets
MEASURES = ("fvu", "l0", "kl", "gap")  # gap: cross-entropy spliced less clean, nats per token


class Job(NamedTuple):
    text: str
    act: str
    solver: str
    seed: int


def rows(job: Job, home: Path) -> Any:
    """The store, or the joined ones, that an SAE is trained on."""
    import saecli

    names = [store.name for store in stores_of(job.text, job.act, home)]
    opened = [saecli.open_store(name, home) for name in names]
    if job.act == "transcoder":
        return saecli.join(opened[0], target=opened[1])
    return saecli.join(*opened) if job.act == "crosscoder" else opened[0]


def stores_of(text: str, act: str, home: Path) -> list[Any]:
    import saecli

    if act not in HOOK_POINTS:
        return [saecli.open_store(CELLS[text].store, home)]
    options = STORES[CELLS[text].store][1]
    if (file := home / options["dataset"]).exists():
        options = options | {"dataset": str(file)}
    return saecli.extract(**options | HOOK_POINTS[act], name=f"{text}-{act}", home=home)


def kept(job: Job, home: Path, when: str) -> Path:
    return home.parent / "finetuned" / "-".join(map(str, job)) / when


def run(job: Job, home: Path, tokens: int) -> dict[str, dict[str, float]]:
    """`MEASURES` before and after; of the fine-tuned SAE even where the other is kept."""
    import saecli

    given = rows(job, home)
    options = {"act": job.act} | ACTS[job.act]
    sae = saecli.fit(
        given, solver=job.solver, d_sae=512, seed=job.seed, shuffle_seed=job.seed, **options
    )
    saecli.save_sae(sae, kept(job, home, "before"), store=given)
    data = None if job.act in HOOK_POINTS else CELLS[job.text].store
    tuned = saecli.finetune(
        str(kept(job, home, "before")), MODEL, data=data, home=home, tokens=tokens, seed=job.seed
    )
    saecli.save_sae(tuned, kept(job, home, "after"))
    return {
        when: {name: one[name] for name in MEASURES[:3]}
        | {"gap": one["ce_spliced"] - one["ce_clean"]}
        for when, one in ((when, tuned.metadata[when]) for when in ("before", "after"))
    }


def features(jobs: list[Job], home: Path) -> str:
    """Of a cell before and after: stability over its seeds, and probes on its first SAE."""
    import saecli

    cells = [f"{jobs[0].text}, {jobs[0].act}, {jobs[0].solver}"]
    for when in ("before", "after"):
        saes = [str(kept(job, home, when)) for job in jobs]
        found = {"pw_mcc": math.nan, "matched_fraction": math.nan}
        found |= saecli.stability(saes, home=home) if len(saes) > 1 else {}
        probes = saecli.probe(saes[:1], model=MODEL, sets=PROBED, k=(1, 16), home=home)["probes"]
        cells.append(
            ", ".join(
                [
                    f"{found['pw_mcc']:.3f}",
                    f"{found['matched_fraction']:.3f}",
                    *(f"{one['auc_difference']:+.4f}" for one in probes if one["run"] is not None),
                ]
            )
        )
    return f"| {' | '.join(cells)} |"


def line(jobs: list[Job], results: dict[Job, dict[str, dict[str, float]]]) -> str:
    cells = [f"{jobs[0].text}, {jobs[0].act}, {jobs[0].solver}"]
    for name in MEASURES:
        before, after = (
            np.array([results[job][when][name] for job in jobs]) for when in ("before", "after")
        )
        change = 100 * (after / before - 1)
        spread = (
            f" ± {t.ppf(0.975, len(jobs) - 1) * change.std(ddof=1) / len(jobs) ** 0.5:.1f}"
            if len(jobs) > 1
            else ""
        )
        digits = 2 if name == "l0" else 4
        cells.append(
            f"{before.mean():.{digits}f}, {after.mean():.{digits}f} ({change.mean():+.1f}{spread}%)"
        )
    return f"| {' | '.join(cells)} |"


def gemma() -> None:
    import torch
    from transformers import Gemma2Config

    from saecli.extract.language_model import LanguageModel
    from saecli.extract.model_source import find_model
    from saecli.extract.options import BUNDLED, HookPoint
    from saecli.extract.passes import Passes
    from saecli.extract.splice import Hooked, StoredWindow
    from saecli.sae.activations import TopK
    from saecli.sae.dictionary import SAE
    from saecli.train import through
    from saecli.train.loop import Record, start_training
    from saecli.train.options import Finetune, TrainingConfig
    from saecli.train.plan import Plan
    from saecli.train.start import Start

    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(
            BUNDLED[MODEL],
            scratch,
            dirs_exist_ok=True,
            ignore=lambda _, names: [name for name in names if "safetensors" in name],
        )
        Gemma2Config().save_pretrained(scratch)  # whose defaults are Gemma-2-2B's sizes
        model = LanguageModel(find_model(scratch), torch.device("cpu"), head=True, weights_seed=0)
    W_dec = torch.nn.functional.normalize(torch.randn(16_384, model.source.d_model))
    sae = SAE(
        W_dec.T.contiguous(),
        torch.zeros(16_384),
        W_dec,
        torch.zeros(model.source.d_model),
        TopK(k=32),
    )
    points = (HookPoint(12, "resid_post"),)
    windows = [
        StoredWindow(torch.randint(100, 2000, (128,)).numpy(), np.ones(128, bool)) for _ in range(2)
    ]
    through.STEP_TOKENS = 128
    passes = through.Through(
        Passes(model), Hooked("sae", sae, (None,), points, points), windows, windows
    )
    rows = through.Sampled(passes, passes.activations(windows, 256))
    plan = Plan.resolved(
        rows,
        rows,
        TrainingConfig(steps=3, smoothing=0.0),
        Finetune(),
        sae.activation,
        Start("sae", "", sae),
    )
    training = start_training(
        through.FinetunePlan(
            rows, rows, plan.training, plan.solver, plan.activation, plan.start, through=passes
        ),
        Record(),
    )
    for batch in islice(training.rows.shuffled(0), 3):
        began = time.perf_counter()
        training.solver.step(batch)
        print(f"{time.perf_counter() - began:.1f} s for {batch.size} tokens", flush=True)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", default="docs,reference")
    parser.add_argument("--acts", default=",".join(ACTS))
    parser.add_argument("--solvers", default=",".join(SOLVERS))
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--tokens", type=int, default=500_000)
    parser.add_argument(
        "--out", type=Path, default=Path("feature-benchmark"), help="folder of stores"
    )
    parser.add_argument("--features", action="store_true", help="measure stability and probes too")
    parser.add_argument(
        "--gemma", action="store_true", help="measure the cost of a step through Gemma-2-2B"
    )
    parser.add_argument("--jobs", type=int, default=2, help="SAEs at a time")
    chosen = parser.parse_args()
    if chosen.gemma:
        gemma()
    else:
        compare(chosen)


def compare(chosen: argparse.Namespace) -> None:
    texts = chosen.texts.split(",")
    home = stores(texts, chosen.out)
    for text, act in product(texts, chosen.acts.split(",")):
        stores_of(text, act, home)
    cells = [
        [Job(*cell, int(seed)) for seed in chosen.seeds.split(",")]
        for cell in product(texts, chosen.acts.split(","), chosen.solvers.split(","))
    ]
    log = chosen.out / f"finetuned-{chosen.tokens}.jsonl"
    results = fill(
        run, [job for cell in cells for job in cell], log, chosen.jobs, home, chosen.tokens
    )
    heads = ["before, after", "FVU", "L0", "KL", "CE gap"]
    print(
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
        *(line(cell, results) for cell in cells),
        sep="\n",
    )
    if chosen.features:
        print(
            "| before, after | PW-MCC, matched, AUC at k = 1, 16 | the same after |",
            "|---" * 3 + "|",
            sep="\n",
        )
        for cell in [one for one in cells if one[0].act not in HOOK_POINTS]:
            print(features(cell, home), flush=True)


if __name__ == "__main__":
    main()
