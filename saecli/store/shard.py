"""Reading shards: checksums, agreement with `store.json`, byte offsets; a store's chunks and columns by number.

No byte is used before its checksum is verified, as the HDF5 library crashes on some damaged headers: the frame when a
shard is first opened, each chunk when it is first read.

Legend: R rows, D = d_in.
"""

import io
import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from .values import CODES, DTYPES, WINDOWS, Norms, Spread, Statistics, Windows

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
    file: tuple[int, ...]  # `_identity` of the shard


def _identity(path: Path) -> tuple[int, ...]:
    """What differs once a file is changed."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


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
            file=_identity(path),
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


class Chunks:
    """A store's chunks, by number within the store; of an unfinished store, those of its whole shards.

    Shards are memory-mapped when first read; thread-safe. Errors are StoreErrors that name the shard.
    """

    # Each map holds a file descriptor, and many systems allow a process only 1024.
    MAPS = 512

    def __init__(self, path: Path, meta: StoreMeta) -> None:
        self.path, self.meta, self.name = path, meta, path.resolve().name
        self.rows, self.d_in, self.dtype = meta.rows, meta.d_in, meta.dtype
        self.storage = DTYPES[meta.dtype].storage
        rows = np.array([shard.rows for shard in meta.shards], np.int64)
        self._chunk_starts = np.concatenate([[0], np.cumsum(-(-rows // meta.chunk_rows))])
        # Each one's first row, then their number.
        self.shard_starts = np.concatenate([[0], np.cumsum(rows)])
        self._files = [path / SHARDS / shard.file for shard in meta.shards]
        self._layouts: dict[int, Layout] = {}
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._lock = threading.Lock()

    def demand_shards(self) -> None:
        """Refuse a store with a shard that is missing or truncated. Cost: one `stat` per shard."""
        for path, shard in zip(self._files, self.meta.shards, strict=True):
            demand_room(path, self.meta, shard)

    @cached_property
    def chunk_sizes(self) -> np.ndarray:
        """(chunks,) rows of each chunk, in stored order."""
        meta = self.meta
        self.demand_shards()  # before arrays are made from counts that a damaged `store.json` may exaggerate
        sizes = [
            np.minimum(meta.chunk_rows, shard.rows - np.arange(0, shard.rows, meta.chunk_rows))
            for shard in meta.shards
        ]
        return np.concatenate([np.empty(0, np.int64), *sizes])

    def chunk(self, chunk: int) -> np.ndarray:
        """A chunk's rows, (R, D) in the storage dtype, a read-only view of the page cache.

        Cost: the first time, a pass of XXH3-64 over the chunk: 20 to 30 GB/s, or 0.03 CPU seconds per GiB.
        """
        shard, within = self._within_shard(chunk)
        layout, mapped = self._open(shard)
        first = within * layout.chunk_rows
        whole = np.ndarray(
            (layout.chunk_rows, self.d_in),
            self.storage,
            mapped,
            layout.start + first * self.meta.row_bytes,
        )
        if not layout.checked[within]:
            checksums = np.ndarray(layout.checked.shape, CHECKSUM, mapped, layout.checksums)
            demand_chunk(self._files[shard], layout, within, int(checksums[within]), whole.data)
            layout.checked[within] = True
        return whole[: layout.rows - first]

    def expect(self, chunk: int) -> None:
        """Have the system prefetch a chunk from disk, if it is yet to be checked."""
        shard, within = self._within_shard(chunk)
        layout, mapped = self._open(shard)
        if not layout.checked[within]:
            size = layout.chunk_rows * self.meta.row_bytes
            end = layout.start + (within + 1) * size
            start = (end - size) // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_WILLNEED, start, end - start)

    def chunk_column(self, chunk: int, name: str) -> Any:
        """A column's values for the rows of a chunk, or their true codes; a read-only view."""
        shard, within = self._within_shard(chunk)
        start = within * self.meta.chunk_rows
        return self._column(shard, name)[start : start + self.chunk_sizes[chunk]]

    def chunk_ids(self, chunk: int) -> np.ndarray:
        """The numbers by which a chunk's rows are split: their documents', else their own."""
        if "document" in self.meta.columns:
            return self.chunk_column(chunk, "document")
        shard, within = self._within_shard(chunk)
        start = int(self.shard_starts[shard]) + within * self.meta.chunk_rows
        return np.arange(start, start + self.chunk_sizes[chunk])

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each row's chunk, and its number within that chunk, from its number within the store."""
        shards = np.searchsorted(self.shard_starts, rows, side="right") - 1
        chunks, within = np.divmod(rows - self.shard_starts[shards], self.meta.chunk_rows)
        return self._chunk_starts[shards] + chunks, within

    def row_ids(self, rows: np.ndarray) -> np.ndarray:
        """As `chunk_ids`, for rows given by their ascending numbers within the store; (R,)."""
        return rows if "document" not in self.meta.columns else self.row_values("document", rows)

    def row_values(self, name: str, rows: np.ndarray) -> np.ndarray:
        """A column's values for rows given by their ascending numbers within the store; (R,)."""
        shards = np.searchsorted(self.shard_starts, rows, side="right") - 1
        within = rows - self.shard_starts[shards]
        ends = np.flatnonzero(np.diff(shards, append=-1)) + 1
        parts = (
            self._column(int(shards[begin]), name)[within[begin:end]]
            for begin, end in pairwise([0, *ends.tolist()])
        )
        return np.concatenate([np.empty(0, np.int64), *parts])

    def _column(self, shard: int, name: str) -> Any:
        """A column of a shard, (rows,), or its true codes; read-only."""
        layout, mapped = self._open(shard)
        if name == CODES:
            from scipy.sparse import csr_array  # `sae list` need not wait for it

            assert self.meta.world is not None
            parts = self._group(shard, CODES)
            return csr_array(
                (parts["value"], parts["index"], parts["offset"]),
                shape=(layout.rows, self.meta.world.features),
            )
        return np.ndarray((layout.rows,), COLUMNS[name], mapped, layout.columns[name])

    def _group(self, shard: int, name: str) -> dict[str, np.ndarray]:
        """The datasets of a group of a shard; read-only."""
        layout, mapped = self._open(shard)
        return {
            part: np.ndarray((length,), kind, mapped, offset)
            for part, (offset, kind, length) in layout.groups[name].items()
        }

    def windows(self, shard: int) -> Windows:
        """The windows whose first row is in a shard, of a store that keeps them."""
        parts = self._group(shard, WINDOWS)
        return Windows(**parts | {"stored": parts["stored"].astype(bool)})

    def _within_shard(self, chunk: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._chunk_starts, chunk, side="right")) - 1
        return shard, chunk - int(self._chunk_starts[shard])

    def _open(self, shard: int) -> tuple[Layout, mmap.mmap]:
        path = self._files[shard]
        with self._lock:
            if shard not in self._maps:
                if shard not in self._layouts or self._layouts[shard].file != _identity(path):
                    self._layouts[shard] = read_layout(path, self.meta, self.meta.shards[shard])
                with path.open("rb") as file:
                    self._maps[shard] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                if len(self._maps) > self.MAPS:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(shard)
            layout, mapped = self._layouts[shard], self._maps[shard]
        # Reading a map beyond the end of its file would kill the process.
        if mapped.size() < len(mapped):
            raise StoreError(
                f"shard {path} was cut short: expected {len(mapped)} bytes, got {mapped.size()}; "
                f"{make_anew(self.path)}"
            )
        return layout, mapped
