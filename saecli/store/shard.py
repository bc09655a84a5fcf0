"""Reading a shard: checksums, agreement with `store.json`, byte offsets; errors for missing and damaged ones.

No byte is used before its checksum is verified, as the HDF5 library crashes on some damaged headers: the frame when a
shard is first opened, each chunk when it is first read.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from ..base.errors import StoreError
from ..base.home import STORE_MARKER, UNREADABLE
from .schema import (
    ACTIVATIONS,
    CHECKSUM,
    CHUNK_CHECKSUMS,
    COLUMNS,
    SHARDS,
    STATISTICS,
    ShardRecord,
    StoreMeta,
)
from .values import CODES, DTYPES, Norms, Spread, Statistics
from .windows import WINDOWS

if TYPE_CHECKING:
    import h5py

PIECE_BYTES = 4 << 20


def make_anew(store: Path) -> str:
    return f"remove it with `sae rm {store.name}` and run the command that made it again"


def _store_of(shard: Path) -> Path:
    """The folder of a shard's store; a rank's is within another."""
    folder = shard.parents[1]
    return folder.parents[1] if folder.parent.name == SHARDS else folder


@dataclass(frozen=True)
class Layout:
    """The byte offsets in a shard."""

    rows: int
    chunk_rows: int
    start: int  # of the activations, whose chunks are consecutive, the last padded
    columns: dict[str, int]
    groups: dict[str, dict[str, tuple[int, np.dtype, int]]]  # offset, type, length of each dataset
    checksums: int
    checked: np.ndarray  # (chunks,) whether a chunk's checksum has been verified


def read_layout(path: Path, meta: StoreMeta, record: ShardRecord) -> Layout:
    """The layout of a shard; StoreError if it is missing, truncated, damaged outside its activations, or differs from
    `store.json`. Cost: reads all but the activations."""
    chunk_rows = min(meta.chunk_rows, record.rows)
    with _verified(path, meta, record) as file:
        _demand_agreement(path, meta, record, file)
        columns = {name: file[name].id.get_offset() for name in meta.columns}
        # An empty dataset has no bytes, and no offset.
        groups = {
            group: {
                name: (dataset.id.get_offset() or 0, dataset.dtype, len(dataset))
                for name, dataset in file[group].items()
            }
            for group in (CODES, WINDOWS)
            if group in file
        }
        return Layout(
            rows=record.rows,
            chunk_rows=chunk_rows,
            start=record.frame.start,
            columns=columns,
            groups=groups,
            checksums=file[CHUNK_CHECKSUMS].id.get_offset(),
            checked=np.zeros(-(-record.rows // chunk_rows), bool),
        )


@contextmanager
def _verified(path: Path, meta: StoreMeta, record: ShardRecord) -> Iterator["h5py.File"]:
    """A shard as HDF5 opens it, after its frame has been compared with its checksum."""
    import h5py  # `sae list` need not wait for it

    end = demand_room(path, meta, record)
    with path.open("rb", buffering=0) as file:
        digest = frame_checksum(file, record.frame.start, end)
        if digest != record.frame.xxh3:
            raise StoreError(
                f"shard {path} is damaged, or {STORE_MARKER} does not fit it: expected the XXH3-64 of its "
                f"headers and columns to be {record.frame.xxh3}, got {digest}; restore {STORE_MARKER} if it "
                f"was edited, else {make_anew(_store_of(path))}"
            )
        file.seek(0)
        with h5py.File(file, "r") as shard:
            yield shard


def _demand_agreement(path: Path, meta: StoreMeta, record: ShardRecord, file: "h5py.File") -> None:
    """StoreError if a whole shard is not as `store.json` says, which was edited then."""
    dataset = file[ACTIVATIONS]
    kind = dataset.id.get_type()
    dtypes = [name for name, dtype in DTYPES.items() if kind.equal(dtype.hdf5)]
    chunk_rows = min(meta.chunk_rows, record.rows)
    for what, said, stored in (
        ("shape", (record.rows, meta.d_in), dataset.shape),
        ("type", meta.dtype, dtypes[0] if dtypes else str(dataset.dtype)),
        ("columns", sorted(meta.columns), sorted(COLUMNS.keys() & file.keys())),
        ("chunks of shape", (chunk_rows, meta.d_in), dataset.chunks),
        ("known features", meta.world is not None, CODES in file),
        ("windows", meta.windows, WINDOWS in file),
    ):
        if said != stored:
            raise StoreError(
                f"{_store_of(path) / STORE_MARKER} does not fit shard {path}, which is as it was "
                f"written: expected {what} {stored}, got {said}; {UNREADABLE}"
            )


def frame_checksum(file: io.FileIO, start: int, end: int) -> str:
    """The XXH3-64, in hexadecimal, of a shard's bytes before `start` and from `end` on."""
    digest = xxh3_64(file.read(start))
    file.seek(end)
    while piece := file.read(PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()


def demand_room(path: Path, meta: StoreMeta, record: ShardRecord) -> int:
    """The byte offset at which a shard's activations end; StoreError if it is too short. Cost: one `stat`."""
    chunk_rows = min(meta.chunk_rows, record.rows)
    end = record.frame.start + -(-record.rows // chunk_rows) * chunk_rows * meta.row_bytes
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise StoreError(f"shard {path} is missing; {make_anew(_store_of(path))}") from error
    if size < end:
        raise StoreError(
            f"shard {path} is truncated: expected {end} bytes or more, got {size}; "
            f"{make_anew(_store_of(path))}"
        )
    return end


def demand_chunk(
    path: Path, layout: Layout, chunk: int, checksum: int, content: bytes | memoryview
) -> None:
    """StoreError if the bytes of a chunk of a shard differ from its checksum."""
    got = xxh3_64_intdigest(content)
    if got != checksum:
        first = chunk * layout.chunk_rows
        last = min(first + layout.chunk_rows, layout.rows) - 1
        raise StoreError(
            f"shard {path} is damaged: expected the XXH3-64 of its rows {first} to {last} to be "
            f"{checksum:016x}, got {got:016x}; {make_anew(_store_of(path))}"
        )


def find_damage(
    store: Path, meta: StoreMeta, show: Callable[[float], None] = lambda read: None
) -> list[str]:
    """A sentence for each shard that is missing, differs from its checksums or does not fit `store.json`; `show` gets
    the bytes read so far. Cost: reads every byte, and its XXH3-64."""
    problems: list[str] = []
    done = 0
    for record in meta.shards:
        if problem := _problem(store, meta, record):
            problems.append(problem)
        done += record.rows * meta.row_bytes
        show(done)
    return problems


def _problem(store: Path, meta: StoreMeta, record: ShardRecord) -> str | None:
    path = store / SHARDS / record.file
    try:
        layout = read_layout(path, meta, record)
        with path.open("rb", buffering=0) as file:
            file.seek(layout.checksums)
            checksums = np.frombuffer(file.read(layout.checked.size * CHECKSUM.itemsize), CHECKSUM)
            file.seek(layout.start)
            for chunk, checksum in enumerate(checksums.tolist()):
                content = file.read(layout.chunk_rows * meta.row_bytes)
                demand_chunk(path, layout, chunk, checksum, content)
    except StoreError as error:
        return str(error)
    except OSError as error:
        return f"cannot read shard {path}: {error.strerror or error}; {make_anew(_store_of(path))}"
    return None


def stored_statistics(path: Path, meta: StoreMeta) -> Statistics | None:
    """The statistics of all rows of a store; None without a shard. Cost: opens every shard, and reads no rows."""
    total = None
    for record in meta.shards:
        with _verified(path / SHARDS / record.file, meta, record) as file:
            group = file[STATISTICS]
            spread = Spread(record.rows, group["mean"][:], group["scatter"][:])
            norms = Norms(**{field.name: group.attrs[field.name].item() for field in fields(Norms)})
        statistics = Statistics(spread, norms)
        total = statistics if total is None else total + statistics
    return total
