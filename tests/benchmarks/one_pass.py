"""What decoder steps from the codes of encoder steps (--decoder-every S) add to the encoder's own time.

    PYTHONPATH=. python tests/benchmarks/one_pass.py [--threads 2] [--every 50,100]

Encoder steps of PAM-SGD on random rows, at d_in 2304, d_sae 4096 and batch 2048: alone, and with a decoder step after
every S of them. The first decoder step, which seeks alpha over all decades, is told apart ("first, s"): there is one a
run. Those that count choose alpha anew half of the time, as early in a run; later they do so ever more rarely. "sums"
is the share of the encoder's time that summing codes takes, "solving" that of the decoder step itself.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from saecli.activations import Activation, Relu, TopK
from saecli.batch import Batch
from saecli.solvers import Solver, Task
from saecli.solvers.pam_sgd import PamSgd
from saecli.training.rows import initial_sae

ACTIVATIONS: dict[str, Activation] = {"topk 32": TopK(k=32), "topk 320": TopK(k=320), "relu": Relu()}
DIFFERENT = 8  # batches that are made, and taken again and again


def batches_of(d_in: int, batch: int) -> list[Batch]:
    """Rows of a subspace and noise."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(d_in // 8, d_in, generator=generator)
    return [Batch.of(torch.randn(batch, d_in // 8, generator=generator) @ basis / (d_in // 8)**0.5
                     + 0.3 * torch.randn(batch, d_in, generator=generator)) for _ in range(DIFFERENT)]


def seconds(action: Callable[[], object]) -> float:
    """Those that an action takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def decoder_step(solver: Solver) -> None:
    """The one that is due, from the codes of encoder steps."""
    solver.begin_pass(tuple)
    solver.end_pass()


def line(name: str, every: int, chosen: argparse.Namespace) -> str:
    """One row of the table."""
    activation = ACTIVATIONS[name]
    batches = batches_of(chosen.d_in, chosen.batch)
    initial = initial_sae(activation, chosen.d_sae, batches[0].x, seed=0)
    sparsity = activation.default_sparsity
    task = Task(10**6 * chosen.batch, 10**6, 1e-3, sparsity, activation.default_weight(sparsity, chosen.d_in),
                batches=10**6)
    solver = PamSgd(decoder_every=every, inner_steps=1).build(initial, task)
    steps, summing, solving = [], [], []
    solver.begin_epoch()
    add = solver._running.add
    solver._running.add = lambda codes, batch: summing.append(seconds(lambda: add(codes, batch)))
    for number in range(chosen.windows * every):
        before = sum(summing)
        taken = seconds(partial(solver.step, batches[number % DIFFERENT]))
        steps.append(taken - sum(summing) + before)
        if solver.due is not None:
            solving.append(seconds(partial(decoder_step, solver)))
    alone = torch.tensor(steps[1:]).median().item()
    summed = sum(summing) / len(steps)
    first, *others = solving
    solved = sum(others) / len(others) / every
    return (f"| {name} | {every} | {chosen.batch / alone:,.0f} | {summed / alone:.1%} | {solved / alone:.1%} | "
            f"{(summed + solved) / alone:.1%} | {first:.1f} |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--d-in", type=int, default=2304)
    parser.add_argument("--d-sae", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--every", default="50,100", help="S, between commas")
    parser.add_argument("--windows", type=int, default=3, help="decoder steps, the first apart")
    parser.add_argument("--activations", default=",".join(ACTIVATIONS), help="out of " + ", ".join(ACTIVATIONS))
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    print("| act | S | encoder alone, rows/s | sums | solving | together | first, s |\n|---|---|---|---|---|---|---|")
    for name in chosen.activations.split(","):
        for every in map(int, chosen.every.split(",")):
            print(line(name, every, chosen), flush=True)


if __name__ == "__main__":
    main()
