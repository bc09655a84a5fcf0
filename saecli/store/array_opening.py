"""Opening an array to import: choosing it from a file, flattening it to rows, and adding labels."""

import math
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ..base.errors import FormatError, counted, did_you_mean
from ..base.files import regular
from .array_formats import ARRAY_FORMATS, SUFFIXES
from .arrays import BLOCK_BYTES, REAL_NUMBERS, Array, Arrays, ArraySource, check_memory, naming
from .hdf5 import Link
from .samples import SAMPLES

LONGEST = 2**31 - 1  # most positions per document
NAMED = 20  # most keys that a message lists


def open_array(file: str, key: str | None = None, labels: str | None = None,
               flatten: str | None = None) -> ArraySource:
    """Open an array to import.

    Args:
        file: path of a file in one of `ARRAY_FORMATS`; or a name in `SAMPLES`, if there is no file of that name.
        key: which array of the file; needed if it holds several.
        labels: path of a file with one array of integers, or the key of one in the same file.
        flatten: the rows of an array of more than two dimensions: "positions", each vector along the last dimension,
            with one document per element of the first; or "features", each element of the first.

    Raises:
        FormatError: the file cannot be read, holds no array of numbers in rows, or does not fit in memory; or the key
            or the way to flatten is missing or wrong, and the choices are listed.
    """
    if file in SAMPLES and not Path(file).exists():
        if key or labels or flatten:
            raise FormatError(f"{file} come whole from scikit-learn; leave out --key, --labels and --flatten")
        return SAMPLES[file]()
    path = Path(file)
    with naming(file):
        arrays = _list_arrays(path)
        from_file = labels is not None and (Path(labels).is_file() or (labels not in arrays and Path(labels).exists()))
        array = _choose(arrays, key, path, other=None if from_file else labels)
    _check_numbers(array, file)
    shape = _flattened(array, file, flatten)
    check_memory(file, array.held + 4 * max(BLOCK_BYTES, 4 * shape[-1]))
    found = None
    if labels is not None:
        if not from_file and labels not in arrays:
            raise FormatError(f"there is no file {labels} to take the labels from; check the path" +
                              (f", or give a key of {file} ({_words(arrays)})" if any(arrays) else ""))
        with naming(labels):
            found = _read_labels(_choose(_list_arrays(Path(labels)), None, Path(labels)) if from_file
                                 else arrays[labels](), labels, shape[:-1])
    own = array.dtype if array.dtype in ("float16", "bfloat16") else "float32"
    return ArraySource(shape, own, naming(file)(array.read), found)


def _list_arrays(path: Path) -> Arrays:
    regular(path).open("rb").close()  # so that the system's errors are reported as such
    name = path.name.lower()
    for pattern, lister in ARRAY_FORMATS.items():
        if re.search(pattern, name):
            return lister(path)
    raise FormatError(f"cannot tell the format of {path} by its name; expected a name that ends in {SUFFIXES}, "
                      f"got {path.name}")


def _choose(arrays: Arrays, key: str | None, path: Path, other: str | None = None) -> Array:
    """The array of a key; without a key, the only array beside the `other`."""
    found = [name for name, array in arrays.items() if not isinstance(array, Link)] or list(arrays)
    there = _words(found) or "none"
    if key is not None:
        if key not in arrays:
            question = did_you_mean(key, arrays)
            raise FormatError(f"{path} holds one array, without a key; leave out --key" if "" in arrays else
                              f"{path} has no array for --key {key}; expected one of its keys ({there})"
                              + f"; {question}" * bool(question))
        return arrays[key]()
    rest = [name for name in found if name != other]
    if len(rest) != 1:
        raise FormatError(f"expected one array in {path}, got {len(rest)} ({there}); choose one with --key")
    return arrays[rest[0]]()


def _words(keys: Iterable[str]) -> str:
    """At most `NAMED` keys of a file, with control characters escaped."""
    names = [key if key.isprintable() else repr(key) for key in keys if key]
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED:,} more" if len(names) > NAMED else "")


def _check_numbers(array: Array, file: str) -> None:
    if not re.fullmatch(REAL_NUMBERS, array.dtype):
        raise FormatError(f"cannot import {file}: expected an array of real numbers, got one of {array.dtype}")
    if len(array.shape) < 2:
        raise FormatError(f"cannot import {file}: expected an array of shape (rows, features) or with more "
                          f"dimensions, got shape {array.shape}")
    if not math.prod(array.shape):
        raise FormatError(f"cannot import {file}: expected a row or more, got an empty array of shape {array.shape}")


def _flattened(array: Array, file: str, flatten: str | None) -> tuple[int, ...]:
    """The shape of an `ArraySource`."""
    shape = array.shape
    if len(shape) == 2:
        if flatten:
            raise FormatError(f"--flatten does nothing with {file}: expected an array of more than two dimensions, got "
                              f"shape {shape}; leave it out")
        return shape
    rows, width = math.prod(shape[:-1]), math.prod(shape[1:])
    chosen = flatten or array.flatten
    if chosen is None:
        raise FormatError(f"cannot import {file}: expected an array of shape (rows, features), got shape {shape}: "
                          f"--flatten positions gives {counted(rows, 'row')} of {shape[-1]:,} dimensions, "
                          f"--flatten features {counted(shape[0], 'row')} of {width:,}")
    if chosen == "features":
        return shape[0], width
    if rows // shape[0] > LONGEST:
        raise FormatError(f"cannot import {file}: expected at most {LONGEST:,} positions in a document, got shape "
                          f"{shape}; import parts of it")
    return shape


def _read_labels(array: Array, name: str, lead: tuple[int, ...]) -> np.ndarray:
    """Labels, (rows,) int64, of rows numbered by the dimensions `lead`, from an array of that shape or flat."""
    rows, shape = math.prod(lead), array.shape
    if math.prod(shape) != rows or (shape[: len(lead)] != lead and shape[:1] != (rows,)):
        other = f" (or of shape {lead})" if len(lead) > 1 else ""
        raise FormatError(f"the labels {name} do not fit: expected {rows}{other}, one for each row, got shape {shape}")
    whole = re.fullmatch(REAL_NUMBERS, array.dtype)
    if whole:
        check_memory(name, array.held + 24 * rows)
        values = np.asarray(array.read((slice(0, shape[0]),))).reshape(rows)
        whole = (values == np.floor(values)).all() and values.min() >= -(2.0**63) and values.max() < 2.0**63
    if not whole:
        raise FormatError(f"the labels {name} do not fit: expected whole numbers, got {array.dtype}")
    return values.astype(np.int64)
