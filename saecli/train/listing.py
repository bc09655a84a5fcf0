"""The stores and runs of a home, listed and removed."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..base.console import Listener, listening
from ..base.errors import ConfigError, SaeError
from ..base.files import folder_bytes, lock_folder
from ..base.home import Home, Shelf
from ..base.words import did_you_mean
from ..sae.run_documents import read_run
from ..store.opening import described
from ..store.reader import ActivationStore, in_words


def list_home(
    home: str | Path | None = None, *, check: bool = False, progress: bool | Listener = False
) -> dict[str, Any]:
    """The stores and runs of a home, newest first, as `sae list --json` prints them.

    Args:
        home: by default $SAE_HOME, else ./sae-data.
        check: read every shard and compare it with its checksum.

    Returns:
        `home`; `stores` and `runs`, an unreadable one with a sentence as `problem`; with `check` `problems`, a sentence
        for each unreadable store and each damaged shard.
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


def _check(stores: list[dict[str, Any]], listener: Listener) -> list[str]:
    """Problems with the shards of readable stores."""
    problems: list[str] = []
    with listener.progress("checking", len(stores), "stores") as show:
        for number, store in enumerate(stores):
            show(number, store["name"])
            if "problem" not in store:
                problems += ActivationStore.open(Path(store["path"])).verify()
    return problems


def removable(home: Home, names: Sequence[str], kind: str | None = None) -> list[dict[str, Any]]:
    """The stores and runs of these names, with the runs trained on a store as `users`; SaeError if not one of each."""
    shelves = {"store": home.stores, "run": home.runs}
    kinds = _kinds({kind: shelves[kind]} if kind else shelves)
    users = _users(home)
    entries = []
    for name in dict.fromkeys(names):
        if name not in kinds:
            advice = did_you_mean(name, sorted(kinds)) or "`sae list` shows what there is"
            raise shelves[kind or "store"].error(
                f"there is no {kind or 'store and no run'} named {name!r} in {home.path}; {advice}"
            )
        found, *others = kinds[name]
        if others:
            raise ConfigError(
                f"{name} is a store and a run; say which by --kind store or --kind run"
            )
        path = shelves[found].path / name
        of_store = users.get(name, set()) if found == "store" else set()
        size = folder_bytes(path)
        entry = {"kind": found, "name": name, "path": str(path), "bytes": size}
        entries.append({**entry, "users": sorted(of_store)})
    return entries


def _users(home: Home) -> dict[str, set[str]]:
    """The runs trained on each store."""
    users: dict[str, set[str]] = {}
    for marker in home.runs.marker_files():
        with suppress(SaeError):  # an unreadable run uses nothing that is known
            run = read_run(marker)
            for store in (run.data, *run.beside, run.target):
                users.setdefault(str(store), set()).add(marker.parent.name)
    return users


def _kinds(shelves: Mapping[str, Shelf]) -> dict[str, list[str]]:
    """Of each folder's name whether a store has it, a run, or both."""
    kinds: dict[str, list[str]] = {}
    for kind, shelf in shelves.items():
        for path in shelf.path.glob("[!.]*"):
            if path.is_dir():
                kinds.setdefault(path.name, []).append(kind)
    return kinds


def remove(home: Home, entry: dict[str, Any]) -> None:
    """Remove an entry of `removable`, of a link only the link; SaeError if it is being written or trained on."""
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
