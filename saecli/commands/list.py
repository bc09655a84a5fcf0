"""`sae list`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ..errors import SaeError, StoreError
from ..home import Shelf, read_run
from ..report import Step, number, size_words, table
from ..store import ActivationStore
from .options import Json, Session, start
from .stores import first_of, rows_dropped, what_was_kept

Check = Annotated[bool, typer.Option("--check", help="Read every shard and compare it with its checksum; exit with "
                                                     "status 1 if one is damaged.")]
# What a store's and a run's columns are, and in which order they are left out where the terminal is too narrow.
STORE_COLUMNS = ("rows", "d_in", "dtype", "norms", "dropped", "shards", "bytes", "state")
STORE_SPARE = ("shards", "dropped", "norms", "d_in", "dtype", "bytes", "rows")
RUN_COLUMNS = ("data", "solver", "act", "d_sae", "test_fvu", "test_l0", "bytes", "state")
RUN_SPARE = ("bytes", "data", "d_sae", "act", "solver", "test_l0", "test_fvu")
HEADS = {"bytes": "size", "norms": "median norm"}
UNBOUNDED = 10_000


def command(ctx: typer.Context, check: Check = False, json: Json = False) -> None:
    """Show the stores and runs in the home folder, newest first.

    Example: sae list --check
    """
    session = start(ctx, json)
    stores = _entries(session.home.stores, _store)
    runs = _entries(session.home.runs, _run)
    unreadable = [store["problem"] for store in stores if "problem" in store]
    damaged = _check(session, stores) if check else []
    problems = unreadable + damaged
    document: dict[str, Any] = {"home": str(session.home.path), "stores": stores, "runs": runs}
    if check:
        document["problems"] = problems
    session.report.result(document, *_tables(session, stores, runs), *damaged)
    if check and problems:
        raise StoreError(first_of(problems))
    if check:
        shards = sum(store["shards"] for store in stores)
        session.report.note(f"checked {len(stores)} stores, {shards} shards: all whole")


def _entries(shelf: Shelf, describe: Callable[[Shelf, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """What stands on a shelf, newest first; an entry that cannot be read, or has no marker, says why."""
    found = [{"name": name, "path": str(shelf.path / name), "state": "unreadable", "created": "", "problem": sentence,
              "bytes": _size(shelf.path / name)} for name, sentence in shelf.unmarked().items()]
    for marker in shelf.path.glob(f"*/{shelf.marker}"):
        entry: dict[str, Any] = {"name": marker.parent.name, "path": str(marker.parent)}
        try:
            entry |= describe(shelf, entry["name"])
        except SaeError as error:
            entry |= {"state": "unreadable", "created": "", "problem": str(error)}
        found.append(entry | {"bytes": _size(marker.parent)})
    return sorted(found, key=lambda entry: (str(entry["created"]), entry["name"]), reverse=True)


def _store(shelf: Shelf, name: str) -> dict[str, Any]:
    store = ActivationStore.open(shelf.path / name)
    return {"state": "complete" if store.complete else "unfinished", "created": store.meta.created,
            "rows": store.meta.saved_rows, "d_in": store.d_in, "dtype": store.dtype, "shards": len(store.meta.shards),
            **what_was_kept(store), "source": store.meta.source}


def _run(shelf: Shelf, name: str) -> dict[str, Any]:
    run = read_run(shelf.path / name / shelf.marker)
    final = run.result.final if run.result else {}
    return {"state": "complete" if run.complete else "unfinished", "created": run.created, "data": run.data,
            "solver": run.solver.name, "act": run.activation.name, "d_sae": run.training.d_sae,
            "test_fvu": final.get("test_fvu"), "test_l0": final.get("test_l0")}


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
    """What is wrong with the shards of the stores that can be read, or with what `store.json` says of them."""
    total, done = sum(store["bytes"] for store in stores), 0
    problems: list[str] = []
    with session.report.progress("checking", total, "bytes") as show:
        for store in stores:
            if "problem" not in store:
                step = partial(_shifted, show, done, store["name"])
                opened = ActivationStore.open(Path(store["path"]))
                problems += opened.verify(show=step) or opened.misfits()
            done += store["bytes"]
            show(done, store["name"])
    return problems


def _shifted(show: Step, begin: int, name: str, done: float) -> None:
    """Show how far the check of one store has come, that begins after others."""
    show(begin + done, name)


def _tables(session: Session, stores: list[dict[str, Any]], runs: list[dict[str, Any]]) -> list[Any]:
    if not stores and not runs:
        return [f"{session.home.path} holds nothing yet; {session.home.stores.remedy}"]
    shown = [_Listing(f"stores in {session.home.stores.path}", STORE_COLUMNS, STORE_SPARE, stores),
             _Listing(f"runs in {session.home.runs.path}", RUN_COLUMNS, RUN_SPARE, runs)]
    broken = [f"{entry['name']}: {entry['problem']}" for entry in (*stores, *runs) if "problem" in entry]
    return [shown[index] for index, entries in enumerate((stores, runs)) if entries] + broken


@dataclass(frozen=True)
class _Listing:
    """A table of entries with as many of its columns as the terminal has room for.

    Args:
        title: the line above it.
        columns: its columns beside the name.
        spare: those that can be left out, the first of them first.
        entries: what it lists.
    """

    title: str
    columns: tuple[str, ...]
    spare: tuple[str, ...]
    entries: list[dict[str, Any]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.title, style="bold")
        for count in range(len(self.spare) + 1):
            kept = tuple(column for column in self.columns if column not in self.spare[:count])
            shown = _table(kept, self.entries)
            # Unbounded, a table tells the width at which none of its cells is folded.
            if console.measure(shown, options=options.update(max_width=UNBOUNDED)).maximum <= options.max_width:
                break
        yield shown
        if count:
            yield Text("no room for " + ", ".join(HEADS.get(column, column) for column in self.spare[:count]))


def _table(columns: tuple[str, ...], entries: list[dict[str, Any]]) -> Any:
    rows = [[entry["name"], *(_cell(entry, column) for column in columns)] for entry in entries]
    return table(None, ["name", *(HEADS.get(column, column) for column in columns)], rows)


def _cell(entry: dict[str, Any], column: str) -> Any:
    value = entry.get(column)
    if column == "bytes":
        return size_words(value)
    if column == "norms" and value is not None:
        return value["quantiles"].get("0.5")
    if column == "dropped" and value is not None:
        return _dropped(entry["rows"], value, entry["dropped_norms"])
    return value


def _dropped(stored: int, counts: dict[str, int], norms: dict[str, dict[str, float]]) -> str | None:
    """The share of rows that were dropped, and their mean norm: 2.1% at 44.5."""
    dropped, measured = rows_dropped(counts), sum(found["rows"] for found in norms.values())
    if not dropped:
        return None
    mean = sum(found["rows"] * found["mean"] for found in norms.values()) / max(measured, 1)
    return f"{100 * dropped / (stored + dropped):.2g}%" + (f" at {number(mean)}" if measured else "")
