"""Reading shards: checksums, byte offsets; a store's chunks and columns by number.

No byte is used before its checksum is verified, as the HDF5 library crashes on some damaged headers: the frame when a
shard is first opened, each chunk when it is first read.

Legend: R rows, D = d_in.
"""

import io
import os
import resource
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import pairwise
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakValueDictionary, finalize

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from ..base.errors import StoreError
from ..base.home import STORE_MARKER
from .blocks import WINDOW_DTYPES, WINDOWS, Windows
from .schema import CHUNK_CHECKSUMS, SHARDS, STATISTICS, ShardRecord, StoreMeta
from .values import CODES, DTYPES, Spread, stacked

if TYPE_CHECKING:
    import h5py

PIECE_BYTES = 4 << 20
# Shards, of all stores together; at most half of the files that the process may open.
MOST_OPEN = 512


def make_anew(store: Path) -> str:
    return f"remove it with `sae rm {store.name}` and run the command that made it again"


@dataclass(frozen=True)
class Layout:
    """The datasets of a verified shard: byte offset, type and length of each but the activations."""

    arrays: dict[str, tuple[int, np.dtype, int]]
    checksums: np.ndarray  # (chunks,)
    checked: np.ndarray  # (chunks,) whether a chunk's checksum has been verified


@dataclass(frozen=True)
class Shard:
    """A finished shard. Errors are StoreErrors that name it."""

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
        """The byte offset at which the activations end; refuse a shorter file. Cost: one `stat`."""
        end = self.record.frame.start + self.chunks * self.chunk_bytes
        try:
            size = self.path.stat().st_size
        except FileNotFoundError as error:
            raise StoreError(f"shard {self.path} is missing; {make_anew(self.store)}") from error
        if size < end:
            raise StoreError(
                f"shard {self.path} is truncated: expected {end} bytes or more, got {size}; {make_anew(self.store)}"
            )
        return end

    @contextmanager
    def reading(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            reason = error.strerror or error
            raise StoreError(
                f"cannot read shard {self.path}: {reason}; {make_anew(self.store)}"
            ) from error

    @contextmanager
    def verified(self) -> Iterator["h5py.File"]:
        import h5py  # `sae list` need not wait for it

        end = self.demand_room()
        with self.reading(), self.path.open("rb", buffering=0) as file:
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
        """Refuse a shard that is missing, truncated, or damaged outside its activations, which are not read."""
        with self.verified() as file:
            groups = [group for group in (CODES, WINDOWS) if group in file]
            parts = [f"{group}/{name}" for group in groups for name in file[group]]
            datasets = {name: file[name] for name in (*self.meta.columns, *parts)}
            arrays = {
                # An empty dataset has no bytes, and no offset.
                name: (dataset.id.get_offset() or 0, dataset.dtype, len(dataset))
                for name, dataset in datasets.items()
            }
            return Layout(arrays, file[CHUNK_CHECKSUMS][:], np.zeros(self.chunks, bool))

    def read(self, opened: "OpenShard", offset: int, out: memoryview) -> None:
        while out:
            with self.reading():
                count = os.preadv(opened.descriptor, [out], offset)
            if not count:
                raise StoreError(
                    f"shard {self.path} is truncated: expected {offset + len(out)} bytes or more, got "
                    f"{offset}; {make_anew(self.store)}"
                )
            out, offset = out[count:], offset + count

    def demand_chunk(self, chunk: int, checksum: int, content: bytes | memoryview) -> None:
        got = xxh3_64_intdigest(content)
        if got != checksum:
            first = chunk * self.chunk_rows
            last = min(first + self.chunk_rows, self.record.rows) - 1
            raise StoreError(
                f"shard {self.path} is damaged: expected the XXH3-64 of its rows {first} to {last} to be "
                f"{checksum:016x}, got {got:016x}; {make_anew(self.store)}"
            )

    def problem(self) -> str | None:
        """A sentence if it is missing or differs from its checksums."""
        try:
            checksums = self.layout().checksums
            with self.reading(), self.path.open("rb", buffering=0) as file:
                file.seek(self.record.frame.start)
                for chunk, checksum in enumerate(checksums.tolist()):
                    self.demand_chunk(chunk, checksum, file.read(self.chunk_bytes))
        except StoreError as error:
            return str(error)
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


class OpenShard:
    """A shard open for reading, closed with the last reference to it."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        finalize(self, os.close, self.descriptor)
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MOST_OPEN if allowed == resource.RLIM_INFINITY else min(MOST_OPEN, allowed // 2)
        _kept_open.append(self)
        while len(_kept_open) > most:
            _kept_open.popleft()


# Of all stores, the oldest first; stores refer to them weakly.
_kept_open: deque[OpenShard] = deque()


class Chunks:
    """A store's chunks, by number within the store. Thread-safe. Errors are StoreErrors that name the shard.

    Bytes are read, not mapped: a file that is cut off under a map kills the process.
    """

    def __init__(self, path: Path, meta: StoreMeta) -> None:
        self.path, self.meta, self.name = path, meta, path.resolve().name
        self.rows, self.d_in, self.dtype = meta.rows, meta.d_in, meta.dtype
        self.storage = DTYPES[meta.dtype].storage
        self.shards = Shard.each(path, meta)
        rows = [shard.record.rows for shard in self.shards]
        self.shard_starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        self._layouts: dict[int, Layout] = {}
        self._opened: WeakValueDictionary[int, OpenShard] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._has_room = False

    def demand_shards(self) -> None:
        """StoreError if a shard is missing or truncated. Cost: once, one `stat` per shard."""
        for shard in () if self._has_room else self.shards:
            shard.demand_room()
        self._has_room = True

    def spread(self) -> Spread:
        """Of all rows, at least one. Cost: opens every shard, and reads no rows."""
        return reduce(add, (shard.spread() for shard in self.shards))

    @cached_property
    def chunk_starts(self) -> np.ndarray:
        """(chunks + 1,) each chunk's first row, then the number of rows."""
        self.demand_shards()  # a damaged `store.json` may exaggerate their rows
        starts = [
            np.arange(start, start + shard.record.rows, shard.chunk_rows)
            for start, shard in zip(self.shard_starts[:-1].tolist(), self.shards, strict=True)
        ]
        return np.concatenate([*starts, [self.rows]])

    def rows_of(self, chunk: int) -> np.ndarray:
        return np.arange(*self.chunk_starts[chunk : chunk + 2])

    def rows_by_shard(self) -> Iterator[np.ndarray]:
        self.demand_shards()  # as above
        yield from map(np.arange, self.shard_starts[:-1], self.shard_starts[1:])

    def read_rows(
        self, chunk: int, within: np.ndarray, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Rows of a chunk, by ascending numbers within it, (R, D) in the storage dtype; in `out` if given.

        Cost: once, reading the whole chunk and its XXH3-64 (20 to 30 GB/s).
        """
        shard, number, of_shard = self._within_shard(chunk)
        layout, opened = self._open(number)
        start, row_bytes = shard.record.frame.start, self.meta.row_bytes
        start += of_shard * shard.chunk_bytes
        rows = np.empty((len(within), self.d_in), self.storage) if out is None else out
        if not layout.checked[of_shard]:
            whole = np.empty((shard.chunk_rows, self.d_in), self.storage)
            shard.read(opened, start, whole.data.cast("B"))
            shard.demand_chunk(of_shard, int(layout.checksums[of_shard]), whole.data)
            layout.checked[of_shard] = True
            return whole.take(within, 0, rows)
        content = rows.data.cast("B")
        cuts = [0, *(np.flatnonzero(np.diff(within) > 1) + 1).tolist(), len(within)]
        for first, (begin, end) in zip(within[cuts[:-1]].tolist(), pairwise(cuts), strict=True):
            run = content[begin * row_bytes : end * row_bytes]
            shard.read(opened, start + first * row_bytes, run)
        return rows

    def prefetch(self, chunk: int) -> None:
        shard, number, of_shard = self._within_shard(chunk)
        layout, opened = self._open(number)
        if not layout.checked[of_shard] and hasattr(os, "posix_fadvise"):  # macOS has none
            start = shard.record.frame.start + of_shard * shard.chunk_bytes
            os.posix_fadvise(opened.descriptor, start, shard.chunk_bytes, os.POSIX_FADV_WILLNEED)

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each row's chunk and number within it, from its number within the store."""
        chunks = np.searchsorted(self.chunk_starts, rows, side="right") - 1
        return chunks, rows - self.chunk_starts[chunks]

    def row_ids(self, rows: np.ndarray) -> np.ndarray:
        """The numbers by which rows are split: their documents', else their own."""
        return rows if "document" not in self.meta.columns else self.row_values("document", rows)

    def row_values(self, name: str, rows: np.ndarray) -> Any:
        """A column's values, or true codes, by rows' ascending numbers within the store."""
        begin, end = (rows[0], rows[-1]) if len(rows) else (0, 0)
        first, last = np.searchsorted(self.shard_starts, (begin, end), side="right") - 1
        cuts = np.searchsorted(rows, self.shard_starts[first + 1 : last + 1])
        parts = enumerate(np.split(rows, cuts), int(first))
        of_shards = [part for part in parts if len(part[1])] or [(int(first), rows)]
        return stacked(
            [
                self._values(shard, name, numbers - self.shard_starts[shard])
                for shard, numbers in of_shards
            ]
        )

    def _values(self, shard: int, name: str, rows: np.ndarray) -> Any:
        begin, end = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
        if name != CODES:
            return self._array(shard, name, begin, end)[rows - begin]
        from scipy.sparse import csr_array  # `sae list` need not wait for it

        assert self.meta.world is not None
        offset = self._array(shard, f"{CODES}/offset", begin, end + 1)
        value, index = (
            self._array(shard, f"{CODES}/{part}", int(offset[0]), int(offset[-1]))
            for part in ("value", "index")
        )
        shape = end - begin, self.meta.world.features
        return csr_array((value, index, offset - offset[0]), shape=shape)[rows - begin]

    def _array(self, shard: int, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        layout, opened = self._open(shard)
        offset, kind, length = layout.arrays[name]
        values = np.empty((length if end is None else end) - begin, kind)
        self.shards[shard].read(opened, offset + begin * kind.itemsize, values.data.cast("B"))
        return values

    def windows(self, shard: int) -> Windows:
        """The windows whose first row is in a shard."""
        parts = {name: self._array(shard, f"{WINDOWS}/{name}") for name in WINDOW_DTYPES}
        return Windows(**parts | {"stored": parts["stored"].astype(bool)})

    def _within_shard(self, chunk: int) -> tuple[Shard, int, int]:
        row = int(self.chunk_starts[chunk])
        number = int(np.searchsorted(self.shard_starts, row, side="right")) - 1
        shard = self.shards[number]
        return shard, number, (row - int(self.shard_starts[number])) // shard.chunk_rows

    def _open(self, number: int) -> tuple[Layout, OpenShard]:
        with self._lock:
            if number not in self._layouts:
                self._layouts[number] = self.shards[number].layout()
            opened = self._opened.get(number)
            if opened is None:
                with self.shards[number].reading():
                    opened = self._opened[number] = OpenShard(self.shards[number].path)
            return self._layouts[number], opened
