"""What a decoder step costs, and what choosing its alpha adds and loses against the full path.

    PYTHONPATH=. python tests/benchmarks/decoder_step.py [--threads 2]

Codes are those of a random topk encoder. "sums" is the pass over the rows, "solve" the decoder step after it,
"first" what a choice of alpha over all decades adds to it and "warm" what one from an alpha a tenth off the last choice
adds; held rows' Gram matrix, which choice and solve share, counts as the solve's. Ratios are to sums and solve
together. "lost" is how far the first and the warm choice's PRESS lie above the least of 101 alphas over the range, on
the rows that the solver passes. Times are the least of three.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from saecli.sae.activations.selection import where
from saecli.train.ridge import HeldRows, Sums, System, Terms, choose_alpha, solve
from saecli.train.ridge.choice import LEAST, MOST, Press

BLOCK = 1024  # rows of a block
PRESS_ROWS = 4096  # rows that the solver passes to a choice
SPREAD = 0.5  # of row norms, in powers of ten: the largest are a hundred times the smallest


@dataclass(frozen=True)
class Size:
    """A problem's size, and the share of its codes that are not zero."""

    rows: int
    d_sae: int
    d_in: int
    density: float


SIZES = [Size(80, 256, 64, 0.1), Size(300, 256, 64, 0.1), Size(1000, 256, 64, 0.1), Size(500, 1024, 64, 0.05),
         Size(1000, 1024, 64, 0.05), Size(4000, 1024, 64, 0.02)]


def problem(size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (N, F), inputs (N, D), and the direction (F, D)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size.rows, size.d_in // 2, generator=generator)
    x = x @ torch.randn(size.d_in // 2, size.d_in, generator=generator) / size.d_in**0.5
    x += 0.3 * torch.randn(size.rows, size.d_in, generator=generator)
    x *= 10 ** (SPREAD * torch.randn(size.rows, 1, generator=generator))
    W_enc = torch.randn(size.d_in, size.d_sae, generator=generator) / size.d_in**0.5
    z = torch.cat([_topk(block @ W_enc, round(size.density * size.d_sae)) for block in x.split(BLOCK)])
    return z, x, W_enc.T.contiguous()


def _topk(before: Tensor, kept: int) -> Tensor:
    least = before.topk(kept, 1).values[:, -1:]
    return torch.where(before >= least, before, 0.0).relu()


def gather(z: Tensor, x: Tensor) -> System:
    """The normal equations, as the solver gathers them."""
    if len(z) < z.shape[1]:
        return HeldRows(z, x)
    sums = Sums(z.shape[1], x.shape[1])
    for block_z, block_x in zip(z.split(BLOCK), x.split(BLOCK), strict=True):
        sums.add(where(block_z, block_z != 0), block_x)
    return sums


def seconds(run: Callable[[System], object], fresh: Callable[[], System]) -> float:
    """The least time of a run, each on a system that nothing has been computed for."""
    taken = []
    for _ in range(3):
        system = fresh()
        started = time.perf_counter()
        run(system)
        taken.append(time.perf_counter() - started)
    return min(taken)


def line(size: Size) -> str:
    """One row of the table."""
    z, x, direction = problem(size)
    stride = -(-size.rows // PRESS_ROWS)
    some_z, some_x = z[::stride], x[::stride]
    zeros = torch.zeros(size.d_sae, dtype=torch.float64)
    terms = Terms(0.0, 0.0, 0.0, 0.0, direction, torch.zeros_like(direction), x[0], zeros)
    system = gather(z, x)

    def fresh() -> System:
        return HeldRows(z, x) if isinstance(system, HeldRows) else system

    first = choose_alpha(system, terms, some_z, some_x, None).alpha
    warm = choose_alpha(system, terms, some_z, some_x, 1.1 * first).alpha
    summing = seconds(lambda _: gather(z, x), lambda: system)

    def choice(last: float | None) -> Callable[[System], float]:
        return lambda held: choose_alpha(held, terms, some_z, some_x, last).alpha

    def added(last: float | None) -> float:
        if not isinstance(system, HeldRows):
            return seconds(choice(last), fresh)
        return seconds(lambda held: solve(held, replace(terms, alpha=choice(last)(held))), fresh) - solving

    solving = seconds(lambda held: solve(held, replace(terms, alpha=first)), fresh)
    choosing, again = added(None), added(1.1 * first)
    cells = [f"{size.rows}", f"{size.d_sae}", f"{size.d_in}", f"{size.density:g}",
             *(f"{1000 * value:.1f}" for value in (summing, solving, choosing, again)),
             f"{choosing / (summing + solving):.2f}", f"{again / (summing + solving):.2f}"]
    index = torch.arange(size.rows) if stride == 1 else None
    press = replace(Press.of(system, terms, some_z, some_x), z=some_z.double(), y=some_x.double(), index=index,
                    weight=torch.ones(len(some_z)).double())
    scores = [press.model(system.factorise(replace(terms, alpha=alpha)), 0.0).value
              for alpha in (first, warm, *system.scale(1.0) * np.logspace(LEAST, MOST, 101))]
    cells += [f"{score / min(scores[2:]) - 1:.2%}" for score in scores[:2]]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    heads = ["N", "F", "D", "density", "sums, ms", "solve, ms", "first, ms", "warm, ms", "first, ratio",
             "warm, ratio", "first, lost", "warm, lost"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for size in SIZES:
        print(line(size), flush=True)


if __name__ == "__main__":
    main()
