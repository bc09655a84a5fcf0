"""The decoder step as the dictionary widens: time and memory, with the Gram matrix and without it.

    PYTHONPATH=. python tests/benchmarks/wide.py [--threads 2] [--most 32768] [--d-in 2304] [--rows-a-latent 2]

K = 32 codes of a row are not zero. How often latents fire falls off as a power of their rank, and those that fire in a
row come from one of 64 groups mostly, so that latents go together as they do in an SAE. The step is for the residual
decoder with alpha at a twentieth of the mean diagonal. Each line runs in a process of its own: "gathering" is the pass
over the rows, of which the codes are at hand, "solving" the decoder and its direction, "memory" the most that the
process took beyond its imports. Lines without the Gram matrix also tell the residual, and how far their Delta is from
the one with it, over its norm; "condition" is that of the matrix, or of what its diagonal leaves of it.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from peak import peak_of
from torch import Tensor

from saecli.encoding import where
from saecli.ridge import DecoderState, StreamedCodes, Sums, Terms, solve

K, GROUPS, ALPHA, BLOCK = 32, 64, 0.05, 4096
FALL = 0.7  # power of the rank with which latents fire less


def blocks(rows: int, d_in: int, d_sae: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Codes (B, F) and inputs (B, D), the same on every call."""
    generator = torch.Generator().manual_seed(0)
    often = torch.arange(1, d_sae + 1).float().pow(-FALL)[torch.randperm(d_sae, generator=generator)]
    group = torch.randint(GROUPS, (d_sae,), generator=generator)
    chance = torch.stack([often * torch.where(group == one, 20.0, 1.0) for one in range(GROUPS)])
    dictionary = torch.randn(d_sae, d_in, generator=generator) / d_in**0.5
    for begin in range(0, rows, BLOCK):
        size = min(BLOCK, rows - begin)
        z = torch.zeros(size, d_sae)
        for some in torch.arange(size).split(BLOCK // 8):
            places = torch.multinomial(chance[torch.randint(GROUPS, (len(some),), generator=generator)], K,
                                       generator=generator)
            z[some] = z[some].scatter_(1, places, torch.rand(len(some), K, generator=generator) + 0.1)
        noise = torch.randn(size, d_in, generator=generator) / d_in**0.5
        places = z.nonzero()[:, 1].view(size, K)
        x = torch.nn.functional.embedding_bag(places, dictionary, mode="sum", per_sample_weights=z.gather(1, places))
        yield z, x + noise


def step(way: str, chosen: argparse.Namespace) -> tuple[float, float, DecoderState]:
    """Seconds of the pass over the rows and of the solution, and the decoder."""
    d_in, d_sae, rows = chosen.d_in, chosen.d_sae, chosen.rows_a_latent * chosen.d_sae
    direction = torch.randn(d_sae, d_in, generator=torch.Generator().manual_seed(1)) / d_in**0.5
    zeros, gathering = torch.zeros(d_sae, d_in), 0.0
    system = (Sums(d_sae, d_in) if way == "direct" else
              StreamedCodes(zeros, lambda: (where(z, z != 0) for z, _ in blocks(rows, d_in, d_sae)), 2.0**34))
    for z, x in blocks(rows, d_in, d_sae):
        started = time.perf_counter()
        system.add(where(z, z != 0), x)
        gathering += time.perf_counter() - started
    alpha = ALPHA * system.scale(1.0)
    terms = Terms(alpha, 0.0, 0.0, 0.0, direction, zeros, torch.zeros(d_in), torch.zeros(d_sae, dtype=torch.float64))
    started = time.perf_counter()
    found = solve(system, terms)
    return gathering, time.perf_counter() - started, found


def measure(way: str, chosen: argparse.Namespace, kept: Path) -> dict[str, float]:
    """One line's figures."""
    (gathering, solving, found), peak = peak_of(lambda: step(way, chosen))
    figures = {"gathering": gathering, "solving": solving, "memory": peak, "condition": found.condition,
               "residual": 0.0 if math.isnan(found.residual) else found.residual}
    if way == "direct":
        torch.save(found.Delta.float(), kept)
    elif kept.exists():
        exact = torch.load(kept, weights_only=True).double()
        figures["apart"] = ((found.Delta - exact).norm() / exact.norm()).item()
    return figures


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--least", type=int, default=2048, help="the first d_sae")
    parser.add_argument("--most", type=int, default=32_768, help="the last d_sae")
    parser.add_argument("--d-in", type=int, default=2304)
    parser.add_argument("--rows-a-latent", type=int, default=2)
    parser.add_argument("--way", choices=("direct", "iterative"), help="measure one line, and print JSON")
    parser.add_argument("--d-sae", type=int, help="its d_sae")
    parser.add_argument("--kept", type=Path, help="the file that the direct way's decoder is handed on by")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    if chosen.way:
        print(json.dumps(measure(chosen.way, chosen, chosen.kept)))
        return
    print(f"d_in {chosen.d_in}, K {K}, {chosen.rows_a_latent} rows a latent, {chosen.threads} threads\n\n"
          "| d_sae | way | gathering, s | a row, ms | solving, s | memory, GiB | d_sae^2 float64, GiB | residual | "
          "condition | from direct |\n|---|---|---|---|---|---|---|---|---|---|")
    d_sae = chosen.least
    with tempfile.TemporaryDirectory() as folder:
        while d_sae <= chosen.most:
            for way in ("direct", "iterative"):
                words = ["--way", way, "--d-sae", str(d_sae), "--kept", str(Path(folder) / f"{d_sae}.pt")]
                done = subprocess.run([sys.executable, __file__, *sys.argv[1:], *words], text=True,
                                      stdout=subprocess.PIPE, check=True)
                found = json.loads(done.stdout.splitlines()[-1])
                rows = chosen.rows_a_latent * d_sae
                print(f"| {d_sae:,} | {way} | {found['gathering']:.1f} | {1e3 * found['gathering'] / rows:.3f} | "
                      f"{found['solving']:.1f} | {found['memory'] / 2**30:.2f} | {8 * d_sae**2 / 2**30:.2f} | "
                      f"{found['residual']:.0e} | {found['condition']:.0e} | "
                      f"{found.get('apart', 0):.0e} |", flush=True)
            d_sae *= 2


if __name__ == "__main__":
    main()
