"""Tables of stores and runs, from the documents of `store.listing`."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from ..base.errors import counted, number, size_words
from ..base.home import Home
from .tables import table

TEXT_REASONS = ("empty_texts", "short_texts")  # reasons in `dropped` that count texts, not rows
STORE_COLUMNS = ("rows", "d_in", "dtype", "bytes", "state", "created", "norms", "dropped", "shards")
RUN_COLUMNS = ("test_fvu", "test_l0", "solver", "act", "d_sae", "state", "created", "data", "bytes")
HEADS = {"bytes": "size", "created": "begun", "norms": "median norm"}


def stored_tables(document: Mapping[str, Any]) -> list[RenderableType]:
    """A table for each store that a command made, from the document of `store.listing.stored`."""
    return [_stored(store) for store in document.get("stores", [document])]


def _stored(store: Mapping[str, Any]) -> RenderableType:
    lines = _source(store["source"])
    lines += [[key, store[key]] for key in ("path", "rows", "d_in", "dtype", "shards")]
    if norms := store["norms"]:
        lines.append(["norm", f"median {number(norms['quantiles'].get('0.5'))}, {_sizes(norms)}"])
    for reason, count in store["dropped"].items():
        share = f" ({_percentage(store['rows'], store['dropped'], count)})"
        norms = store["dropped_norms"].get(reason)
        lines.append([f"dropped: {reason}", counted(count, "text") if reason in TEXT_REASONS else
                      f"{count:,}{share}" + (f", norm {_sizes(norms)}" if norms else "")])
    return table("stored already, by the same request" if store["cached"] else "stored", ["", store["name"]], lines)


def _source(source: Mapping[str, Any]) -> list[list[Any]]:
    """Lines on the source of a store's rows."""
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


def _sizes(norms: Mapping[str, Any]) -> str:
    return f"mean {number(norms['mean'])}, max {number(norms['max'])}"


def _percentage(rows: int, dropped: Mapping[str, int], count: int) -> str:
    return f"{100 * count / (rows + _rows_dropped(dropped)):.2g}%"


def _rows_dropped(counts: Mapping[str, int]) -> int:
    return sum(count for reason, count in counts.items() if reason not in TEXT_REASONS)


def listing_tables(document: Mapping[str, Any]) -> list[RenderableType]:
    """A table of stores, one of runs, and a line for each problem, from the document of `list_home`."""
    home, stores, runs = Home(Path(document["home"])), document["stores"], document["runs"]
    if not stores and not runs:
        return [f"{home.path} holds nothing yet; {home.stores.remedy}"]
    shown = [_listing(title, columns, entries) for title, columns, entries in (
        (f"stores in {home.stores.path}", STORE_COLUMNS, stores), (f"runs in {home.runs.path}", RUN_COLUMNS, runs))
        if entries]
    broken = [f"{entry['name']}: {entry['problem']}" for entry in (*stores, *runs) if "problem" in entry]
    unreadable = sum("problem" in store for store in stores)  # come first in problems, and are in broken
    return [*shown, *broken, *document.get("problems", [])[unreadable:]]


def _listing(title: str, columns: Sequence[str], entries: Sequence[Mapping[str, Any]]) -> RenderableType:
    rows = [[entry["name"], *(_cell(entry, column) for column in columns)] for entry in entries]
    return table(title, ["name", *(HEADS.get(column, column) for column in columns)], rows)


def _cell(entry: Mapping[str, Any], column: str) -> Any:
    value = entry.get(column)
    if column == "bytes":
        return size_words(entry["bytes"])
    if column == "created":
        return _local_time(entry["created"])
    if column == "norms" and value is not None:
        return value["quantiles"].get("0.5")
    if column == "dropped" and value is not None:
        return _dropped(entry["rows"], value, entry["dropped_norms"])
    return value


def _local_time(created: str) -> str | None:
    """To the minute, from a marker's time with its zone; unchanged if it has none."""
    try:
        when = datetime.fromisoformat(created)
    except ValueError:
        return created or None
    return f"{when.astimezone():%Y-%m-%d %H:%M}" if when.tzinfo else created


def _dropped(stored: int, counts: Mapping[str, int], norms: Mapping[str, Mapping[str, float]]) -> str | None:
    """The percentage of rows dropped, and their mean norm: 2.1% at 44.5."""
    dropped, measured = _rows_dropped(counts), sum(found["rows"] for found in norms.values())
    if not dropped:
        return None
    mean = sum(found["rows"] * found["mean"] for found in norms.values()) / max(measured, 1)
    return _percentage(stored, counts, dropped) + (f" at {number(mean)}" if measured else "")
