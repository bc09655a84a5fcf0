"""JSON documents, which pydantic checks strictly against a dataclass when read; unknown fields are ignored."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Gt, Le
from pydantic import TypeAdapter, ValidationError

Parsed = TypeVar("Parsed")
NonzeroFraction = Annotated[float, Gt(0), Le(1)]


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
