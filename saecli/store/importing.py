"""Importing rows into a store: arrays of activations or images, or a world's rows."""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast, get_args

import numpy as np

from ..base.console import Listener, listening
from ..base.errors import ConfigError, StoreError
from ..base.files import appearing_whole, file_sha256
from ..base.home import Home, checked_name
from ..base.options import demand_known, options_of
from ..base.processes import writing_thread
from ..base.words import counted, printable, refuse_idle, size_words
from .array_files import ArraySource, Files, open_array
from .blocks import RowBlock
from .opening import DERIVED, finished_store, note_when_stopped, warn_of_nonfinite
from .options import ImportConfig, StoredDtype, SyntheticConfig
from .reader import ActivationStore
from .schema import COLUMNS, WORLD_FILE, StoreMeta, WorldRecord, hash_request, rows_per_shard
from .values import CODES
from .worlds import World, stored_world, world_of
from .writer import StoreWriter

SYNTHETIC = "synthetic"
OF_BOTH = {"dtype", "shard_rows"}  # options of arrays and of synthetic rows
OF_ARRAYS = options_of(ImportConfig).keys() - OF_BOTH
OF_WORLDS = options_of(SyntheticConfig).keys()
# Part of a request if they are set.
OF_ROWS = ("max_norm_multiple", "index", "transpose", "mask", "drop_zeros")
WORLD_SHARD_ROWS = 32_768  # true codes of a shard are held in memory until it is whole
# From a row on: each block's first row, and its values, as `ArraySource.blocks`.
ArrayBlocks: TypeAlias = Iterator[tuple[int, Mapping[str, Any]]]


def import_array(
    file: Files,
    name: str | None = None,
    *,
    home: str | Path | None = None,
    progress: bool | Listener = False,
    **options: Any,
) -> ActivationStore:
    """Put the rows of arrays into a store; an existing store of the same rows is opened. CLI equivalent: `sae import`.

    Args:
        file: a path, folder or pattern with `*`, or several in order; or `digits` or `patches` of scikit-learn.
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.
        **options: of the command, such as `flatten="positions"`, `mask`, `dtype`.

    Raises:
        ConfigError: an option is unknown or invalid.
        FormatError: a file cannot be read as such an array, or does not fit the others.
        StoreError: the name is another store's, or the disk has no room.
    """
    words = [str(word) for word in ([file] if isinstance(file, str | Path) else file)]
    if not words:
        raise ConfigError("there is nothing to import: expected a file or more, got none; name one")
    listener = listening(progress)
    idle = OF_WORLDS & options.keys()
    refuse_idle(idle, f"with {words[0]}; leave it out, or import synthetic")
    demand_known("import_array", options, options_of(ImportConfig), "import")
    if isinstance(options.get("shape"), tuple | list):
        options["shape"] = ",".join(map(str, options["shape"]))
    config = ImportConfig(**options)
    source = open_array(words, config)
    first, *others = source.files or [Path(words[0])]
    of_folder = others or Path(words[0]).is_dir()
    folder = _folder(home, name, first.absolute().parent.name if of_folder else first.stem)
    dtype = _stored_dtype(config, source.dtype)
    shard_rows = config.shard_rows or rows_per_shard(source.features, dtype)
    record = _record(first.name, source, config)
    meta = StoreMeta(
        source=record,
        request_hash=hash_request({**record, "dtype": dtype, "shard_rows": shard_rows}),
        dtype=dtype,
        d_in=source.features,
        shard_rows=shard_rows,
        columns=source.columns,
        max_norm_multiple=config.max_norm_multiple,
    )
    if (finished := finished_store(folder, meta.request_hash)) is not None:
        return finished
    _warn_of_rows(words[0], source, config, listener)
    zeros = _fill(
        folder, meta, source.rows, source.blocks, "importing", listener, config.drop_zeros
    )
    store = ActivationStore.open(folder)
    if zeros and not config.drop_zeros:
        listener.warn(
            f"{folder.name}: {zeros:,} of {store.rows:,} rows are all 0, as padding is; --drop-zeros leaves them out"
        )
    return store


def _stored_dtype(config: ImportConfig, default: StoredDtype) -> StoredDtype:
    if config.dtype is None or config.shape:  # raw binary's is that of its numbers
        return default
    if config.dtype not in get_args(StoredDtype):
        raise ConfigError(
            f"--dtype {config.dtype} is of raw binary, with --shape; a store's is {', '.join(get_args(StoredDtype))}"
        )
    return cast(StoredDtype, config.dtype)


def _warn_of_rows(name: str, source: ArraySource, config: ImportConfig, listener: Listener) -> None:
    arrays = source.arrays
    if source.rows < source.features and source.files and len(arrays) == 1 and not config.flatten:
        listener.warn(
            f"{name}: {counted(source.rows, 'row')} of {source.features:,} dimensions, fewer rows than dimensions; "
            f"if its columns are the rows, {'leave out' if config.transpose else 'add'} --transpose"
        )
    if (mask := source.likely_mask) is not None:
        listener.warn(
            f"{name}: {mask} has a 0 or 1 for each position; if it marks padding, add --mask {mask}"
        )
    if len(arrays) > 1 and len(arrays[0].shape) == 2:
        held_out = "whole arrays" if source.is_of_documents else "single rows"
        listener.note(f"{name}: {len(arrays):,} arrays; {held_out} are held out as test rows")


def _record(file: str, source: ArraySource, config: ImportConfig) -> dict[str, Any]:
    """What identifies the rows: the files' names and contents, in order, and options."""
    sums = [(path.name, file_sha256(path)) for path in source.files]
    if len(sums) > 1:
        file, sha256 = f"{file} and {len(sums) - 1} more", hash_request({"files": sums})
    elif sums:
        sha256 = sums[0][1]
    else:
        rows = np.ascontiguousarray(source.arrays[0].open()["rows"].read(slice(None)))
        sha256 = hashlib.sha256(rows.data).hexdigest()
    record: dict[str, Any] = {
        "kind": "array",
        "file": printable(file),  # which may be no UTF-8
        "key": config.key,
        "sha256": sha256,
    }
    values = config.to_json()
    record |= {name: values[name] for name in OF_ROWS if values[name]}
    # features, which is some formats' default, gives the same rows either way
    if config.flatten == "positions":
        record["flatten"] = config.flatten
    if config.shape:
        record["numbers"] = [config.dtype, *source.arrays[0].shape]
    return record


def import_synthetic(
    name: str | None = None,
    *,
    home: str | Path | None = None,
    progress: bool | Listener = False,
    **options: Any,
) -> ActivationStore:
    """Put rows of a world, whose features are known, into a store; an existing one of the same rows is opened. CLI
    equivalent: `sae import synthetic`.

    Args:
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.
        **options: `features` (G), `d_in` (D), `rows`, `seed`, `l0`, `zipf`, `hierarchy`, `correlation`; `dtype` and
            `shard_rows`.

    Raises ConfigError for an option that is unknown, invalid, or has no effect here, and as `import_array`.
    """
    listener = listening(progress)
    refuse_idle(OF_ARRAYS & options.keys(), f"with {SYNTHETIC}; leave it out")
    demand_known("import_synthetic", options, [*OF_WORLDS, *OF_BOTH], "import synthetic")
    shape = ImportConfig(**{name: options.pop(name) for name in OF_BOTH & options.keys()})
    config, dtype = SyntheticConfig(**options), _stored_dtype(shape, "float32")
    source = {"kind": "world", "file": SYNTHETIC, **config.to_json()}
    meta = StoreMeta(
        source=source,
        request_hash=hash_request({**source, "dtype": dtype, "shard_rows": shape.shard_rows}),
        dtype=dtype,
        d_in=config.d_in,
        shard_rows=shape.shard_rows or rows_per_shard(config.d_in, dtype, WORLD_SHARD_ROWS),
        world=WorldRecord(config.features),
    )
    folder = _folder(home, name, SYNTHETIC)
    if (finished := finished_store(folder, meta.request_hash)) is not None:
        return finished
    blocks = partial(_world_blocks, folder, config, world_of(config))
    _fill(folder, meta, config.rows, blocks, "sampling", listener)
    return ActivationStore.open(folder)


def _world_blocks(folder: Path, config: SyntheticConfig, world: World, start: int) -> ArrayBlocks:
    path = folder / WORLD_FILE
    if path.exists():  # whose last bits may be of another machine's matrix products
        world = stored_world(folder)
    else:
        with appearing_whole(path) as temporary:
            temporary.write_bytes(world.to_bytes())
    for first in range(start, config.rows, world.block_rows):
        codes = world.codes(config.seed, first // world.block_rows)[: config.rows - first]
        yield first, {"rows": world.rows(codes), CODES: codes}


def is_world(source: str) -> bool:
    """Whether a source is synthetic, and no file of that name."""
    return source == SYNTHETIC and not Path(source).is_file()


def _folder(home: str | Path | None, name: str | None, derived: str) -> Path:
    return Home.at(home).stores.path / (
        checked_name(derived, DERIVED) if name is None else checked_name(name)
    )


def _fill(
    folder: Path,
    meta: StoreMeta,
    rows: int,
    blocks_from: Callable[[int], ArrayBlocks],
    label: str,
    listener: Listener,
    drop_zeros: bool = False,
) -> int:
    """Fill a store and finish it; the number of its rows that are all 0."""
    with (
        note_when_stopped(listener) as folders,
        StoreWriter.open(folder, meta) as writer,
        listener.progress(label, rows, "rows") as show,
        writing_thread() as pool,  # where Ctrl-C does not end a block part-way
    ):
        folders.append(folder)
        _demand_room(folder, rows - writer.rows, meta)
        start = writer.cursor or {"row": 0}
        zeros = start.get("_zeros", 0)
        if writer.rows:
            listener.note(f"{folder.name}: going on after {writer.rows:,} rows")
        for first, values in () if writer.meta.complete else blocks_from(start["row"]):
            cursor = {"row": first, "_zeros": zeros}
            block, zero_rows = _block(values, meta.row_values, drop_zeros)
            zeros += zero_rows
            pool.submit(writer.append, block, cursor).result()
            show(writer.rows)
        writer.finish()
    warn_of_nonfinite(folder.name, writer.meta, listener)
    return zeros


def _block(
    values: Mapping[str, Any], columns: Iterable[str], drop_zeros: bool
) -> tuple[RowBlock, int]:
    """The rows of a block that are stored, and the number of zero rows."""
    rows = values["rows"]
    with np.errstate(invalid="ignore"):  # signalling NaNs, dropped as they are stored
        nonzero = rows.any(axis=1)
    unmasked = values.get("mask", np.ones(len(rows))) > 0
    chosen = unmasked & nonzero if drop_zeros else unmasked
    before = np.cumsum(chosen)
    dropped = {"masked": before[~unmasked], "all_zero": before[unmasked & ~chosen]}
    stored = {name: values[name] for name in columns}
    if not chosen.all():
        rows = rows[chosen]
        stored = {name: column[chosen] for name, column in stored.items()}
    return RowBlock(rows, stored, dropped), int((unmasked & ~nonzero).sum())


def _demand_room(folder: Path, rows: int, meta: StoreMeta) -> None:
    needed = rows * (meta.row_bytes + sum(COLUMNS[column].itemsize for column in meta.columns))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StoreError(
            f"cannot store {folder.name}: expected {size_words(needed)} of free disk for {counted(rows, 'row')}, "
            f"got {size_words(free)}; free some, or choose another --home"
        )
