"""What a store's statistics cost while it is written, and what they save when training begins.

    PYTHONPATH=. python tests/benchmarks/store_statistics.py [--gib 1] [--d-in 2304] [--folder DIR]

"of writing" is the processor time that the statistics alone take over the same chunks, as a share of what writing the
store takes, checksums included; rows are random, so that no model's time is in it. "normalise" compares the spread
of the training rows found from the store's statistics and the held-out rows with that found by a pass over the
training rows, in the page cache, the least of three.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from saecli.store import DTYPES, ActivationStore, Spread, StoreMeta, StoreWriter, rows_per_shard
from saecli.store.statistics import Statistics

DOCUMENT = 256  # rows


def written(path: Path, dtype: str, d_in: int, size: int) -> tuple[ActivationStore, float]:
    """A store of about `size` bytes, and the processor seconds that writing it took."""
    meta = StoreMeta({"dataset": "random"}, "", dtype, d_in, rows_per_shard(d_in, dtype), columns=("document",))
    block = np.random.default_rng(0).standard_normal((8192, d_in), np.float32) + 3
    started = time.process_time()
    with StoreWriter.open(path, meta) as writer:
        for number in range(size // (block.size * DTYPES[dtype].storage.itemsize)):
            writer.append(block, {"document": (number * len(block) + np.arange(len(block))) // DOCUMENT},
                          {"block": number})
        writer.finish()
    return ActivationStore.open(path), time.process_time() - started


def statistics_alone(store: ActivationStore) -> float:
    """Processor seconds of decoding and measuring every chunk."""
    shape = (store.meta.chunk_rows, store.d_in)
    decoded, scratch = np.empty(shape, np.float32), np.empty(shape)
    started = time.process_time()
    total = None
    for chunk in range(len(store.chunk_sizes)):
        rows = store.chunk(chunk)
        DTYPES[store.dtype].decode_rows(rows, decoded[: len(rows)])
        np.copyto(scratch[: len(rows)], decoded[: len(rows)])
        found = Statistics.of(scratch[: len(rows)])
        total = found if total is None else total + found
    return time.process_time() - started


def least(action: Callable[[], object]) -> float:
    """Seconds, the least of three."""
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def main() -> None:
    """Print a line for each stored type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1)
    parser.add_argument("--d-in", type=int, default=2304)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    for dtype in ("bfloat16", "float32"):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            store, writing = written(Path(folder) / dtype, dtype, arguments.d_in, int(arguments.gib * 2**30))
            for chunk in range(len(store.chunk_sizes)):
                store.chunk(chunk)  # whose checksum is looked at when it is first read
            alone = statistics_alone(store)
            train = store.split("train")
            by_pass = least(lambda rows=train: Spread.measured(rows.sequential(1024), rows.d_in))
            by_rest = least(train.spread)
            print(f"{dtype:9} written in {writing:.2f} CPU s, statistics alone {alone:.2f} ({alone / writing:.0%} of "
                  f"writing); normalise: {by_rest:.3f} s, by a pass {by_pass:.3f} s ({by_pass / by_rest:.1f} times)",
                  flush=True)


if __name__ == "__main__":
    main()
