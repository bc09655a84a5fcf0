"""`sae list`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import SaeError, StoreError
from ..home import Shelf
from ..report import table
from ..store import ActivationStore
from .options import Json, Session, start

Check = Annotated[bool, typer.Option("--check", help="Read every shard and compare it with its checksum; exit with "
                                                     "status 1 if one is damaged.")]
UNITS = ("B", "kB", "MB", "GB", "TB")


def command(ctx: typer.Context, check: Check = False, json: Json = False) -> None:
    """Show the stores and runs in the home folder, newest first.

    Example: sae list --check
    """
    session = start(ctx, json)
    stores = _entries(session.home.stores, _store)
    runs = _entries(session.home.runs, _run)
    problems = _check(session, stores) if check else []
    document: dict[str, Any] = {"home": str(session.home.path), "stores": stores, "runs": runs}
    if check:
        document["problems"] = problems
    session.report.result(document, *_tables(session, stores, runs))
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise StoreError(f"{problems[0]}{more}; remove the store and make it again")
    if check:
        shards = sum(store["shards"] for store in stores)
        session.report.note(f"checked {len(stores)} stores, {shards} shards: all whole")


def _entries(shelf: Shelf, describe: Callable[[Shelf, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """What stands on a shelf, newest first; an entry that cannot be read says why."""
    found = []
    for marker in shelf.path.glob(f"*/{shelf.marker}"):
        entry: dict[str, Any] = {"name": marker.parent.name, "path": str(marker.parent)}
        try:
            entry |= describe(shelf, entry["name"])
        except (SaeError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            entry |= {"state": "unreadable", "created": "", "problem": str(error)}
        found.append(entry | {"bytes": _size(marker.parent)})
    return sorted(found, key=lambda entry: (str(entry["created"]), entry["name"]), reverse=True)


def _store(shelf: Shelf, name: str) -> dict[str, Any]:
    store = ActivationStore.open(shelf.path / name)
    return {"state": "complete" if store.complete else "unfinished", "created": store.meta.created,
            "rows": store.rows, "d_in": store.d_in, "dtype": store.dtype, "shards": len(store.meta.shards),
            "dropped": store.meta.dropped, "source": store.meta.source}


def _run(shelf: Shelf, name: str) -> dict[str, Any]:
    run = shelf.read_marker(name)
    final = (run["result"] or {}).get("final", {})
    return {"state": "complete" if run["complete"] else "unfinished", "created": run["created"], "data": run["data"],
            "solver": run["solver"]["name"], "act": run["activation"]["name"], "d_sae": run["training"].get("d_sae"),
            "test_fvu": final.get("test_fvu"), "l0": final.get("l0")}


def _size(folder: Path) -> int:
    """Bytes of the files in a folder."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # a file that a running command has renamed meanwhile
            continue
    return total


def _check(session: Session, stores: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the stores, a sentence for each shard and each `store.json`."""
    total, done = sum(store["bytes"] for store in stores), 0
    problems: list[str] = []
    with session.report.progress("checking", total, "bytes") as show:
        for store in stores:
            if store["state"] == "unreadable":
                problems.append(store["problem"])
            else:
                problems += ActivationStore.open(Path(store["path"])).verify()
            done += store["bytes"]
            show(done, store["name"])
    return problems


def _tables(session: Session, stores: list[dict[str, Any]], runs: list[dict[str, Any]]) -> list[Any]:
    if not stores and not runs:
        return [f"{session.home.path} holds nothing yet; {session.home.stores.remedy}"]
    store_columns = ("rows", "d_in", "dtype", "shards", "bytes", "state")
    run_columns = ("data", "solver", "act", "d_sae", "test_fvu", "l0", "bytes", "state")
    shown = [_table(f"stores in {session.home.stores.path}", store_columns, stores),
             _table(f"runs in {session.home.runs.path}", run_columns, runs)]
    broken = [f"{entry['name']}: {entry['problem']}" for entry in (*stores, *runs) if "problem" in entry]
    return [shown[index] for index, entries in enumerate((stores, runs)) if entries] + broken


def _table(title: str, columns: tuple[str, ...], entries: list[dict[str, Any]]) -> Any:
    rows = [[entry["name"], *(_bytes(entry["bytes"]) if column == "bytes" else entry.get(column) for column in columns)]
            for entry in entries]
    return table(title, ["name", *("size" if column == "bytes" else column for column in columns)], rows)


def _bytes(count: float) -> str:
    """A size as people read it: 1.3 GB."""
    for unit in UNITS:
        if count < 1000 or unit == UNITS[-1]:
            break
        count /= 1000
    return f"{count:.3g} {unit}"
