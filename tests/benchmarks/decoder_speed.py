"""The decoder step against the machine's matrix product, against LAPACK, and against other least squares.

    PYTHONPATH=. python tests/benchmarks/decoder_speed.py [--threads 2] [--d-sae 4096] [--d-in 2304] [--rows 16384]

First table: "sums" is the pass over the rows, dense codes (half of them zero, as relu's) and sparse ones (K = 32).
Of the dense pass "of peak" is the share of the measured float32 matrix product that F^2 + 2 D F operations a row come
to: the Gram matrix is symmetric. "factorisation" is the decoder step's own, beside LAPACK's by torch in float64;
"solve" is what follows it, for W and for the direction, beside torch.cholesky_solve. "choosing" is what a step that
chooses alpha, from a last choice a tenth off, has beyond one that is given it.

Second table: the same ridge regression, N rows of dense codes, by the decoder step, by sklearn.linear_model.Ridge and
by torch.linalg.lstsq with the ridge as further rows, at N and 4 N: seconds without those of making the rows, memory
beyond that of the imports, and how far W is from a float64 solution, over its norm. Each runs in a process of its own.
The decoder step's rows come block by block, as they do in training; the others need them whole.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peak import peak_of
from torch import Tensor

from saecli.codes import SparseCodes
from saecli.encoding import where
from saecli.ridge import Sums, Terms, choose_alpha, solve

BLOCK = 4096  # rows, as in training
K = 32
ALPHA = 100.0
NOISE = 0.5


def block_of(number: int, rows: int, d_in: int, d_sae: int) -> tuple[Tensor, Tensor]:
    """Codes (B, F), half of them zero, and inputs (B, D) that are linear in some of them; a function of the number."""
    generator = torch.Generator().manual_seed(number)
    z = torch.randn(rows, d_sae, generator=generator).relu_()
    x = z[:, :d_in] + z[:, -d_in:] + NOISE * torch.randn(rows, d_in, generator=generator)
    return z, x


def blocks(rows: int, d_in: int, d_sae: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of so many rows in all."""
    for begin in range(0, rows, BLOCK):
        yield block_of(begin, min(BLOCK, rows - begin), d_in, d_sae)


def sparse(z: Tensor) -> SparseCodes:
    """The K largest codes of each row."""
    values, latents = z.topk(K, 1)
    return SparseCodes(torch.arange(len(z)) * K, latents.flatten(), values.flatten(), z.shape[1])


def least(action: Callable[[], object], times: int = 2) -> float:
    """The least seconds of several runs of an action."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        taken.append(time.perf_counter() - started)
    return min(taken)


def terms_of(d_in: int, d_sae: int, alpha: float, direction: Tensor | None) -> Terms:
    """A ridge and nothing else."""
    zeros = torch.zeros(d_sae, dtype=torch.float64)
    return Terms(alpha, 0.0, 0.0, 0.0, direction, torch.zeros(d_sae, d_in), torch.zeros(d_in), zeros)


def against_peak(rows: int, d_in: int, d_sae: int) -> list[tuple[str, float, str]]:
    """The first table's lines: what, seconds, and of what."""
    left, right = torch.randn(BLOCK, d_in), torch.randn(d_in, d_sae)
    rate = 2 * BLOCK * d_in * d_sae / least(lambda: left @ right, 5)
    sums = Sums(d_sae, d_in)
    for z, x in blocks(max(rows, 4 * d_sae), d_in, d_sae):
        sums.add(where(z, z != 0), x)
    z, x = block_of(0, BLOCK, d_in, d_sae)
    few, further = sparse(z), Sums(d_sae, d_in)
    further.add(where(z, z != 0), x)
    dense_seconds = least(lambda: further.add(where(z, z != 0), x), 4)
    few_seconds = least(lambda: further.add(few, x), 4)
    along = torch.randn(d_sae, d_in, generator=torch.Generator().manual_seed(0))
    alpha = 0.01 * sums.scale(1.0)
    terms = terms_of(d_in, d_sae, alpha, along)
    by_torch = lapack(sums, alpha)
    share = (d_sae**2 + 2 * d_in * d_sae) * BLOCK / dense_seconds / rate
    factored = least(lambda: sums.factorise(terms))
    given = least(lambda: solve(sums, terms))
    best = choose_alpha(sums, terms, z, x, None).alpha

    choosing = least(lambda: solve(sums, terms, choose_alpha(sums, terms, z, x, 1.1 * best)))
    return [("matrix product, GFLOP/s", rate / 1e9, ""),
            ("sums, dense, a row in ms", 1e3 * dense_seconds / BLOCK, f"{share:.2f} of peak"),
            (f"sums, K = {K}, a row in ms", 1e3 * few_seconds / BLOCK,
             f"{dense_seconds / few_seconds:.1f} times as fast as dense"),
            ("factorisation, s", factored, f"{by_torch[0] / factored:.2f} of LAPACK's speed"),
            ("solve for W and direction, s", given - factored,
             f"{by_torch[1] / (given - factored):.2f} of torch.cholesky_solve's speed"),
            ("decoder step, alpha given, s", given, ""),
            ("decoder step, alpha chosen, s", choosing, f"{choosing / given:.2f} of one that is given it"),
            ("choosing, s", choosing - given, f"{(choosing - given) / factored:.2f} factorisations")]


def lapack(sums: Sums, alpha: float) -> tuple[float, float]:
    """Seconds of torch's factorisation, and of its solution for twice D columns."""
    matrix = sums.gram.matrix.tril() + sums.gram.matrix.tril(-1).T
    matrix.diagonal().add_(alpha)
    lower = torch.linalg.cholesky(matrix)
    return least(lambda: torch.linalg.cholesky(matrix)), 2 * least(lambda: torch.cholesky_solve(sums.zy, lower))


def ours(rows: int, d_in: int, d_sae: int) -> tuple[float, Tensor]:
    """Seconds and W, (F, D), by sums."""
    sums, seconds = Sums(d_sae, d_in), 0.0
    for z, x in blocks(rows, d_in, d_sae):
        seconds += timed(lambda z=z, x=x: sums.add(where(z, z != 0), x))[0]
    solving, decoder = timed(lambda: solve(sums, terms_of(d_in, d_sae, ALPHA, None)))
    return seconds + solving, decoder.Delta


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of an action, and what it gives."""
    started = time.perf_counter()
    result = action()
    return time.perf_counter() - started, result


def whole(rows: int, d_in: int, d_sae: int) -> tuple[Tensor, Tensor]:
    """All rows at once."""
    z, x = torch.empty(rows, d_sae), torch.empty(rows, d_in)
    for begin, (some_z, some_x) in zip(range(0, rows, BLOCK), blocks(rows, d_in, d_sae), strict=True):
        z[begin:begin + BLOCK], x[begin:begin + BLOCK] = some_z, some_x
    return z, x


def sklearn(rows: int, d_in: int, d_sae: int) -> tuple[float, Tensor]:
    """Seconds and W, (F, D), by scikit-learn's Ridge, which may overwrite the rows."""
    from sklearn.linear_model import Ridge

    z, x = whole(rows, d_in, d_sae)
    seconds, ridge = timed(lambda: Ridge(ALPHA, copy_X=False).fit(z.numpy(), x.numpy()))
    return seconds, torch.from_numpy(ridge.coef_).T.double()


def lstsq(rows: int, d_in: int, d_sae: int) -> tuple[float, Tensor]:
    """Seconds and W, (F, D), by torch.linalg.lstsq of the centred rows, with the ridge as further ones."""
    z, x = whole(rows, d_in, d_sae)

    def fit() -> Tensor:
        left = torch.cat([z.sub_(z.mean(0)), ALPHA**0.5 * torch.eye(d_sae)])
        right = torch.cat([x.sub_(x.mean(0)), torch.zeros(d_sae, d_in)])
        return torch.linalg.lstsq(left, right).solution

    seconds, W = timed(fit)
    return seconds, W.double()


WAYS = {"saecli": ours, "sklearn Ridge": sklearn, "torch.linalg.lstsq": lstsq}


def alone(way: str, rows: int, chosen: argparse.Namespace) -> dict[str, float]:
    """Seconds, memory beyond the imports' and W's error, of one way in a process of its own."""
    words = ["--way", way, "--rows", str(rows), "--d-in", str(chosen.other_d_in), "--d-sae", str(chosen.other_d_sae),
             "--threads", str(chosen.threads)]
    done = subprocess.run([sys.executable, __file__, *words], text=True, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(way: str, rows: int, d_in: int, d_sae: int) -> dict[str, float]:
    """What `alone` returns, measured in this process."""
    if way == "sklearn Ridge":
        import sklearn.linear_model  # noqa: F401, imported before its memory is counted
    (seconds, W), peak = peak_of(lambda: WAYS[way](rows, d_in, d_sae))
    gram, cross = torch.zeros(d_sae, d_sae, dtype=torch.float64), torch.zeros(d_sae, d_in, dtype=torch.float64)
    sum_z, sum_x = torch.zeros(d_sae, dtype=torch.float64), torch.zeros(d_in, dtype=torch.float64)
    for z, x in blocks(rows, d_in, d_sae):
        z, x = z.double(), x.double()
        gram += z.T @ z
        cross += z.T @ x
        sum_z += z.sum(0)
        sum_x += x.sum(0)
    gram -= torch.outer(sum_z, sum_z) / rows
    gram.diagonal().add_(ALPHA)
    exact = torch.linalg.solve(gram, cross - torch.outer(sum_z, sum_x) / rows)
    return {"seconds": seconds, "peak": peak, "error": ((W - exact).norm() / exact.norm()).item()}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--d-in", type=int, default=2304)
    parser.add_argument("--d-sae", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=16_384, help="N of the second table")
    parser.add_argument("--other-d-in", type=int, default=512, help="D of the second table")
    parser.add_argument("--other-d-sae", type=int, default=2048, help="F of the second table")
    parser.add_argument("--way", choices=tuple(WAYS), help="measure one way of the second table, and print JSON")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    if chosen.way:
        print(json.dumps(measure(chosen.way, chosen.rows, chosen.d_in, chosen.d_sae)))
        return
    print(f"d_in {chosen.d_in}, d_sae {chosen.d_sae}, {chosen.threads} threads, torch {torch.__version__}\n")
    print("| what | | |\n|---|---|---|")
    for what, value, of in against_peak(chosen.rows, chosen.d_in, chosen.d_sae):
        print(f"| {what} | {value:.3g} | {of} |", flush=True)
    print(f"\nd_in {chosen.other_d_in}, d_sae {chosen.other_d_sae}\n\n| N | by | s | memory, GiB | error of W |\n"
          "|---|---|---|---|---|")
    for rows in (chosen.rows, 4 * chosen.rows):
        for way in WAYS:
            found = alone(way, rows, chosen)
            print(f"| {rows:,} | {way} | {found['seconds']:.2f} | {found['peak'] / 2**30:.2f} | "
                  f"{found['error']:.0e} |", flush=True)


if __name__ == "__main__":
    main()
