"""A store's `store.json` and `shards.jsonl`; README.md specifies the format."""

import dataclasses
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import add
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from annotated_types import Ge, Gt, Le, Lt

from ..base.errors import StoreError
from ..base.files import appearing_whole, demand_version, parse_json, to_json, write_json
from ..base.home import STORE_MARKER, UNREADABLE, now
from ..base.options import Check
from .options import StoredDtype
from .origin import STORED, Origin
from .values import CODES, DTYPES, Norms

FORMAT_VERSION = 4
SHARDS, SHARD_LIST = "shards", "shards.jsonl"
WORLD_FILE = "world.safetensors"
ACTIVATIONS = "activations"
STATISTICS = "statistics"
CHUNK_CHECKSUMS = "chunk_xxh3"
CHECKSUM = np.dtype("<u8")

COLUMNS: dict[str, np.dtype] = {
    "token_id": np.dtype("<i4"),
    "position": np.dtype("<i4"),
    "document": np.dtype("<i8"),
    "source": np.dtype("<i2"),
    "role": np.dtype("u1"),
}
# Entries of `store.json` that are left out where there is nothing.
OPTIONAL = ("resume", "shards", "sources", "control_tokens", "ranks", "world", "windows", "reads")
MOST = 1 << 40  # rows, and dimensions; byte counts stay exact
Size = Annotated[int, Ge(1), Le(MOST)]
Weight = Annotated[float, Gt(0), Lt(math.inf)]
CHUNK_BYTES = 1 << 20
SHARD_BYTES = 64 << 20


def rows_per_chunk(d_in: int, dtype: str) -> int:
    return max(1, CHUNK_BYTES // (d_in * DTYPES[dtype].storage.itemsize))


def rows_per_shard(d_in: int, dtype: str, most: int = MOST) -> int:
    """Rows in a shard of about 64 MiB, or at most `most`, in whole chunks."""
    chunk = rows_per_chunk(d_in, dtype)
    return chunk * max(1, min(SHARD_BYTES // CHUNK_BYTES, most // chunk))


def hash_request(request: Mapping[str, Any]) -> str:
    """A hash of all that determines a store's rows."""
    return hashlib.sha256(json.dumps(request, sort_keys=True, allow_nan=False).encode()).hexdigest()


@dataclass(frozen=True)
class Resume:
    """Where a producer resumes: at the block of `cursor`, after `skip` of its rows. Entries of a cursor that may differ
    between passes begin with an underscore."""

    cursor: dict[str, Any]
    skip: int

    @property
    def position(self) -> tuple[dict[str, Any], int]:
        cursor = {name: value for name, value in self.cursor.items() if not name.startswith("_")}
        return cursor, self.skip


@dataclass(frozen=True)
class Frame:
    """The activations' byte offset, and the XXH3-64, in hexadecimal, of the bytes around them."""

    start: Annotated[int, Ge(0)]
    xxh3: str


def _shard_file(name: str) -> str:
    if not re.fullmatch(r"[0-9]{5,}\.h5", name):  # a path would lead out of the store
        raise ValueError("a shard's name such as 00000.h5")
    return name


@dataclass(frozen=True)
class ShardRecord:
    """One finished shard, a line of `shards.jsonl`."""

    file: Annotated[str, Check(_shard_file)]
    rows: Annotated[int, Ge(1)]
    frame: Frame


@dataclass(frozen=True)
class WorldRecord:
    features: int


@dataclass(frozen=True)
class StoreMeta:
    """The contents of `store.json`.

    `origin` is the typed part of `source`. `median_norm` is that of the first block's finite rows. `sources` counts the
    rows of each text of a mixture, in the order of the column `source`; `control_tokens` those of each of a chat
    template's tokens, by id.
    """

    source: dict[str, Any]
    request_hash: str
    dtype: StoredDtype
    d_in: Size
    shard_rows: Size  # in a shard, at most
    chunk_rows: Annotated[int, Ge(0), Le(MOST)] = 0  # in a chunk; 0 for `rows_per_chunk`
    columns: tuple[str, ...] = ()  # names, out of `COLUMNS`, of the values stored with each row
    max_norm_multiple: Annotated[float, Ge(1), Lt(math.inf)] | None = None
    median_norm: float | None = None
    created: str = field(default_factory=now)
    complete: bool = False
    dropped: dict[str, int] = field(default_factory=dict)  # number of rows, by reason
    norms: Norms | None = None
    shards: tuple[ShardRecord, ...] = ()  # the first `shard_count` of `shards.jsonl`
    shard_count: Annotated[int, Ge(0)] = 0
    resume: Resume | None = None  # after the last shard
    sources: dict[str, int] = field(default_factory=dict)
    control_tokens: dict[str, int] = field(default_factory=dict)
    ranks: int = 0  # processes that each write a store within it; 0 if one writes it alone
    world: WorldRecord | None = None
    windows: bool = False  # whether shards hold the windows of tokens that rows came from
    reads: tuple[Weight, ...] = ()  # how strongly the model reads each dimension, if known
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if not self.chunk_rows:
            object.__setattr__(self, "chunk_rows", rows_per_chunk(self.d_in, self.dtype))

    @cached_property
    def origin(self) -> Origin:
        return Origin.from_json({name: self.source[name] for name in STORED if name in self.source})

    @cached_property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def row_bytes(self) -> int:
        return self.d_in * DTYPES[self.dtype].storage.itemsize

    @property
    def row_values(self) -> tuple[str, ...]:
        return (*self.columns, CODES) if self.world else self.columns

    def request(self) -> dict[str, Any]:
        names = (
            "dtype",
            "d_in",
            "shard_rows",
            "chunk_rows",
            "columns",
            "max_norm_multiple",
            "windows",
            "request_hash",
        )
        features = {"features": self.world.features} if self.world else {}
        return {**self.source, **features, **{name: getattr(self, name) for name in names}}

    def joined(self, parts: Mapping[str, "StoreMeta"]) -> Self:
        """The store of several ranks, by their folders' names, in order; ValueError if one is of another request."""
        shards: list[ShardRecord] = []
        dropped: Counter[str] = Counter()
        sources, control_tokens = Counter(self.sources), Counter(self.control_tokens)
        for name, part in parts.items():
            if part.request() != self.request():
                raise ValueError(
                    f"expected the rows of {self.request()} in {name}, got {part.request()}"
                )
            for shard in part.shards:
                shards.append(dataclasses.replace(shard, file=f"{name}/{SHARDS}/{shard.file}"))
            dropped.update(part.dropped)
            sources.update(part.sources)
            control_tokens.update(part.control_tokens)
        norms = [part.norms for part in parts.values() if part.norms]
        return dataclasses.replace(
            self,
            complete=bool(shards)
            and len(parts) == self.ranks
            and all(part.complete for part in parts.values()),
            shards=tuple(shards),
            dropped=dict(dropped),
            norms=reduce(add, norms) if norms else None,
            sources=dict(sources),
            control_tokens={name: rows for name, rows in control_tokens.items() if rows},
        )

    def to_json(self) -> dict[str, Any]:
        document = dataclasses.asdict(self)
        for name in OPTIONAL:
            if not document[name]:
                del document[name]
        return {
            name: document[name] for name in ("format_version", "created", "complete", *document)
        }

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse the contents of a `store.json`; ValueError if it is invalid, or of another version."""
        demand_version(text, FORMAT_VERSION, oldest=FORMAT_VERSION)
        meta = parse_json(text, cls)
        _ = meta.origin  # which checks its types
        return meta


def shard_name(index: int) -> str:
    return f"{index:05d}.h5"


def rank_folder(store: Path, rank: int) -> Path:
    return store / SHARDS / f"{rank:05d}"


def read_meta(store: Path) -> StoreMeta:
    """StoreError if a document of the store is damaged, of another version, or missing."""
    path = store / STORE_MARKER
    try:
        meta = StoreMeta.from_json(path.read_bytes())
        if meta.shard_count > len(meta.shards):
            path = store / SHARD_LIST
            return dataclasses.replace(meta, shards=_listed(path.read_bytes(), meta.shard_count))
        if meta.ranks:
            folders = sorted(folder.parent for folder in (store / SHARDS).glob(f"*/{STORE_MARKER}"))
            return meta.joined({folder.name: read_meta(folder) for folder in folders})
        return meta
    except FileNotFoundError as error:
        raise StoreError(
            f"no activation store at {store}: it has no {path.name}; make one with `sae extract` or `sae import`"
        ) from error
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {path}: {error}; {UNREADABLE}") from error


def _listed(text: bytes, count: int) -> tuple[ShardRecord, ...]:
    """The first `count` shards; a killed process may have listed more."""
    lines = text.splitlines()[:count]
    if len(lines) < count:
        raise ValueError(f"expected {count} shards, got {len(lines)}")
    return parse_json(b"[%s]" % b",".join(lines), tuple[ShardRecord, ...])


def write_meta(store: Path, meta: StoreMeta) -> None:
    head = dataclasses.replace(meta, shards=(), shard_count=len(meta.shards))
    write_json(store / STORE_MARKER, head.to_json())


def list_shards(store: Path, shards: tuple[ShardRecord, ...]) -> None:
    """Write `shards.jsonl` anew, without what a killed process left in it."""
    with appearing_whole(store / SHARD_LIST) as temporary:
        temporary.write_bytes(b"".join(map(_line, shards)))


def list_shard(store: Path, shard: ShardRecord) -> None:
    with (store / SHARD_LIST).open("ab", buffering=0) as file:
        file.write(_line(shard))
        os.fsync(file.fileno())


def _line(shard: ShardRecord) -> bytes:
    return f"{to_json(dataclasses.asdict(shard))}\n".encode()
