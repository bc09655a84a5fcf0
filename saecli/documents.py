"""JSON documents, which anyone may have edited: each is checked against a type as it is read.

A document's type is a dataclass whose fields' annotations say all that is relied on; pydantic checks it, strictly: no
word stands for a number, and no number for a word. Fields that a type does not have are left out.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from .files import regular

Document = TypeVar("Document")


def read_json(path: Path, kind: type[Document]) -> Document:
    """The document in a file.

    Args:
        path: a regular file of JSON text.
        kind: what it must be.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it is no regular file, or cannot be read.
        ValueError: its text is no JSON, or the document is not of that type; says what of it.
    """
    return parse_json(regular(path).read_bytes(), kind)


def parse_json(text: str | bytes, kind: type[Document]) -> Document:
    """The document in a text; see `read_json`.

    Raises:
        ValueError: it is no JSON, or not of that type; says what of it.
    """
    from pydantic import ValidationError  # takes 0.1 s to import, which `sae --help` has no use for

    try:
        return _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise ValueError(_sentence(error.errors(include_url=False)[0])) from None


@dataclass(frozen=True)
class Origin:
    """Where rows came from, as stores and the files of SAEs say it, as far as they do.

    Args:
        model: hub id, folder or name of the language model.
        layer: the block, counted from 0.
        site: where in the block.
        dataset: the text.
        context: tokens in a window.
        prepend_bos: whether windows begin with special tokens.
    """

    model: str | None = None
    layer: int | None = None
    site: str | None = None
    dataset: str | None = None
    context: int | None = None
    prepend_bos: bool | None = None


@dataclass(frozen=True)
class _Versioned:
    format_version: int


def demand_version(text: str | bytes, newest: int) -> None:
    """Refuse a document of a newer version than this tool knows, whatever else is in it; ValueError where its
    `format_version` is newer, or there is none."""
    version = parse_json(text, _Versioned).format_version
    if version > newest:
        raise ValueError(f"expected format version {newest} or older, got {version}; upgrade saecli to read it")


@cache
def _adapter(kind: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _sentence(problem: Any) -> str:
    """What is wrong, of one of pydantic's errors."""
    field = ".".join(map(str, problem["loc"]))
    at = f"{field}: " if field else ""
    if problem["type"] == "missing":
        return f"expected a field {field}, got none"
    message = problem["msg"]
    if message.startswith("Input should be "):
        return f"{at}expected {message.removeprefix('Input should be ')}, got {problem['input']!r:.60}"
    return f"{at}{message.removeprefix('Value error, ')}"
