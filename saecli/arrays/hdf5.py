"""HDF5 files, read by a process of their own.

The HDF5 library takes a file at its word: it follows it to other files and to pipes, and brings down the process that
it runs in where the file refers to itself, or where a byte of it has flipped. So `hdf5_process.py` refuses what leads
out of the file and what was never written, takes no more memory than was agreed on, and what ends it is told in a
sentence.
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

from ..errors import FormatError
from .array import Array, Arrays, Index

PROGRAM = Path(__file__).with_name("hdf5_process.py")
PIPE_BYTES = 1 << 20


class Link:
    """A name in a file under which another one's array is found, or another file's.

    Args:
        path: the file.
        key: the name.
        why: what is wrong with it, and what to do.
    """

    def __init__(self, path: Path, key: str, why: str) -> None:
        self._sentence = _refusal(path, key, why)

    def __call__(self) -> Array:
        """As an array that cannot be described.

        Raises:
            FormatError: always.
        """
        raise FormatError(self._sentence)


def list_hdf5(path: Path) -> Arrays:
    """The datasets of a file, and its links, by their names."""
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
        # -P: not what else lies beside the program, in place of Python's own modules.
        self._process = subprocess.Popen([sys.executable, "-P", PROGRAM, path], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, pipesize=PIPE_BYTES,
                                         stderr=None if os.environ.get("SAE_DEBUG") else subprocess.DEVNULL)
        weakref.finalize(self, _end, self._process)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """What it answers; see `hdf5_process.py`."""
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
