"""What `sae geometry` takes on a large SAE: time and memory against rows, and its pass over a bare encode-decode.

    PYTHONPATH=. python tests/benchmarks/geometry_scale.py [--rows 50000,200000] [--d-in 768] [--d-sae 16384] [--k 64]

Rows are random about 256 centres and the SAE's weights random, so that the figures are those of the work alone. Each
`sae geometry --split all` runs in a process of its own, whose largest resident memory it tells. "pass" is the
processor time of supports, census and margins over 4,096 rows, for each activation, over that of the SAE's
reconstructions of these rows in float32, the least of three, taking turns.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from saecli.geometry.largest_cells import cells_of
from saecli.geometry.survey import batch_size, gather
from saecli.sae.activations import Activation, Relu, TopK, activation_to_json
from saecli.sae.dictionary import SAE
from saecli.sae.formats import SavedSAE, save_native
from saecli.store.schema import StoreMeta, rows_per_shard
from saecli.store.writer import StoreWriter

PASS_ROWS = 4096


def random_sae(activation: Activation, d_in: int, d_sae: int, bias: float = 0.0) -> SAE:
    """An SAE of random tied weights, the bias the same for every latent."""
    W_enc = torch.randn(d_in, d_sae, generator=torch.Generator().manual_seed(0)) / d_in**0.5
    return SAE(W_enc, torch.full((d_sae,), bias), W_enc.T.contiguous(), torch.zeros(d_in), activation)


def random_rows(count: int, d_in: int) -> Iterator[np.ndarray]:
    """Rows about 256 centres, in blocks of up to 8,192."""
    rng = np.random.default_rng(0)
    centres = 2 * rng.standard_normal((256, d_in), np.float32)
    for at in range(0, count, 8192):
        size = min(8192, count - at)
        yield centres[rng.integers(0, 256, size)] + rng.standard_normal((size, d_in), np.float32)


def make_home(home: Path, rows: int, sae: SAE) -> None:
    """A store of so many rows, and a run that holds the SAE."""
    meta = StoreMeta({"dataset": "random"}, "", "float32", sae.d_in, rows_per_shard(sae.d_in, "float32"))
    with StoreWriter.open(home / "activations" / "rows", meta) as writer:
        for number, block in enumerate(random_rows(rows, sae.d_in)):
            writer.append(block, {}, {"block": number})
        writer.finish()
    folder = home / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({
        "format_version": 1, "created": "2026-01-01", "complete": True, "data": "rows",
        "training": {"split_seed": 0, "fraction": 1.0}, "solver": {"name": "sgd"},
        "activation": activation_to_json(sae.activation), "result": None}))
    save_native(SavedSAE(sae, {}), folder)


def whole_command(rows: int, sae: SAE) -> str:
    """A line on `sae geometry` over so many rows: seconds and memory."""
    with tempfile.TemporaryDirectory() as folder:
        make_home(Path(folder), rows, sae)
        words = [sys.executable, "-m", "saecli", "--home", folder, "geometry", "one", "--split", "all", "--rows",
                 str(rows), "--json"]
        started = time.perf_counter()
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        document = json.load(process.stdout)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - started
    spent = usage.ru_utime + usage.ru_stime
    return (f"{rows:>9,} rows: {seconds:6.0f} s, {spent:6.0f} s of processor, {usage.ru_maxrss / 1024:6,.0f} MiB; "
            f"{document['cells_visited']:,} cells, margin {document['margin']['median']:.3g}, "
            f"{document['references']['kmeans_cells']:,} cells of k-means")


@torch.no_grad()
def pass_ratio(sae: SAE) -> str:
    """A line on the pass over rows against reconstructing them."""
    x = torch.from_numpy(np.concatenate(list(random_rows(PASS_ROWS, sae.d_in))))
    cells, least = cells_of(sae), [float("inf")] * 2
    for _ in range(3):
        for which, work in enumerate((lambda: [sae(some) for some in x.split(1024)],
                                      lambda: gather(cells, x.split(batch_size(sae.d_sae))))):
            started = time.process_time()
            work()
            least[which] = min(least[which], time.process_time() - started)
    return (f"{sae.activation.name:>9}: pass {least[1]:.2f} s, bare encode and decode {least[0]:.2f} s, "
            f"ratio {least[1] / least[0]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="50000,200000", help="rows of the stores, by commas; 0 for none")
    parser.add_argument("--d-in", type=int, default=768)
    parser.add_argument("--d-sae", type=int, default=16_384)
    parser.add_argument("--k", type=int, default=64)
    given = parser.parse_args()
    for activation, bias in ((TopK(given.k), 0.0), (Relu(), -6.0)):
        print(pass_ratio(random_sae(activation, given.d_in, given.d_sae, bias)), flush=True)
    for rows in [int(count) for count in given.rows.split(",") if int(count)]:
        print(whole_command(rows, random_sae(TopK(given.k), given.d_in, given.d_sae)), flush=True)


if __name__ == "__main__":
    main()
