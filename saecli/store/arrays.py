"""Arrays in files. A format, in `ARRAY_FORMATS`, is a function that lists a file's arrays by key ("" for one alone)."""

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
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import safe_open

from ..base.errors import FormatError
from ..base.files import read_json
from ..base.machine import available_memory
from ..base.words import size_words
from .options import SUFFIXES, ImportConfig

if TYPE_CHECKING:
    import h5py
    from pyarrow.parquet import ParquetFile

ROW_NUMBERS = r"bool|uint8|b?float\d+"  # as activations and images have them
IN_PIECES = "save it as .npy, which is read in pieces"
IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
CHUNK_CACHE_BYTES = 64 << 20  # of an HDF5 dataset, whose rows may be read a chunk's part at a time


@dataclass(frozen=True)
class Array:
    shape: tuple[int, ...]
    dtype: str
    # Elements of the first dimension, or another part, in a form that NumPy can convert to float32.
    read: Callable[[Any], Any]
    # How files of this format are flattened by default; None if either way may be meant.
    flatten: str | None = None
    in_list: bool = False  # one of a list of tensors, whose rows follow each other


Arrays = dict[str, Callable[[], Array]]


@contextmanager
def naming(name: str, to_fit: str = IN_PIECES) -> Iterator[None]:
    """Turn what libraries raise for unreadable files, of any type, into a FormatError that names the file. Their
    messages, which may advise to run the code in a file, are dropped. `to_fit`: what to do if memory is too small."""
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
    if needed > (free := available_memory()):
        raise FormatError(
            f"cannot read {name}: expected {size_words(needed)} of free memory, got {size_words(free)}; {to_fit}"
        )


def demand_rows(dtype: str, subject: str) -> None:
    if not re.fullmatch(ROW_NUMBERS, dtype):
        raise FormatError(
            f"{subject}: expected floats, or bytes of images, got {dtype}; convert them to float32 if they "
            "are rows, which token ids are not"
        )


def of_numpy(values: np.ndarray) -> Array:
    return Array(values.shape, values.dtype.name, values.__getitem__)


def _of_torch(shape: tuple[int, ...], tensor: Any, in_list: bool = False) -> Array:
    """Of a tensor, or a slice of a safetensors file; bfloat16, which NumPy lacks, is read as float32."""
    kind = tensor if hasattr(tensor, "dtype") else tensor[0:0]
    dtype = str(kind.dtype).removeprefix("torch.")

    def read(index: Any) -> np.ndarray:
        part = tensor[index]
        return (part.float() if dtype == "bfloat16" else part).numpy(force=True)

    return Array(shape, dtype, read, in_list=in_list)


def _list_numpy(path: Path, _: ImportConfig) -> Arrays:
    """The arrays of an .npz archive, each read whole when opened; or the mapped one of an .npy file."""
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            loaded = np.load(path, mmap_mode="r", allow_pickle=False)
            return {"": lambda: of_numpy(loaded)}
    with zipfile.ZipFile(path) as members:
        sizes = {member.filename: member.file_size for member in members.infolist()}

    def load(name: str) -> Array:
        check_memory(str(path), sizes[name])
        with np.load(path, allow_pickle=False) as archive:
            return of_numpy(archive[name])

    return {name.removesuffix(".npy"): partial(load, name) for name in sizes}


def _list_safetensors(path: Path, _: ImportConfig) -> Arrays:
    def describe(key: str) -> Array:
        part = file.get_slice(key)
        shape = tuple(part.get_shape())
        return _of_torch(shape, part if shape else file.get_tensor(key))

    file = safe_open(path, framework="pt")
    return {key: partial(describe, key) for key in file.keys()}  # noqa: SIM118 - it is not iterable


def _files_of_tensors(index: Path) -> dict[str, Path]:
    with naming(str(index)):
        files = read_json(index, dict[str, dict[str, Any]])["weight_map"]
        return {key: index.with_name(file) for key, file in files.items()}


def shards_of(path: Path) -> set[Path]:
    """The files that a file is an index of."""
    is_index = format_of(path) is _list_index
    return set(_files_of_tensors(path).values()) if is_index else set()


def _list_index(path: Path, config: ImportConfig) -> Arrays:
    """The tensors of several safetensors files."""

    def describe(key: str, file: Path) -> Array:
        with naming(str(file)):
            return _list_safetensors(file, config)[key]()

    return {key: partial(describe, key, file) for key, file in _files_of_tensors(path).items()}


def _list_torch(path: Path, _: ImportConfig) -> Arrays:
    import torch

    def tensors(value: Any, key: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, torch.Tensor):
            if value.is_nested or value.layout != torch.strided:
                raise _not_dense(path, "nested" if value.is_nested else str(value.layout))
            yield key, value.detach()
        elif isinstance(value, Mapping | list | tuple):
            entries = value if isinstance(value, Mapping) else dict(enumerate(value))
            for name, entry in entries.items():
                yield from tensors(entry, f"{key}.{name}" if key else str(name))

    loaded = load_torch(path)
    # Not of a tuple, as transformers returns the layers' hidden states.
    in_list = isinstance(loaded, list)
    return {
        key: partial(_of_torch, tuple(tensor.shape), tensor, in_list)
        for key, tensor in tensors(loaded, "")
    }


def _not_dense(path: Path, kind: str) -> FormatError:
    return FormatError(
        f"cannot import {path}: expected dense tensors, got a {kind} one; save a nested one as `list(x.unbind())`, "
        "a sparse one as `x.to_dense()`"
    )


def load_torch(path: Path) -> Any:
    """Load a file of `torch.save`, without running code in it, mapped if possible; call it within `naming`."""
    import torch

    can_map = zipfile.is_zipfile(path)  # files of torch before 1.6 can only be read whole
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=can_map)
    except pickle.UnpicklingError as error:
        if "nested jagged" in str(error):
            raise _not_dense(path, "nested") from error
        raise FormatError(
            f"cannot read {path}: it is damaged, or holds other objects than tensors, which could run code; check "
            "that the file is whole and of this format, or save the tensors alone with `torch.save`"
        ) from error


def _list_idx(path: Path, _: ImportConfig) -> Arrays:
    """MNIST's format: two zero bytes, a type, the number of dimensions, each size, the numbers; all big-endian."""
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    with opened(path, "rb") as file:
        head = file.read(4)
        kind = IDX_TYPES.get(int.from_bytes(head[:3]))  # two zeros, and the type
        if kind is None or len(head) < 4:
            raise FormatError(
                f"cannot read {path}: expected an idx file to begin with 0, 0 and a type, got "
                f"{list(head)}; check that the file is of this format"
            )
        shape = struct.unpack(f">{head[3]}I", file.read(4 * head[3]))
        size = math.prod(shape) * np.dtype(kind).itemsize
        check_memory(str(path), size)
        values = np.frombuffer(file.read(size), kind).reshape(shape)
    return {"": lambda: replace(of_numpy(values), flatten="features")}


def _list_raw(path: Path, config: ImportConfig) -> Arrays:
    """Numbers alone, as of NumPy's tofile; the machine's own byte order."""
    import torch

    words = config.shape or ""
    if not (config.dtype and re.fullmatch(r"(-1|[1-9]\d*)(,[1-9]\d*)+", words)):
        raise FormatError(
            f"{path} holds numbers alone: give their shape and type, such as --shape -1,768 --dtype float32"
        )
    kind, size = getattr(torch, config.dtype), path.stat().st_size
    shape = tuple(map(int, words.split(",")))
    width = kind.itemsize * math.prod(shape[1:])
    if size == 0 or size % width or shape[0] not in (-1, size // width):
        raise FormatError(
            f"cannot read {path}: expected {words} numbers of {config.dtype}, {width:,} bytes for each "
            f"of the first dimension, got {size:,} bytes; check --shape and --dtype"
        )
    shape = (size // width, *shape[1:])
    tensor = torch.from_file(str(path), size=math.prod(shape), dtype=kind)
    return {"": partial(_of_torch, shape, tensor.reshape(shape))}


def _list_parquet(path: Path, _: ImportConfig) -> Arrays:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    kinds = {each.name: getattr(each.type, "value_type", each.type) for each in file.schema_arrow}
    return {
        name: partial(_of_parquet, path, file, name)
        for name, kind in kinds.items()
        if re.fullmatch(r"bool|u?int\d+|halffloat|float|double", str(kind))
    }


def _of_parquet(path: Path, file: "ParquetFile", column: str) -> Array:
    counts = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    starts = [0, *np.cumsum(counts).tolist()]

    @lru_cache(maxsize=1)
    def group(number: int) -> np.ndarray:
        size = file.metadata.row_group(number).total_byte_size
        check_memory(str(path), 3 * size, "write it in smaller row groups")
        cells = file.read_row_group(number, columns=[column]).column(0).to_numpy()
        try:
            return np.stack(cells) if cells.dtype == object else cells
        except ValueError as error:
            raise FormatError(
                f"cannot import {path}: expected lists of one length in {column}, got others; drop these rows"
            ) from error

    def read(index: Any) -> np.ndarray:
        elements, *others = index if isinstance(index, tuple) else (index,)
        begin, end, _ = elements.indices(starts[-1])
        taken = [
            group(number)[max(0, begin - start) : end - start]
            for number, start in enumerate(starts[:-1])
            if begin < starts[number + 1] and start < end
        ]
        return np.concatenate(taken)[(slice(None), *others)]

    first = group(0)
    return Array((starts[-1], *first.shape[1:]), first.dtype.name, read)


def _list_hdf5(path: Path, _: ImportConfig) -> Arrays:
    import h5py

    arrays: Arrays = {}

    def add(key: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            arrays[key] = partial(_of_hdf5, path, item)

    h5py.File(path, "r", locking=False, rdcc_nbytes=CHUNK_CACHE_BYTES).visititems(add)
    return arrays


def _of_hdf5(path: Path, dataset: "h5py.Dataset") -> Array:
    """Refuses numbers outside the file: the HDF5 library would open other files, and wait for pipes."""
    import h5py

    created = dataset.id.get_create_plist()
    filters = [created.get_filter(number) for number in range(created.get_nfilters())]
    if dataset.is_virtual or dataset.external:
        problem = "has its numbers elsewhere; write them into a dataset of this file"
    elif missing := [name for code, _, _, name in filters if not h5py.h5z.filter_avail(code)]:
        problem = f"is compressed by {missing[0].decode(errors='replace') or 'an unknown filter'}; use gzip"
    elif _is_partly_written(dataset):
        problem = "was not written in full; write the rest, or cut it to what is there"
    else:
        if dataset.chunks:
            chunk = math.prod(dataset.chunks) * dataset.dtype.itemsize
            check_memory(str(path), chunk, "write it in smaller chunks")
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
    counts = [-(-length // chunk) for length, chunk in zip(shape, dataset.chunks, strict=True)]
    return dataset.id.get_num_chunks() < math.prod(counts)


# By the end of the lower-case file name.
ARRAY_FORMATS: dict[str, Callable[[Path, ImportConfig], Arrays]] = {
    r"\.np[yz]$": _list_numpy,
    r"\.safetensors$": _list_safetensors,
    r"\.index\.json$": _list_index,
    r"\.(pt|pth)$": _list_torch,
    r"\.(h5|hdf5)$": _list_hdf5,
    r"\.parquet$": _list_parquet,
    r"[.-]idx(\d-\w+)?(\.gz)?$": _list_idx,
    r"\.(bin|raw|dat)$": _list_raw,
}


def format_of(path: Path) -> Callable[[Path, ImportConfig], Arrays] | None:
    name = path.name.lower()
    return next((lister for end, lister in ARRAY_FORMATS.items() if re.search(end, name)), None)


def list_arrays(path: Path, config: ImportConfig) -> Arrays:
    path.open("rb").close()  # so that the system's errors are reported as such
    lister = format_of(path)
    if lister is None:
        raise FormatError(
            f"cannot tell the format of {path} by its name; expected a name that ends in {SUFFIXES}, got {path.name}"
        )
    if config.shape and lister is not _list_raw:
        raise FormatError(f"--shape does nothing with {path}, which records its own; leave it out")
    return lister(path, config)
