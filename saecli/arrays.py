"""Arrays in files of many kinds, read as blocks of float32 rows.

A format is one function and one line in `ARRAY_FORMATS`. The function lists the arrays of a file by their keys
(one of no name where the format holds just one); an array is opened when it is chosen, and its numbers are read
when they are asked for, where the format allows.

Legend: R rows, F features.
"""

import gzip
import math
import os
import pickle
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import FormatError

BLOCK_BYTES = 16 << 20
SQUARE, PATCH, PATCHES_PER_SQUARE = 32, 16, 8  # pixels, pixels, patches
REAL_NUMBERS = r"bool|u?int\d+|b?float\d+"

_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


@dataclass(frozen=True)
class Array:
    """One array of a file.

    Args:
        shape: its shape.
        dtype: the name of its numbers' type, as NumPy and torch have it.
        read: first row, row after the last -> those rows, as NumPy can turn them into float32.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], Any]


Arrays = dict[str, Callable[[], Array]]


@dataclass(frozen=True)
class ArraySource:
    """Rows to import.

    Args:
        name: what messages call it.
        rows: how many rows.
        features: how many features: an array of more than two dimensions is flattened to (rows, features).
        dtype: the stored type that loses least: "float16" or "bfloat16" for these, else "float32".
        labels: (rows,) int64, or None.
        read: as of `Array`.
        documents: (rows,) int64, or None: rows of one document are trained on or held out together.
    """

    name: str
    rows: int
    features: int
    dtype: str
    labels: np.ndarray | None
    read: Callable[[int, int], Any]
    documents: np.ndarray | None = None

    def blocks(self, start: int = 0) -> Iterator[tuple[int, np.ndarray]]:
        """The rows in blocks of about 16 MiB.

        Args:
            start: number of the row to begin with.

        Yields:
            The number of the block's first row, and (R, F) float32.

        Raises:
            FormatError: the file is damaged, or ends too early.
        """
        step = max(1, BLOCK_BYTES // (4 * self.features))
        for begin in range(start, self.rows, step):
            with _naming(self.name):
                block = self.read(begin, min(begin + step, self.rows))
            # What overflows becomes infinite; the store drops such rows and counts them.
            with np.errstate(over="ignore"):
                yield begin, np.ascontiguousarray(block, np.float32).reshape(-1, self.features)


def open_array(file: str, key: str | None = None, labels: str | None = None) -> ArraySource:
    """Open an array to import.

    Args:
        file: path of a file in one of `ARRAY_FORMATS`; or a name in `SAMPLES`, where there is no file of that name.
        key: which array of the file; needed where it holds several.
        labels: path of a file with one array of integers, or the key of one in the same file.

    Raises:
        FormatError: the file cannot be read, or what it holds is no array of numbers in rows; the keys to
            choose from are listed where `key` is missing or wrong.
    """
    if file in SAMPLES and not Path(file).exists():
        if key or labels:
            raise FormatError(f"{file} come whole from scikit-learn; leave out --key and --labels")
        return SAMPLES[file]()
    path = Path(file)
    from_file = labels is not None and Path(labels).is_file()
    with _naming(file):
        arrays = _list_arrays(path)
        array = _choose(arrays, key, path, other=None if from_file else labels)
    _check_rows(array, file)
    found = None
    if labels is not None:
        if not from_file and labels not in arrays:
            keys = ", ".join(filter(None, arrays))
            raise FormatError(f"there is no file {labels} to take the labels from; check the path" +
                              (f", or give a key of {file} ({keys})" if keys else ""))
        with _naming(labels):
            found = _read_labels(_choose(_list_arrays(Path(labels)), None, Path(labels)) if from_file
                                 else arrays[labels](), labels, array.shape[0])
    own = array.dtype if array.dtype in ("float16", "bfloat16") else "float32"
    return ArraySource(path.stem, array.shape[0], math.prod(array.shape[1:]), own, found, array.read)


def _list_arrays(path: Path) -> Arrays:
    if path.is_dir():
        raise FormatError(f"cannot read {path}: expected a file, got a folder; give a file in it")
    name = path.name.lower()
    for pattern, lister in ARRAY_FORMATS.items():
        if re.search(pattern, name):
            return lister(path)
    raise FormatError(f"cannot tell the format of {path} by its name; expected a name that ends in {SUFFIXES}, "
                      f"got {path.name}")


def _choose(arrays: Arrays, key: str | None, path: Path, other: str | None = None) -> Array:
    """The array of that key; without one, the only array there is beside the `other`."""
    there = ", ".join(arrays) or "none"
    if key is not None:
        if key not in arrays:
            raise FormatError(f"{path} holds one array, without a key; leave out --key" if "" in arrays else
                              f"{path} has no array for --key {key}; expected one of its keys ({there})")
        return arrays[key]()
    rest = [name for name in arrays if name != other]
    if len(rest) != 1:
        raise FormatError(f"expected one array in {path}, got {len(rest)} ({there}); choose one with --key")
    return arrays[rest[0]]()


def _check_rows(array: Array, file: str) -> None:
    if not re.fullmatch(REAL_NUMBERS, array.dtype):
        raise FormatError(f"cannot import {file}: expected an array of real numbers, got one of {array.dtype}")
    if len(array.shape) < 2:
        raise FormatError(f"cannot import {file}: expected an array of shape (rows, features) or with more "
                          f"dimensions, got shape {array.shape}")
    if not math.prod(array.shape):
        raise FormatError(f"cannot import {file}: expected a row or more, got an empty array of shape {array.shape}")


def _read_labels(array: Array, name: str, rows: int) -> np.ndarray:
    if math.prod(array.shape) != rows or array.shape[:1] != (rows,):
        raise FormatError(f"the labels {name} do not fit: expected {rows}, one for each row, got shape {array.shape}")
    values = np.asarray(array.read(0, rows) if re.fullmatch(REAL_NUMBERS, array.dtype) else np.nan)
    if not (values == np.floor(values)).all():
        raise FormatError(f"the labels {name} do not fit: expected whole numbers, got {array.dtype}")
    return values.reshape(rows).astype(np.int64)


# What the libraries raise, together, for files that they cannot read.
UNREADABLE = (OSError, EOFError, ValueError, LookupError, TypeError, RuntimeError, zlib.error, zipfile.BadZipFile,
              pickle.UnpicklingError)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Turn what the libraries raise for files that they cannot read into a sentence that names the file.

    Their own words are left out: they advise options that are not ours, among them to run what a file holds.
    """
    try:
        yield
    except FormatError:
        raise
    except FileNotFoundError as error:
        raise FormatError(f"there is no file {name}; check the path") from error
    except UNREADABLE as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number else "expected numbers in its name's format, got something else"
        remedy = "check the path" if number else "check that the file is whole and of this format"
        raise FormatError(f"cannot read {name}: {reason}; {remedy}") from error


def _in_memory(array: np.ndarray) -> Array:
    """An array that NumPy holds or maps."""
    return Array(array.shape, array.dtype.name, lambda begin, end: array[begin:end])


def _of_torch(shape: tuple[int, ...], tensor: Any) -> Array:
    """What torch slices: a tensor, or a slice of a safetensors file; NumPy has no bfloat16, so float32 comes out."""
    kind = tensor if hasattr(tensor, "layout") else tensor[0:0]
    dtype = str(kind.dtype).removeprefix("torch.")
    return Array(shape, dtype if str(kind.layout) == "torch.strided" else f"sparse {dtype}",
                 lambda begin, end: tensor[begin:end].float().numpy())


def _list_npy(path: Path) -> Arrays:
    return {"": lambda: _in_memory(np.load(path, mmap_mode="r", allow_pickle=False))}


def _list_npz(path: Path) -> Arrays:
    def load(key: str) -> Array:
        with path.open("rb") as content, np.load(content, allow_pickle=False) as file:
            return _in_memory(file[key])

    with path.open("rb") as content, np.load(content, allow_pickle=False) as file:
        return {key: lambda key=key: load(key) for key in file.files}


def _list_safetensors(path: Path) -> Arrays:
    import safetensors

    def load(key: str) -> Array:
        part = file.get_slice(key)
        shape = tuple(part.get_shape())
        return _of_torch(shape, part if shape else file.get_tensor(key))

    try:
        file = safetensors.safe_open(path, framework="pt")
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from error
    return {key: lambda key=key: load(key) for key in file.keys()}  # noqa: SIM118 - it cannot be iterated over


def _list_torch(path: Path) -> Arrays:
    import torch

    def tensors(value: Any, key: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, torch.Tensor):
            yield key, value.detach()
        elif isinstance(value, Mapping):
            for name, entry in value.items():
                yield from tensors(entry, f"{key}.{name}" if key else str(name))

    mapped = zipfile.is_zipfile(path)  # files of torch before 1.6 are not, and can only be read whole
    try:
        with warnings.catch_warnings(action="ignore"):  # of pickle protocols that may fail, which is an error anyway
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        with path.open("rb") as file:
            pickled = mapped or file.read(1) == pickle.PROTO
        if not pickled:
            raise
        raise FormatError(f"cannot read {path}: expected tensors alone, got other Python objects, which are not loaded "
                          "as they could run code; save the tensors alone, with `torch.save`") from error
    return {key: lambda tensor=tensor: _of_torch(tuple(tensor.shape), tensor) for key, tensor in tensors(content, "")}


def _list_hdf5(path: Path) -> Arrays:
    import h5py

    def load(key: str) -> Array:
        dataset = file[key]
        # A store's bfloat16 is a float of two bytes that h5py gives as float32.
        brain = dataset.dtype == np.float32 and dataset.id.get_type().get_size() == 2
        return Array(dataset.shape or (), "bfloat16" if brain else dataset.dtype.name,
                     lambda begin, end: dataset[begin:end])

    file = h5py.File(path, "r", locking=False)
    keys: list[str] = []
    file.visititems(lambda key, item: keys.append(key) if isinstance(item, h5py.Dataset) else None)
    return {key: lambda key=key: load(key) for key in keys}


def _list_idx(path: Path) -> Arrays:
    """MNIST's format: two zero bytes, a type, the number of dimensions, each size, the numbers; all big-endian."""
    if path.suffix.lower() == ".gz":
        with gzip.open(path) as file:
            content = np.frombuffer(file.read(), np.uint8)  # gzip cannot be read from the middle
    else:
        content = np.memmap(path, np.uint8, "r")
    head = bytes(content[:4])
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_TYPES:
        raise FormatError(f"cannot read {path}: expected an idx file to begin with 0, 0 and a type, got {list(head)}; "
                          "check that the file is of this format")
    begin, numbers = 4 + 4 * head[3], np.dtype(_IDX_TYPES[head[2]])
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, begin, 4))
    end = begin + math.prod(shape) * numbers.itemsize
    if len(content) < end:
        raise FormatError(f"cannot read {path}: expected {end} bytes for shape {shape}, got {len(content)}; "
                          "it is truncated, so fetch it again")
    return {"": lambda: _in_memory(content[begin:end].view(numbers).reshape(shape))}


def _digits() -> ArraySource:
    """scikit-learn's 1797 handwritten digits of 8x8 pixels, with their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return ArraySource("digits", *images.shape, "float32", labels.astype(np.int64), _in_memory(images).read)


def _patches() -> ArraySource:
    """Patches of scikit-learn's two photographs, in grey, each less its mean.

    Every square of a photograph's grid is a document: 8 patches lie in it, at places drawn with a fixed seed, so that
    no pixel is both in patches trained on and in patches held out. Rows differ in norm two-hundredfold.
    """
    from sklearn.datasets import load_sample_images

    try:
        photographs = load_sample_images().images
    except ImportError as error:
        raise FormatError("reading the photographs that patches are cut from needs Pillow, which is not installed; "
                          "install it with `pip install pillow`") from error
    random, places = np.random.default_rng(0), SQUARE - PATCH + 1
    rows: list[np.ndarray] = []
    for grey in (photograph.mean(-1) for photograph in photographs):
        windows = np.lib.stride_tricks.sliding_window_view(grey, (PATCH, PATCH))
        for top in range(0, grey.shape[0] - SQUARE + 1, SQUARE):
            for left in range(0, grey.shape[1] - SQUARE + 1, SQUARE):
                chosen = random.choice(places**2, PATCHES_PER_SQUARE, replace=False)
                rows.extend(windows[top + chosen // places, left + chosen % places])
    patches = np.stack(rows).reshape(len(rows), -1)
    centred = (patches - patches.mean(1, keepdims=True)).astype(np.float32)
    documents = np.arange(len(rows), dtype=np.int64) // PATCHES_PER_SQUARE
    return ArraySource("patches", *centred.shape, "float32", None, _in_memory(centred).read, documents)


SAMPLES: dict[str, Callable[[], ArraySource]] = {"digits": _digits, "patches": _patches}
# By the end of the file's name, in lower case.
ARRAY_FORMATS: dict[str, Callable[[Path], Arrays]] = {
    r"\.npy$": _list_npy,
    r"\.npz$": _list_npz,
    r"\.safetensors$": _list_safetensors,
    r"\.(pt|pth)$": _list_torch,
    r"\.(h5|hdf5)$": _list_hdf5,
    r"[.-]idx(\d-\w+)?(\.gz)?$": _list_idx,
}
SUFFIXES = ".npy, .npz, .safetensors, .pt, .pth, .h5, .hdf5, .idx or idx3-ubyte, the last two also with .gz"
