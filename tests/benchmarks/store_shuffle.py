"""How well a store in document order is shuffled: pairs of rows of one document that share a batch.

    PYTHONPATH=. python tests/benchmarks/store_shuffle.py [--rows 400000] [--batch-size 256]

Counted over an epoch of a store whose documents are all of one length, and divided by what a uniform shuffle is
expected to have; also in 16 successive batches together. N/W is the store's rows over those of a window: windows are
made small to stand for a store that is large, and 16 batches are then a large part of one. Nothing here measures time.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

from saecli.store import ActivationStore, StoreMeta, StoreWriter

D_IN = 128
ROW_BYTES = 2 * D_IN


def write(path: Path, rows: int, length: int) -> ActivationStore:
    """Write a store whose rows hold the number of their document, in two parts that bfloat16 holds."""
    meta = StoreMeta({"dataset": "documents"}, "", "bfloat16", D_IN, 1 << 16, columns=("document",))
    with StoreWriter.open(path, meta) as writer:
        for begin in range(0, rows, 1 << 14):
            documents = np.arange(begin, min(begin + (1 << 14), rows)) // length
            block = np.zeros((len(documents), D_IN), np.float32)
            block[:, 0], block[:, 1] = np.divmod(documents, 128)
            writer.append(block, {"document": documents}, {"row": begin})
        writer.finish()
    return ActivationStore.open(path)


def pairs(documents: np.ndarray) -> int:
    """Pairs of rows of one document."""
    counts = np.unique(documents, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def ratio(documents: np.ndarray, size: int) -> float:
    """Pairs in groups of so many rows, over the expectation of a uniform shuffle; a last short group is left out."""
    rows, groups = len(documents), len(documents) // size
    found = sum(pairs(group) for group in np.split(documents[: groups * size], groups))
    return found / (groups * pairs(documents) * size * (size - 1) / (rows * (rows - 1)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--batch-size", type=int, default=256)
    arguments = parser.parse_args()
    size = arguments.batch_size
    print(f"{'rows a document':>15} {'N/W':>5} {'a batch':>8} {'16 batches':>11}")
    for length in (64, 128, 1024):
        with tempfile.TemporaryDirectory() as folder:
            rows = write(Path(folder) / "store", arguments.rows, length).split("all")
            for parts in (1, 4, 30, 200, "exact"):
                if parts == "exact":  # uniformly, for comparison
                    came = np.random.default_rng(0).permutation(arguments.rows) // length
                else:
                    window = arguments.rows // parts * ROW_BYTES
                    came = np.concatenate([(batch[:, 0] * 128 + batch[:, 1]).astype(int) for batch in
                                           rows.batches(size, seed=0, epoch=0, window_bytes=window)])
                print(f"{length:15} {parts:>5} {ratio(came, size):8.2f} {ratio(came, 16 * size):11.2f}", flush=True)


if __name__ == "__main__":
    main()
