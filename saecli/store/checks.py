"""Checksums of shards: which shards need checking, and whether their bytes are as recorded.

There are two kinds of damage. A shard that was changed, as by a copy or an editor, has a later `ctime` than
`store.json`, which is written after every shard; finding it costs one `stat` per shard. A shard whose bytes decayed
on disk is found when it is read, by its chunks' checksums; `suspect` then gives it a later `ctime` too, so that the
command that made the store rewrites it.
"""

import hashlib
import io
import os
import stat
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from xxhash import xxh3_64

from ..base.errors import StoreError
from ..base.files import file_sha256
from ..base.home import STORE_MARKER
from .schema import SHARDS, WORLD_FILE, StoreMeta

MEND_SHARD = "run the command that made the store again, which rewrites that shard"
MEND_WORLD = "run the command that made the store again, which rewrites that file"
PIECE_BYTES = 4 << 20
THREADS = 4


def no_show(done: float) -> None:
    """Shows no progress."""


def changed(store: Path, meta: StoreMeta) -> list[int]:
    """The numbers of the shards that are missing, or may have changed since `store.json` was last written."""
    since = (store / STORE_MARKER).stat().st_ctime_ns
    found = []
    for index, shard in enumerate(meta.shards):
        try:
            # Equal times mean one clock tick, some milliseconds, within which the order of writes is unknown.
            if (store / SHARDS / shard.file).stat().st_ctime_ns >= since:
                found.append(index)
        except OSError:
            found.append(index)
    return found


def find_damage(store: Path, meta: StoreMeta, shards: Iterable[int],
                show: Callable[[float], None] = no_show) -> dict[int, str]:
    """Read shards whole, compare them with their checksums, and record the outcome in their `ctime`.

    Args:
        store: the store's folder.
        meta: its `store.json`.
        shards: the numbers of the shards to read.
        show: called with the number of bytes read so far.

    Returns:
        Shard number -> a sentence, for each shard that is missing or damaged.

    Cost: SHA-256, 2 GB/s per core, on at most `THREADS` cores.
    """
    shards = list(shards)
    done, lock = 0, threading.Lock()

    def read(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            show(done)

    pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="sae-check")
    try:
        sentences = pool.map(partial(_problem, store, meta, read), shards)
        damaged = {index: sentence for index, sentence in zip(shards, sentences, strict=True) if sentence}
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupt waits only for the shards being read
    if set(changed(store, meta)) <= set(shards):
        suspect(store / STORE_MARKER)  # later than every whole shard, and earlier than the damaged ones
    for index in damaged:
        suspect(store / SHARDS / meta.shards[index].file)
    return damaged


def damaged_world(store: Path, meta: StoreMeta) -> list[str]:
    """A sentence if the file of the features that a store's rows are made of is missing or damaged; none if it is
    whole, or the store has no such file.

    Cost: one read of the file.
    """
    if meta.world is None:
        return []
    path = store / WORLD_FILE
    try:
        got = file_sha256(path)
    except OSError as error:
        return [f"cannot read {path}: {error.strerror or error}; {MEND_WORLD}"]
    if got == meta.world.sha256:
        return []
    return [f"{path} is damaged: expected SHA-256 {meta.world.sha256}, got {got}; {MEND_WORLD}"]


def remembers(store: Path) -> bool:
    """Whether this user may record the outcome of a check, so that it is not repeated every time."""
    return os.access(store, os.W_OK) and (store / STORE_MARKER).stat().st_uid == os.geteuid()


def suspect(path: Path) -> None:
    """Set a file's `ctime` to now, and change nothing else."""
    with suppress(OSError):  # missing, or another user's: then each read finds the damage again
        path.chmod(stat.S_IMODE(path.stat().st_mode))


def open_shard(path: Path) -> io.FileIO:
    """Open a shard to read its bytes.

    Raises:
        StoreError: it is missing, or not a regular file.
        OSError: the system refuses to open it.
    """
    if not stat.S_ISREG(found_file(path).st_mode):  # opening a pipe would block
        raise StoreError(f"cannot read shard {path}: expected a file, got something else; {MEND_SHARD}")
    return path.open("rb", buffering=0)


def found_file(path: Path) -> os.stat_result:
    """A shard's `stat`; StoreError if it is missing."""
    try:
        return path.stat()
    except FileNotFoundError as error:
        raise StoreError(f"shard {path} is missing; {MEND_SHARD}") from error


def damage(path: Path, what: str, expected: str, got: str) -> StoreError:
    """The error for a shard whose bytes differ from those recorded; marks the shard suspect."""
    suspect(path)
    return StoreError(f"shard {path} is damaged: expected {what} {expected}, got {got}; {MEND_SHARD}")


def frame_checksum(file: io.FileIO, start: int, end: int) -> str:
    """The XXH3-64, in hexadecimal, of a shard's bytes outside its activations, which lie from `start` to `end`."""
    digest = xxh3_64(file.read(start))
    file.seek(end)
    while piece := file.read(PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()


def _problem(store: Path, meta: StoreMeta, read: Callable[[int], None], index: int) -> str | None:
    record = meta.shards[index]
    path = store / SHARDS / record.file
    digest = hashlib.sha256()
    try:
        with open_shard(path) as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
                read(len(piece))
    except StoreError as error:
        return str(error)
    except OSError as error:
        return f"cannot read shard {path}: {error.strerror}; {MEND_SHARD}"
    if digest.hexdigest() == record.sha256:
        return None
    return str(damage(path, "SHA-256", record.sha256, digest.hexdigest()))
