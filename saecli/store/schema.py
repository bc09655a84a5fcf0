"""The format of a store, and the contents of its `store.json`.

The format, version 1:

- A store is a folder with `store.json` and `shards/00000.h5`, `shards/00001.h5`, ... A reader MUST take the
  list of shards from `store.json` and ignore any other file: it may be unfinished.
- `store.json` is one JSON object with the fields of `StoreMeta`. A reader MUST refuse a larger
  `format_version` than it knows, and SHOULD ignore fields that it does not know.
- Each shard is an HDF5 file of `shard_rows` rows; the last, and where several ranks wrote the store each rank's last,
  may be shorter.
- Its dataset `activations` has shape (rows, d_in); its chunks MUST be `chunk_rows` whole rows (a shard of fewer rows
  has one chunk, of exactly its rows), without filters, every chunk present. Its type is float32, float16, or for
  bfloat16 a custom float of 8 exponent and 7 mantissa bits, all little-endian.
- The datasets of `columns`, each (rows,), are contiguous integers of the types in `COLUMNS`; a shard has none of those
  columns that `store.json` does not list.
- A shard SHOULD have a dataset `chunk_xxh3`, (chunks,) contiguous uint64, the XXH3-64 of each chunk's bytes, and its
  chunks one after the other in order; its `frame` in `store.json` then gives their offset, and the XXH3-64 of all
  bytes before and after them. A reader MUST refuse bytes that differ from a checksum, and where there is no `frame`
  a file that differs from its `sha256`.
- No activation is NaN or infinite. Where there is a `max_norm_multiple`, no row's norm, before rounding to the stored
  type, exceeds `max_norm_multiple` times `median_norm`.
- `dropped` counts, by reason, rows that are not stored: `nonfinite`, `high_norm` (by `max_norm_multiple`), `special`
  tokens, and `beside`; and the texts that are not: `empty_texts`, `short_texts`.
- Where `source` has a `beside`, one command filled this store and one for each of the places listed there, "l12-mlp_in"
  for site mlp_in of block 12. Row i of each is of the same token: a row that one drops is dropped from all, and those
  that could have stored it count it under `beside`.
- A shard MAY have a group `statistics` of its rows as stored: `mean` and `scatter`, (d_in,) float64, the mean and
  `sum_i (x_i - mean)^2`; attributes `norm_mean` and `norm_max` of their Euclidean norms, float64; and a histogram of
  these norms, `norm_bin`, (K,) int32 ascending, and `norm_count`, (K,) int64 above 0: bin 0 is for norms of 0, bin i
  for norms in `[2^((i - 1) / 40 - 149), 2^(i / 40 - 149))`.
- A store of rows made of known features has a `world`: the file `world.safetensors` in its folder has that `sha256`,
  and `directions` (G, d_in), `bias` (d_in,) and `firing_probabilities` (G,), float32, of G `features`. Then every shard
  has a group `codes` of contiguous datasets: `offset` (rows + 1,) int64 from 0, `index` (n,) int32 in [0, G) ascending
  within a row, `value` (n,) float32 above 0. Row i, before rounding to the stored type, is `bias` plus the sum of
  `value[j] directions[index[j]]` over j in [`offset[i]`, `offset[i + 1]`).
- `store.json` MAY lack `max_norm_multiple`, `median_norm`, `norms`, `norm_quantiles`, `dropped_norms` and a shard's
  `frame`: older versions wrote none of them.
- `store.json` MAY have `ranks`, where several processes wrote the store: rank r stored the documents whose number is r
  modulo the number of ranks. Each entry, in order of rank, gives the rows the rank was to store and the number of
  shards it wrote, which are consecutive. An unfinished store of several ranks has no shards: each rank writes its own
  store in `ranks/NNNNN`, which a reader MUST ignore.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..base.documents import Origin, demand_version, parse_json
from ..base.errors import ConfigError, StoreError, flag_of
from ..base.files import regular, write_json
from ..base.home import STORE_MARKER, UNREADABLE, now
from .dtypes import DTYPES
from .sparse_rows import CODES
from .statistics import Norms

FORMAT_VERSION = 1
SHARDS = "shards"
RANKS = "ranks"
WORLD_FILE = "world.safetensors"
ACTIVATIONS = "activations"
CHUNK_CHECKSUMS = "chunk_xxh3"
CHECKSUM = np.dtype("<u8")

COLUMNS: dict[str, np.dtype] = {
    "token_id": np.dtype("<i4"),
    "position": np.dtype("<i4"),
    "document": np.dtype("<i8"),
    "label": np.dtype("<i8"),
}

MOST = 1 << 40  # rows, and dimensions; byte counts stay exact
CHUNK_BYTES = 1 << 20
SHARD_BYTES = 64 << 20


def rows_per_chunk(d_in: int, dtype: str) -> int:
    """Rows in a chunk of about 1 MiB, at least one."""
    return max(1, CHUNK_BYTES // (d_in * DTYPES[dtype].storage.itemsize))


def rows_per_shard(d_in: int, dtype: str, most: int = MOST) -> int:
    """The default number of rows in a shard: about 64 MiB, or `most` rows, in whole chunks, so that none is padded."""
    chunk = rows_per_chunk(d_in, dtype)
    return chunk * max(1, min(SHARD_BYTES // CHUNK_BYTES, most // chunk))


def hash_request(request: Mapping[str, Any]) -> str:
    """A hash of all that determines a store's rows, by which an identical finished store is recognised."""
    return hashlib.sha256(json.dumps(request, sort_keys=True, allow_nan=False).encode()).hexdigest()


@dataclass(frozen=True)
class Resume:
    """Where a producer resumes after a shard.

    Args:
        cursor: the producer's record of where the block of the shard's last row begins; entries with a leading
            underscore only help to get there, and may differ between passes.
        skip: the number of kept rows of that block in this shard and the ones before it.
    """

    cursor: dict[str, Any]
    skip: int

    @property
    def position(self) -> tuple[dict[str, Any], int]:
        """Cursor and skip without the entries that may differ between passes."""
        return {name: value for name, value in self.cursor.items() if not name.startswith("_")}, self.skip


@dataclass(frozen=True)
class Frame:
    """The bytes around a shard's activations: HDF5's headers, the columns, the chunks' checksums.

    Args:
        start: byte offset of the activations, whose chunks lie one after the other.
        xxh3: XXH3-64 of all bytes before and after them, in hexadecimal.
    """

    start: int
    xxh3: str


@dataclass(frozen=True)
class ShardRecord:
    """One finished shard.

    Args:
        file: its name within `shards/`.
        rows: rows in it.
        sha256: hash of the file's bytes.
        dropped: rows dropped, by reason, in the blocks that ended since the previous shard.
        resume: where the producer resumes after it.
        dropped_norms: norms of the rows dropped, by reason.
        frame: by which it is checked while it is read; None if it must be checked whole before.
    """

    file: str
    rows: int
    sha256: str
    dropped: dict[str, int]
    resume: Resume
    dropped_norms: dict[str, Norms] = field(default_factory=dict)
    frame: Frame | None = None


@dataclass(frozen=True)
class RankShards:
    """The rows and shards of one of several ranks.

    Args:
        rows: number of rows it is to store.
        shards: number of shards it wrote; 0 while the store is unfinished.
    """

    rows: int
    shards: int = 0


@dataclass(frozen=True)
class WorldRecord:
    """The features that a store's rows are made of.

    Args:
        features: G, their number.
        sha256: hash of the bytes of `world.safetensors`.
    """

    features: int
    sha256: str


@dataclass(frozen=True)
class StoreMeta:
    """The contents of `store.json`.

    Args:
        source: where the rows come from (model, revision, layer, site, dataset, context, ...), free-form.
        request_hash: `hash_request` of the request; an interrupted store is resumed only under the same.
        dtype: "float32", "float16" or "bfloat16".
        d_in: dimensions of a row.
        shard_rows: rows in every shard but the last, or the last of each rank.
        chunk_rows: rows in a chunk; 0 for `rows_per_chunk`.
        columns: names, out of `COLUMNS`, of the values stored beside each row.
        max_norm_multiple: rows with a norm above this multiple of `median_norm` are dropped; None for no limit.
        median_norm: the median norm of the first block's finite rows; None until there is a shard.
        created: when the store was begun.
        complete: whether all of its rows are stored.
        dropped: rows dropped, by reason.
        dropped_norms: norms of the rows dropped, by reason.
        norms: norms of the rows stored; None where an earlier version wrote some of them.
        norm_quantiles: fraction -> quantile of the norms, within 0.87%.
        shards: the finished shards, in the order of their rows.
        ranks: each rank's rows and shards, where several write the store; see `ranks.py`.
        world: the known features that the rows are made of, whose true codes are stored too; None if there are none.
        format_version: version of the format.
    """

    source: dict[str, Any]
    request_hash: str
    dtype: str
    d_in: int
    shard_rows: int
    chunk_rows: int = 0
    columns: tuple[str, ...] = ()
    max_norm_multiple: float | None = None
    median_norm: float | None = None
    created: str = field(default_factory=now)
    complete: bool = False
    dropped: dict[str, int] = field(default_factory=dict)
    dropped_norms: dict[str, Norms] = field(default_factory=dict)
    norms: Norms | None = None
    norm_quantiles: dict[str, float] = field(default_factory=dict)
    shards: tuple[ShardRecord, ...] = ()
    ranks: tuple[RankShards, ...] = ()
    world: WorldRecord | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}", option="dtype")
        if unknown := [name for name in self.columns if name not in COLUMNS]:
            raise ConfigError(f"--columns must be some of {', '.join(COLUMNS)}, got {unknown[0]!r}", option="columns")
        if len(set(self.columns)) < len(self.columns):
            raise ConfigError(f"--columns must differ from each other, got {', '.join(self.columns)}", option="columns")
        if self.max_norm_multiple is not None and not 1 <= self.max_norm_multiple < math.inf:
            raise ConfigError(f"--max-norm-multiple must be at least 1 and finite, got {self.max_norm_multiple}",
                              option="max_norm_multiple")
        for name, least in (("d_in", 1), ("shard_rows", 1), ("chunk_rows", 0)):
            if not least <= getattr(self, name) <= MOST:
                raise ConfigError(f"{flag_of(name)} must be from {least} to {MOST}, got {getattr(self, name)}",
                                  option=name)
        if not self.chunk_rows:
            object.__setattr__(self, "chunk_rows", rows_per_chunk(self.d_in, self.dtype))

    @property
    def rows(self) -> int:
        """Rows in the finished shards."""
        return sum(shard.rows for shard in self.shards)

    @property
    def row_bytes(self) -> int:
        """Bytes per row of activations as stored."""
        return self.d_in * DTYPES[self.dtype].storage.itemsize

    @property
    def row_values(self) -> tuple[str, ...]:
        """The names of the values stored beside each row: the columns, and true codes."""
        return (*self.columns, CODES) if self.world else self.columns

    def is_last(self, shard: int) -> bool:
        """Whether a shard is its rank's last, and so may be short."""
        return shard + 1 in (len(self.shards), *accumulate(rank.shards for rank in self.ranks))

    def request(self) -> dict[str, Any]:
        """The entries that must agree for an interrupted store to be resumed."""
        names = ("dtype", "d_in", "shard_rows", "chunk_rows", "columns", "max_norm_multiple", "request_hash")
        features = {"features": self.world.features} if self.world else {}
        return {**self.source, **features, **{name: getattr(self, name) for name in names}}

    def to_json(self) -> dict[str, Any]:
        """The JSON object of `store.json`."""
        document = dataclasses.asdict(self)
        for name in ("ranks", "world"):
            if not document[name]:
                del document[name]
        return {name: document[name] for name in ("format_version", "created", "complete", *document)}

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse the contents of a `store.json`.

        Raises:
            ValueError: it is invalid, or of a newer version; the message says what is wrong.
        """
        demand_version(text, FORMAT_VERSION)
        parse_json(text, _Demanded)
        meta = parse_json(text, cls)
        if meta.ranks and sum(rank.shards for rank in meta.ranks) != len(meta.shards):
            raise ValueError(f"expected {sum(rank.shards for rank in meta.ranks)} shards, as `ranks` says, got "
                             f"{len(meta.shards)}")
        for index, shard in enumerate(meta.shards):
            # An edited name must not lead out of the store.
            if shard.file != shard_name(index):
                raise ValueError(f"expected shard {index} to be named {shard_name(index)}, got {shard.file!r:.60}")
            if shard.rows < 1:
                raise ValueError(f"expected shard {shard.file} to hold a row or more, got {shard.rows}")
            if shard.rows > meta.shard_rows or (shard.rows < meta.shard_rows and not meta.is_last(index)):
                raise ValueError(f"expected {meta.shard_rows} rows in shard {shard.file}, got {shard.rows}")
        return meta


@dataclass(frozen=True)
class _Demanded:
    """Entries that a `store.json` must have although `StoreMeta` has defaults for them."""

    source: Origin
    created: str
    complete: bool
    chunk_rows: int
    columns: list[str]
    dropped: dict[str, int]
    shards: list[Any]


def shard_name(index: int) -> str:
    """File name of a shard."""
    return f"{index:05d}.h5"


def read_meta(store: Path) -> StoreMeta:
    """Read a store's `store.json`; StoreError if it is missing, damaged or of a newer version."""
    path = store / STORE_MARKER
    try:
        return StoreMeta.from_json(regular(path).read_bytes())
    except FileNotFoundError as error:
        raise StoreError(f"no activation store at {store}; expected {STORE_MARKER} in it, got none; "
                         "make one with `sae extract` or `sae import`") from error
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {path}: {error}; {UNREADABLE}") from error


def write_meta(store: Path, meta: StoreMeta) -> None:
    """Write a store's `store.json`, atomically."""
    write_json(store / STORE_MARKER, meta.to_json())
