"""The formats of files that hold arrays.

A format is one function and one line in `ARRAY_FORMATS`. The function lists the arrays of a file by key (the empty key
where the format holds just one); an array is described when it is chosen, and its numbers are read when requested, if
the format allows. Reading takes no more memory than `Array.held`, whatever a header claims.
"""

import functools
import gzip
import math
import pickle
import struct
import tokenize
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from ..base.errors import FormatError
from .arrays import IN_PIECES, Array, Arrays, check_memory
from .hdf5 import list_hdf5

# Version 3 differs from 2 only in the encoding of field names, which arrays of real numbers do not have.
_NPY_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0, (3, 0): npy.read_array_header_2_0}
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def _of_numpy(shape: tuple[int, ...], dtype: np.dtype, load: Callable[[], np.ndarray], **more: Any) -> Array:
    """An array that NumPy loads or maps when it is first read."""
    load = functools.cache(load)
    return Array(shape, dtype.name, lambda index: load()[index], **more)


def _of_torch(shape: tuple[int, ...], tensor: Any) -> Array:
    """A tensor, or a slice of a safetensors file; bfloat16, which NumPy lacks, is read as float32."""
    kind = tensor if hasattr(tensor, "layout") else tensor[0:0]
    dtype = str(kind.dtype).removeprefix("torch.")

    def read(index: tuple[int | slice, ...]) -> np.ndarray:
        part = tensor[index]
        return (part.float() if dtype == "bfloat16" else part).numpy(force=True)

    return Array(shape, dtype if str(kind.layout) == "torch.strided" else f"sparse {dtype}", read)


def _check_holds(path: Path, what: str, end: int, size: int) -> None:
    """Raise a FormatError if a file or an archive's member ends before its numbers do."""
    if size < end:
        raise FormatError(f"cannot read {path}: expected {end} bytes {what}, got {size}; "
                          "it is truncated, so fetch it again")


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], str, np.dtype]:
    """Shape, order ("C" or "F") and dtype from a header of NumPy's format."""
    try:
        shape, fortran, dtype = _NPY_HEADERS[npy.read_magic(file)](file)
    except (TypeError, LookupError, SyntaxError, tokenize.TokenError) as error:  # a header that is not Python
        raise ValueError(str(error)) from error
    if any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"expected a shape, got {shape}")
    return shape, "F" if fortran else "C", dtype


def _list_npy(path: Path) -> Arrays:
    with path.open("rb") as file:
        shape, order, dtype = _npy_header(file)
        begin = file.tell()
    _check_holds(path, f"for shape {shape}", begin + math.prod(shape) * dtype.itemsize, path.stat().st_size)
    return {"": lambda: _of_numpy(shape, dtype, lambda: np.memmap(path, dtype, "r", begin, shape, order))}


def _members(path: Path, methods: Mapping[int, str]) -> dict[str, zipfile.ZipInfo]:
    """The files in a zip archive, by name; FormatError for repeated names, or other compression methods than these."""
    with zipfile.ZipFile(path) as archive:
        infos = [info for info in archive.infolist() if not info.filename.endswith("/")]
    found = {info.filename.removesuffix(".npy"): info for info in infos}
    if len(found) < len(infos):
        raise FormatError(f"cannot read {path}: expected parts of different names, got several of one; save it again")
    for name, info in found.items():
        if info.compress_type not in methods or info.flag_bits & 1:
            got = "an encrypted one" if info.flag_bits & 1 else "another compression"
            raise FormatError(f"cannot read {path}: expected parts that are {' or '.join(methods.values())}, got "
                              f"{got} in {name!r}; save it again")
    return found


def list_npz(path: Path) -> Arrays:
    """The arrays of NumPy's archive, by name; errors in an array are raised when it is described or read."""
    def load(member: zipfile.ZipInfo) -> np.ndarray:
        with zipfile.ZipFile(path) as archive, archive.open(member) as file:
            values = npy.read_array(file)
            file.read(1)  # at the end, the checksum is verified
            return values

    def describe(member: zipfile.ZipInfo) -> Array:
        with zipfile.ZipFile(path) as archive, archive.open(member) as file:
            shape, _, dtype = _npy_header(file)
            held = math.prod(shape) * dtype.itemsize
            _check_holds(path, f"for shape {shape}", file.tell() + held, member.file_size)
        return _of_numpy(shape, dtype, lambda: load(member), held=held)

    members = _members(path, {zipfile.ZIP_STORED: "stored", zipfile.ZIP_DEFLATED: "deflated"})
    return {key: lambda member=member: describe(member) for key, member in members.items()}


def _list_safetensors(path: Path) -> Arrays:
    import safetensors

    def describe(key: str) -> Array:
        part = file.get_slice(key)
        shape = tuple(part.get_shape())
        return _of_torch(shape, part if shape else file.get_tensor(key))

    file = safetensors.safe_open(path, framework="pt")
    return {key: lambda key=key: describe(key) for key in file.keys()}  # noqa: SIM118 - it is not iterable


# What else torch's unpickler raises for damaged pickles.
_NO_TENSORS = (struct.error, LookupError, TypeError, AttributeError, AssertionError)


def _list_torch(path: Path) -> Arrays:
    import torch

    visited: set[int] = set()

    def tensors(value: Any, key: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, torch.Tensor):
            yield key, value.detach()
        elif isinstance(value, Mapping) and id(value) not in visited:  # a pickled mapping can contain itself
            visited.add(id(value))
            for name, entry in value.items():
                yield from tensors(entry, f"{key}.{name}" if key else str(name))

    content = load_torch(path, in_place=True)
    return {key: lambda tensor=tensor: _of_torch(tuple(tensor.shape), tensor) for key, tensor in tensors(content, "")}


def load_torch(path: Path, in_place: bool = False, to_fit: str = IN_PIECES) -> Any:
    """Load a file of `torch.save` on the CPU, without running code in it.

    Args:
        path: the file.
        in_place: map the numbers rather than read them, if the file allows.
        to_fit: what to do if it does not fit in memory.

    Raises:
        FormatError: it holds other objects than tensors and plain ones, or does not fit in memory.
        Exception: those that `naming` turns into a FormatError.
    """
    import torch

    archive = zipfile.is_zipfile(path)
    if archive:
        _members(path, {zipfile.ZIP_STORED: "stored"})  # torch would read compressed bytes as numbers
    if not (archive and in_place):  # files of torch before 1.6 can only be read whole
        check_memory(str(path), path.stat().st_size, to_fit)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=archive and in_place)
    except pickle.UnpicklingError as error:
        with path.open("rb") as file:
            pickled = archive or file.read(1) == pickle.PROTO
        if not pickled:
            raise
        raise FormatError(f"cannot read {path}: expected tensors alone, got other Python objects, which are not loaded "
                          "as they could run code; save the tensors alone, with `torch.save`") from error
    except _NO_TENSORS as error:
        raise ValueError(str(error)) from error


def _list_idx(path: Path) -> Arrays:
    """MNIST's format: two zero bytes, a type, the number of dimensions, each size, the numbers; all big-endian.

    It usually holds images, so each element of the first dimension is a row.
    """
    zipped = path.suffix.lower() == ".gz"
    with (gzip.open if zipped else open)(path, "rb") as file:
        head = file.read(4)
        if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_TYPES:
            raise FormatError(f"cannot read {path}: expected an idx file to begin with 0, 0 and a type, got "
                              f"{list(head)}; check that the file is of this format")
        begin, dtype = 4 + 4 * head[3], np.dtype(_IDX_TYPES[head[2]])
        sizes = file.read(begin - 4)
    _check_holds(path, "of the sizes", begin, 4 + len(sizes))
    shape = tuple(int.from_bytes(sizes[at : at + 4], "big") for at in range(0, begin - 4, 4))
    held = math.prod(shape) * dtype.itemsize

    def inflate() -> np.ndarray:
        with gzip.open(path) as file:  # gzip cannot be read from the middle
            file.seek(begin)
            content = file.read(held)
            _check_holds(path, f"for shape {shape}", begin + held, begin + len(content))
            file.read(1)  # at the end, the checksum is verified
        return np.frombuffer(content, dtype).reshape(shape)

    if zipped:
        return {"": lambda: _of_numpy(shape, dtype, inflate, held=held, flatten="features")}
    _check_holds(path, f"for shape {shape}", begin + held, path.stat().st_size)
    return {"": lambda: _of_numpy(shape, dtype, lambda: np.memmap(path, dtype, "r", begin, shape), flatten="features")}


# By the end of the lower-case file name.
ARRAY_FORMATS: dict[str, Callable[[Path], Arrays]] = {
    r"\.npy$": _list_npy,
    r"\.npz$": list_npz,
    r"\.safetensors$": _list_safetensors,
    r"\.(pt|pth)$": _list_torch,
    r"\.(h5|hdf5)$": list_hdf5,
    r"[.-]idx(\d-\w+)?(\.gz)?$": _list_idx,
}
SUFFIXES = ".npy, .npz, .safetensors, .pt, .pth, .h5, .hdf5, .idx or idx3-ubyte, the last two also with .gz"
