"""Claiming a run's folder: one process trains there, and what one left that was killed before its first checkpoint is
cleared away."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..documents import read_json
from ..errors import RunError
from ..files import lock_folder
from ..home import RUN_MARKER, Marker
from .checkpoints import CHECKPOINT, EVENTS, METRICS

BEFORE_MARKER = {"config.toml"}  # what a run writes before its run.json, and then before its first checkpoint
BEFORE_CHECKPOINT = {*BEFORE_MARKER, RUN_MARKER, METRICS, EVENTS, "sae.safetensors"}


@contextmanager
def claimed(folder: Path, new: bool = True) -> Iterator[None]:
    """Hold a run's folder, and leave none behind that has no checkpoint to go on from.

    Args:
        folder: the folder; made if need be.
        new: whether a run begins there, and does not go on; what is left of one killed before its first checkpoint is
            then removed.

    Raises:
        FileExistsError: a new run has its name from something else.
        RunError: another process is training it.
    """
    if new and not _is_free(folder):
        raise FileExistsError(folder)
    try:
        lock = lock_folder(folder)
    except BlockingIOError as error:
        raise RunError(f"another process is training {folder.name}; wait for it, or stop it") from error
    try:
        if new:
            if not _is_free(folder):  # by now
                raise FileExistsError(folder)
            _clear(folder)
        try:
            yield
        finally:
            if not (folder / CHECKPOINT).exists():
                shutil.rmtree(folder)
    finally:
        os.close(lock)


def _is_free(folder: Path) -> bool:
    """Whether a folder holds nothing, or what a run left that cannot be gone on with."""
    if not folder.is_dir():
        return not folder.exists()
    names = {path.name for path in folder.glob("[!.]*")}
    if names <= BEFORE_MARKER:
        return True
    with suppress(OSError, ValueError):
        return names <= BEFORE_CHECKPOINT and not read_json(folder / RUN_MARKER, Marker).complete
    return False


def _clear(folder: Path) -> None:
    """Remove what is in a folder, but for its lock and other hidden files."""
    for path in folder.glob("[!.]*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
