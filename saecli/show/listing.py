"""Tables of stores and runs."""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from ..base.errors import counted, number, size_words
from ..base.home import Home
from ..base.tables import table

TEXT_REASONS = ("empty_texts", "short_texts")  # reasons in `dropped` that count texts, not rows
# Most wanted first: columns that do not fit in a narrow terminal are stacked below.
STORE_COLUMNS = ("rows", "d_in", "dtype", "bytes", "state", "created", "norms", "dropped", "shards")
RUN_COLUMNS = ("test_fvu", "test_l0", "solver", "act", "d_sae", "state", "created", "data", "bytes")
HEADS = {"bytes": "size", "created": "begun", "norms": "median norm"}


def stored_tables(document: dict[str, Any]) -> list[RenderableType]:
    """`store.opening.stored`'s document: a table for each store."""
    return [table("stored already, by the same request" if store["cached"] else "stored", ["", store["name"]],
                  [*_source(store["source"]),
                   *([key, store[key]] for key in ("path", "rows", "d_in", "dtype", "shards")), *_norms(store["norms"]),
                   *([f"dropped: {reason}", _dropped(store, reason)] for reason in store["dropped"])])
            for store in document.get("stores", [document])]


def _source(source: Mapping[str, Any]) -> list[list[Any]]:
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


def _norms(norms: Mapping[str, Any] | None) -> list[list[str]]:
    return [["norm", f"median {number(norms['quantiles'].get('0.5'))}, {_sizes(norms)}"]] if norms else []


def _sizes(norms: Mapping[str, float]) -> str:
    return f"mean {number(norms['mean'])}, max {number(norms['max'])}"


def _rows_dropped(counts: Mapping[str, int]) -> int:
    return sum(count for reason, count in counts.items() if reason not in TEXT_REASONS)


def _dropped(store: Mapping[str, Any], reason: str) -> str:
    """Number, percentage and norms of the rows dropped for a reason; or the number of texts."""
    count, norms = store["dropped"][reason], store["dropped_norms"].get(reason)
    if reason in TEXT_REASONS:
        return f"{count:,} {'text' if count == 1 else 'texts'}"
    sizes = f", norm {_sizes(norms)}" if norms else ""
    return f"{count:,} ({100 * count / (store['rows'] + _rows_dropped(store['dropped'])):.2g}%){sizes}"


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
    value: Any = entry.get(column)
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
    dropped, measured = _rows_dropped(counts), sum(found["rows"] for found in norms.values())
    if not dropped:
        return None
    mean = sum(found["rows"] * found["mean"] for found in norms.values()) / max(measured, 1)
    return f"{100 * dropped / (stored + dropped):.2g}%" + (f" at {number(mean)}" if measured else "")
