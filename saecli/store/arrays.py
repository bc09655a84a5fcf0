"""Arrays in files: the formats, and the rows of an array as imported.

A format is one function, which lists a file's arrays by key ("" for the only one), and one line in `ARRAY_FORMATS`.

Legend: R rows, F features.
"""

import gzip
import math
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import safe_open

from ..base.errors import FormatError, size_words
from ..base.machine import available_memory
from .options import StoredDtype

if TYPE_CHECKING:
    import h5py

BLOCK_BYTES = 16 << 20
ROW_NUMBERS = r"bool|uint8|b?float\d+"  # as activations and images have them
IN_PIECES = "save it as .npy, which is read in pieces"
IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
CHUNK_CACHE_BYTES = 64 << 20  # of an HDF5 dataset, whose rows may be read a chunk's part at a time


@dataclass(frozen=True)
class Array:
    shape: tuple[int, ...]
    dtype: str
    # Some elements of the first dimension, or by () all, in a form that NumPy can convert to float32.
    read: Callable[[slice | tuple[()]], Any]
    # How files of this format are flattened by default; None if either way may be meant.
    flatten: str | None = None


Arrays = dict[str, Callable[[], Array]]


@dataclass(frozen=True)
class ArraySource:
    shape: tuple[int, ...]  # (rows, features), or (documents, positions, ..., features)
    dtype: StoredDtype  # which loses least: float16 or bfloat16 if the array's own, else float32
    read: Callable[[slice | tuple[()]], Any]  # as in `Array`
    documents: np.ndarray | None = None  # (rows,) int64

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def features(self) -> int:
        return self.shape[-1]

    def columns(self, begin: int, end: int) -> dict[str, np.ndarray]:
        """The stored columns of rows `begin` to `end`, (R,) integers each."""
        if self.documents is not None:
            return {"document": self.documents[begin:end]}
        if len(self.shape) == 2:
            return {}
        documents, positions = np.divmod(np.arange(begin, end), self.rows // self.shape[0])
        return {"document": documents, "position": positions}

    def blocks(self, start: int = 0) -> Iterator[tuple[int, np.ndarray]]:
        """The rows from `start` on, in blocks of about 16 MiB, or of one document: the number of the first row, and
        (R, F) float32."""
        unit = self.rows // self.shape[0]  # rows per element of the first dimension
        step = max(1, BLOCK_BYTES // (4 * self.features * unit))
        for element in range(start // unit, self.shape[0], step):
            block = np.ascontiguousarray(self.read(slice(element, element + step)), np.float32)
            row = element * unit
            yield max(row, start), block.reshape(-1, self.features)[max(0, start - row) :]


@contextmanager
def naming(name: str, to_fit: str = IN_PIECES) -> Iterator[None]:
    """Turn what libraries raise for unreadable files into a FormatError that names the file: NumPy, torch, h5py and
    safetensors document no set of exceptions. Their messages, which may advise to run the code in a file, are dropped.
    `to_fit`: what to do if memory is too small."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except FormatError:
        raise
    except FileNotFoundError as error:
        raise FormatError(f"there is no file {name}; check the path") from error
    except MemoryError as error:
        raise FormatError(
            f"cannot read {name}: expected memory for it, got none; {to_fit}"
        ) from error
    except Exception as error:  # of any type: none is documented
        reason = getattr(error, "strerror", None) or "it is damaged or of another format"
        raise FormatError(
            f"cannot read {name}: {reason}; check that the file is whole and of this format"
        ) from error


def check_memory(name: str, needed: int, to_fit: str = IN_PIECES) -> None:
    """Raise a FormatError if a file does not fit in memory."""
    if needed > (free := available_memory()):
        raise FormatError(
            f"cannot read {name}: expected {size_words(needed)} of free memory, which it takes at once, "
            f"got {size_words(free)}; {to_fit}"
        )


def demand_rows(dtype: str, subject: str) -> None:
    """FormatError if numbers of a type are no rows of activations or images, after the words `subject`."""
    if not re.fullmatch(ROW_NUMBERS, dtype):
        raise FormatError(
            f"{subject}: expected floats, or bytes of images, got {dtype}; convert them to float32 if they "
            "are rows, which token ids are not"
        )


def _of_numpy(values: np.ndarray) -> Array:
    return Array(values.shape, values.dtype.name, values.__getitem__)


def _of_torch(shape: tuple[int, ...], tensor: Any) -> Array:
    """A tensor, or a slice of a safetensors file; bfloat16, which NumPy lacks, is read as float32."""
    kind = tensor if hasattr(tensor, "dtype") else tensor[0:0]
    dtype = str(kind.dtype).removeprefix("torch.")

    def read(elements: slice | tuple[()]) -> np.ndarray:
        part = tensor[elements]
        return (part.float() if dtype == "bfloat16" else part).numpy(force=True)

    return Array(shape, dtype, read)


def list_numpy(path: Path) -> Arrays:
    """The arrays of an .npz archive, by name, each read whole when opened; or the mapped one of an .npy file."""
    with path.open("rb") as file:
        if file.read(2) == b"PK":
            zipfile.ZipFile(file).close()  # of a damaged one NumPy would leave the file open
    loaded = np.load(path, mmap_mode="r", allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return {"": lambda: _of_numpy(loaded)}
    loaded.close()

    def load(key: str) -> Array:
        with np.load(path, allow_pickle=False) as archive:
            return _of_numpy(archive[key])

    return {key: partial(load, key) for key in loaded.files}


def _list_safetensors(path: Path) -> Arrays:
    def describe(key: str) -> Array:
        part = file.get_slice(key)
        shape = tuple(part.get_shape())
        return _of_torch(shape, part if shape else file.get_tensor(key))

    file = safe_open(path, framework="pt")
    return {key: partial(describe, key) for key in file.keys()}  # noqa: SIM118 - it is not iterable


def _list_torch(path: Path) -> Arrays:
    import torch

    def tensors(value: Any, key: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, torch.Tensor):
            yield key, value.detach()
        elif isinstance(value, Mapping | list | tuple):
            entries = value if isinstance(value, Mapping) else dict(enumerate(value))
            for name, entry in entries.items():
                yield from tensors(entry, f"{key}.{name}" if key else str(name))

    return {
        key: partial(_of_torch, tuple(tensor.shape), tensor)
        for key, tensor in tensors(load_torch(path), "")
    }


def load_torch(path: Path) -> Any:
    """Load a file of `torch.save` on the CPU, without running code in it; call it within `naming`. Numbers are mapped
    rather than read if the file allows."""
    import torch

    can_map = zipfile.is_zipfile(path)  # files of torch before 1.6 can only be read whole
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=can_map)
    except pickle.UnpicklingError as error:
        raise FormatError(
            f"cannot read {path}: it is damaged, or holds other Python objects than tensors, which are not "
            "loaded as they could run code; check that the file is whole and of this format, or save the "
            "tensors alone with `torch.save`"
        ) from error


def _list_idx(path: Path) -> Arrays:
    """MNIST's format: two zero bytes, a type, the number of dimensions, each size, the numbers; all big-endian."""
    content = path.read_bytes()
    if path.suffix.lower() == ".gz":
        content = gzip.decompress(content)
    kind = IDX_TYPES.get(int.from_bytes(content[:3]))  # two zeros, and the type
    if kind is None or len(content) < 4:
        raise FormatError(
            f"cannot read {path}: expected an idx file to begin with 0, 0 and a type, got "
            f"{list(content[:4])}; check that the file is of this format"
        )
    dimensions = content[3]
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    values = np.frombuffer(content, kind, offset=4 + 4 * dimensions).reshape(shape)
    return {"": lambda: replace(_of_numpy(values), flatten="features")}


def list_hdf5(path: Path) -> Arrays:
    """The datasets of a file; links to others are none of them."""
    import h5py

    arrays: Arrays = {}

    def add(key: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            arrays[key] = partial(_of_hdf5, path, item)

    h5py.File(path, "r", locking=False, rdcc_nbytes=CHUNK_CACHE_BYTES).visititems(add)
    return arrays


def _of_hdf5(path: Path, dataset: "h5py.Dataset") -> Array:
    """A dataset whose numbers are all in its own file; the HDF5 library would open other files, and wait for pipes."""
    import h5py

    made = dataset.id.get_create_plist()
    filters = [made.get_filter(number) for number in range(made.get_nfilters())]
    if dataset.is_virtual or dataset.external:
        problem = "has its numbers elsewhere; write them into a dataset of this file"
    elif missing := [name for code, _, _, name in filters if not h5py.h5z.filter_avail(code)]:
        problem = f"is compressed by {missing[0].decode(errors='replace') or 'an unknown filter'}; use gzip"
    elif _is_partly_written(dataset):
        problem = "was not written in full; write the rest, or cut it to what is there"
    else:
        # A store's bfloat16 is a float of two bytes that h5py gives as float32.
        is_bfloat16 = dataset.dtype == np.float32 and dataset.id.get_type().get_size() == 2
        dtype = "bfloat16" if is_bfloat16 else dataset.dtype.name
        return Array(dataset.shape or (), dtype, dataset.__getitem__)
    raise FormatError(f"cannot import {path}: the dataset {dataset.name} {problem}")


def _is_partly_written(dataset: "h5py.Dataset") -> bool:
    """Whether some numbers were never written, and would be read as 0."""
    shape = dataset.shape or ()
    if dataset.chunks is None:
        return dataset.id.get_storage_size() < math.prod(shape) * dataset.id.get_type().get_size()
    counts = [-(-length // own) for length, own in zip(shape, dataset.chunks, strict=True)]
    return dataset.id.get_num_chunks() < math.prod(counts)


# By the end of the lower-case file name.
ARRAY_FORMATS: dict[str, Callable[[Path], Arrays]] = {
    r"\.np[yz]$": list_numpy,
    r"\.safetensors$": _list_safetensors,
    r"\.(pt|pth)$": _list_torch,
    r"\.(h5|hdf5)$": list_hdf5,
    r"[.-]idx(\d-\w+)?(\.gz)?$": _list_idx,
}
SUFFIXES = ".npy, .npz, .safetensors, .pt, .pth, .h5, .hdf5, .idx or idx3-ubyte, the last two also with .gz"


def list_arrays(path: Path) -> Arrays:
    path.open("rb").close()  # so that the system's errors are reported as such
    for pattern, lister in ARRAY_FORMATS.items():
        if re.search(pattern, path.name.lower()):
            return lister(path)
    raise FormatError(
        f"cannot tell the format of {path} by its name; expected a name that ends in {SUFFIXES}, "
        f"got {path.name}"
    )
