"""Checksums of shards, and the errors for shards that are missing or damaged."""

import hashlib
import io
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from xxhash import xxh3_64

from ..base.errors import StoreError
from ..base.files import file_sha256
from .schema import SHARDS, WORLD_FILE, ShardRecord, StoreMeta

PIECE_BYTES = 4 << 20
THREADS = 4


def make_anew(store: Path) -> str:
    return f"remove it with `sae rm {store.name}` and run the command that made it again"


def find_damage(store: Path, meta: StoreMeta, show: Callable[[float], None] = lambda read: None) -> list[str]:
    """Read all shards and compare them with their checksums.

    Args:
        show: called with the number of bytes read so far.

    Returns:
        A sentence for each shard that is missing or damaged.

    Cost: SHA-256, 2 GB/s per core, on at most `THREADS` cores.
    """
    done, lock = 0, threading.Lock()

    def read(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            show(done)

    pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="sae-check")
    try:
        sentences = list(pool.map(partial(_problem, store, read), meta.shards))
        return [sentence for sentence in sentences if sentence]
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupt waits only for the shards being read


def _problem(store: Path, read: Callable[[int], None], record: ShardRecord) -> str | None:
    path, digest = store / SHARDS / record.file, hashlib.sha256()
    try:
        with open_shard(path) as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
                read(len(piece))
    except StoreError as error:
        return str(error)
    except OSError as error:
        return str(unreadable(path, error.strerror or str(error)))
    if digest.hexdigest() == record.sha256:
        return None
    return str(damage(path, "SHA-256", record.sha256, digest.hexdigest()))


def damaged_world(store: Path, meta: StoreMeta) -> list[str]:
    """A sentence if `world.safetensors` is missing or damaged; none without known features. Cost: reads the file."""
    if meta.world is None:
        return []
    path = store / WORLD_FILE
    try:
        got = file_sha256(path)
    except OSError as error:
        return [f"cannot read {path}: {error.strerror or error}; {make_anew(store)}"]
    if got == meta.world.sha256:
        return []
    return [f"{path} is damaged: expected SHA-256 {meta.world.sha256}, got {got}; {make_anew(store)}"]


def open_shard(path: Path) -> io.FileIO:
    """Open a shard to read its bytes; StoreError if it is missing or not a regular file."""
    if not stat.S_ISREG(found_file(path).st_mode):  # opening a pipe would block
        raise unreadable(path, "expected a file, got something else")
    return path.open("rb", buffering=0)


def found_file(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError as error:
        raise StoreError(f"shard {path} is missing; {make_anew(path.parents[1])}") from error


def unreadable(path: Path, why: str) -> StoreError:
    return StoreError(f"cannot read shard {path}: {why}; {make_anew(path.parents[1])}")


def damage(path: Path, what: str, expected: str, got: str) -> StoreError:
    return StoreError(f"shard {path} is damaged: expected {what} {expected}, got {got}; {make_anew(path.parents[1])}")


def frame_checksum(file: io.FileIO, start: int, end: int) -> str:
    """The XXH3-64, in hexadecimal, of a shard's bytes before `start` and from `end` on."""
    digest = xxh3_64(file.read(start))
    file.seek(end)
    while piece := file.read(PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()
