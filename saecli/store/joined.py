"""The stores that are trained on: one, several side by side, or inputs and a target."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from ..base.console import Listener
from ..base.errors import ConfigError
from ..base.home import Home
from .opening import find_store, open_named_store
from .origin import STORES, Origin
from .reader import ActivationStore, JoinedRows, Rows, RowSource, in_words
from .schema import hash_request
from .split import Which

COMPARED_ROWS = 1 << 16  # rows of the columns at a time


class Joined:
    def __init__(
        self, inputs: tuple[ActivationStore, ...], target: ActivationStore | None = None
    ) -> None:
        self.inputs, self.target = inputs, target
        self.all = (*inputs, target) if target else inputs
        self.d_in = sum(store.d_in for store in inputs)
        self.name = in_words([store.name for store in inputs], target.name if target else None)
        self.is_single = target is None and len(inputs) == 1

    @classmethod
    def of(cls, rows: "RowSource | Joined") -> "Joined":
        if isinstance(rows, Joined):
            return rows
        inputs = tuple(each.store for each in rows.inputs)
        return cls(inputs, rows.target.store if rows.target else None)

    @cached_property
    def hash(self) -> str:
        """The request hash of the only store, else one of all of them."""
        hashes = [store.meta.request_hash for store in self.inputs]
        if self.is_single:
            return hashes[0]
        return hash_request(
            {"inputs": hashes, "target": self.target and self.target.meta.request_hash}
        )

    @property
    def origin(self) -> Origin:
        """The first input's, with all hook points and the stores' names."""
        origin = Origin.joined([store.meta.origin for store in self.inputs])
        if self.target and self.target.meta.origin.read[0].site:
            origin = replace(origin, written=self.target.meta.origin.read[0])
        first, *others = (store.reference for store in self.inputs)
        return replace(
            origin,
            data=first,
            data_hash=self.hash,
            beside=tuple(others),
            target=self.target.reference if self.target else None,
        )

    def names(self) -> dict[str, Any]:
        entries = self.origin.to_json()
        return {name: entries[name] for name in STORES if name in entries}

    def options(self) -> dict[str, Any]:
        first, *others = (store.reference for store in self.inputs)
        target = {"target": self.target.reference} if self.target else {}
        return {"data": [first, *others] if others else first, **target}

    def demand_alike(self) -> None:
        """ConfigError unless the stores are row for row the same tokens. Cost: reads all columns."""
        first, *others = self.all
        for other in others:
            if difference := _difference(first, other):
                raise ConfigError(
                    f"{first.name} and {other.name} are not row for row the same tokens: they differ in "
                    f"{difference}; make both with one `sae extract`, by several --sites or --layers"
                )

    def split(self, which: Which, **choice: Any) -> Rows | JoinedRows:
        inputs = tuple(store.split(which, **choice) for store in self.inputs)
        if self.is_single:
            return inputs[0]
        target = self.target.split(which, **choice) if self.target else None
        return JoinedRows(inputs, target)


def _difference(first: ActivationStore, other: ActivationStore) -> str:
    for what, ours, theirs in (
        ("rows", first.rows, other.rows),
        ("dtype", first.dtype, other.dtype),
        ("columns", first.meta.columns, other.meta.columns),
    ):
        if ours != theirs:
            return f"{what}, {ours} and {theirs}"
    for column in first.meta.columns:
        parts = (store.split("all").column(column, COMPARED_ROWS) for store in (first, other))
        if not all(np.array_equal(*pair) for pair in zip(*parts, strict=True)):
            return f"the column {column}"
    return ""


def open_joined(home: Home, data: Sequence[str], target: str | None, listener: Listener) -> Joined:
    """Open input stores (default: the newest) and a target; ConfigError if an input is named twice, or they are not row
    for row the same tokens."""
    names: Sequence[str | None] = data or [None]
    inputs = tuple(open_named_store(home, name, listener) for name in names)
    paths = [store.path.resolve() for store in inputs]
    for store, path in zip(inputs, paths, strict=True):
        if paths.count(path) > 1:
            raise ConfigError(f"--data names {store.name} twice; name each store once")
    joined = Joined(inputs, None if target is None else open_named_store(home, target, listener))
    joined.demand_alike()
    return joined


def paired(home: Home, data: Sequence[str], targets: Sequence[str]) -> list[tuple[str, str]]:
    """The names of input and target stores of the same layer, in order of layers; ConfigError unless both have the same
    layers, each once."""
    layers: list[list[Any]] = [
        [find_store(home, name).meta.origin.read[0].layer for name in names]
        for names in (data, targets)
    ]
    inputs, outputs = (
        dict(zip(found, names, strict=True))
        for found, names in zip(layers, (data, targets), strict=True)
    )
    is_each_once = len(inputs) == len(data) and len(outputs) == len(targets)
    if None in inputs or inputs.keys() != outputs.keys() or not is_each_once:
        raise ConfigError(
            "expected one store of each layer by --data, and one of the same layers by --target, got layers "
            f"{layers[0]} and {layers[1]}; name other stores, or pair two alone, without --each"
        )
    return [(inputs[layer], outputs[layer]) for layer in sorted(inputs)]
