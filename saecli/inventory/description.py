"""Stores as JSON documents, and as tables for people."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType

from ..store import ActivationStore, Norms
from ..tables import table
from ..wording import counted, number

TEXT_REASONS = ("empty_texts", "short_texts")  # reasons in `dropped` that count texts and not rows


def what_was_kept(store: ActivationStore) -> dict[str, Any]:
    """Of a store's JSON: how many rows were left out, and how large those and the stored ones are.

    Norms are None where an earlier version wrote some of the rows.
    """
    meta = store.meta
    norms = None if meta.norms is None else {**asdict(meta.norms), "quantiles": meta.norm_quantiles}
    return {"dropped": meta.dropped, "dropped_norms": {name: asdict(found) for name, found in
                                                       meta.dropped_norms.items()}, "norms": norms}


def rows_dropped(counts: Mapping[str, int]) -> int:
    """How many rows were dropped, of counts by reason."""
    return sum(count for reason, count in counts.items() if reason not in TEXT_REASONS)


def _dropped(store: ActivationStore, reason: str) -> str:
    """How many rows were dropped for a reason, what share of all, and how large they were; or how many texts."""
    count, norms = store.meta.dropped[reason], store.meta.dropped_norms.get(reason)
    if reason in TEXT_REASONS:
        return f"{count:,} {'text' if count == 1 else 'texts'}"
    sizes = f", norm {_sizes(norms)}" if norms else ""
    return f"{count:,} ({100 * count / (store.rows + rows_dropped(store.meta.dropped)):.2g}%){sizes}"


def taken_from(source: Mapping[str, Any]) -> list[list[Any]]:
    """What a store's rows were taken from, a line each."""
    names = ("model", "site", "dataset", "file", "key")
    lines = [[name, source[name]] for name in names if source.get(name) is not None]
    if "layer" in source:
        counted_from = f" of {source['layers']}, from 0" if "layers" in source else ""
        lines.insert(1, ["layer", f"{source['layer']}{counted_from}"])
    if "context" in source:
        packed = ", packed" if source.get("packed") else ""
        lines.append(["context", f"{counted(source['context'], 'token')}{packed}"])
    return lines


def stored(stores: Sequence[tuple[ActivationStore, bool]]) -> tuple[dict[str, Any], list[RenderableType]]:
    """The result of a command that made stores.

    Args:
        stores: each with whether it was there already.

    Returns:
        The JSON document, of one store or of all below `stores`, and a table for each.
    """
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
