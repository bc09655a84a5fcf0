"""Stores and runs as JSON documents: sizes, states, rows dropped, and damaged shards."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ..base.console import Listener, Step, listening
from ..base.documents import read_run
from ..base.errors import SaeError
from ..base.home import Home, Shelf
from .joined import in_words
from .ranks import saved_rows
from .reader import ActivationStore


def what_was_kept(store: ActivationStore) -> dict[str, Any]:
    """The entries of a store's JSON on rows dropped, and the norms of dropped and stored rows.

    Norms are None if an earlier version wrote some of the rows.
    """
    meta = store.meta
    norms = None if meta.norms is None else {**asdict(meta.norms), "quantiles": meta.norm_quantiles}
    return {"dropped": meta.dropped, "dropped_norms": {name: asdict(found) for name, found in
                                                       meta.dropped_norms.items()}, "norms": norms}


def stored(stores: Sequence[ActivationStore]) -> dict[str, Any]:
    """The JSON document of a command that made stores: of one, or of all below `stores`."""
    documents = [{"name": store.name, "path": str(store.path), "rows": store.rows, "d_in": store.d_in,
                  "dtype": store.dtype, "shards": len(store.meta.shards), "cached": store.cached,
                  **what_was_kept(store), "source": store.meta.source} for store in stores]
    return documents[0] if len(documents) == 1 else {"stores": documents}


def list_home(home: str | Path | None = None, *, check: bool = False, progress: bool = False) -> dict[str, Any]:
    """The stores and runs of a home, newest first, as `sae list --json` prints them.

    Args:
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.
        check: read every shard and compare it with its checksum.
        progress: show the check's progress on stderr.

    Returns:
        home: the folder.
        stores, runs: a list of mappings each; an unreadable one has a `problem`, a sentence.
        problems: only with `check`, a sentence for each unreadable store and each damaged shard.
    """
    return listed(Home.at(home), check, listening(progress))


def listed(home: Home, check: bool, listener: Listener) -> dict[str, Any]:
    """As `list_home`, with a listener for the check's progress."""
    stores, runs = _entries(home.stores, _store), _entries(home.runs, _run)
    document: dict[str, Any] = {"home": str(home.path), "stores": stores, "runs": runs}
    if check:
        unreadable = [store["problem"] for store in stores if "problem" in store]
        document["problems"] = unreadable + _check(stores, listener)
    return document


def _entries(shelf: Shelf, describe: Callable[[Shelf, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of a shelf, newest first; one that cannot be read, or has no marker, says why."""
    found = [{"name": name, "path": str(shelf.path / name), "state": "unreadable", "created": "", "problem": sentence,
              "bytes": folder_bytes(shelf.path / name)} for name, sentence in shelf.unmarked().items()]
    for marker in shelf.path.glob(f"*/{shelf.marker}"):
        entry: dict[str, Any] = {"name": marker.parent.name, "path": str(marker.parent)}
        try:
            entry |= describe(shelf, entry["name"])
        except SaeError as error:
            entry |= {"state": "unreadable", "created": "", "problem": str(error)}
        found.append(entry | {"bytes": folder_bytes(marker.parent)})
    return sorted(found, key=lambda entry: (str(entry["created"]), entry["name"]), reverse=True)


def _store(shelf: Shelf, name: str) -> dict[str, Any]:
    store = ActivationStore.open(shelf.path / name)
    return {"state": "complete" if store.complete else "unfinished", "created": store.meta.created,
            "rows": saved_rows(store.path), "d_in": store.d_in, "dtype": store.dtype, "shards": len(store.meta.shards),
            **what_was_kept(store), "source": store.meta.source}


def _run(shelf: Shelf, name: str) -> dict[str, Any]:
    run = read_run(shelf.path / name / shelf.marker)
    final = run.result.final if run.result else {}
    return {"state": "complete" if run.complete else "unfinished", "created": run.created,
            "data": in_words([run.data, *run.beside], run.target),
            "solver": run.solver.name, "act": run.activation.name, "d_sae": run.training.d_sae,
            "test_fvu": final.get("test_fvu"), "test_l0": final.get("test_l0")}


def folder_bytes(folder: Path) -> int:
    """Bytes of the files in a folder."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # a file that a running command has renamed meanwhile
            continue
    return total


def _check(stores: list[dict[str, Any]], listener: Listener) -> list[str]:
    """A sentence for each problem with the shards of readable stores, or with their entries in `store.json`."""
    total, done = sum(store["bytes"] for store in stores), 0
    problems: list[str] = []
    with listener.progress("checking", total, "bytes") as show:
        for store in stores:
            if "problem" not in store:
                step = partial(_shifted, show, done, store["name"])
                opened = ActivationStore.open(Path(store["path"]))
                problems += opened.verify(show=step) or opened.misfits()
            done += store["bytes"]
            show(done, store["name"])
    return problems


def _shifted(show: Step, begin: int, name: str, done: float) -> None:
    """Show the progress of one store's check, after the others'."""
    show(begin + done, name)
