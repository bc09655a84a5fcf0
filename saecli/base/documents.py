"""JSON documents, which anyone may have edited: pydantic checks each strictly against a dataclass when read.

Fields that the dataclass does not have are ignored.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Le

from .errors import RunError
from .files import regular

Document = TypeVar("Document")
RUN_VERSION = 1  # of run.json


def read_json(path: Path, kind: type[Document]) -> Document:
    """The document in a regular file; OSError if it cannot be read, else as `parse_json`."""
    return parse_json(regular(path).read_bytes(), kind)


def parse_json(text: str | bytes, kind: type[Document]) -> Document:
    """The document in a text; a ValueError says where it is not JSON, or not of that type."""
    from pydantic import ValidationError  # takes 0.1 s to import, and `sae --help` does not need it

    try:
        found: Any = kind
        return _adapter(found).validate_json(text, strict=True)
    except ValidationError as error:
        raise ValueError(_sentence(error.errors(include_url=False)[0])) from None


@dataclass(frozen=True)
class Origin:
    """Where rows came from, as recorded in stores and the files of SAEs; None where unknown.

    Args:
        model: hub id, folder or name of the language model.
        layer: the block, from 0.
        site: where in the block.
        dataset: the text.
        context: tokens in a window.
        prepend_bos: whether windows begin with special tokens.
        target_layer: of a transcoder, the block of its targets.
        target_site: of a transcoder, where in that block.
        inputs: of a crosscoder, layer and site of each input, in order.
        data: the store's reference, of several the first's.
        data_hash: `Joined.hash` of the stores.
        beside: references of further stores.
        target: reference of the targets' store.
        split_seed: seed of the split into training and held-out rows.
        fraction: fraction of the training rows that was trained on.
    """

    model: str | None = None
    layer: int | None = None
    site: str | None = None
    dataset: str | None = None
    context: int | None = None
    prepend_bos: bool | None = None
    target_layer: int | None = None
    target_site: str | None = None
    inputs: tuple[dict[str, Any], ...] | None = None
    data: str | None = None
    data_hash: str | None = None
    beside: tuple[str, ...] | None = None
    target: str | None = None
    split_seed: int | None = None
    fraction: float | None = None


@dataclass(frozen=True)
class Marker:
    """The entries that the marker files of stores and runs have in common; for `created` see `home.now`."""

    created: str
    complete: bool


@dataclass(frozen=True)
class Named:
    """A solver or an activation, by name; its settings are not read here."""

    name: str


@dataclass(frozen=True)
class Trained:
    """The training settings that determine an SAE's data and width."""

    split_seed: Annotated[int, Ge(0)]
    fraction: Annotated[float, Gt(0), Le(1)]
    d_sae: Annotated[int, Ge(1)] | None = None


@dataclass(frozen=True)
class Result:
    """The result of a training; only its measures are read here."""

    final: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class RunDocument(Marker):
    """The entries of a `run.json` that describe the run's SAE.

    Args:
        data: name of the store that it was trained on, of several the first.
        training: training settings; `sae train --resume` reads the others too.
        solver: the solver.
        activation: the SAE's activation.
        data_hash: `Joined.hash` of the stores; None if unknown.
        streamed: where its rows came from without a store, which would have been called `data`; None if from one.
        beside: names of further stores, side by side with the first.
        target: name of the store of its targets; None if these are the rows.
        result: None until it is finished.
    """

    data: str
    training: Trained
    solver: Named
    activation: Named
    data_hash: str | None = None
    streamed: dict[str, Any] | None = None
    beside: tuple[str, ...] = ()
    target: str | None = None
    result: Result | None = None


@dataclass(frozen=True)
class _Versioned:
    format_version: int


def demand_version(text: str | bytes, newest: int) -> None:
    """ValueError if a document's `format_version` is missing or newer than `newest`, whatever else is in it."""
    version = parse_json(text, _Versioned).format_version
    if version > newest:
        raise ValueError(f"expected format version {newest} or older, got {version}; upgrade saecli to read it")


def read_run(path: Path) -> RunDocument:
    """Read a `run.json`; RunError if it is not as `sae train` writes it, or of a newer version."""
    return _read_run(path, RunDocument)


def read_settings(path: Path) -> dict[str, Any]:
    """All entries of a `run.json`; RunError as in `read_run`."""
    return _read_run(path, dict[str, Any])


def _read_run(path: Path, kind: type) -> Any:
    try:
        text = regular(path).read_bytes()
        demand_version(text, RUN_VERSION)
        parse_json(text, RunDocument)
        return parse_json(text, kind)
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}; restore it, or remove the folder to go on without it") from error


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _sentence(problem: Any) -> str:
    field = ".".join(map(str, problem["loc"]))
    at = f"{field}: " if field else ""
    if problem["type"] == "missing":
        return f"expected a field {field}, got none"
    message = problem["msg"]
    if message.startswith("Input should be "):
        return f"{at}expected {message.removeprefix('Input should be ')}, got {problem['input']!r:.60}"
    return f"{at}{message.removeprefix('Value error, ')}"
