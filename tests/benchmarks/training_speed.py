"""Rows per second of encoder steps, against full training steps of SAELens and the machine's matrix product.

    PYTHONPATH=. python tests/benchmarks/training_speed.py [--threads 2] [--device cuda] [--saelens-python PYTHON]

PYTHON is of an environment that has sae-lens (`python -m venv FOLDER && FOLDER/bin/pip install sae-lens==6.54.12`);
without it, saecli alone is timed. The two take turns, round after round, and the least time of a step counts. "of
peak" is the share of the measured float32 matrix product that the dense arithmetic of a step comes to: 10 d_in d_sae
operations a row, 8 where the decoder gets no gradient; above 1 where zeros are skipped, and in bf16. "bf16" is
`--precision bf16`; "both": SAELens too, by its own autocast.
"""

import argparse
import json
import math
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from saecli.sae.activations import Activation, Relu, TopK
from saecli.sae.dictionary import Batch
from saecli.train.descent import Task
from saecli.train.options import Pam, PamSgd, Sgd, SolverConfig, TrainingConfig
from saecli.train.solver import Solver
from saecli.train.start import initial_sae

SAELENS = "sae-lens==6.54.12"
CASES: dict[str, tuple[Activation, SolverConfig, str, int]] = {
    "relu, sgd": (Relu(), Sgd(), "relu", 10),
    "relu, sgd, bf16": (Relu(), Sgd(), "relu", 10),
    "relu, sgd, bf16 both": (Relu(), Sgd(), "relu-bf16", 10),
    "relu, pam-sgd, bf16": (Relu(), PamSgd(), "relu", 10),
    "relu, pam-sgd": (Relu(), PamSgd(), "relu", 10),
    "relu, pam": (Relu(), Pam(), "relu", 8),
    "topk 32, sgd": (TopK(k=32), Sgd(), "topk-32", 10),
    "topk 32, sgd, bf16": (TopK(k=32), Sgd(), "topk-32", 10),
    "topk 32, sgd, bf16 both": (TopK(k=32), Sgd(), "topk-32-bf16", 10),
    "topk 32, pam-sgd": (TopK(k=32), PamSgd(), "topk-32", 10),
    "topk 320, sgd": (TopK(k=320), Sgd(), "topk-320", 10),
    "topk 320, pam-sgd": (TopK(k=320), PamSgd(), "topk-320", 10),
}


def least(action: Callable[[], object], times: int) -> float:
    """The least seconds of several runs of an action, after one other."""
    taken = []
    for _ in range(times + 1):
        started = time.perf_counter()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return min(taken[1:])


def new_solver(
    config: SolverConfig, activation: Activation, d_sae: int, rows: Batch, precision: str
) -> Solver:
    """A solver at the start of a training without end."""
    sparsity = activation.default_sparsity
    weight = activation.penalty(sparsity).default_weight(rows.x.shape[1])
    training = TrainingConfig(
        sparsity=sparsity, smoothing=0.0, sparsity_weight=weight, precision=precision
    )
    initial = initial_sae(activation, d_sae, rows, 0, None, sparsity)
    return config.build(initial, Task(training, 10**6, 10**6, 1e-3))


def ours(case: str, chosen: argparse.Namespace) -> float:
    """The least seconds of an encoder step."""
    activation, config, _, _ = CASES[case]
    rows = torch.randn(chosen.batch, chosen.d_in, generator=torch.Generator().manual_seed(0))
    batch = Batch.of(rows.to(chosen.device))
    precision = "bf16" if "bf16" in case else "float32"
    solver = new_solver(config, activation, chosen.d_sae, batch, precision)
    return least(lambda: solver.descend(batch), chosen.steps)


def product_rate(chosen: argparse.Namespace) -> float:
    """Operations a second of the product `x @ W_enc`."""
    x = torch.randn(chosen.batch, chosen.d_in, device=chosen.device)
    W = torch.randn(chosen.d_in, chosen.d_sae, device=chosen.device)
    return 2 * chosen.batch * chosen.d_in * chosen.d_sae / least(lambda: x @ W, 2 * chosen.steps)


def saelens(chosen: argparse.Namespace) -> dict[str, float]:
    """The least seconds of SAELens' steps, by case."""
    if chosen.saelens_python is None:
        return {}
    words = (
        chosen.d_in,
        chosen.d_sae,
        chosen.batch,
        chosen.steps,
        chosen.threads,
        chosen.device,
        *dict.fromkeys(theirs for *_, theirs, _ in CASES.values()),
    )
    script = Path(__file__).with_name("saelens_training.py")
    done = subprocess.run(
        [chosen.saelens_python, script, "steps", *map(str, words)],
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def benchmark(chosen: argparse.Namespace) -> None:
    """Print the table."""
    torch.set_num_threads(chosen.threads)
    rates, theirs, found = [], {}, {}
    for _ in range(chosen.rounds):
        rates.append(product_rate(chosen))
        for case, seconds in saelens(chosen).items():
            theirs[case] = min(seconds, theirs.get(case, seconds))
        for case in CASES:
            found[case] = min(ours(case, chosen), found.get(case, math.inf))
    print(
        f"matrix product: {max(rates) / 1e9:.0f} GFLOP/s; d_in {chosen.d_in}, d_sae {chosen.d_sae}, batch "
        f"{chosen.batch}, {chosen.device}, {chosen.threads} threads; {SAELENS}, torch {torch.__version__}\n"
    )
    print("| step | SAELens, rows/s | saecli, rows/s | ratio | of peak |\n|---|---|---|---|---|")
    for case, seconds in found.items():
        *_, name, factor = CASES[case]
        their = theirs.get(name, math.nan)
        share = factor * chosen.d_in * chosen.d_sae * chosen.batch / seconds / max(rates)
        print(
            f"| {case} | {chosen.batch / their:,.0f} | {chosen.batch / seconds:,.0f} | {their / seconds:.2f} | "
            f"{share:.2f} |"
        )


def main() -> None:
    """Read the options, and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--d-in", type=int, default=2304)
    parser.add_argument("--d-sae", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4, help="of which the least counts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saelens-python", type=Path, help="Python that has sae-lens")
    benchmark(parser.parse_args())


if __name__ == "__main__":
    main()
