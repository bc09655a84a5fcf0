"""Files that appear whole or not at all."""

import csv
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

LOCK = ".lock"
_PARTIAL = re.compile(r"(?<![^/\s'\"])\.([^/]+?)\.partial(?![\w.])")
KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
         stat.S_IFBLK: "a device"}


class NotAFile(OSError):  # noqa: N818 - named as NotADirectoryError is
    """What stands at a path is no regular file: to open a pipe waits for its other end, a device may never end."""


def regular(path: Path) -> Path:
    """The path, where a regular file stands at it, or a link to one; NotAFile where something else does, and
    FileNotFoundError or another OSError as the system says."""
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:
        raise NotAFile(f"expected a file, got {KINDS.get(kind, 'something else')}")
    return path


def is_utf8(path: Path) -> bool:
    """Whether the path's name is UTF-8, as it must be where safetensors is to open it."""
    return str(path).encode("utf-8", "replace") == os.fsencode(path)


def flush_to_disk(path: Path) -> None:
    """Force a file's contents, or a folder's entries, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal; cost: one read of the file. Raises OSError where it is no regular
    file, or cannot be read."""
    with regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def partial_path(path: Path) -> Path:
    """Where a file is written before it appears at `path`: beside it, hidden."""
    return path.with_name(f".{path.name}.partial")


def as_named(text: str) -> str:
    """A message with every `partial_path` in it replaced by the path at which the file was to appear."""
    return _PARTIAL.sub(r"\1", text)


def settle(temporary: Path, path: Path) -> None:
    """Flush a finished temporary file to disk and let it appear at `path`, in the same folder.

    Raises:
        OSError: the disk refuses it; `path` is as it was.
    """
    temporary.chmod(0o666 & ~_umask())  # some writers make files that only their owner may read
    flush_to_disk(temporary)
    temporary.replace(path)
    flush_to_disk(path.parent)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def appearing_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success flush it to disk and rename it to `path`.

    On any failure, a full disk and an interrupt included, the temporary file is removed and whatever stood
    at `path` before is untouched.
    """
    temporary = partial_path(path)
    temporary.unlink(missing_ok=True)  # of a process that was killed; or what to write to would wait for ever
    try:
        yield temporary
        settle(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def is_free(folder: Path) -> bool:
    """Whether `folder_appearing_whole` can write there: nothing has that name yet, or an empty folder."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


@contextmanager
def folder_appearing_whole(folder: Path) -> Iterator[Path]:
    """Yield an empty temporary folder beside `folder`; on success rename it to `folder`, which `is_free`.

    On any failure, an interrupt included, the temporary folder is removed with all that is in it.
    """
    make_folder(folder.parent)
    temporary = partial_path(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        temporary.replace(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    flush_to_disk(folder.parent)


def storable(document: Any) -> Any:
    """The document with every NaN and infinity, which JSON cannot hold, replaced by None, and with the bytes of files'
    names that are no UTF-8, which readers of JSON refuse, escaped."""
    if isinstance(document, dict):
        return {key: storable(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [storable(value) for value in document]
    if isinstance(document, float) and not math.isfinite(document):
        return None
    if isinstance(document, str) and not document.isascii():
        return document.encode("utf-8", "backslashreplace").decode()
    return document


def to_json(document: Any, indent: int | None = None) -> str:
    """The document as JSON text, made `storable`."""
    return json.dumps(storable(document), indent=indent, allow_nan=False)


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document that appears whole or not at all."""
    with appearing_whole(path) as temporary:
        temporary.write_text(to_json(document, indent=2) + "\n", encoding="utf-8")


def write_csv(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write a table that appears whole or not at all, its folder made if need be.

    Args:
        path: the file.
        lines: one mapping a line; their keys, in the order in which they first occur, are the columns. Numbers keep
            every digit, NaNs and infinities are left empty.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(key for line in lines for key in line))
    with appearing_whole(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(storable(line) for line in lines)


def check_place(path: Path) -> None:
    """Find out, before the work, whether a file can be written at a path, its folder made if need be; leaves nothing.
    Raises OSError where it cannot."""
    with suppress(FileNotFoundError):
        regular(path)  # what would be replaced
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        NamedTemporaryFile(prefix=f".{path.name}.", dir=path.parent).close()
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, so that they outlast a power cut; one that is there is left as it is. Raises
    OSError where the disk refuses it."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(made):
        flush_to_disk(folder.parent)


def lock_folder(folder: Path) -> int:
    """Lock a folder, which is made if need be, against other processes that lock it.

    Args:
        folder: the folder.

    Returns:
        A descriptor to close when done; the system closes it, and lets go of the lock, if the process dies.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the folder cannot be made.
    """
    while True:
        make_folder(folder)
        try:
            # A file of its own: network file systems lock no folders.
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have removed the folder, lock and all, since the file was opened.
            if os.path.samestat(os.stat(folder / LOCK), os.fstat(descriptor)):
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
