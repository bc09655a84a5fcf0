"""Opening stores by name: one, several side by side, or inputs and a target; warnings about them, and their JSON."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..base.console import Listener
from ..base.errors import ConfigError, PeerError, StoreError
from ..base.files import expanded
from ..base.home import STORE_MARKER, Home
from ..base.processes import signals_handled
from ..base.words import counted
from .origin import STORES, Origin
from .reader import ActivationStore, JoinedRows, Rows, RowSource, in_words
from .schema import StoreMeta, hash_request, read_meta
from .split import Which
from .values import OUTLYING, Norms

DERIVED = "the store's name, which --name sets,"  # in messages on a name that the user did not give
COMPARED_ROWS = 1 << 16  # rows of the columns at a time


def find_store(home: Home, name: str | None) -> ActivationStore:
    """The store of that name in the home, else in the folder of that path; None for the newest."""
    shelf = home.stores
    folder = None if name is None or name in shelf else expanded(name)
    if folder is None or not (folder / STORE_MARKER).is_file():
        return ActivationStore.open(shelf.find(name))
    return ActivationStore.open(folder, homed=folder.resolve().parent == shelf.path.resolve())


def open_named_store(home: Home, name: str | None, listener: Listener) -> ActivationStore:
    """The store of `find_store`, with a note that names the newest; StoreError if a shard is missing or truncated."""
    store = find_store(home, name)
    if name is None:
        listener.note(f"using the newest store, {store.name}")
    warn_of(store, listener)
    store.demand_shards()
    return store


def warn_of(store: ActivationStore, listener: Listener) -> None:
    if not store.complete:
        listener.warn(
            f"{store.name} is not finished; its whole shards hold {counted(store.rows, 'row')} so far"
        )
    norms, multiple = store.meta.norms, store.meta.max_norm_multiple
    if norms and (multiple is None or multiple > OUTLYING):
        warn_of_massive(store.name, norms, listener)


def warn_of_massive(name: str, norms: Norms, listener: Listener) -> None:
    if norms.massive_rows:
        listener.warn(
            f"{name}: {norms.massive_rows:,} of {norms.rows:,} rows have over {OUTLYING} times the median "
            f"norm; --max-norm-multiple {OUTLYING} drops them as rows are made"
        )


def warn_of_nonfinite(name: str, meta: StoreMeta, listener: Listener) -> None:
    if left_out := meta.dropped.get("nonfinite"):
        listener.warn(
            f"{name}: {counted(left_out, 'row')} left out, with numbers that are NaN or too large for {meta.dtype}; "
            "check where they come from, or give a wider --dtype"
        )


def finished_store(folder: Path, request_hash: str) -> ActivationStore | None:
    """The finished store in a folder, or None; StoreError if it was made from something else, or a shard is missing."""
    if not (folder / STORE_MARKER).exists():
        return None
    store = ActivationStore.open(folder)
    if store.meta.request_hash != request_hash:
        if not store.complete and not store.rows:
            return None
        raise StoreError(
            f"there is a store named {folder.name!r} already, made from something else; give another --name"
        )
    store.demand_shards()
    store.cached = store.complete
    return store if store.complete else None


@contextmanager
def note_when_stopped(listener: Listener) -> Iterator[list[Path]]:
    """If Ctrl-C or SIGTERM ends the block, note how many rows are saved in the folders listed."""
    folders: list[Path] = []
    is_free = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # and not torchrun's
    try:
        with signals_handled(signal.default_int_handler, *[signal.SIGTERM] * is_free):
            yield folders
    except (KeyboardInterrupt, PeerError):
        metas = [read_meta(folder) for folder in folders if (folder / STORE_MARKER).exists()]
        if metas:
            # Other ranks may save more.
            least = "at least " if metas[0].ranks else ""
            rows = sum(meta.rows for meta in metas)
            listener.note(
                f"stopped; {least}{rows:,} rows are saved, and the same command goes on from there"
            )
        raise


def described(store: ActivationStore) -> dict[str, Any]:
    meta = store.meta
    document: dict[str, Any] = {
        "rows": store.rows,
        "d_in": store.d_in,
        "dtype": store.dtype,
        "shards": len(meta.shards),
        "dropped": meta.dropped,
        "norms": None if meta.norms is None else asdict(meta.norms),
    }
    if meta.sources:
        document["sources"] = meta.sources
    if meta.control_tokens:
        document["control_tokens"] = meta.control_tokens
    return {**document, "source": meta.source}


def stores_document(stores: Sequence[ActivationStore]) -> dict[str, Any]:
    """One store's JSON, or that of several below `stores`."""
    documents = [
        {"name": store.name, "path": str(store.path), **described(store), "cached": store.cached}
        for store in stores
    ]
    return documents[0] if len(documents) == 1 else {"stores": documents}


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
