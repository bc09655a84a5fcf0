"""Stores read side by side: several hook points of the same tokens, row for row.

Legend: B rows of a batch, D = d_in, all inputs' widths together, E the target's width; 0 without.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import cached_property
from typing import Any, NoReturn, Self, cast

import numpy as np

from ..base.errors import ConfigError
from .reader import ActivationStore, Rows, RowSource
from .schema import hash_request
from .split import Which
from .stream import WHOLE, Part
from .values import Spread

COMPARED_ROWS = 1 << 16  # rows of the columns at a time


class JoinedRows(RowSource):
    """The same rows of several stores: one or more inputs, and their targets if not themselves."""

    inputs: tuple[Rows, ...] = ()  # of one or more stores

    def __init__(self, inputs: tuple[Rows, ...], target: Rows | None = None) -> None:
        self.inputs, self.target = inputs, target
        self.all = (*inputs, target) if target else inputs
        self.rows = inputs[0].rows
        self.widths = tuple(rows.d_in for rows in inputs)
        self.d_in, self.d_target = sum(self.widths), target.d_in if target else 0
        self.places = self.widths if len(inputs) > 1 and target is None else ()
        self.name = Joined.of(self).name

    def as_stored(self) -> "JoinedRows":
        return JoinedRows(
            tuple(rows.as_stored() for rows in self.inputs), self.target and self.target.as_stored()
        )

    def batches(
        self,
        batch_size: int,
        *,
        seed: int,
        epoch: int,
        window_bytes: int | None = None,
        part: Part = WHOLE,
        first: int = 0,
    ) -> Iterator[np.ndarray]:
        """One epoch of shuffled batches, (B, D + E), in the order of the first input alone; see `Rows.batches`."""
        row_bytes = self.inputs[0].store.meta.row_bytes
        return _side_by_side(
            [
                rows.batches(
                    batch_size,
                    seed=seed,
                    epoch=epoch,
                    window_bytes=window_bytes,
                    part=part,
                    first=first,
                    row_bytes=row_bytes,
                )
                for rows in self.all
            ]
        )

    def sequential(self, batch_size: int, part: Part = WHOLE) -> Iterator[np.ndarray]:
        """The rows in stored order, (B, D + E); see `Rows.sequential`."""
        return _side_by_side([rows.sequential(batch_size, part) for rows in self.all])

    def spread(self) -> Spread:
        """Mean and scatter of all D + E dimensions."""
        spreads = [rows.spread() for rows in self.all]
        return Spread(
            self.rows,
            np.concatenate([spread.mean for spread in spreads]),
            np.concatenate([spread.scatter for spread in spreads]),
        )


def _side_by_side(streams: list[Iterator[np.ndarray]]) -> Iterator[np.ndarray]:
    with ExitStack() as opened:
        for stream in streams:
            opened.enter_context(closing(cast(Generator[np.ndarray, None, None], stream)))
        for parts in zip(*streams, strict=True):
            yield np.concatenate(parts, axis=1)


def in_words(inputs: Sequence[str], target: str | None) -> str:
    names = " + ".join(inputs)
    return f"{names} -> {target}" if target else names


class Joined:
    """The stores that are trained on: one, several side by side, or inputs and a target."""

    def __init__(
        self, inputs: tuple[ActivationStore, ...], target: ActivationStore | None = None
    ) -> None:
        self.inputs, self.target = inputs, target
        self.all = (*inputs, target) if target else inputs
        self.d_in = sum(store.d_in for store in inputs)
        self.name = in_words([store.name for store in inputs], target.name if target else None)
        self.is_single = target is None and len(inputs) == 1

    @classmethod
    def of(cls, rows: RowSource) -> Self:
        inputs = tuple(own.store for own in rows.inputs)
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
    def origin(self) -> dict[str, Any]:
        """The first input's source, with layer and site of the target and of several inputs, and their models and
        revisions if they differ."""
        sources = [store.meta.source for store in self.inputs]
        models = {(source.get("model"), source.get("revision")) for source in sources}
        keys = ("layer", "site", "model", "revision") if len(models) > 1 else ("layer", "site")
        inputs = [{key: source[key] for key in keys if key in source} for source in sources]
        origin = dict(sources[0])
        if self.target:
            target = self.target.meta.source
            origin |= {f"target_{key}": target[key] for key in ("layer", "site") if key in target}
        if len(inputs) > 1 and all(inputs):
            origin["inputs"] = inputs
        return origin

    def names(self) -> dict[str, Any]:
        """The entries of a run's document: `data`, further inputs as `beside`, and `target`."""
        first, *others = (store.reference for store in self.inputs)
        names: dict[str, Any] = {"data": first, "data_hash": self.hash}
        if others:
            names["beside"] = others
        if self.target:
            names["target"] = self.target.reference
        return names

    def options(self) -> dict[str, Any]:
        first, *others = (store.reference for store in self.inputs)
        target = {"target": self.target.reference} if self.target else {}
        return {"data": [first, *others] if others else first, **target}

    def demand_alike(self) -> None:
        """Refuse stores that are not row for row the same tokens, by a ConfigError. Cost: reads all columns."""
        first, *others = self.all
        for other in others:
            for what, ours, theirs in (
                ("rows", first.rows, other.rows),
                ("dtype", first.dtype, other.dtype),
                ("columns", first.meta.columns, other.meta.columns),
            ):
                if ours != theirs:
                    _refuse(first, other, f"the same {what}", ours, theirs)
            for column in first.meta.columns:
                _demand_same_values(first, other, column)

    def split(
        self, which: Which, *, fraction: float = 1.0, seed: int = 0, rest: bool = False
    ) -> Rows | JoinedRows:
        """The same choice of rows from each; see `ActivationStore.split`."""
        inputs, target = (
            tuple(store.split(which, fraction=fraction, seed=seed, rest=rest) for store in stores)
            for stores in (self.inputs, (self.target,) if self.target else ())
        )
        return inputs[0] if self.is_single else JoinedRows(inputs, target[0] if target else None)


def _demand_same_values(first: ActivationStore, other: ActivationStore, column: str) -> None:
    begin = 0
    for ours, theirs in zip(
        first.split("all").column(column, COMPARED_ROWS),
        other.split("all").column(column, COMPARED_ROWS),
        strict=True,
    ):
        for row in np.flatnonzero(ours != theirs)[:1]:
            same = f"the same {column} in row {begin + row:,}"
            _refuse(first, other, same, ours[row], theirs[row])
        begin += len(ours)


def _refuse(
    first: ActivationStore, other: ActivationStore, expected: str, *got: object
) -> NoReturn:
    raise ConfigError(
        f"{first.name} and {other.name} are not row for row the same tokens: expected {expected}, "
        f"got {got[0]} and {got[1]}; make both with one `sae extract`, by several --sites or --layers"
    )
