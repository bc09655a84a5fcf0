"""Reading shards: checksums, byte offsets; a store's chunks and columns by number.

No byte is used before its checksum is verified, as the HDF5 library crashes on some damaged headers: the frame when a
shard is first opened, each chunk when it is first read.

Legend: R rows, D = d_in.
"""

import io
import mmap
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from ..base.errors import StoreError
from ..base.home import STORE_MARKER
from .schema import CHUNK_CHECKSUMS, SHARDS, STATISTICS, ShardRecord, StoreMeta
from .values import CODES, DTYPES, KINDS, WINDOWS, Spread, Windows, stacked

if TYPE_CHECKING:
    import h5py

PIECE_BYTES = 4 << 20


def make_anew(store: Path) -> str:
    return f"remove it with `sae rm {store.name}` and run the command that made it again"


@dataclass(frozen=True)
class Layout:
    """Where the datasets of a verified shard are."""

    # Byte offset, type and length of each but the activations.
    arrays: dict[str, tuple[int, np.dtype, int]]
    checked: np.ndarray  # (chunks,) whether a chunk's checksum has been verified


@dataclass(frozen=True)
class Shard:
    """A finished shard, as the store's `meta` and its own `record` describe it. Errors are StoreErrors that name it."""

    path: Path
    meta: StoreMeta
    record: ShardRecord

    @classmethod
    def each(cls, store: Path, meta: StoreMeta) -> list[Self]:
        return [cls(store / SHARDS / record.file, meta, record) for record in meta.shards]

    @property
    def store(self) -> Path:
        folder = self.path.parents[1]
        return folder.parents[1] if folder.parent.name == SHARDS else folder  # of a rank's store

    @property
    def chunk_rows(self) -> int:
        return min(self.meta.chunk_rows, self.record.rows)

    @property
    def chunks(self) -> int:
        return -(-self.record.rows // self.chunk_rows)

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_rows * self.meta.row_bytes

    def demand_room(self) -> int:
        """The byte offset at which the activations end; refuse a file that is shorter. Cost: one `stat`."""
        end = self.record.frame.start + self.chunks * self.chunk_bytes
        try:
            size = self.path.stat().st_size
        except FileNotFoundError as error:
            raise StoreError(f"shard {self.path} is missing; {make_anew(self.store)}") from error
        if size < end:
            raise StoreError(
                f"shard {self.path} is truncated: expected {end} bytes or more, got {size}; "
                f"{make_anew(self.store)}"
            )
        return end

    @contextmanager
    def verified(self) -> Iterator["h5py.File"]:
        """The shard as HDF5 opens it, after its frame has been compared with its checksum."""
        import h5py  # `sae list` need not wait for it

        end = self.demand_room()
        with self.path.open("rb", buffering=0) as file:
            digest = frame_checksum(file, self.record.frame.start, end)
            if digest != self.record.frame.xxh3:
                raise StoreError(
                    f"shard {self.path} is damaged, or {STORE_MARKER} does not fit it: expected the XXH3-64 of its "
                    f"headers and columns to be {self.record.frame.xxh3}, got {digest}; restore {STORE_MARKER} if it "
                    f"was edited, else {make_anew(self.store)}"
                )
            file.seek(0)
            with h5py.File(file, "r") as shard:
                yield shard

    def layout(self) -> Layout:
        """Where its datasets are; refuse a shard that is missing, truncated, or damaged outside its activations.

        Cost: reads all but the activations.
        """
        with self.verified() as file:
            groups = [group for group in (CODES, WINDOWS) if group in file]
            parts = [f"{group}/{name}" for group in groups for name in file[group]]
            datasets = {name: file[name] for name in (CHUNK_CHECKSUMS, *self.meta.columns, *parts)}
            arrays = {
                # An empty dataset has no bytes, and no offset.
                name: (dataset.id.get_offset() or 0, dataset.dtype, len(dataset))
                for name, dataset in datasets.items()
            }
            return Layout(arrays, np.zeros(self.chunks, bool))

    def demand_chunk(self, chunk: int, checksum: int, content: bytes | memoryview) -> None:
        """Refuse the bytes of a chunk that differ from its checksum."""
        got = xxh3_64_intdigest(content)
        if got != checksum:
            first = chunk * self.chunk_rows
            last = min(first + self.chunk_rows, self.record.rows) - 1
            raise StoreError(
                f"shard {self.path} is damaged: expected the XXH3-64 of its rows {first} to {last} to be "
                f"{checksum:016x}, got {got:016x}; {make_anew(self.store)}"
            )

    def problem(self) -> str | None:
        """A sentence if it is missing or differs from its checksums. Cost: reads every byte, and its XXH3-64."""
        try:
            offset, kind, length = self.layout().arrays[CHUNK_CHECKSUMS]
            with self.path.open("rb", buffering=0) as file:
                file.seek(offset)
                checksums = np.frombuffer(file.read(length * kind.itemsize), kind)
                file.seek(self.record.frame.start)
                for chunk, checksum in enumerate(checksums.tolist()):
                    self.demand_chunk(chunk, checksum, file.read(self.chunk_bytes))
        except StoreError as error:
            return str(error)
        except OSError as error:
            reason = error.strerror or error
            return f"cannot read shard {self.path}: {reason}; {make_anew(self.store)}"
        return None

    def spread(self) -> Spread:
        with self.verified() as file:
            group = file[STATISTICS]
            return Spread(self.record.rows, group["mean"][:], group["scatter"][:])


def frame_checksum(file: io.FileIO, start: int, end: int) -> str:
    """The XXH3-64, in hexadecimal, of a shard's bytes before `start` and from `end` on."""
    digest = xxh3_64(file.read(start))
    file.seek(end)
    while piece := file.read(PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()


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
        self.shards = Shard.each(path, meta)
        # Each one's first row, then the number of rows.
        rows = [shard.record.rows for shard in self.shards]
        self.shard_starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        self._layouts: dict[int, Layout] = {}
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._lock = threading.Lock()

    def demand_shards(self) -> None:
        """Refuse a store with a shard that is missing or truncated. Cost: one `stat` per shard."""
        for shard in self.shards:
            shard.demand_room()

    def spread(self) -> Spread:
        """Mean and scatter of all rows, of which there must be some. Cost: opens every shard, and reads no rows."""
        return reduce(add, (shard.spread() for shard in self.shards))

    @cached_property
    def chunk_starts(self) -> np.ndarray:
        """(chunks + 1,) each chunk's first row, in stored order, then the number of rows."""
        self.demand_shards()  # a damaged `store.json` may exaggerate their rows
        starts = [
            np.arange(start, start + shard.record.rows, shard.chunk_rows)
            for start, shard in zip(self.shard_starts[:-1].tolist(), self.shards, strict=True)
        ]
        return np.concatenate([*starts, [self.rows]])

    def rows_of(self, chunk: int) -> np.ndarray:
        """The numbers of a chunk's rows within the store, (R,)."""
        return np.arange(*self.chunk_starts[chunk : chunk + 2])

    def rows_by_shard(self) -> Iterator[np.ndarray]:
        """The numbers of each shard's rows within the store, (R,)."""
        self.demand_shards()  # as above
        yield from map(np.arange, self.shard_starts[:-1], self.shard_starts[1:])

    def chunk(self, chunk: int) -> np.ndarray:
        """A chunk's rows, (R, D) in the storage dtype, a read-only view of the page cache.

        Cost: the first time, a pass of XXH3-64 over the chunk: 20 to 30 GB/s, or 0.03 CPU seconds per GiB.
        """
        shard, number, within = self._within_shard(chunk)
        layout, mapped = self._open(number)
        start = shard.record.frame.start + within * shard.chunk_bytes
        whole = np.ndarray((shard.chunk_rows, self.d_in), self.storage, mapped, start)
        if not layout.checked[within]:
            checksum = int(self._array(number, CHUNK_CHECKSUMS)[within])
            shard.demand_chunk(within, checksum, whole.data)
            layout.checked[within] = True
        return whole[: shard.record.rows - within * shard.chunk_rows]

    def expect(self, chunk: int) -> None:
        """Have the system prefetch a chunk from disk, if it is yet to be checked."""
        shard, number, within = self._within_shard(chunk)
        layout, mapped = self._open(number)
        if not layout.checked[within]:
            end = shard.record.frame.start + (within + 1) * shard.chunk_bytes
            start = (end - shard.chunk_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_WILLNEED, start, end - start)

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each row's chunk, and its number within that chunk, from its number within the store."""
        chunks = np.searchsorted(self.chunk_starts, rows, side="right") - 1
        return chunks, rows - self.chunk_starts[chunks]

    def row_ids(self, rows: np.ndarray) -> np.ndarray:
        """The numbers by which rows are split: their documents', else their own. As `row_values`."""
        return rows if "document" not in self.meta.columns else self.row_values("document", rows)

    def row_values(self, name: str, rows: np.ndarray) -> Any:
        """A column's values, or true codes, for rows given by their ascending numbers within the store."""
        begin, end = (rows[0], rows[-1]) if len(rows) else (0, 0)
        first, last = np.searchsorted(self.shard_starts, (begin, end), side="right") - 1
        cuts = np.searchsorted(rows, self.shard_starts[first + 1 : last + 1])
        return stacked(
            [
                self._column(shard, name)[own - self.shard_starts[shard]]
                for shard, own in enumerate(np.split(rows, cuts), int(first))
            ]
        )

    def _column(self, shard: int, name: str) -> Any:
        """A column of a shard, (rows,), or its true codes; read-only."""
        if name != CODES:
            return self._array(shard, name)
        from scipy.sparse import csr_array  # `sae list` need not wait for it

        assert self.meta.world is not None
        parts = [self._array(shard, f"{CODES}/{part}") for part in ("value", "index", "offset")]
        shape = self.shards[shard].record.rows, self.meta.world.features
        return csr_array(tuple(parts), shape=shape)

    def _array(self, shard: int, name: str) -> np.ndarray:
        """A one-dimensional dataset of a shard; read-only."""
        layout, mapped = self._open(shard)
        offset, kind, length = layout.arrays[name]
        return np.ndarray((length,), kind, mapped, offset)

    def windows(self, shard: int) -> Windows:
        """The windows whose first row is in a shard, of a store that keeps them."""
        parts = {name: self._array(shard, f"{WINDOWS}/{name}") for name in KINDS}
        return Windows(**parts | {"stored": parts["stored"].astype(bool)})

    def _within_shard(self, chunk: int) -> tuple[Shard, int, int]:
        """A chunk's shard, that shard's number, and the chunk's within it."""
        row = int(self.chunk_starts[chunk])
        number = int(np.searchsorted(self.shard_starts, row, side="right")) - 1
        shard = self.shards[number]
        return shard, number, (row - int(self.shard_starts[number])) // shard.chunk_rows

    def _open(self, number: int) -> tuple[Layout, mmap.mmap]:
        shard = self.shards[number]
        with self._lock:
            if number not in self._layouts:
                self._layouts[number] = shard.layout()
            if number not in self._maps:
                with shard.path.open("rb") as file:
                    self._maps[number] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                if len(self._maps) > self.MAPS:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(number)
            return self._layouts[number], self._maps[number]
