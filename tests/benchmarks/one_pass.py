"""What decoder steps from the codes of encoder steps (--decoder-every S) add to the encoder's own time.

    PYTHONPATH=. python tests/benchmarks/one_pass.py [--threads 2] [--every 50,100]

Encoder steps of PAM-SGD on random rows, at d_in 2304, d_sae 4096 and batch 2048: alone, and with a decoder step after
every S of them. The first decoder step, which seeks alpha over all decades, is told apart ("first, s"): there is one a
run. Those that count choose alpha anew half of the time, as early in a run; later they do so ever more rarely. "sums"
is the share of the encoder's time that summing codes takes, "solving" that of the decoder step itself.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from saecli.solvers.alternation import PamSgdSolver
from torch import Tensor

from saecli.activations import Activation, Relu, TopK
from saecli.solvers import Task
from saecli.solvers.pam_sgd import PamSgd
from saecli.training.rows import initial_sae

ACTIVATIONS: dict[str, Activation] = {"topk 32": TopK(k=32), "topk 320": TopK(k=320), "relu": Relu()}
DIFFERENT = 8  # batches that are made, and taken again and again


@dataclass(frozen=True)
class RandomRows:
    """Rows of a subspace and noise, in batches."""

    batches: list[Tensor]
    count: int

    @property
    def rows(self) -> int:
        """How many."""
        return self.count * len(self.batches[0])

    @property
    def d_in(self) -> int:
        """Their width."""
        return self.batches[0].shape[1]

    def shuffled(self, epoch: int) -> Iterator[Tensor]:
        """Each batch, in turn."""
        return (self.batches[(epoch + index) % len(self.batches)] for index in range(self.count))

    def sequential(self) -> Iterator[Tensor]:
        """The same."""
        return self.shuffled(0)


def rows_of(d_in: int, batch: int, count: int) -> RandomRows:
    """So many batches, of `DIFFERENT` that differ."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(d_in // 8, d_in, generator=generator)
    return RandomRows([torch.randn(batch, d_in // 8, generator=generator) @ basis / (d_in // 8)**0.5
                       + 0.3 * torch.randn(batch, d_in, generator=generator) for _ in range(DIFFERENT)], count)


def line(name: str, every: int, chosen: argparse.Namespace) -> str:
    """One row of the table."""
    activation = ACTIVATIONS[name]
    rows = rows_of(chosen.d_in, chosen.batch, 10**6)
    initial = initial_sae(activation, chosen.d_sae, rows.batches[0], seed=0)
    sparsity = activation.default_sparsity
    task = Task(rows.rows, 10**6, 1e-3, sparsity, activation.default_weight(sparsity, chosen.d_in), batches=10**6)
    solver = PamSgd(decoder_every=every, inner_steps=1).build(initial, task)
    times: dict[str, list[float]] = {"alone": [], "summed": [], "solved": []}
    original = solver.solve_decoder

    def solve_decoder(*words: object, **named: object) -> object:
        started = time.perf_counter()
        found = original(*words, **named)
        times["solved"].append(time.perf_counter() - started)
        return found

    solver.solve_decoder = solve_decoder
    steps = solver.epoch(rows, 0)
    for _ in range(chosen.windows * every + 1):
        solving, started = sum(times["solved"]), time.perf_counter()
        next(steps)
        taken = time.perf_counter() - started - (sum(times["solved"]) - solving)
        times["summed" if is_counting(solver) else "alone"].append(taken)
    alone = torch.tensor(times["alone"][1:]).median().item()
    adding = sum(times["summed"]) / len(times["summed"]) - alone
    summed = adding * len(times["summed"]) / (chosen.windows * every)  # a step
    first, *others = times["solved"]
    solved = sum(others) / len(others) / every
    return (f"| {name} | {every} | {chosen.batch / alone:,.0f} | {summed / alone:.1%} | {solved / alone:.1%} | "
            f"{(summed + solved) / alone:.1%} | {first:.1f} |")


def is_counting(solver: PamSgdSolver) -> bool:
    """Whether the step just made counts for the next decoder step."""
    return solver._counting


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
