"""How fast a store is read, against a raw read of the same files from the page cache.

    PYTHONPATH=. python tests/benchmarks/store_speed.py [--gib 1.5] [--d-in 768] [--folder DIR]

Every figure counts bytes as stored, so a bfloat16 store's float32 output is twice that. Each is the best of
three passes. "of raw" compares times, "of raw, CPU" processor times summed over threads, which other programs on
the machine disturb less: it is what one core would give, and reading uses two. The rows written are random; the
files are removed at the end.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from saecli.store import ActivationStore, StoreMeta, StoreWriter, rows_per_shard

BATCH = 4096


def write(path: Path, dtype: str, d_in: int, size: int) -> float:
    """Write a store of about `size` bytes; returns the seconds it took, its checksums included."""
    meta = StoreMeta({"dataset": "random"}, "", dtype, d_in, rows_per_shard(d_in, dtype), columns=("document",))
    rng = np.random.default_rng(0)
    block = rng.standard_normal((8192, d_in), np.float32)
    blocks = size // (len(block) * d_in * (4 if dtype == "float32" else 2))
    started = time.perf_counter()
    with StoreWriter.open(path, meta) as writer:
        for number in range(blocks):
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


def consume(batches: Iterable[np.ndarray]) -> None:
    """Ask for every batch, and touch one number of each."""
    for batch in batches:
        float(batch[0, 0])


def best(action: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and processor seconds, the least of three."""
    wall, processor = [], []
    for _ in range(3):
        started, worked = time.perf_counter(), time.process_time()
        action()
        wall.append(time.perf_counter() - started)
        processor.append(time.process_time() - worked)
    return min(wall), min(processor)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.5)
    parser.add_argument("--d-in", type=int, default=768)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    size = int(arguments.gib * 2**30)
    print(f"{'store':10} {'read':28} {'GB/s':>7} {'of raw':>7} {'of raw, CPU':>12}")
    for dtype in ("bfloat16", "float16", "float32"):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            path = Path(folder) / dtype
            seconds = write(path, dtype, arguments.d_in, size)
            store = ActivationStore.open(path)
            everything, train = store.split("all"), store.split("train")
            files = [path / "shards" / shard.file for shard in store.meta.shards]
            stored = store.rows * arguments.d_in * (4 if dtype == "float32" else 2)
            print(f"{dtype:10} {'(written, with checksums)':28} {stored / seconds / 1e9:7.2f}")
            raw = best(lambda files=files: read_raw(files))
            passes: dict[str, Callable[[], None]] = {
                "raw": lambda files=files: read_raw(files),
                f"sequential({BATCH})": lambda rows=everything: consume(rows.sequential(BATCH)),
                f"batches({BATCH})": lambda rows=everything: consume(rows.batches(BATCH, seed=0, epoch=0)),
                "batches(256)": lambda rows=everything: consume(rows.batches(256, seed=0, epoch=0)),
                f"batches({BATCH}), train": lambda rows=train: consume(rows.batches(BATCH, seed=0, epoch=0)),
            }
            for name, action in passes.items():
                seconds, processor = best(action)
                share = train.rows / store.rows if "train" in name else 1.0
                print(f"{dtype:10} {name:28} {share * stored / seconds / 1e9:7.2f} {share * raw[0] / seconds:7.2f} "
                      f"{share * raw[1] / processor:12.2f}", flush=True)


if __name__ == "__main__":
    main()
