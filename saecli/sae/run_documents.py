"""`run.json`, as far as it describes an SAE; without NumPy or torch."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from ..base.errors import RunError
from ..base.files import Marker, NonzeroFraction, demand_version, parse_json

RUN_VERSION = 1  # of run.json


@dataclass(frozen=True)
class Named:
    name: str


@dataclass(frozen=True)
class Trained:
    split_seed: Annotated[int, Ge(0)]
    fraction: NonzeroFraction
    d_sae: Annotated[int, Ge(1)] | None = None


@dataclass(frozen=True)
class Result:
    final: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class RunDocument(Marker):
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


def read_run(path: Path) -> RunDocument:
    """RunError for a document that is not as `sae train` writes it, or of a newer version."""
    try:
        text = path.read_bytes()
        demand_version(text, RUN_VERSION)
        return replace(parse_json(text, RunDocument), settings=parse_json(text, dict[str, Any]))
    except (OSError, ValueError) as error:
        raise RunError(
            f"cannot read {path}: {error}; restore it, or remove the folder to go on without it"
        ) from error
