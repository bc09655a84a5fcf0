"""The stores and runs of a home: opening, several stores side by side, listing and removing."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..base.console import Listener, listening
from ..base.documents import read_run
from ..base.errors import ConfigError, PeerError, SaeError, StoreError, counted, did_you_mean
from ..base.files import expanded, lock_folder
from ..base.home import STORE_MARKER, Home, Shelf
from ..base.processes import signals_handled
from .reader import ActivationStore, JoinedRows, Rows, RowSource, in_words
from .schema import StoreMeta, hash_request, read_meta
from .split import Which
from .values import OUTLYING, Norms

DERIVED = "the store's name, which --name sets,"  # in messages on a name that the user did not give
COMPARED_ROWS = 1 << 16  # rows of the columns at a time


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
    def of(cls, rows: "RowSource | Joined") -> "Joined":
        if isinstance(rows, Joined):
            return rows
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
        first, *beside = (store.reference for store in self.inputs)
        target = self.target and self.target.reference
        names = {"data": first, "data_hash": self.hash, "beside": beside, "target": target}
        return {key: name for key, name in names.items() if name}

    def options(self) -> dict[str, Any]:
        first, *others = (store.reference for store in self.inputs)
        target = {"target": self.target.reference} if self.target else {}
        return {"data": [first, *others] if others else first, **target}

    def demand_alike(self) -> None:
        """Refuse stores that are not row for row the same tokens, by a ConfigError. Cost: reads all columns."""
        first, *others = self.all
        for other in others:
            if difference := _difference(first, other):
                raise ConfigError(
                    f"{first.name} and {other.name} are not row for row the same tokens: they differ in "
                    f"{difference}; make both with one `sae extract`, by several --sites or --layers"
                )

    def split(self, which: Which, **choice: Any) -> Rows | JoinedRows:
        """The same choice of rows from each; see `ActivationStore.split`."""
        inputs = tuple(store.split(which, **choice) for store in self.inputs)
        if self.is_single:
            return inputs[0]
        target = self.target.split(which, **choice) if self.target else None
        return JoinedRows(inputs, target)


def _difference(first: ActivationStore, other: ActivationStore) -> str:
    """In what two stores differ, in words; empty if they hold rows of the same tokens."""
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


def find_store(home: Home, name: str | None) -> ActivationStore:
    """The store of that name in the home, else in the folder of that path; None for the newest."""
    shelf = home.stores
    folder = None if name is None or name in shelf else expanded(name)
    if folder is None or not (folder / STORE_MARKER).is_file():
        return ActivationStore.open(shelf.find(name))
    return ActivationStore.open(folder, homed=folder.resolve().parent == shelf.path.resolve())


def open_store(home: Home, name: str | None, listener: Listener) -> ActivationStore:
    """The store of `find_store`, with a note that names the newest; StoreError if a shard is missing or truncated."""
    store = find_store(home, name)
    if name is None:
        listener.note(f"using the newest store, {store.name}")
    warn_of(store, listener)
    store.demand_shards()
    return store


def open_joined(home: Home, data: Sequence[str], target: str | None, listener: Listener) -> Joined:
    """Open input stores (default: the newest) and an optional target; ConfigError if an input is named twice, or they
    are not row for row the same tokens."""
    names: Sequence[str | None] = data or [None]
    inputs = tuple(open_store(home, name, listener) for name in names)
    paths = [store.path.resolve() for store in inputs]
    for store, path in zip(inputs, paths, strict=True):
        if paths.count(path) > 1:
            raise ConfigError(f"--data names {store.name} twice; name each store once")
    joined = Joined(inputs, None if target is None else open_store(home, target, listener))
    joined.demand_alike()
    return joined


def paired(home: Home, data: Sequence[str], targets: Sequence[str]) -> list[tuple[str, str]]:
    """The names of input stores and, of the same layer, target stores, in order of layers; ConfigError unless both have
    the same layers, each once."""
    layers: list[list[Any]] = [
        [find_store(home, name).meta.source.get("layer") for name in names]
        for names in (data, targets)
    ]
    inputs, outputs = (
        dict(zip(own, names, strict=True))
        for own, names in zip(layers, (data, targets), strict=True)
    )
    is_each_once = len(inputs) == len(data) and len(outputs) == len(targets)
    if None in inputs or inputs.keys() != outputs.keys() or not is_each_once:
        raise ConfigError(
            "expected one store of each layer by --data, and one of the same layers by --target, got layers "
            f"{layers[0]} and {layers[1]}; name other stores, or pair two alone, without --each"
        )
    return [(inputs[layer], outputs[layer]) for layer in sorted(inputs)]


def warn_of(store: ActivationStore, listener: Listener) -> None:
    """Warn about a store that is not finished, and rows of massive norm, which decide a fit."""
    if not store.complete:
        listener.warn(
            f"{store.name} is not finished; its whole shards hold {counted(store.rows, 'row')} so far"
        )
    norms, multiple = store.meta.norms, store.meta.max_norm_multiple
    if norms and (multiple is None or multiple > OUTLYING):
        warn_of_massive(store.name, norms, listener)


def warn_of_massive(name: str, norms: Norms, listener: Listener) -> None:
    """Warn about massive rows by the norms of some rows."""
    if norms.massive_rows:
        listener.warn(
            f"{name}: {norms.massive_rows:,} of {norms.rows:,} rows have over {OUTLYING} times the median "
            f"norm; --max-norm-multiple {OUTLYING} drops them as rows are made"
        )


def warn_of_nonfinite(name: str, meta: StoreMeta, listener: Listener) -> None:
    """Warn about rows that were left out as their numbers are not finite in the store's type."""
    if left_out := meta.dropped.get("nonfinite"):
        listener.warn(
            f"{name}: {counted(left_out, 'row')} left out, with numbers that are NaN or too large for {meta.dtype}; "
            "check where they come from, or give a wider --dtype"
        )


def finished_store(folder: Path, request_hash: str) -> ActivationStore | None:
    """The finished store in a folder; StoreError if it, or an unfinished one with rows, was made from something else,
    or a shard is missing."""
    if not (folder / STORE_MARKER).exists():
        return None
    store = ActivationStore.open(folder)
    if store.meta.request_hash != request_hash:
        if not store.complete and not store.rows:
            return None
        raise StoreError(
            f"there is a store named {folder.name!r} already, made from something else; give another "
            "--name"
        )
    store.demand_shards()
    store.cached = store.complete
    return store if store.complete else None


@contextmanager
def note_when_stopped(listener: Listener) -> Iterator[list[Path]]:
    """If Ctrl-C or SIGTERM ends a command that fills stores, whose folders go into the list, say how many rows are
    saved."""
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
    """The entries of a store's JSON: with rows dropped, the norms of rows, a mixture's sources and the control tokens
    of chats."""
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
    """The JSON document of a command that made stores: of one store, or of all below `stores`."""
    documents = [
        {"name": store.name, "path": str(store.path), **described(store), "cached": store.cached}
        for store in stores
    ]
    return documents[0] if len(documents) == 1 else {"stores": documents}


def list_home(
    home: str | Path | None = None, *, check: bool = False, progress: bool | Listener = False
) -> dict[str, Any]:
    """The stores and runs of a home, newest first, as `sae list --json` prints them.

    Args:
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.
        check: read every shard and compare it with its checksum.

    Returns:
        `home`, the folder; `stores` and `runs`, lists of mappings, an unreadable one with a `problem`, a sentence; with
        `check` `problems`, a sentence for each unreadable store and each damaged shard.
    """
    opened = Home.at(home)
    stores = _entries(opened.stores, _describe_store)
    runs = _entries(opened.runs, _describe_run)
    document: dict[str, Any] = {"home": str(opened.path), "stores": stores, "runs": runs}
    if check:
        unreadable = [store["problem"] for store in stores if "problem" in store]
        document["problems"] = unreadable + _check(stores, listening(progress))
    return document


def _entries(
    shelf: Shelf, describe: Callable[[Shelf, str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """The entries of a shelf, newest first; an unreadable one has a `problem`."""
    entries = []
    for marker in shelf.marker_files():
        path = marker.parent
        try:
            description = describe(shelf, path.name)
        except SaeError as error:
            description = {"state": "unreadable", "created": "", "problem": str(error)}
        size = {"bytes": folder_bytes(path)}
        entries.append({"name": path.name, "path": str(path), **description, **size})
    return sorted(entries, key=lambda entry: (str(entry["created"]), entry["name"]), reverse=True)


def _describe_store(shelf: Shelf, name: str) -> dict[str, Any]:
    store = ActivationStore.open(shelf.path / name)
    return {
        "state": "complete" if store.complete else "unfinished",
        "created": store.meta.created,
        **described(store),
    }


def _describe_run(shelf: Shelf, name: str) -> dict[str, Any]:
    run = read_run(shelf.path / name / shelf.marker)
    final: Mapping[str, Any] = run.result.final if run.result else {}
    return {
        "state": "complete" if run.complete else "unfinished",
        "created": run.created,
        "data": in_words([run.data, *run.beside], run.target),
        "solver": run.solver.name,
        "act": run.activation.name,
        "d_sae": run.training.d_sae,
        "test_fvu": final.get("test_fvu"),
        "test_l0": final.get("test_l0"),
    }


def folder_bytes(folder: Path) -> int:
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # another process may rename or remove it
                size += os.stat(os.path.join(parent, name)).st_size
    return size


def _check(stores: list[dict[str, Any]], listener: Listener) -> list[str]:
    """A sentence for each problem with the shards of readable stores."""
    problems: list[str] = []
    with listener.progress("checking", len(stores), "stores") as show:
        for number, store in enumerate(stores):
            show(number, store["name"])
            if "problem" not in store:
                problems += ActivationStore.open(Path(store["path"])).verify()
    return problems


def removable(home: Home, names: Sequence[str], kind: str | None = None) -> list[dict[str, Any]]:
    """The stores and runs of these names; SaeError if not one of each. `users` are the runs trained on a store."""
    shelves = {"store": home.stores, "run": home.runs}
    kinds: dict[str, list[str]] = {}  # of each folder's name
    for shelf_kind in [kind] if kind else shelves:
        for path in shelves[shelf_kind].path.glob("[!.]*"):
            if path.is_dir():
                kinds.setdefault(path.name, []).append(shelf_kind)
    runs = {}
    for marker in home.runs.marker_files():
        with suppress(SaeError):  # an unreadable run uses nothing that is known
            runs[marker.parent.name] = read_run(marker)
    users: dict[str, set[str]] = {}  # of each store
    for user, run in runs.items():
        for store in (run.data, *run.beside, run.target):
            users.setdefault(str(store), set()).add(user)
    entries = []
    for name in dict.fromkeys(names):
        if name not in kinds:
            advice = did_you_mean(name, sorted(kinds)) or "`sae list` shows what there is"
            raise shelves[kind or "store"].error(
                f"there is no {kind or 'store and no run'} named {name!r} in {home.path}; {advice}"
            )
        if len(kinds[name]) > 1:
            raise ConfigError(
                f"{name} is a store and a run; say which by --kind store or --kind run"
            )
        (own_kind,) = kinds[name]
        path = shelves[own_kind].path / name
        entries.append(
            {
                "kind": own_kind,
                "name": name,
                "path": str(path),
                "bytes": folder_bytes(path),
                "users": sorted(users.get(name, ())) if own_kind == "store" else [],
            }
        )
    return entries


def remove(home: Home, entry: dict[str, Any]) -> None:
    """Remove an entry of `removable`; SaeError if it is being written or trained on. Of a link to a
    folder only the link is removed."""
    path, shelf = Path(entry["path"]), home.stores if entry["kind"] == "store" else home.runs
    try:
        for run in entry["users"]:
            if (home.runs.path / run).exists():  # else it has just been removed
                os.close(lock_folder(home.runs.path / run))
        if path.is_symlink():
            path.unlink()
            return
        lock = lock_folder(path)
        try:
            # First, so that what a kill leaves is no store or run.
            (path / shelf.marker).unlink(missing_ok=True)
            shutil.rmtree(path)
        finally:
            os.close(lock)
    except OSError as error:
        why = f"{error.strerror or error}; see who owns {path}"
        if isinstance(error, BlockingIOError):
            why = "another process is writing it, or training on it; wait for it, or stop it"
        raise shelf.error(f"cannot remove {entry['name']}: {why}") from error
