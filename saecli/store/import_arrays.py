"""Importing an array of activations or images into a store."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from ..base.console import Listener, listening
from ..base.errors import StoreError, counted, size_words
from ..base.files import file_sha256
from ..base.home import STORE_MARKER, Home, checked_name
from .array_opening import open_array
from .arrays import ArraySource
from .opening import DERIVED, filling, finished_store, told_when_stopped
from .options import ImportConfig
from .reader import ActivationStore
from .schema import COLUMNS, StoreMeta, hash_request, rows_per_shard
from .writer import StoreWriter


def import_array(file: str | Path, name: str | None = None, *, key: str | None = None, labels: str | None = None,
                 flatten: str | None = None, max_norm_multiple: float | None = None, dtype: str | None = None,
                 shard_rows: int | None = None, home: str | Path | None = None,
                 progress: bool = False) -> ActivationStore:
    """Put an array into a store, as `sae import` does, whose options these are.

    Args:
        file: its path; or `digits` or `patches`, which scikit-learn brings.
        name: the store's name; by default the file's.
        key: which array of the file, if it holds several.
        labels: a label for each row: a file, or the key of an array in the same file.
        flatten: the rows of an array of more than two dimensions, `positions` or `features`.
        max_norm_multiple: rows whose norm exceeds this multiple of the median norm are dropped; at least 1.
        dtype: of the stored rows, float32, float16 or bfloat16; by default the file's own.
        shard_rows: rows in a shard file; by default 64 MiB of them.
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.
        progress: show progress on stderr.

    Returns:
        The store; an existing one of the same rows is opened.

    Raises:
        ConfigError: an invalid option.
        FormatError: the file cannot be read as such an array.
        StoreError: the name is another store's, or the disk has no room.
    """
    config = ImportConfig(key, labels, flatten, max_norm_multiple, dtype, shard_rows)
    return imported(str(file), config, name, Home.at(home), listening(progress))[0]


def imported(file: str, config: ImportConfig, name: str | None, home: Home,
             listener: Listener) -> tuple[ActivationStore, bool]:
    """The store of a file's rows, and whether it existed already.

    Args:
        file: as in `import_array`.
        config: the options that determine the rows.
        name: the store's name; None for the file's.
        home: where it goes.
        listener: shows notes and progress.
    """
    with told_when_stopped(listener) as folders:
        named = checked_name(Path(file).stem, DERIVED) if name is None else checked_name(name)
        folder = home.stores.path / named
        array = open_array(file, config.key, config.labels, config.flatten)
        folders.append(folder)
        meta = _meta(file, array, config)
        beside = sum(COLUMNS[name].itemsize for name in meta.columns)
        check_room(folder, array.rows, meta, beside)
        if (finished := finished_store(folder, meta.request_hash)) is not None:
            return finished, True
        with (StoreWriter.open(folder, meta) as writer,
              filling([writer], "importing", array.rows, listener) as show):
            start = writer.cursor["row"] if writer.cursor else 0
            for begin, rows in () if writer.complete else array.blocks(start):
                writer.append(rows, array.columns(begin, begin + len(rows)), {"row": begin})
                show(writer.rows)
            writer.finish()
    return ActivationStore.open(folder), False


def _meta(file: str, array: ArraySource, config: ImportConfig) -> StoreMeta:
    """The store's `store.json` to begin with, including the hash of the request."""
    dtype = config.dtype or array.dtype
    shard_rows = config.shard_rows or rows_per_shard(array.features, dtype)
    source = {"kind": "array", "file": Path(file).name, "key": config.key, **_identity(file, array)}
    # Else hash as before these options existed.
    if config.max_norm_multiple is not None:
        source["max_norm_multiple"] = config.max_norm_multiple
    if config.flatten == "positions":
        source["flatten"] = config.flatten
    wanted = hash_request({**source, "dtype": dtype, "shard_rows": shard_rows})
    return StoreMeta(source, wanted, dtype, array.features, shard_rows, columns=tuple(array.columns(0, 0)),
                     max_norm_multiple=config.max_norm_multiple)


def check_room(folder: Path, rows: int, meta: StoreMeta, beside: int) -> None:
    """Refuse rows that the disk has no room for, before reading any: a header can claim any number.

    Args:
        folder: the store's; rows that it holds already need no room.
        rows: number of rows it is to hold.
        meta: its `store.json`.
        beside: bytes stored beside each row.

    Raises:
        StoreError: the disk has no room.
    """
    if (folder / STORE_MARKER).exists():
        store = ActivationStore.open(folder)
        rows = 0 if store.complete else rows - store.rows
    needed = rows * (meta.row_bytes + beside)
    free = shutil.disk_usage(next(parent for parent in folder.absolute().parents if parent.exists())).free
    if needed > free:
        raise StoreError(f"cannot store {folder.name}: expected {size_words(needed)} of free disk for "
                         f"{counted(rows, 'row')} of {meta.d_in:,} dimensions, got {size_words(free)}; free some, or "
                         "choose another --home")


def _identity(file: str, array: ArraySource) -> dict[str, Any]:
    """Hashes of the file's bytes, or of the numbers if there is no file, and of labels and documents."""
    content = file_sha256(Path(file)) if Path(file).exists() else _hash(array.read((slice(None),)))
    documents = {} if array.documents is None else {"documents_sha256": _hash(array.documents)}
    return {"sha256": content, "labels_sha256": None if array.labels is None else _hash(array.labels), **documents}


def _hash(numbers: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(numbers).data).hexdigest()
