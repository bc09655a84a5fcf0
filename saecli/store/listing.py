"""Stores and runs as JSON documents and as tables: sizes, states, rows dropped, and damaged shards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from ..base.console import Listener, Step, listening
from ..base.documents import read_run
from ..base.errors import SaeError, counted, number, size_words
from ..base.home import Home, Shelf
from ..base.tables import table
from .joined import in_words
from .ranks import saved_rows
from .reader import ActivationStore
from .statistics import Norms

TEXT_REASONS = ("empty_texts", "short_texts")  # reasons in `dropped` that count texts, not rows


def what_was_kept(store: ActivationStore) -> dict[str, Any]:
    """The entries of a store's JSON on rows dropped, and the norms of dropped and stored rows.

    Norms are None if an earlier version wrote some of the rows.
    """
    meta = store.meta
    norms = None if meta.norms is None else {**asdict(meta.norms), "quantiles": meta.norm_quantiles}
    return {"dropped": meta.dropped, "dropped_norms": {name: asdict(found) for name, found in
                                                       meta.dropped_norms.items()}, "norms": norms}


def rows_dropped(counts: Mapping[str, int]) -> int:
    """Number of rows dropped, from counts by reason."""
    return sum(count for reason, count in counts.items() if reason not in TEXT_REASONS)


def _dropped(store: ActivationStore, reason: str) -> str:
    """Number, percentage and norms of the rows dropped for a reason; or the number of texts."""
    count, norms = store.meta.dropped[reason], store.meta.dropped_norms.get(reason)
    if reason in TEXT_REASONS:
        return f"{count:,} {'text' if count == 1 else 'texts'}"
    sizes = f", norm {_sizes(norms)}" if norms else ""
    return f"{count:,} ({100 * count / (store.rows + rows_dropped(store.meta.dropped)):.2g}%){sizes}"


def taken_from(source: Mapping[str, Any]) -> list[list[Any]]:
    """Table lines on the source of a store's rows."""
    names = ("model", "site", "dataset", "file", "key")
    lines = [[name, source[name]] for name in names if source.get(name) is not None]
    if "layer" in source:
        counted_from = f" of {source['layers']}, from 0" if "layers" in source else ""
        lines.insert(1, ["layer", f"{source['layer']}{counted_from}"])
    if "context" in source:
        packed = ", packed" if source.get("packed") else ""
        lines.append(["context", f"{counted(source['context'], 'token')}{packed}"])
    if "beside" in source:
        lines.append(["same tokens as", ", ".join(source["beside"])])
    return lines


def stored(stores: Sequence[tuple[ActivationStore, bool]]) -> tuple[dict[str, Any], list[RenderableType]]:
    """The result of a command that made stores, given each with whether it existed already: the JSON document, of one
    store or of all below `stores`, and a table for each."""
    documents, tables = [], []
    for store, cached in stores:
        meta = store.meta
        document = {"name": store.name, "path": str(store.path), "rows": store.rows, "d_in": store.d_in,
                    "dtype": store.dtype, "shards": len(meta.shards), "cached": cached, **what_was_kept(store),
                    "source": meta.source}
        shown = taken_from(meta.source)
        shown += [[key, document[key]] for key in ("path", "rows", "d_in", "dtype", "shards")]
        if meta.norms:
            median = number(meta.norm_quantiles.get("0.5"))
            shown.append(["norm", f"median {median}, {_sizes(meta.norms)}"])
        shown += [[f"dropped: {reason}", _dropped(store, reason)] for reason in meta.dropped]
        heading = "stored already, by the same request" if cached else "stored"
        documents.append(document)
        tables.append(table(heading, ["", store.name], shown))
    return documents[0] if len(documents) == 1 else {"stores": documents}, tables


def _sizes(norms: Norms) -> str:
    return f"mean {number(norms.mean)}, max {number(norms.max)}"


# Most wanted first: columns that do not fit in a narrow terminal are stacked below.
STORE_COLUMNS = ("rows", "d_in", "dtype", "bytes", "state", "created", "norms", "dropped", "shards")
RUN_COLUMNS = ("test_fvu", "test_l0", "solver", "act", "d_sae", "state", "created", "data", "bytes")
HEADS = {"bytes": "size", "created": "begun", "norms": "median norm"}


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


def listing_tables(document: dict[str, Any]) -> list[RenderableType]:
    """`list_home`'s document for people: a table of stores, one of runs, and a line for each problem."""
    home, stores, runs = Home(Path(document["home"])), document["stores"], document["runs"]
    if not stores and not runs:
        return [f"{home.path} holds nothing yet; {home.stores.remedy}"]
    shown = [_listing(f"stores in {home.stores.path}", STORE_COLUMNS, stores),
             _listing(f"runs in {home.runs.path}", RUN_COLUMNS, runs)]
    broken = [f"{entry['name']}: {entry['problem']}" for entry in (*stores, *runs) if "problem" in entry]
    unreadable = sum("problem" in store for store in stores)  # come first in problems, and are in broken
    damaged = document.get("problems", [])[unreadable:]
    return [shown[index] for index, entries in enumerate((stores, runs)) if entries] + broken + damaged


def _listing(title: str, columns: tuple[str, ...], entries: list[dict[str, Any]]) -> RenderableType:
    rows = [[entry["name"], *(_cell(entry, column) for column in columns)] for entry in entries]
    return table(title, ["name", *(HEADS.get(column, column) for column in columns)], rows)


def _cell(entry: dict[str, Any], column: str) -> Any:
    value = entry.get(column)
    if column == "bytes":
        return size_words(value)
    if column == "created":
        return _local_time(value)
    if column == "norms" and value is not None:
        return value["quantiles"].get("0.5")
    if column == "dropped" and value is not None:
        return _fraction_dropped(entry["rows"], value, entry["dropped_norms"])
    return value


def _local_time(created: str) -> str | None:
    """To the minute, from a marker's time with its zone; as it is where it has none."""
    try:
        when = datetime.fromisoformat(created)
    except ValueError:
        return created or None
    return f"{when.astimezone():%Y-%m-%d %H:%M}" if when.tzinfo else created


def _fraction_dropped(stored: int, counts: dict[str, int], norms: dict[str, dict[str, float]]) -> str | None:
    """The percentage of rows dropped, and their mean norm: 2.1% at 44.5."""
    dropped, measured = rows_dropped(counts), sum(found["rows"] for found in norms.values())
    if not dropped:
        return None
    mean = sum(found["rows"] * found["mean"] for found in norms.values()) / max(measured, 1)
    return f"{100 * dropped / (stored + dropped):.2g}%" + (f" at {number(mean)}" if measured else "")
