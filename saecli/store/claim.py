"""Locking a folder for one writer, which begins or resumes a store in it."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..base.errors import StoreError
from ..base.files import LOCK, lock_folder
from ..base.home import STORE_MARKER
from .checks import changed, find_damage
from .schema import RANKS, SHARDS, WORLD_FILE, StoreMeta, read_meta, write_meta


class ClaimedStore:
    """A store that only this process may write; a context manager that releases its lock.

    Args:
        path: the store's folder.
        meta: its `store.json`.
        lock: the descriptor that holds its lock, closed on exit.
    """

    def __init__(self, path: Path, meta: StoreMeta, lock: int) -> None:
        self.path, self._meta, self._lock = path, meta, lock
        self._failed = False

    @property
    def meta(self) -> StoreMeta:
        """The store's `store.json` as it is on disk."""
        return self._meta

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        os.close(self._lock)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Turn a failed write into a StoreError, after which nothing more is written."""
        if self._failed:
            raise StoreError(f"cannot write to {self.path}: an earlier write failed; open it again to go on")
        try:
            yield
        except OSError as error:
            self._failed = True
            raise refused(self.path, self._meta.rows, error) from error


def claim(path: Path, meta: StoreMeta, show: Callable[[float], None]) -> tuple[int, StoreMeta, list[int]]:
    """Lock a folder and begin a store in it, or resume one that was interrupted or has damaged shards.

    Args:
        path: the store's folder; created if missing.
        meta: what the store is to hold.
        show: called with the number of bytes read to check shards that may have changed since they were written.

    Returns:
        The lock, a descriptor to close when done; the `store.json` to resume from; and the numbers of damaged shards.

    Raises:
        StoreError: another process is writing it, or it holds something else.
    """
    try:
        lock = lock_folder(path)  # the system releases it if the process dies
    except BlockingIOError as error:
        raise StoreError(f"cannot write to {path}: another process is writing it; wait for that one, or choose "
                         "another --name") from error
    except OSError as error:
        raise refused(path, 0, error) from error
    new = not (path / STORE_MARKER).exists()
    try:
        there = begin(path, meta)
        return lock, there, sorted(find_damage(path, there, changed(path, there), show))
    except OSError as error:
        if not (path / STORE_MARKER).exists():
            forsake(path)
        os.close(lock)
        raise refused(path, 0, error) from error
    except BaseException:
        if new:  # leave no empty store behind
            remove_empty(path)
        os.close(lock)
        raise


def forsake(path: Path) -> None:
    """Remove the lock's file, while the lock is held, and the folder if nothing else is in it."""
    with suppress(OSError):
        (path / LOCK).unlink(missing_ok=True)
        path.rmdir()


def remove_empty(path: Path) -> None:
    """Remove a store whose `store.json` lists no shard, while its lock is held."""
    with suppress(OSError):
        for folder in (path / SHARDS, path / RANKS):
            if folder.exists():
                shutil.rmtree(folder)
        (path / STORE_MARKER).unlink(missing_ok=True)
        (path / WORLD_FILE).unlink(missing_ok=True)
    forsake(path)


def begin(path: Path, meta: StoreMeta) -> StoreMeta:
    """The `store.json` to resume from, written if there was none.

    Raises:
        StoreError: the folder holds something else.
        OSError: it cannot be written.
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
        raise StoreError(f"{path} holds something else: expected {wanted}, got {got}; choose another --name, or "
                         "remove that store")
    return there


def no_rows(path: Path, left_out: Mapping[str, int]) -> StoreError:
    """The error for a text or array that ended without a row to store; `left_out` counts rows by reason."""
    counts = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
    return StoreError(f"there are no rows to store in {path}; expected at least one, got none "
                      f"(dropped: {counts or 'none'}); give more or other data")


def other_number(path: Path, expected: int, got: int) -> StoreError:
    """The error for resuming a store with another number of processes than began it."""
    command = f"`torchrun --nproc-per-node {expected}`" if expected > 1 else "one process, without torchrun"
    return StoreError(f"cannot go on with {path}: expected the number of processes that began it, {expected}, got "
                      f"{got}; run the command with {command}, or remove that store")


def refused(path: Path, rows: int, error: Exception) -> Exception:
    """The error for a failed write, with `rows` stored so far; a StoreError is returned as it is."""
    if isinstance(error, StoreError):
        return error
    number = getattr(error, "errno", None)
    reason = os.strerror(number) if number else " ".join(str(error).split())
    remedy = "free some space" if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "fix that"
    return StoreError(f"cannot write to {path}: {reason}; {remedy} and run the same command again, "
                      f"which goes on after the {rows} rows that are safe")


def _difference(wanted: Mapping[str, Any], got: Mapping[str, Any]) -> tuple[str, str]:
    """The first entry in which two requests differ, as a phrase for each."""
    name = next(n for n in {**wanted, **got} if wanted.get(n) != got.get(n))
    return f"{name} {wanted.get(name)}", f"{got.get(name)}"
