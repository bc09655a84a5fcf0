"""Claiming a folder for one writer, to begin a store in or to go on with one."""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import StoreError
from ..files import LOCK, lock_folder
from ..home import STORE_MARKER
from .schema import SHARDS, StoreMeta, read_meta, write_meta


def take_lock(path: Path) -> int:
    """Lock a store against other writers; its folder is made if need be.

    Returns:
        A descriptor to close when done; the system closes it, and lets go of the lock, if the process dies.

    Raises:
        StoreError: another process holds the lock.
        OSError: the folder cannot be made.
    """
    try:
        return lock_folder(path)
    except BlockingIOError as error:
        raise StoreError(f"cannot write to {path}: another process is writing it; "
                         "wait for that one, or choose another --name") from error


def forsake(path: Path) -> None:
    """Remove the lock, while it is held, and the folder if nothing else is in it."""
    with suppress(OSError):
        (path / LOCK).unlink(missing_ok=True)
        path.rmdir()


def remove_empty(path: Path) -> None:
    """Remove a store whose `store.json` lists no shard, while its lock is held."""
    with suppress(OSError):
        if (path / SHARDS).exists():
            shutil.rmtree(path / SHARDS)
        (path / STORE_MARKER).unlink(missing_ok=True)
    forsake(path)


def begin(path: Path, meta: StoreMeta) -> StoreMeta:
    """The `store.json` to go on from, written if there was none.

    Raises:
        StoreError: the folder holds something else.
        OSError: the disk refuses it.
    """
    if not (path / STORE_MARKER).exists():
        foreign = [entry.name for entry in path.iterdir() if not entry.name.startswith(".")]
        if foreign:
            raise StoreError(f"cannot make a store in {path}: expected an empty folder, got one that holds "
                             f"{foreign[0]}; choose another --name")
        write_meta(path, meta)
        return meta
    there = read_meta(path)
    if there.request() != meta.request():
        wanted, got = _difference(meta.request(), there.request())
        raise StoreError(f"{path} holds something else: expected {wanted}, got {got}; "
                         "choose another --name, or remove that store")
    return there


def _difference(wanted: Mapping[str, Any], got: Mapping[str, Any]) -> tuple[str, str]:
    """The first entry by which two requests differ, each as a phrase."""
    name = next(n for n in {**wanted, **got} if wanted.get(n) != got.get(n))
    return f"{name} {wanted.get(name)}", f"{got.get(name)}"
