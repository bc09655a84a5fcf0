"""HDF5 files, read by a separate process.

The HDF5 library trusts a file: it follows links to other files and pipes, and crashes its process where the file refers
to itself or a byte is damaged. So `hdf5_process.py` refuses links out of the file and unwritten data, limits its
memory, and a crash of it becomes an error message.
"""

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from signal import Signals
from typing import Any

import numpy as np

from ..base.errors import FormatError
from .arrays import Array, Arrays, Index

PROGRAM = Path(__file__).with_name("hdf5_process.py")
PIPE_BYTES = 1 << 20


class Link:
    """A link in a file to an array of another name or another file.

    Args:
        path: the file.
        key: the link's name.
        why: why it is refused, and what to do.
    """

    def __init__(self, path: Path, key: str, why: str) -> None:
        self._sentence = _refusal(path, key, why)

    def __call__(self) -> Array:
        """Raise a FormatError, since a link is not described as an array."""
        raise FormatError(self._sentence)


def list_hdf5(path: Path) -> Arrays:
    """The datasets and links of a file, by name."""
    reader = _Reader(path)
    found = reader.ask({})
    return {**{key: lambda key=key: reader.describe(key) for key in found["datasets"]},
            **{key: Link(path, key, why) for key, why in found["links"].items()}}


def _refusal(path: Path, key: str, why: str) -> str:
    return f"cannot import {path}: expected a dataset stored in the file itself, got {key}, which {why}"


class _Reader:
    """The process that reads a file; it ends with this object."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # -P: do not import modules from the program's folder in place of Python's own.
        self._process = subprocess.Popen([sys.executable, "-P", PROGRAM, path], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, pipesize=PIPE_BYTES,
                                         stderr=None if os.environ.get("SAE_DEBUG") else subprocess.DEVNULL)
        weakref.finalize(self, _end, self._process)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer; see `hdf5_process.py`."""
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._failed()
        return json.loads(self._process.stdout.readline() or self._failed())

    def describe(self, key: str) -> Array:
        found = self.ask({"key": key})
        if "refused" in found:
            raise FormatError(_refusal(self._path, key, found["refused"]))
        shape, dtype = tuple(found["shape"]), np.dtype(found["type"])

        def read(index: Index) -> np.ndarray:
            *outer, rows = index
            self.ask({"key": key, "outer": outer, "begin": rows.start, "end": rows.stop})
            values = np.empty((min(rows.stop, shape[len(outer)]) - rows.start, *shape[len(index) :]), dtype)
            if self._process.stdout.readinto(values.data.cast("B")) < values.nbytes:
                self._failed()
            return values

        return Array(shape, found["dtype"], read, found["held"])

    def _failed(self) -> None:
        status = self._process.wait()
        if status >= 0:
            raise ValueError("the HDF5 library found the file damaged")
        raise FormatError(f"cannot read {self._path}: expected an HDF5 file, got what ends the HDF5 library "
                          f"({Signals(-status).name}); check that the file is whole")


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.stdin.close()
    process.stdout.close()
    process.wait()
