"""What the tests of the store share."""

import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from saecli.store.blocks import RowBlock, Windows
from saecli.store.reader import ActivationStore
from saecli.store.schema import StoreMeta
from saecli.store.writer import StoreWriter


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A temporary folder, in memory where the system has such a place: flushing to disk is slow."""
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)


def make_meta(
    d_in: int, dtype: str = "float32", *, sources: tuple[str, ...] = (), **fields: Any
) -> StoreMeta:
    """A small store's meta."""
    defaults = {"request_hash": "request", "source": {"dataset": "test"}, "shard_rows": 100}
    defaults |= {"chunk_rows": 8, "sources": dict.fromkeys(sources, 0)}
    return StoreMeta(dtype=dtype, d_in=d_in, **defaults | fields)


def window_starts(documents: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The indices of the rows that begin a window, a run of one document's rows with ascending positions; not row 0."""
    return 1 + np.flatnonzero((np.diff(documents) != 0) | (np.diff(positions) <= 0))


def make_store(
    path: Path,
    rows: np.ndarray,
    dtype: str = "float32",
    *,
    block: int = 37,
    documents: np.ndarray | None = None,
    columns: dict[str, np.ndarray] | None = None,
    **meta,
) -> ActivationStore:
    """Write rows to a store, block by block, and open it; with `windows` at once, all of whose tokens are rows."""
    columns = columns or ({} if documents is None else {"document": documents})
    wanted, windows = make_meta(rows.shape[1], dtype, columns=tuple(columns), **meta), None
    if wanted.windows:
        block, starts = len(rows), window_starts(columns["document"], columns["position"])
        lengths = np.diff([0, *starts, len(rows)])
        windows = Windows.of(lengths, columns["token_id"], np.ones(len(rows), bool))
    with StoreWriter.open(path, wanted) as writer:
        for start in range(0, len(rows), block):
            part = slice(start, start + block)
            own = {name: column[part] for name, column in columns.items()}
            writer.append(RowBlock(rows[part], own, windows=windows), {"row": start})
        writer.finish()
    return ActivationStore.open(path)


def change_listed(path: Path, number: int, **fields: Any) -> None:
    """Change fields of a shard's line in a store's `shards.jsonl`."""
    lines = listed_shards(path)
    lines[number] |= fields
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (path / "shards.jsonl").write_text(text)


def listed_shards(path: Path) -> list[dict[str, Any]]:
    """The lines of a store's `shards.jsonl`."""
    return [json.loads(line) for line in (path / "shards.jsonl").read_text().splitlines()]


def collect(batches: Iterator[np.ndarray]) -> np.ndarray:
    """All rows of a stream."""
    return np.concatenate([*batches])


def stored_contents(path: Path) -> dict[str, Any]:
    """All that a store says and holds, but for when it was begun."""
    store = ActivationStore.open(path)
    assert store.verify() == []
    rows, windows = np.empty((0, store.d_in), np.float32), []
    if store.rows:
        rows, windows = collect(store.split("all").sequential(64)), windows_of(store)
    return {"meta": store.meta.to_json() | {"created": ""}, "rows": rows, "windows": windows}


def windows_of(store: ActivationStore) -> list[list[list[int]]]:
    """Token ids and mask of each window, if the store keeps them."""
    if not store.meta.windows:
        return []
    return [[part.tolist() for part in window] for window in store.split("all").windows()]


ROUNDING = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}


def assert_same_pass(path: Path, expected: Path, *, but_for: tuple[str, ...] = ()) -> None:
    """Two stores are of equal forward passes: rows and norms to rounding, all else exactly."""
    stores = [ActivationStore.open(folder) for folder in (path, expected)]
    assert [store.verify() for store in stores] == [[], []]
    got, wanted = (store.meta.to_json() for store in stores)
    for document in (got, wanted):
        for name in ("created", "shard_count", *but_for):  # the shards are compared
            document.pop(name, None)
    for name in ("norms", "median_norm"):
        expected_norms = wanted.pop(name)
        if expected_norms is not None:
            expected_norms = pytest.approx(expected_norms, rel=0.02)
        assert got.pop(name) == expected_norms
    for document in (got, wanted):
        for shard in document.get("shards", ()):
            del shard["frame"]
        if "resume" in document:  # which only the parts of several ranks' stores have
            cursor = document["resume"]["cursor"]
            document["resume"]["cursor"] = {
                name: value for name, value in cursor.items() if not name.startswith("_")
            }
    assert got == wanted
    rows, others = (store.split("all") for store in stores)
    for name in stores[0].meta.columns:
        own, theirs = (collect(every.column(name, 4096)) for every in (rows, others))
        np.testing.assert_array_equal(own, theirs)
    assert windows_of(stores[0]) == windows_of(stores[1])
    own, theirs = (collect(every.sequential(4096)) for every in (rows, others))
    np.testing.assert_allclose(own, theirs, rtol=ROUNDING[stores[0].meta.dtype], atol=1e-4)


def damaged(content: bytes, chance: random.Random) -> bytes:
    """The content cut off, with bytes flipped, or parts of it swapped, left out or said to be other numbers."""
    result, first, second = bytearray(content), *sorted(chance.sample(range(len(content)), 2))
    match chance.randrange(5):
        case 0:
            return content[:second]
        case 1:
            result[first : first + 9] = content[second:][:9]
            result[second : second + 9] = content[first:][:9]
        case 2:
            del result[first : first + chance.randrange(9)]
        case 3:
            at = chance.randrange(min(300, len(content)))
            others = [b"-1", b"99", b"((", b"\xff\xff", b"\0\0", b"9" * 25, b"''"]
            result[at : at + 2] = chance.choice(others)
        case 4:
            for at in chance.choices(range(len(content)), k=3):
                result[at] ^= 1 << chance.randrange(8)
    return bytes(result)
