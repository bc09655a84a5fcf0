"""The rows of arrays in files: which files and arrays, what is a row, and the rows in blocks.

Legend: R rows, F features.
"""

import glob
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import filter as matches_of
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ..base.errors import FormatError
from ..base.home import natural_order
from ..base.words import counted
from .arrays import (
    Array,
    Arrays,
    check_memory,
    demand_rows,
    format_of,
    list_arrays,
    naming,
    of_numpy,
    shards_of,
)
from .options import ImportConfig, StoredDtype

SQUARE, PATCH, PATCHES_PER_SQUARE = 32, 16, 8  # pixels, pixels, patches
TOKEN_IDS = {"token_ids": "token_id", "input_ids": "token_id"}  # keys of arrays, and their column
# Arrays from which on each is a document: of fewer, a tenth may be much of the rows. Not shards of one array.
MANY = 10
SHARD_NAMES = r"(\d-of-\d+\.\w+|\.parquet|\.index\.json)$"
OF_FILES = ("key", "index", "flatten", "transpose", "mask", "shape")  # options
BLOCK_BYTES = 16 << 20
DEFAULTS = ImportConfig()
Files: TypeAlias = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class ImportedArray:
    """The rows of one array, opened when read: a process can have few files open."""

    name: str  # in messages
    shape: tuple[int, ...]  # (rows, features), or (documents, positions, ..., features)
    dtype: str
    open: Callable[[], dict[str, Array]]  # "rows", and others by name
    per_row: tuple[str, ...] = ()  # others that have a value for each row: "mask", and columns

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def kind(self) -> str:
        """What rows that follow each other have in common."""
        others = "".join(f" and {name}" for name in self.per_row)
        return f"{len(self.shape)} axes of {self.dtype}, {self.shape[-1]:,} dimensions{others}"

    def values(self, opened: Mapping[str, Array], elements: slice) -> dict[str, np.ndarray]:
        values = {}
        for name in ("rows", *self.per_row):
            shape = (-1, self.shape[-1]) if name == "rows" else (-1,)
            kind = np.float32 if name in ("rows", "mask") else np.int64
            # Overflow gives infinities; the store drops and counts such rows. A view would keep its file open.
            with naming(self.name), np.errstate(over="ignore"):
                values[name] = np.array(opened[name].read(elements), kind, order="C").reshape(shape)
        if not np.isin(values.get("mask", 0), (0, 1)).all():
            raise FormatError(
                f"cannot import {self.name}: expected a --mask of 0 and 1, got others; choose another array"
            )
        return values


@dataclass(frozen=True)
class ArraySource:
    arrays: Sequence[ImportedArray]
    files: Sequence[Path] = ()
    is_of_documents: bool = False  # each array is one
    likely_mask: str | None = None  # an array that may be the mask, if none is given

    @property
    def rows(self) -> int:
        return sum(array.rows for array in self.arrays)

    @property
    def features(self) -> int:
        return self.arrays[0].shape[-1]

    @property
    def dtype(self) -> StoredDtype:
        halves: dict[str, StoredDtype] = {"float16": "float16", "bfloat16": "bfloat16"}
        return halves.get(self.arrays[0].dtype, "float32")

    @property
    def has_documents(self) -> bool:
        return self.is_of_documents or len(self.arrays[0].shape) > 2

    @property
    def columns(self) -> tuple[str, ...]:
        names = [name for name in self.arrays[0].per_row if name != "mask"]
        return ("document", "position", *names) if self.has_documents else (*names,)

    def blocks(self, start: int = 0) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Blocks of about 16 MiB, or of one document, from row `start` on, with which one begins: the first row's
        number; "rows", (R, F) float32; and (R,) each the stored columns, and the "mask" of rows to store."""
        most = BLOCK_BYTES // (4 * self.features)
        gathered: list[dict[str, np.ndarray]] = []
        rows = 0  # of those gathered
        for values in self._pieces(start, most):
            if gathered and rows + len(values["rows"]) > most:
                yield start, _joined(gathered)
                start, gathered, rows = start + rows, [], 0
            gathered.append(values)
            rows += len(values["rows"])
        yield start, _joined(gathered)

    def _pieces(self, start: int, most: int) -> Iterator[dict[str, np.ndarray]]:
        """As `blocks`, each of one array, and of at most `most` rows."""
        begin = documents = 0  # before the array
        for array in self.arrays:
            unit = array.rows // array.shape[0]  # rows per element of the first dimension
            length = array.rows if self.is_of_documents else unit  # of a document
            step = max(1, most // unit)
            elements = range(max(0, start - begin) // unit, array.shape[0], step)
            opened = array.open() if elements else {}
            for element in elements:
                values = array.values(opened, slice(element, element + step))
                if self.has_documents:
                    rows = element * unit + np.arange(len(values["rows"]))
                    values |= {"document": documents + rows // length, "position": rows % length}
                yield values
            begin, documents = begin + array.rows, documents + array.rows // length


def _joined(gathered: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    if len(gathered) == 1:
        return gathered[0]
    return {name: np.concatenate([values[name] for values in gathered]) for name in gathered[0]}


def files_of(words: Sequence[str]) -> list[Path]:
    """The files of paths, folders and patterns, each once, without the shards of an index, in the order of the numbers
    in their names; FormatError if there are none."""
    found: list[Path] = []
    for word in words:
        paths = [Path(word)]
        is_folder = paths[0].is_dir()
        if not paths[0].is_file():
            names = glob.glob(f"{glob.escape(word)}/*" if is_folder else word, recursive=True)
            paths = [path for path in map(Path, names) if path.is_file()]
        if is_folder:
            paths = [path for path in paths if format_of(path)]
        if not paths:
            raise FormatError(
                f"cannot import {word}: expected files of arrays, got none; check the path"
            )
        found += sorted(paths, key=lambda path: natural_order(str(path)))
    shards = {shard for path in found for shard in shards_of(path)}
    return [path for path in dict.fromkeys(found) if path not in shards]


def open_array(file: Files, config: ImportConfig = DEFAULTS) -> ArraySource:
    """Open files in `ARRAY_FORMATS`, or a name in `SAMPLES`; see `import_array`."""
    words = [str(word) for word in ([file] if isinstance(file, str | Path) else file)]
    if words[0] in SAMPLES and not Path(words[0]).exists() and len(words) == 1:
        if any(getattr(config, name) for name in OF_FILES):
            raise FormatError(
                f"{words[0]} come whole from scikit-learn; leave out --key, --flatten and other options of files"
            )
        return SAMPLES[words[0]]()
    files = files_of(words)
    listed = lru_cache(maxsize=1)(partial(list_arrays, config=config))
    imported: list[ImportedArray] = []
    likely_mask = None
    for path in files:
        with naming(str(path)):
            keys = _chosen(listed(path), path, config)
            several = len(files) > 1 or len(keys) > 1
            imported += [_imported(path, key, listed, config, several) for key in keys]
            likely_mask = likely_mask or _likely_mask(listed(path), keys, imported[-1])
    first = imported[0]
    for array in imported:
        if array.kind != first.kind:
            raise FormatError(
                f"cannot import {array.name} with {first.name}: expected {first.kind}, got {array.kind}; leave it out"
            )
    shards = sorted({shard for path in files for shard in shards_of(path)})
    is_shards = all(re.search(SHARD_NAMES, path.name) for path in files)
    is_texts = "token_id" in first.per_row or len(imported) >= MANY
    are_documents = len(imported) > 1 and len(first.shape) == 2 and is_texts and not is_shards
    return ArraySource(imported, [*files, *shards], are_documents, likely_mask)


def _chosen(arrays: Arrays, path: Path, config: ImportConfig) -> list[str]:
    key = config.key
    if not arrays:
        raise FormatError(f"cannot import {path}: expected arrays, got none; name another file")
    if key is not None and "" in arrays:
        raise FormatError(f"{path} holds one array, without a key; leave out --key")
    keys = list(arrays)
    if key is not None:
        keys = [key] if key in arrays else sorted(matches_of(arrays, key), key=natural_order)
    elif len(arrays) > 1:
        opened = {name: arrays[name]() for name in arrays if name != config.mask}
        floats = {name: array for name, array in opened.items() if "float" in array.dtype}
        keys = [name for name, each in floats.items() if each.in_list or len(each.shape) > 1]
        if len(keys) > 1 and not all(opened[name].in_list for name in keys):
            keys = []
    if not keys:
        what = f"no array {key}" if key else f"{len(arrays)} arrays"
        raise FormatError(
            f"{path} has {what}; choose by --key one of its keys ({', '.join(arrays)}), or several alike by a pattern"
        )
    return keys


def _parent(key: str) -> str:
    """What the keys of a list's mapping, or of a group, have in common."""
    return key[: max(key.rfind("."), key.rfind("/")) + 1]


def _imported(
    path: Path, key: str, listed: Callable[[Path], Arrays], config: ImportConfig, several: bool
) -> ImportedArray:
    def opened() -> dict[str, Array]:
        return _opened(listed(path), key, path, config, several)

    name = f"{path}, {key}" if key and several else str(path)
    others = opened()
    rows = others.pop("rows")
    shape = _row_shape(rows, name, config, [other.shape for other in others.values()])
    positions = shape[:-1]
    per_row = [column for column, other in others.items() if other.shape == positions]
    is_reshaped = (
        "mask" in others and "mask" not in per_row and _is_of(others["mask"].shape, positions)
    )

    def fitting() -> dict[str, Array]:
        """With a mask of the same positions in their axes."""
        arrays = opened()
        values = np.asarray(arrays["mask"].read(slice(None)))
        return arrays | {"mask": of_numpy(values.reshape(positions))}

    if is_reshaped:
        per_row.append("mask")
    if config.mask and "mask" not in per_row:
        got = f"shape {others['mask'].shape}" if "mask" in others else "none of this name"
        raise FormatError(
            f"cannot use --mask {config.mask} for {name}: expected an array of a value for each position, shape "
            f"{positions}, got {got}; choose one of its keys ({', '.join(listed(path))})"
        )
    # An allocator need not refuse what a file claims.
    to_fit = f"one row or document of its shape, {rows.shape}, is as large; check the shape"
    check_memory(name, 4 * math.prod(rows.shape[1:]), to_fit)
    return ImportedArray(
        name, shape, rows.dtype, fitting if is_reshaped else opened, tuple(per_row)
    )


def _likely_mask(arrays: Arrays, keys: Sequence[str], imported: ImportedArray) -> str | None:
    """An array, none of the rows, that leaves out some positions of the last of them."""
    for name in arrays if "mask" not in imported.per_row else ():
        short_name = name.removeprefix(_parent(keys[-1]))
        if name in keys or short_name in TOKEN_IDS:
            continue
        array = arrays[name]()
        if _is_of(array.shape, imported.shape[:-1]):
            values = np.asarray(array.read(slice(None)))
            if np.isin(values, (0, 1)).all() and not values.all():
                return short_name
    return None


def _is_of(shape: tuple[int, ...], positions: tuple[int, ...]) -> bool:
    """Whether the shapes have equal axes, but for some of 1, or one has all positions in one axis."""
    axes, others = ([length for length in each if length > 1] for each in (shape, positions))
    is_flat = 1 in (len(axes), len(others))
    return axes == others or (is_flat and math.prod(axes) == math.prod(others))


def _opened(
    arrays: Arrays, key: str, path: Path, config: ImportConfig, several: bool
) -> dict[str, Array]:
    """The "rows" of an array, and the "mask" and "token_id" next to it."""
    rows = arrays[key]()
    demand_rows(rows.dtype, f"cannot import {path}")
    if config.index or config.transpose or several:
        rows = _view(rows, path, config, several)
    found = {
        column: arrays[prefix + name]()
        for name, column in ((config.mask, "mask"), *TOKEN_IDS.items())
        for prefix in ("", _parent(key))  # those next to it count
        if name and prefix + name in arrays
    }
    return {"rows": rows, **found}


def _view(array: Array, path: Path, config: ImportConfig, several: bool) -> Array:
    try:
        words = config.index.split(",") if config.index else []
        entries = [slice(None) if word == ":" else int(word) for word in words]
        shape = np.broadcast_to(np.int8(0), array.shape)[tuple(entries)].shape
    except (IndexError, ValueError) as error:
        raise FormatError(
            f"cannot take --index {config.index} of {path}: expected a number or : for each axis, such as ':,2', of "
            f"an array of shape {array.shape}"
        ) from error
    if config.transpose and len(shape) != 2:
        raise FormatError(
            f"cannot --transpose {path}: expected a matrix, got shape {shape}; choose one by --index"
        )
    entries += [slice(None)] * (len(array.shape) - len(entries))
    axes = [axis for axis, entry in enumerate(entries) if isinstance(entry, slice)]
    if config.transpose:
        axes, shape = axes[::-1], shape[::-1]
    is_vector = several and len(shape) == 1

    def read(part: slice) -> np.ndarray:
        wanted = list(entries)
        if not is_vector:
            wanted[axes[0]] = part
        values = array.read(tuple(wanted))
        return np.asarray(values).T if config.transpose else values

    return replace(array, shape=(1, *shape) if is_vector else shape, read=read)


def _row_shape(
    array: Array, name: str, config: ImportConfig, others: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
    """(rows, features), or (documents, positions, ..., features); positions are the axes of `others`, the shapes of
    masks and token ids, where an array begins with them."""
    shape, flatten = array.shape, config.flatten or array.flatten
    if len(shape) < 2 or min(shape) < 1:
        raise FormatError(
            f"cannot import {name}: expected an array of shape (rows, features) or with more axes, got shape {shape}"
        )
    if len(shape) == 2:
        if config.flatten:
            raise FormatError(
                f"--flatten does nothing with {name}, of two dimensions, shape {shape}; leave it out"
            )
        return shape
    *axes, features = shape
    width = math.prod(shape[1:])
    if flatten == "features":
        return shape[0], width
    known = next((other for other in others if other and other == shape[:-1][: len(other)]), ())
    is_clear = flatten is not None and (len(axes) == 2 or config.index is not None)
    positions = known or (shape[:-1] if is_clear else ())
    if not positions or math.prod(positions) < math.prod(axes):
        lengths = ", ".join(f"axis {axis} of {length:,}" for axis, length in enumerate(axes))
        as_rows = f"{counted(math.prod(axes), 'row')} of {features:,} dimensions"
        option = "--flatten positions" if len(axes) == 2 else "--flatten positions --index :"
        raise FormatError(
            f"cannot import {name}: expected one vector for each position, got {lengths}, and {features:,} dimensions: "
            f"{'' if known else f'{option} gives {as_rows}, '}--flatten features gives "
            f"{counted(shape[0], 'row')} of {width:,}; where axis 1 is layers or heads, --index ':,0' takes the first"
        )
    return (*positions, features)


def _sample(rows: np.ndarray, **columns: np.ndarray) -> ArraySource:
    values = {"rows": rows, **columns}
    arrays = {name: Array(each.shape, "float32", each.__getitem__) for name, each in values.items()}
    return ArraySource(
        (ImportedArray("sample", rows.shape, "float32", lambda: arrays, tuple(columns)),)
    )


def _digits() -> ArraySource:
    from sklearn.datasets import load_digits

    return _sample(load_digits().data)


def _patches() -> ArraySource:
    """Patches of scikit-learn's two photographs, in grey, each less its mean. Every square of a grid is a document of
    8, so that training patches and held-out ones share no pixel."""
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
