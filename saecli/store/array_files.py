"""The rows of arrays in files: which files and arrays, and what is a row."""

import glob
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import filter as matches_of
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..base.errors import FormatError, counted
from ..base.home import natural_order
from .arrays import (
    Array,
    Arrays,
    ArraySource,
    Part,
    check_memory,
    demand_rows,
    files_named_in,
    format_of,
    list_arrays,
    list_index,
    naming,
)
from .options import ImportConfig

SQUARE, PATCH, PATCHES_PER_SQUARE = 32, 16, 8  # pixels, pixels, patches
TOKEN_IDS = {"token_ids": "token_id", "input_ids": "token_id"}  # keys of arrays, and their column
# Arrays from which on each is a document: of fewer, a tenth may be much of the rows. Not shards of one array.
MANY = 10
SHARD_NAMES = r"(\d-of-\d+\.\w+|\.parquet|\.index\.json)$"
DEFAULTS = ImportConfig()
Files: TypeAlias = str | Path | Sequence[str | Path]


def files_of(words: Sequence[str]) -> list[Path]:
    """The files of paths, folders and patterns; those of a folder or a pattern in the order of the numbers in their
    names. FormatError if there are none, or one comes twice."""
    found: list[Path] = []
    for word in words:
        path, paths = Path(word), [Path(word)]
        if path.is_dir():
            paths = [entry for entry in path.glob("[!.]*") if entry.is_file() and format_of(entry)]
            paths = [entry for entry in paths if format_of(entry) is list_index] or paths
        elif not path.exists() and glob.has_magic(word):
            paths = [
                entry for entry in map(Path, glob.glob(word, recursive=True)) if entry.is_file()
            ]
        if not paths:
            raise FormatError(
                f"cannot import {word}: expected files of arrays, got none; check the path"
            )
        found += sorted(paths, key=lambda path: natural_order(str(path)))
    counts = Counter(path.resolve() for path in found)
    for path in found:
        if counts[path.resolve()] > 1:
            raise FormatError(f"cannot import {path}: it is given twice; name each file once")
    return found


def open_array(file: Files, config: ImportConfig = DEFAULTS) -> ArraySource:
    """Open rows to import: of files in `ARRAY_FORMATS`, or a name in `SAMPLES`; see `import_array`."""
    words = [str(word) for word in ([file] if isinstance(file, str | Path) else file)]
    if words[0] in SAMPLES and not Path(words[0]).exists() and len(words) == 1:
        if config.key or config.flatten or config.index or config.mask or config.transpose:
            raise FormatError(
                f"{words[0]} come whole from scikit-learn; leave out --key, --flatten and other options of files"
            )
        return SAMPLES[words[0]]()
    files = files_of(words)
    listed = lru_cache(maxsize=1)(lambda path: list_arrays(path, config))
    parts: list[Part] = []
    likely_mask = None
    for path in files:
        with naming(str(path)):
            keys = _chosen(listed(path), path, config.key)
            several = len(files) > 1 or len(keys) > 1
            for key in keys:
                part = _part(path, key, listed, config, several)
                first = parts[0] if parts else part
                if part.kind != first.kind:
                    raise FormatError(
                        f"cannot import {part.name} with {first.name}: expected {first.kind}, got {part.kind}; "
                        "leave it out, or convert it"
                    )
                parts.append(part)
            likely_mask = likely_mask or _likely_mask(listed(path), keys, part)
    indexes = [path for path in files if format_of(path) is list_index]
    members = sorted(file for index in indexes for file in set(files_named_in(index).values()))
    is_shards = all(re.search(SHARD_NAMES, path.name) for path in files)
    is_texts = "token_id" in parts[0].beside or len(parts) >= MANY
    by_part = several and len(parts[0].shape) == 2 and is_texts and not is_shards
    return ArraySource(parts, [*files, *members], by_part, likely_mask)


def _chosen(arrays: Arrays, path: Path, key: str | None) -> list[str]:
    """The keys of the arrays whose rows are meant."""
    if key is not None and "" in arrays:
        raise FormatError(f"{path} holds one array, without a key; leave out --key")
    if key is not None:
        keys = [key] if key in arrays else sorted(matches_of(arrays, key), key=natural_order)
    else:
        opened = {name: listing() for name, listing in arrays.items()}
        keys = [
            name
            for name, array in opened.items()
            if len(arrays) == 1
            or ("float" in array.dtype and (array.in_list or len(array.shape) > 1))
        ]
        if len(keys) > 1 and not all(opened[name].in_list for name in keys):
            keys = []
    if not keys:
        what = f"no array {key}" if key else f"{len(arrays)} arrays"
        raise FormatError(
            f"{path} has {what}; choose by --key one of its keys ({', '.join(arrays) or 'none'}), or several "
            "alike by a pattern"
        )
    return keys


def _parent(key: str) -> str:
    """What the keys of a list's mapping, or of a group, have in common."""
    return key[: max(key.rfind("."), key.rfind("/")) + 1]


def _part(
    path: Path, key: str, listed: Callable[[Path], Arrays], config: ImportConfig, several: bool
) -> Part:
    def opened() -> dict[str, Array]:
        return _opened(listed(path), key, path, config, several)

    name = f"{path}, {key}" if key and several else str(path)
    arrays = opened()
    rows, beside = arrays["rows"], tuple(arrays)[1:]
    shape = _flattened(rows, name, config, beside)
    # An allocator need not refuse what a file claims.
    to_fit = f"one row or document of its shape, {rows.shape}, is as large; check the shape"
    check_memory(name, 4 * math.prod(rows.shape[1:]), to_fit)
    return Part(name, shape, rows.dtype, opened, beside)


def _likely_mask(arrays: Arrays, keys: Sequence[str], part: Part) -> str | None:
    """An array, none of the rows, that leaves out some positions of the last of them."""
    for name in arrays.keys() - set(keys) if "mask" not in part.beside else ():
        own_name = name.removeprefix(_parent(keys[-1]))
        if own_name not in TOKEN_IDS and (array := arrays[name]()).shape == part.shape[:-1]:
            values = np.asarray(array.read(slice(None)))
            if np.isin(values, (0, 1)).all() and not values.all():
                return own_name
    return None


def _opened(
    arrays: Arrays, key: str, path: Path, config: ImportConfig, several: bool
) -> dict[str, Array]:
    """The "rows" of an array, and values of the same positions: the mask, and token ids."""
    array = arrays[key]()
    demand_rows(array.dtype, f"cannot import {path}")
    beside = {
        column: arrays[prefix + name]()
        for name, column in ((config.mask, "mask"), *TOKEN_IDS.items())
        for prefix in ("", _parent(key))  # its own ones count
        if name and prefix + name in arrays
    }
    if config.mask and "mask" not in beside:
        raise FormatError(
            f"{path} has no array {config.mask} for --mask; choose one of its keys ({', '.join(arrays)})"
        )
    if config.index:
        entries, whole = config.index.split(","), array.shape
        array = _indexed(array, entries, path)
        for name, other in beside.items():
            if other.shape == whole[: len(other.shape)]:
                beside[name] = _indexed(other, entries[: len(other.shape)], path)
    if config.transpose:
        array = _transposed(array, path, config.index is not None)
    if several and len(array.shape) == 1:  # each vector is a row
        vector = array
        array = replace(array, shape=(1, *array.shape), read=lambda part: vector.read(slice(None)))
    tokens = beside["token_id"].shape if "token_id" in beside else array.shape[:-1]
    flatten = config.flatten or array.flatten
    if flatten != "features" and array.shape[: len(tokens)] == tokens:
        array = _of_one_layer(array, len(tokens), path)
    positions = array.shape[:1] if flatten == "features" else array.shape[:-1]
    if config.mask and beside["mask"].shape != positions:
        raise FormatError(
            f"cannot use --mask {config.mask} for {path}: expected a value for each position, shape {positions}, "
            f"got shape {beside['mask'].shape}; choose another array"
        )
    fitting = {name: other for name, other in beside.items() if other.shape == positions}
    return {"rows": array, **fitting}


def _indexed(array: Array, index: Sequence[str], path: Path) -> Array:
    """A part of an array, by the entries of an index in NumPy's brackets."""
    entries: list[int | slice] = []
    try:
        for entry in index:
            if ":" in entry:
                start, stop = (int(end) if end else None for end in entry.split(":"))
                entries.append(slice(start, stop))
            else:
                entries.append(int(entry))
        shape = np.broadcast_to(np.int8(0), array.shape)[tuple(entries)].shape
        entries.append(slice(None))
        first = next(axis for axis, each in enumerate(entries) if isinstance(each, slice))
        numbers: Any = range(array.shape[first])[entries[first]]
    except (IndexError, ValueError) as error:
        raise FormatError(
            f"cannot take --index {','.join(index)} of {path}: expected an index such as ':,2', without steps, of an "
            f"array of shape {array.shape}"
        ) from error

    def read(elements: slice) -> np.ndarray:
        own = numbers[elements]
        part = slice(own.start, own.stop)
        return array.read((*entries[:first], part, *entries[first + 1 : -1]))

    return replace(array, shape=shape, read=read)


def _transposed(array: Array, path: Path, is_part: bool) -> Array:
    if len(array.shape) != 2 or is_part:
        raise FormatError(
            f"cannot --transpose {path}: expected a matrix, without --index, got shape {array.shape}; leave one out"
        )
    return replace(
        array,
        shape=array.shape[::-1],
        read=lambda part: np.asarray(array.read((slice(None), part))).T,
    )


def _of_one_layer(array: Array, axes: int, path: Path) -> Array:
    """An array without the axes between its tokens and its width; FormatError if these hold several layers."""
    layers = array.shape[axes:-1]
    if not layers:
        return array
    if math.prod(layers) > 1:
        before = ":," * axes
        raise FormatError(
            f"cannot import {path}: expected one vector for each token, got {layers[0]:,} layers, shape {array.shape}: "
            f"choose one, by --index {before}0 for the first, or put them side by side by --flatten features"
        )
    return _indexed(array, [*":" * axes, *"0" * len(layers)], path)


def _flattened(
    array: Array, name: str, config: ImportConfig, beside: Sequence[str]
) -> tuple[int, ...]:
    """The shape (rows, features), or (documents, positions, features) with one or more dimensions of positions."""
    shape = array.shape
    if len(shape) < 2 or min(shape) < 1:
        raise FormatError(
            f"cannot import {name}: expected rows in an array of shape (rows, features) or with more "
            f"dimensions, got shape {shape}"
        )
    if len(shape) == 2:
        if config.flatten:
            raise FormatError(
                f"--flatten does nothing with {name}: expected an array of more than two dimensions, got "
                f"shape {shape}; leave it out"
            )
        return shape
    rows, width = math.prod(shape[:-1]), math.prod(shape[1:])
    flatten = config.flatten or array.flatten
    if flatten is None:
        raise FormatError(
            f"cannot import {name}: expected an array of shape (rows, features), got shape {shape}: "
            f"--flatten positions gives {counted(rows, 'row')} of {shape[-1]:,} dimensions, "
            f"--flatten features {counted(shape[0], 'row')} of {width:,}"
        )
    if flatten == "positions" and len(shape) > 3 and not (config.index or beside):
        axes = ", ".join(f"axis {axis} of {length:,}" for axis, length in enumerate(shape[:-1]))
        raise FormatError(
            f"cannot import {name}: expected to know which axes are positions, got {axes}, and {shape[-1]:,} "
            "dimensions: where an axis is layers or heads, choose one by --index (':,2': the third of axis 1); "
            "where none is, take all by --index :"
        )
    return (shape[0], width) if flatten == "features" else shape


def _sample(rows: np.ndarray, **columns: np.ndarray) -> ArraySource:
    values = {"rows": rows, **columns}
    arrays = {name: Array(each.shape, "float32", each.__getitem__) for name, each in values.items()}
    return ArraySource((Part("sample", rows.shape, "float32", lambda: arrays, tuple(columns)),))


def _digits() -> ArraySource:
    from sklearn.datasets import load_digits

    images = load_digits().data
    return _sample(images)


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
    return _sample(centred, document=documents)


SAMPLES: dict[str, Callable[[], ArraySource]] = {"digits": _digits, "patches": _patches}
