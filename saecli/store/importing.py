"""Importing rows into a store: an array of activations or images, or a world's rows."""

import hashlib
import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..base.console import Listener, listening
from ..base.errors import (
    ConfigError,
    FormatError,
    StoreError,
    counted,
    flag_of,
    printable,
    size_words,
)
from ..base.files import appearing_whole, file_sha256
from ..base.home import Home, checked_name
from ..base.options import demand_known, options_of
from .arrays import (
    Array,
    Arrays,
    ArraySource,
    check_memory,
    demand_rows,
    list_arrays,
    naming,
)
from .opening import DERIVED, finished_store, note_when_stopped
from .options import ImportConfig, StoredDtype, SyntheticConfig
from .reader import ActivationStore
from .schema import COLUMNS, WORLD_FILE, StoreMeta, WorldRecord, hash_request, rows_per_shard
from .shard_writer import Columns
from .values import CODES
from .worlds import stored_world, world_of
from .writer import StoreWriter

SQUARE, PATCH, PATCHES_PER_SQUARE = 32, 16, 8  # pixels, pixels, patches
SYNTHETIC = "synthetic"
OF_BOTH = {"dtype", "shard_rows"}  # options of arrays and of synthetic rows
OF_ARRAYS = options_of(ImportConfig).keys() - OF_BOTH
OF_WORLDS = options_of(SyntheticConfig).keys()
WORLD_SHARD_ROWS = 32_768  # true codes of a shard are held in memory until it is whole


def import_array(
    file: str | Path,
    name: str | None = None,
    *,
    home: str | Path | None = None,
    progress: bool | Listener = False,
    **options: Any,
) -> ActivationStore:
    """Put an array into a store; an existing store of the same rows is opened. CLI equivalent: `sae import`.

    Args:
        file: its path; or `digits` or `patches`, which scikit-learn brings.
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.
        **options: `key` of the array, `dtype` and `shard_rows` of the store; `flatten`, the rows of an array of more
            than two dimensions: `positions` or `features`; `max_norm_multiple`: drop rows with a norm above this
            multiple of the median, at least 1.

    Raises:
        ConfigError: an option is unknown or invalid.
        FormatError: the file cannot be read as such an array.
        StoreError: the name is another store's, or the disk has no room.
    """
    file, listener = str(file), listening(progress)
    for option in sorted(OF_WORLDS & options.keys()):
        raise ConfigError(
            f"{flag_of(option)} does nothing with {file}; leave it out, or import synthetic"
        )
    demand_known("import_array", options, options_of(ImportConfig), "import")
    config = ImportConfig(**options)
    with note_when_stopped(listener) as folders:
        folder = _folder(home, name, Path(file).stem)
        array = open_array(file, config.key, config.flatten)
        folders.append(folder)
        dtype = config.dtype or array.dtype
        shard_rows = config.shard_rows or rows_per_shard(array.features, dtype)
        source = _source_of(file, array, config)
        meta = StoreMeta(
            source=source,
            request_hash=hash_request({**source, "dtype": dtype, "shard_rows": shard_rows}),
            dtype=dtype,
            d_in=array.features,
            shard_rows=shard_rows,
            columns=tuple(array.columns(0, 0)),
            max_norm_multiple=config.max_norm_multiple,
        )
        if (finished := finished_store(folder, meta.request_hash)) is not None:
            return finished

        def blocks(start: int) -> Iterator[tuple[int, np.ndarray, Columns]]:
            for begin, rows in array.blocks(start):
                yield begin, rows, array.columns(begin, begin + len(rows))

        return _filled(folder, meta, array.rows, "importing", listener, blocks)


def _source_of(file: str, array: ArraySource, config: ImportConfig) -> dict[str, Any]:
    if Path(file).exists():
        sha256 = file_sha256(Path(file))
    else:
        sha256 = hashlib.sha256(np.ascontiguousarray(array.read(())).data).hexdigest()
    source = {
        "kind": "array",
        "file": printable(Path(file).name),  # which may be no UTF-8
        "key": config.key,
        "sha256": sha256,
    }
    # features, which is some formats' default, gives the same rows either way
    flatten = config.flatten if config.flatten == "positions" else None
    more = {"max_norm_multiple": config.max_norm_multiple, "flatten": flatten}
    return source | {name: value for name, value in more.items() if value is not None}


def import_synthetic(
    name: str | None = None,
    *,
    home: str | Path | None = None,
    progress: bool | Listener = False,
    **options: Any,
) -> ActivationStore:
    """Put rows of a world, whose features are known, into a store; an existing one of the same rows is opened.

    `evaluate` on it measures the features that an SAE has found. CLI equivalent: `sae import synthetic`.

    Args:
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.
        **options: `features` (G), `d_in` (D), `rows`, `seed`, `l0`, `zipf`, `hierarchy`, `correlation`; `dtype` and
            `shard_rows`.

    Raises ConfigError for an option that is unknown, invalid, or has no effect here, and as `import_array`.
    """
    listener = listening(progress)
    for option in sorted(OF_ARRAYS & options.keys()):
        raise ConfigError(f"{flag_of(option)} does nothing with synthetic; leave it out")
    demand_known("import_synthetic", options, [*OF_WORLDS, *OF_BOTH], "import synthetic")
    shape = ImportConfig(**{name: options.pop(name) for name in OF_BOTH & options.keys()})
    config, dtype = SyntheticConfig(**options), shape.dtype or "float32"
    with note_when_stopped(listener) as folders:
        folder = _folder(home, name, SYNTHETIC)
        source = {"kind": "world", "file": SYNTHETIC, **config.to_json()}
        request = hash_request({**source, "dtype": dtype, "shard_rows": shape.shard_rows})
        folders.append(folder)
        if (finished := finished_store(folder, request)) is not None:
            return finished
        world = world_of(config)
        meta = StoreMeta(
            source=source,
            request_hash=request,
            dtype=dtype,
            d_in=world.d_in,
            shard_rows=shape.shard_rows or rows_per_shard(world.d_in, dtype, WORLD_SHARD_ROWS),
            world=WorldRecord(world.features),
        )

        def blocks(start: int) -> Iterator[tuple[int, np.ndarray, Columns]]:
            path, own = folder / WORLD_FILE, world
            if path.exists():  # whose last bits may be of another machine's matrix products
                own = stored_world(folder)
            else:
                with appearing_whole(path) as temporary:
                    temporary.write_bytes(own.to_bytes())
            for begin in range(start, config.rows, own.block_rows):
                codes = own.codes(config.seed, begin // own.block_rows)[: config.rows - begin]
                yield begin, own.rows(codes), {CODES: codes}

        return _filled(folder, meta, config.rows, "sampling", listener, blocks)


def is_world(source: str) -> bool:
    """Whether a source is synthetic, and no file of that name."""
    return source == SYNTHETIC and not Path(source).is_file()


def _folder(home: str | Path | None, name: str | None, derived: str) -> Path:
    return Home.at(home).stores.path / (
        checked_name(derived, DERIVED) if name is None else checked_name(name)
    )


def _filled(
    folder: Path,
    meta: StoreMeta,
    rows: int,
    label: str,
    listener: Listener,
    blocks: Callable[[int], Iterator[tuple[int, np.ndarray, Columns]]],
) -> ActivationStore:
    """Fill a store with blocks, from a given row on: the first one's number, the rows and their columns."""
    with (
        StoreWriter.open(folder, meta) as writer,
        listener.progress(label, rows, "rows") as show,
        ThreadPoolExecutor(1) as pool,  # where Ctrl-C does not end a block part-way
    ):
        _demand_room(folder, rows - writer.rows, meta)
        start = writer.cursor["row"] if writer.cursor else 0
        if writer.rows:
            listener.note(f"{folder.name}: going on after {writer.rows:,} rows")
        for begin, block, columns in () if writer.meta.complete else blocks(start):
            pool.submit(writer.append, block, columns, {"row": begin}).result()
            show(writer.rows)
        writer.finish()
    return ActivationStore.open(folder)


def _demand_room(folder: Path, rows: int, meta: StoreMeta) -> None:
    """StoreError if the disk lacks room for rows, of which a file may claim any number."""
    needed = rows * (meta.row_bytes + sum(COLUMNS[column].itemsize for column in meta.columns))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StoreError(
            f"cannot store {folder.name}: expected {size_words(needed)} of free disk for "
            f"{counted(rows, 'row')} of {meta.d_in:,} dimensions, got {size_words(free)}; free some, or "
            "choose another --home"
        )


def open_array(file: str, key: str | None = None, flatten: str | None = None) -> ArraySource:
    """Open an array to import: of a file in one of `ARRAY_FORMATS`, or a name in `SAMPLES`; see `import_array`."""
    if file in SAMPLES and not Path(file).exists():
        if key or flatten:
            raise FormatError(f"{file} come whole from scikit-learn; leave out --key and --flatten")
        return SAMPLES[file]()
    path = Path(file)
    with naming(file):
        array = _choose(list_arrays(path), key, path)
    demand_rows(array.dtype, f"cannot import {file}")
    shape = _flattened(array, file, flatten)
    # An allocator need not refuse what a file claims.
    to_fit = f"one row or document of its shape, {array.shape}, is as large; check the shape"
    check_memory(file, 4 * math.prod(array.shape[1:]), to_fit)
    own_types: dict[str, StoredDtype] = {"float16": "float16", "bfloat16": "bfloat16"}

    @naming(file)
    def read(elements: slice | tuple[()]) -> np.ndarray:
        # Overflow gives infinities; the store drops and counts such rows.
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(array.read(elements), np.float32)

    return ArraySource(shape, own_types.get(array.dtype, "float32"), read)


def _choose(arrays: Arrays, key: str | None, path: Path) -> Array:
    if key is None and len(arrays) == 1:
        (key,) = arrays
    elif "" in arrays:
        raise FormatError(f"{path} holds one array, without a key; leave out --key")
    elif key not in arrays:
        what = f"no array {key}" if key else f"{len(arrays)} arrays"
        raise FormatError(
            f"{path} has {what}; choose by --key one of its keys ({', '.join(arrays) or 'none'})"
        )
    return arrays[key]()


def _flattened(array: Array, file: str, flatten: str | None) -> tuple[int, ...]:
    """The shape (rows, features), or (documents, positions, features) with one or more dimensions of positions."""
    shape = array.shape
    if len(shape) < 2 or not math.prod(shape):
        raise FormatError(
            f"cannot import {file}: expected rows in an array of shape (rows, features) or with more "
            f"dimensions, got shape {shape}"
        )
    if len(shape) == 2:
        if flatten:
            raise FormatError(
                f"--flatten does nothing with {file}: expected an array of more than two dimensions, got "
                f"shape {shape}; leave it out"
            )
        return shape
    rows, width = math.prod(shape[:-1]), math.prod(shape[1:])
    flatten = flatten or array.flatten
    if flatten is None:
        raise FormatError(
            f"cannot import {file}: expected an array of shape (rows, features), got shape {shape}: "
            f"--flatten positions gives {counted(rows, 'row')} of {shape[-1]:,} dimensions, "
            f"--flatten features {counted(shape[0], 'row')} of {width:,}"
        )
    return (shape[0], width) if flatten == "features" else shape


def _digits() -> ArraySource:
    from sklearn.datasets import load_digits

    images = load_digits().data
    return ArraySource(images.shape, "float32", images.__getitem__)


def _patches() -> ArraySource:
    """Patches of scikit-learn's two photographs, in grey, each less its mean.

    Every square of a photograph's grid is a document of 8 patches, at positions drawn with a fixed seed, so that
    training patches and held-out ones share no pixel.
    """
    from sklearn.datasets import load_sample_images

    photographs = load_sample_images().images
    random, offsets = np.random.default_rng(0), SQUARE - PATCH + 1
    rows: list[np.ndarray] = []
    for grey in (photograph.mean(-1) for photograph in photographs):
        windows = np.lib.stride_tricks.sliding_window_view(grey, (PATCH, PATCH))
        for top in range(0, grey.shape[0] - SQUARE + 1, SQUARE):
            for left in range(0, grey.shape[1] - SQUARE + 1, SQUARE):
                chosen = random.choice(offsets**2, PATCHES_PER_SQUARE, replace=False)
                rows.extend(windows[top + chosen // offsets, left + chosen % offsets])
    patches = np.stack(rows).reshape(len(rows), -1)
    centred = (patches - patches.mean(1, keepdims=True)).astype(np.float32)
    documents = np.arange(len(rows), dtype=np.int64) // PATCHES_PER_SQUARE
    return ArraySource(centred.shape, "float32", centred.__getitem__, documents=documents)


SAMPLES: dict[str, Callable[[], ArraySource]] = {"digits": _digits, "patches": _patches}
