"""What many shards, stores, runs or latents cost: each as a curve over size, with its slope at the end.

    PYTHONPATH=. python tests/benchmarks/scale.py [--parts shards,files] [--shards 1024,4096,16384]

A slope is the exponent between the last two sizes: 0 where a cost is flat, 1 where it is linear, 2 where quadratic.
Costs are CPU seconds, of memory the peak of a process. What fails has the sentence of its failure.
"""

import argparse
import json
import math
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

import saecli
from saecli.base.console import Silent
from saecli.base.home import Home
from saecli.measure.latents import CoFiring
from saecli.sae.activations import TopK
from saecli.sae.activations.base import between
from saecli.sae.dictionary import SAE
from saecli.sae.formats import SavedSAE, save_native
from saecli.sae.library import find_subject
from saecli.store.blocks import RowBlock, Windows
from saecli.store.origin import Origin
from saecli.store.reader import ActivationStore
from saecli.store.schema import StoreMeta
from saecli.store.writer import StoreWriter
from saecli.train import through
from saecli.train.listing import list_home, removable, remove

SIZES = {
    "shards": [1024, 4096, 16_384],
    "files": [10, 30, 100],
    "runs": [500, 1000, 2000],
    "stores": [1000, 2000, 4000],
    "latents": [16_384, 65_536, 262_144],
    "finetune": [2304, 9216, 36_864],
}
LAST = 64  # commits, at the end of a store
ALLOWED = 256  # files open at once
D_IN, WINDOW = 8, 32
Costs = dict[str, float]  # by what is measured
ROW = "| {} | {} | {} |"


def cpu(work: Callable[..., object], *arguments: object) -> float:
    """CPU seconds of this process."""
    begun = time.process_time()
    work(*arguments)
    return time.process_time() - begun


@contextmanager
def new_home() -> Iterator[Path]:
    """A home in memory, where the system has such a place: flushing to disk is slow."""
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)


def make_store(path: Path, shards: int, rows: int = 1) -> list[float]:
    """Write a store of small shards, of so many rows each; the CPU seconds of each shard."""
    meta = StoreMeta({}, "request", "float32", D_IN, rows, columns=("document",))
    costs = []
    with StoreWriter.open(path, meta) as writer:
        for number in range(shards):
            block = np.full((rows, D_IN), number, np.float32)
            block = RowBlock(block, {"document": np.full(rows, number)})
            costs.append(cpu(writer.append, block, {"row": number * rows}))
        writer.finish()
    return costs


def of_shards(count: int) -> Costs:
    """One store of so many shards."""
    with new_home() as home:
        path = home / "activations" / "s"
        last = make_store(path, count)[-LAST:]
        return {
            "a commit": sum(last) / len(last),
            "open a store": cpu(lambda: ActivationStore.open(path)),
            "find the newest store": cpu(lambda: Home.at(home).stores.find(None)),
            "resume a store, per shard": cpu(lambda: _resumed(path)) / count,
        }


def _resumed(path: Path) -> None:
    marker = path / "store.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"complete": False}))
    meta = StoreMeta({}, "request", "float32", D_IN, 1, columns=("document",))
    with StoreWriter.open(path, meta):
        pass


def of_files(count: int) -> Costs:
    """Stores of 40 shards read side by side, with few files allowed."""
    with new_home() as home:
        folders = [home / str(number) for number in range(count)]
        for folder in folders:
            make_store(folder, 40, rows=8)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (ALLOWED, most))
        split = saecli.join(*folders).split("all")
        taken = cpu(lambda: sum(len(rows) for rows in split.batches(64, seed=0, epoch=0)))
        return {f"an epoch of stores at once, {ALLOWED} files": taken}


def make_runs(home: Path, count: int, latents: int = 16) -> None:
    """Runs trained on a store `s` of a row's width."""
    W_enc = torch.randn(D_IN, latents, generator=torch.Generator().manual_seed(0))
    biases = torch.zeros(latents), torch.zeros(D_IN)
    sae = SAE(W_enc, biases[0], W_enc.T / D_IN, biases[1], TopK(k=8))
    document = {
        "format_version": 1,
        "created": "2026-01-01",
        "complete": True,
        "data": "s",
        "training": {"split_seed": 0, "fraction": 1.0},
        "solver": {"name": "sgd"},
        "activation": {"name": "topk", "k": 8},
        "result": None,
    }
    first = home / "runs" / "r0"
    first.mkdir(parents=True)
    (first / "run.json").write_text(json.dumps(document))
    save_native(SavedSAE(sae, Origin(data="s")), first)
    for number in range(1, count):
        shutil.copytree(first, home / "runs" / f"r{number}")


def of_runs(count: int) -> Costs:
    """Runs found by a pattern, each opened; listed; removed."""
    with new_home() as folder:
        make_store(folder / "activations" / "s", 2, rows=100)
        make_runs(folder, count)
        home = Home.at(folder)
        names = home.runs.matching(["r*"])
        assert len(names) == count
        return {
            "match and find runs": cpu(
                lambda: [find_subject(home, name, Silent()) for name in names]
            ),
            "list runs": cpu(lambda: list_home(folder)),
            "remove runs": cpu(lambda: [remove(home, each) for each in removable(home, names)]),
        }


def of_stores(count: int) -> Costs:
    """Stores that as many runs were trained on, listed and removed."""
    with new_home() as folder:
        make_store(folder / "activations" / "s", 2, rows=100)
        make_runs(folder, count)
        for number in range(count):
            shutil.copytree(folder / "activations" / "s", folder / "activations" / f"s{number}")
        home = Home.at(folder)
        names = home.stores.matching(["s?*"])
        return {
            "open stores by name": cpu(
                lambda: [saecli.open_store(name, home=folder) for name in names]
            ),
            "list stores": cpu(lambda: list_home(folder)),
            "remove stores": cpu(lambda: [remove(home, each) for each in removable(home, names)]),
        }


def of_latents(count: int) -> Costs:
    """A report on an SAE of so many latents, of which 4,096 get pages; peak memory beyond the imports, in GB."""
    with new_home() as home:
        rows, rng = 256, np.random.default_rng(0)
        columns = {
            "document": np.arange(rows) // WINDOW,
            "position": np.arange(rows) % WINDOW,
            "token_id": rng.integers(0, 99, rows),
        }
        meta = StoreMeta({}, "x", "float32", D_IN, rows, columns=tuple(columns), windows=True)
        lengths = np.full(rows // WINDOW, WINDOW)
        windows = Windows.of(lengths, columns["token_id"], np.ones(rows, bool))
        with StoreWriter.open(home / "activations" / "s", meta) as writer:
            block = rng.standard_normal((rows, D_IN), np.float32)
            writer.append(RowBlock(block, columns, windows=windows), {"row": 0})
            writer.finish()
        make_runs(home, 1, count)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        taken = cpu(lambda: saecli.report("r0", home / "report", home=home))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        return {"a report": taken, "a report's memory, GB": peak * 1024 / 1e9}


def of_pairs(count: int) -> Costs:
    """The latents that fire together with 1,024 others, on 8,192 rows of 64 codes each."""
    pairs, random = CoFiring(count, 8192), torch.Generator().manual_seed(0)
    for _ in range(32):
        z = torch.zeros(256, count)
        pairs.update(z.scatter_(1, torch.randint(count, (256, 64), generator=random), 1.0))
    chosen = torch.arange(1024)
    return {"co-firing of 1,024 latents": cpu(lambda: pairs.partners(chosen, 10, Silent().note))}


def of_finetune(count: int) -> Costs:
    """What holds the L0 of relu in eight steps of a finetune, by 2,048 rows of so many latents."""
    pre = torch.randn(2048, count, generator=torch.Generator().manual_seed(0))
    times = 8 // getattr(through, "HOLD_EVERY", 1)
    return {"hold relu's L0 for 8 steps": times * cpu(lambda: between(pre, 2048 * 64))}


PARTS = {
    "shards": of_shards,
    "files": of_files,
    "runs": of_runs,
    "stores": of_stores,
    "latents": of_latents,
    "pairs": of_pairs,
    "finetune": of_finetune,
}


def measured(part: str, size: int) -> Costs | str:
    """The costs at a size, in a process of its own; the sentence of a failure."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_in_process, (part, size))


def _in_process(part: str, size: int) -> Costs | str:
    torch.set_num_threads(1)
    try:
        return PARTS[part](size)
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def slope(costs: list[tuple[int, float]]) -> float:
    """The exponent of the cost over the size, between the last two sizes."""
    (size, cost), (larger, most) = costs[-2:]
    return math.log(max(most, 1e-6) / max(cost, 1e-6)) / math.log(larger / size)


def show(part: str, sizes: list[int]) -> None:
    curves: dict[str, list[tuple[int, float]]] = {}
    for size in sizes:
        costs = measured(part, size)
        if isinstance(costs, str):
            print(ROW.format(part, f"{size:,}: {costs[:100]}", "-"), flush=True)
            continue
        for what, cost in costs.items():
            curves.setdefault(what, []).append((size, cost))
    for what, curve in curves.items():
        points = ", ".join(f"{size:,}: {cost:.3g}" for size, cost in curve)
        end = f"{slope(curve):.1f}" if len(curve) > 1 else "-"
        print(ROW.format(what, points, end), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="the parts to measure")
    for part in PARTS:
        default = SIZES["latents" if part == "pairs" else part]
        parser.add_argument(
            f"--{part}", default=",".join(map(str, default)), help="sizes, ascending (%(default)s)"
        )
    arguments = vars(parser.parse_args())
    unknown = {*arguments["parts"].split(",")} - PARTS.keys()
    if unknown:
        parser.error(f"--parts must be among {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    print(f"{saecli.__file__}, {os.cpu_count()} cores, Python {sys.version.split()[0]}\n")
    print(ROW.format("what", "size: CPU s", "slope at the end"))
    print(ROW.format("---", "---", "---"))
    for part in arguments["parts"].split(","):
        show(part, [int(size) for size in arguments[part].split(",")])


if __name__ == "__main__":
    main()
