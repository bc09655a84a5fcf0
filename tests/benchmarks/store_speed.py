"""How fast a store is read, against a raw read of the same files from the page cache and from disk.

    PYTHONPATH=. python tests/benchmarks/store_speed.py [--gib 2] [--d-in 2304] [--dtypes bfloat16] [--folder DIR]

Every figure counts bytes as stored, so a bfloat16 store's float32 output is twice that; "as stored" is what is read for
a GPU, which converts it itself. Each is the best of some passes, in turn with those of the raw read. "of raw" compares
times, "of raw, CPU" processor times summed over threads, which other programs on the machine disturb less; it is what
one core would give, and reading uses two. Before a pass from disk, the files are dropped from the page cache and the
store is opened anew, so that checksums are compared too. The rows written are random; the files are removed at the
end.
"""

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np

from saecli.store.reader import ActivationStore, Rows
from saecli.store.schema import StoreMeta, rows_per_shard
from saecli.store.values import DTYPES
from saecli.store.writer import StoreWriter

WAYS = {
    "sequential(2048)": lambda rows: rows.sequential(2048),
    "batches(256)": lambda rows: rows.batches(256, seed=0, epoch=0),
    "batches(2048)": lambda rows: rows.batches(2048, seed=0, epoch=0),
    "batches(2048), as stored": lambda rows: rows.as_stored().batches(2048, seed=0, epoch=0),
    "batches(2048), training rows": lambda rows: rows.store.split("train").batches(
        2048, seed=0, epoch=0
    ),
}


def write(path: Path, dtype: str, d_in: int, size: int) -> float:
    """Write a store of about `size` bytes; returns the seconds it took, its checksums included."""
    meta = StoreMeta(
        {"dataset": "random"}, "", dtype, d_in, rows_per_shard(d_in, dtype), columns=("document",)
    )
    block = np.random.default_rng(0).standard_normal((8192, d_in), np.float32)
    started = time.perf_counter()
    with StoreWriter.open(path, meta) as writer:
        for number in range(max(1, size // (block.size * DTYPES[dtype].storage.itemsize))):
            documents = (number * len(block) + np.arange(len(block))) // 256
            writer.append(block, {"document": documents}, {"block": number})
        writer.finish()
    return time.perf_counter() - started


def read_raw(files: Iterable[Path]) -> None:
    """Read files from end to end into one buffer of 1 MiB."""
    buffer = bytearray(1 << 20)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def size_of(path: Path) -> int:
    """The bytes of a store's rows."""
    meta = ActivationStore.open(path).meta
    return meta.rows * meta.row_bytes


def consume(batches: Iterable[np.ndarray]) -> int:
    """Ask for every batch, and touch one number of each; returns the number of rows."""
    rows = 0
    for batch in batches:
        float(batch[0, 0])
        rows += len(batch)
    return rows


def drop(files: Iterable[Path]) -> None:
    """Drop files from the page cache; what is mapped stays."""
    gc.collect()
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(action: Callable[[], object]) -> np.ndarray:
    """Seconds, and processor seconds."""
    started, worked = time.perf_counter(), time.process_time()
    action()
    return np.array([time.perf_counter() - started, time.process_time() - worked])


def measure(path: Path, place: str, passes: int) -> None:
    """Print how fast a store is read from the page cache or from disk."""
    files = sorted((path / "shards").iterdir())
    kept = ActivationStore.open(path) if place == "page cache" else None
    stored = size_of(path)
    best: dict[str, np.ndarray] = {}
    shares = {"raw": 1.0}

    def read(name: str, batches: Callable[[Rows], Iterable[np.ndarray]]) -> None:
        rows = (kept or ActivationStore.open(path)).split("all")
        shares[name] = consume(batches(rows)) / rows.rows

    actions = {"raw": lambda: read_raw(files)} | {
        name: partial(read, name, way) for name, way in WAYS.items()
    }
    for _ in range(passes):
        for name, action in actions.items():
            if place == "disk":
                drop(files)
            best[name] = np.minimum(best.get(name, np.inf), timed(action))
    for name, (seconds, processor) in best.items():
        print(
            f"{path.name:9} {place:10} {name:29} {shares[name] * stored / seconds / 1e9:6.2f} "
            f"{shares[name] * best['raw'][0] / seconds:7.2f} "
            f"{shares[name] * best['raw'][1] / processor:12.2f}",
            flush=True,
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--d-in", type=int, default=2304)
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    print(f"{'store':9} {'from':10} {'read':29} {'GB/s':>6} {'of raw':>7} {'of raw, CPU':>12}")
    for dtype in arguments.dtypes.split(","):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            path = Path(folder) / dtype
            seconds = write(path, dtype, arguments.d_in, int(arguments.gib * 2**30))
            size = size_of(path)
            print(f"{dtype:9} {'':10} {'(written, with checksums)':29} {size / seconds / 1e9:6.2f}")
            for place in ("page cache", "disk"):
                measure(path, place, arguments.passes)


if __name__ == "__main__":
    main()
