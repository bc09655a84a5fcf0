"""Files and folders written atomically; JSON documents, checked strictly against a dataclass when they are read."""

import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated, Any, TypeVar

from annotated_types import Gt, Le
from pydantic import TypeAdapter, ValidationError

from .errors import ConfigError

Parsed = TypeVar("Parsed")
NonzeroFraction = Annotated[float, Gt(0), Le(1)]
LOCK = ".lock"
# What file systems answer that cannot flush a folder: of Windows, in user space, of virtual machines.
UNFLUSHABLE = (errno.EINVAL, errno.EBADF, errno.EACCES, errno.ENOTSUP)


def read_json(path: Path, kind: type[Parsed]) -> Parsed:
    return parse_json(path.read_bytes(), kind)


def parse_json(text: str | bytes, kind: type[Parsed]) -> Parsed:
    """ValueError if the text is not JSON, or not of that type."""
    try:
        declared: Any = kind  # as in `options_of`
        return _adapter(declared).validate_json(text, strict=True)
    except ValidationError as error:
        raise ValueError(_sentence(error.errors(include_url=False)[0])) from None


@dataclass(frozen=True)
class Marker:
    """The entries that the marker files of stores and runs have in common."""

    created: str
    complete: bool


@dataclass(frozen=True)
class _Versioned:
    format_version: int


def demand_version(text: str | bytes, newest: int, oldest: int = 1) -> None:
    """ValueError if a document's `format_version` is missing, newer than `newest` or older than `oldest`."""
    version = parse_json(text, _Versioned).format_version
    if version < oldest:
        raise ValueError(f"expected format version {oldest}, got {version}, of an older saecli")
    if version > newest:
        raise ValueError(
            f"expected format version {newest} or older, got {version}; upgrade saecli to read it"
        )


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def expectation(problem: Any) -> str:
    """What pydantic expected in place of a value: "a valid integer", "at least 1"."""
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    message = message.replace("greater than or equal to", "at least")
    message = message.replace("less than or equal to", "at most")
    return message.partition(", unable to")[0]


def _sentence(problem: Any) -> str:
    field = ".".join(map(str, problem["loc"]))
    at = f"{field}: " if field else ""
    if problem["type"] in ("missing", "json_invalid"):  # which have no value
        return f"{at}{problem['msg']}"
    return f"{at}expected {expectation(problem)}, got {problem['input']!r:.60}"


def expanded(path: str | Path) -> Path:
    return Path(os.path.expanduser(path))


def flush_to_disk(path: Path) -> None:
    """Force a file's contents, or a folder's entries where its file system can, onto the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in UNFLUSHABLE or not path.is_dir():
            raise


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def partial_path(path: Path) -> Path:
    """Where the only writer of a file makes it: next to `path`, hidden."""
    return path.with_name(f".{path.name}.partial")


def _own_partial(path: Path) -> Path:
    """The same for one of several writers."""
    return path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")


def settle(temporary: Path, path: Path) -> None:
    """Flush a finished temporary file to disk and rename it to `path`, in the same folder."""
    flush_to_disk(temporary)
    temporary.replace(path)
    flush_to_disk(path.parent)


@contextmanager
def appearing_whole(path: Path) -> Iterator[Path]:
    """Yield an empty temporary file; flush it to disk and rename it to `path`, or on any failure remove it. Of several
    writers, the last to succeed counts."""
    temporary = _own_partial(path)
    temporary.touch(exist_ok=False)
    mode = stat.S_IMODE(temporary.stat().st_mode)
    try:
        yield temporary
        temporary.chmod(mode)  # some writers replace it by a file that only its owner may read
        settle(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(path)  # of a write that fails, the system names no file
        raise


def is_free(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


@contextmanager
def folder_appearing_whole(folder: Path, replacing: bool = False) -> Iterator[Path]:
    """Yield an empty temporary folder; rename it to `folder`, which `is_free` unless `replacing`, or on any failure
    remove it: what was to be replaced stays."""
    make_folder(folder.parent)
    temporary = _own_partial(folder)
    temporary.mkdir()
    try:
        yield temporary
        if not replacing or is_free(folder):
            temporary.replace(folder)
        else:
            old = _own_partial(folder)
            folder.replace(old)
            try:
                temporary.replace(folder)
            except BaseException:
                with suppress(OSError):  # another writer's may be there by now
                    old.replace(folder)
                raise
            # The new one stands, though a file system may keep something of the old one, as NFS does what is open.
            shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    flush_to_disk(folder.parent)


def to_json(document: Any, **layout: Any) -> str:
    """The document as JSON text, NaN and infinities as null; `layout` as of `json.dumps`."""
    return json.dumps(_without_nan(document), allow_nan=False, **layout)


def _without_nan(document: Any) -> Any:
    """pydantic's own conversion refuses the names of files that are no UTF-8."""
    if isinstance(document, dict):
        return {key: _without_nan(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [_without_nan(value) for value in document]
    if isinstance(document, float) and not math.isfinite(document):
        return None
    return document


def write_json(path: Path, document: Any) -> None:
    with appearing_whole(path) as temporary:
        temporary.write_text(to_json(document, indent=2) + "\n", encoding="utf-8")


def demand_place(path: Path, remedy: str = "name another path") -> None:
    """ConfigError if a file cannot be written at a path, whose folder must exist; leaves nothing behind."""
    try:
        if path.exists() and not path.is_file():  # would be replaced
            raise OSError("expected a file, got a folder or a device")
        if not path.parent.is_dir():
            raise OSError(f"there is no folder {path.parent}")
        NamedTemporaryFile(prefix=f".{path.name}.", suffix=".partial", dir=path.parent).close()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}; {remedy}") from error


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, flushed to disk; OSError if the disk refuses it."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(made):
        flush_to_disk(folder.parent)


def lock_folder(folder: Path, owned: Collection[str] = ()) -> int:
    """Lock a folder, created if missing, by a descriptor to close; BlockingIOError if another process has it. Removes
    what killed owners left of the `owned` files."""
    make_folder(folder)
    # A file in it, since network file systems lock no folders.
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in owned:
            for left in folder.glob(f".{name}.*.partial"):
                left.unlink()
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def folder_bytes(folder: Path) -> int:
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # another process may rename or remove it
                size += os.stat(os.path.join(parent, name)).st_size
    return size
