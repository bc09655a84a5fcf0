"""JSON documents, which anyone may have edited: pydantic checks each strictly against a dataclass when read.

Fields that the dataclass does not have are ignored.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Le
from pydantic import TypeAdapter, ValidationError

from .errors import RunError

Document = TypeVar("Document")
Layer = Annotated[int, Ge(0)]
Fraction = Annotated[float, Gt(0), Le(1)]
RUN_VERSION = 1  # of run.json
LOCAL = {"local": True}  # of a field: it means something in one home alone


def read_json(path: Path, kind: type[Document]) -> Document:
    """The document in a file; OSError, or ValueError as `parse_json`."""
    return parse_json(path.read_bytes(), kind)


def parse_json(text: str | bytes, kind: type[Document]) -> Document:
    """The document in a text; ValueError if it is not JSON, or not of that type."""
    try:
        declared: Any = kind  # as in `options_of`
        return _adapter(declared).validate_json(text, strict=True)
    except ValidationError as error:
        raise ValueError(_sentence(error.errors(include_url=False)[0])) from None


@dataclass(frozen=True)
class Origin:
    """Where rows came from, as recorded in stores and the files of SAEs; None where unknown."""

    model: str | None = None  # hub id, folder or name of the language model
    revision: str | None = None  # its commit on the hub
    layer: Layer | None = None  # block, from 0
    site: str | None = None  # hook point in the block; a module's whole name without a layer
    dataset: str | None = None
    context: int | None = None  # tokens in a window
    prepend_bos: bool | None = None  # whether windows begin with special tokens
    target_layer: Layer | None = None  # of a transcoder
    target_site: str | None = None
    # Of a crosscoder, layer and site of each input, in order, and its model and revision where these differ.
    inputs: tuple[dict[str, Any], ...] | None = None
    # Reference of the (first) store, `Joined.hash` of the stores, references of further ones and of the targets'.
    data: str | None = field(default=None, metadata=LOCAL)
    data_hash: str | None = field(default=None, metadata=LOCAL)
    beside: tuple[str, ...] | None = field(default=None, metadata=LOCAL)
    target: str | None = field(default=None, metadata=LOCAL)
    split_seed: Annotated[int, Ge(0)] | None = None
    fraction: Fraction | None = None  # of the training rows that was trained on


def published(origin: Mapping[str, Any]) -> dict[str, Any]:
    """An origin for others: without fields that are `LOCAL`, and of each path only its last part."""
    names = [entry.name for entry in fields(Origin) if not entry.metadata]
    return {name: without_folders(origin[name]) for name in names if name in origin}


def without_folders(value: Any) -> Any:
    """A value of a document for others: of each path only the last part."""
    if isinstance(value, Mapping):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(item) for item in value]
    if not isinstance(value, str):
        return value
    return " + ".join(map(_last_part, value.split(" + ")))  # the texts of a mixture


def _last_part(name: str) -> str:
    """The last part of a path; a name on the hub, OWNER/NAME, as it is."""
    is_path = re.match(r"[/~.]|.*\\|.*/.*/", name, re.DOTALL)
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1] if is_path else name


def point_words(layer: int | None, site: str, between: str = ", ") -> str:
    """A hook point in a sentence: a block's, or a module outside of blocks."""
    return site if layer is None else f"layer {layer}{between}{site}"


@dataclass(frozen=True)
class Marker:
    """The entries that the marker files of stores and runs have in common."""

    created: str
    complete: bool


@dataclass(frozen=True)
class Named:
    name: str


@dataclass(frozen=True)
class Trained:
    """The training settings that determine an SAE's data and width."""

    split_seed: Annotated[int, Ge(0)]
    fraction: Fraction
    d_sae: Annotated[int, Ge(1)] | None = None


@dataclass(frozen=True)
class Result:
    final: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class RunDocument(Marker):
    """The entries of a `run.json` that describe the run's SAE."""

    data: str  # name of the (first) store
    training: Trained
    solver: Named
    activation: Named
    data_hash: str | None = None  # `Joined.hash` of the stores
    streamed: dict[str, Any] | None = None  # the options of rows from a model without a store
    beside: tuple[str, ...] = ()  # names of further stores
    target: str | None = None  # name of the targets' store, if they are not the rows
    result: Result | None = None  # None until it is finished
    settings: dict[str, Any] = field(default_factory=dict)  # all entries


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


def read_run(path: Path) -> RunDocument:
    """Read a `run.json`; RunError if it is not as `sae train` writes it, or of a newer version."""
    try:
        text = path.read_bytes()
        demand_version(text, RUN_VERSION)
        return replace(parse_json(text, RunDocument), settings=parse_json(text, dict[str, Any]))
    except (OSError, ValueError) as error:
        raise RunError(
            f"cannot read {path}: {error}; restore it, or remove the folder to go on without it"
        ) from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def expectation(problem: Any) -> str:
    """What pydantic expected in place of a value: "a valid integer", "greater than or equal to 1"."""
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return message.partition(", unable to")[0]


def _sentence(problem: Any) -> str:
    field = ".".join(map(str, problem["loc"]))
    at = f"{field}: " if field else ""
    if problem["type"] in ("missing", "json_invalid"):  # which have no value
        return f"{at}{problem['msg']}"
    return f"{at}expected {expectation(problem)}, got {problem['input']!r:.60}"
