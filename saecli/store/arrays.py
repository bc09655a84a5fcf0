"""An array in a file, and its rows as imported.

Legend: R rows, F features.
"""

import math
import os
import pickle
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors import SafetensorError

from ..base.errors import FormatError, size_words
from ..base.files import NotAFile
from ..base.machine import available_memory

BLOCK_BYTES = 16 << 20
REAL_NUMBERS = r"bool|u?int\d+|b?float\d+"

Index = tuple[int | slice, ...]  # of an array's first dimensions: integers, and a slice of the last of them


@dataclass(frozen=True)
class Array:
    """One array in a file.

    Args:
        shape: its shape.
        dtype: the name of its dtype in NumPy and torch.
        read: index -> the numbers there, in a form that NumPy can convert to float32.
        held: bytes of memory that reading takes beside the numbers requested.
        flatten: how files of this format are flattened by default; None where either way may be meant.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Index], Any]
    held: int = 0
    flatten: str | None = None


Arrays = dict[str, Callable[[], Array]]


@dataclass(frozen=True)
class ArraySource:
    """Rows to import.

    Args:
        shape: (rows, features); or (documents, positions, features), or more dimensions of positions, whose rows are
            numbered in that order.
        dtype: the stored type that loses least: the array's own if "float16" or "bfloat16", else "float32".
        read: index of rows, as in `Array` -> these rows, with the array's own last dimensions.
        labels: (rows,) int64, or None.
        documents: (rows,) int64, or None; rows of one document are trained on or held out together.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Index], Any]
    labels: np.ndarray | None = None
    documents: np.ndarray | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return math.prod(self.shape[:-1])

    @property
    def features(self) -> int:
        """Dimensions of a row."""
        return self.shape[-1]

    def columns(self, begin: int, end: int) -> dict[str, np.ndarray]:
        """The stored columns of rows `begin` to `end`, (R,) integers each."""
        columns = {"label": self.labels, "document": self.documents}
        kept = {name: values[begin:end] for name, values in columns.items() if values is not None}
        if len(self.shape) > 2:
            kept["document"], kept["position"] = np.divmod(np.arange(begin, end), self.rows // self.shape[0])
        return kept

    def blocks(self, start: int = 0) -> Iterator[tuple[int, np.ndarray]]:
        """The rows in blocks of about 16 MiB, each a slice of one dimension of the array.

        Args:
            start: number of the first row.

        Yields:
            The number of the block's first row, and (R, F) float32.

        Raises:
            FormatError: the file is damaged, or ends too early.
        """
        lead, most = self.shape[:-1], max(1, BLOCK_BYTES // (4 * self.features))
        # The first dimension whose elements fit in a block, and the rows per element.
        axis = next((axis for axis in range(len(lead)) if math.prod(lead[axis + 1 :]) <= most), len(lead) - 1)
        unit = math.prod(lead[axis + 1 :])
        row = start
        while row < self.rows:
            outer, first = divmod(row // unit, lead[axis])
            last = min(first + max(1, most // unit), lead[axis])
            end = (outer * lead[axis] + last) * unit
            block = self.read((*map(int, np.unravel_index(outer, lead[:axis])), slice(first, last)))
            # Overflow gives infinities; the store drops and counts such rows.
            with np.errstate(over="ignore"):
                yield row, np.ascontiguousarray(block, np.float32).reshape(-1, self.features)[row - end :]
            row = end


# Raised for unreadable files, each as observed. Exceptions that could come from a bug here are not listed; what else
# torch's unpickler and NumPy's headers raise is caught where they are called.
UNREADABLE = (
    OSError,  # gzip: wrong checksum, or not gzip; the system
    EOFError,  # gzip, zip, pickle: truncated
    ValueError,  # NumPy: missing numbers; names that are not UTF-8
    OverflowError,  # zip, torch, safetensors: sizes and offsets beyond 64 bits
    RuntimeError,  # torch: no archive, or truncated storages; zip: an unknown version or method
    zlib.error,  # damaged compression
    zipfile.BadZipFile,
    pickle.UnpicklingError,
    SafetensorError,
)


IN_PIECES = "save it as .npy, which is read in pieces"


@contextmanager
def naming(name: str, to_fit: str = IN_PIECES) -> Iterator[None]:
    """Turn the libraries' exceptions for unreadable files into a FormatError that names the file.

    Their own messages and warnings are dropped: they advise options that this tool does not have, such as running the
    code in a file.

    Args:
        name: the file.
        to_fit: what to do if it does not fit in memory.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except FormatError:
        raise
    except FileNotFoundError as error:
        raise FormatError(f"there is no file {name}; check the path") from error
    except NotAFile as error:
        raise FormatError(f"cannot read {name}: {error}; give a file") from error
    except MemoryError as error:
        raise FormatError(f"cannot read {name}: expected memory for it, got none; {to_fit}") from error
    except UNREADABLE as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number else "expected numbers in its name's format, got something else"
        remedy = "check the path" if number else "check that the file is whole and of this format"
        raise FormatError(f"cannot read {name}: {reason}; {remedy}") from error


def check_memory(name: str, needed: int, to_fit: str = IN_PIECES) -> None:
    """Raise a FormatError if a file does not fit in memory, before allocating any.

    Args:
        name: the file.
        needed: bytes.
        to_fit: what to do about it.
    """
    if needed > (free := available_memory()):
        raise FormatError(f"cannot read {name}: expected {size_words(needed)} of free memory, which it takes at once, "
                          f"got {size_words(free)}; {to_fit}")
