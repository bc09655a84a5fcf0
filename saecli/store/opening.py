"""Opening stores by name; warnings about them, and their JSON."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..base.console import Listener
from ..base.errors import PeerError, StoreError
from ..base.files import expanded
from ..base.home import STORE_MARKER, Home
from ..base.processes import signals_handled
from ..base.words import counted
from .reader import ActivationStore
from .schema import StoreMeta, read_meta
from .values import OUTLYING, Norms

DERIVED = "the store's name, which --name sets,"  # in messages on a name that the user did not give


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
