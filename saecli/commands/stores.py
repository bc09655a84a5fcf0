"""What commands share that make or open activation stores."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import PeerError, StoreError
from ..home import STORE_MARKER
from ..report import counted, number, table
from ..store import ActivationStore, Norms, check_changed, first_of, remembers, saved_rows
from .options import Session

DERIVED = "the store's name, which --name sets,"  # where it is made of the imported file's name
TEXT_REASONS = ("empty_texts", "short_texts")  # reasons in `dropped` that count texts and not rows


def open_store(session: Session, name: str | None) -> ActivationStore:
    """The store of that name, or the newest, which is then named on stderr.

    Raises:
        StoreError: there is none, or a shard that was changed since the store was written is damaged.
    """
    store = ActivationStore.open(session.home.stores.find(name))
    if name is None:
        session.report.note(f"using the newest store, {store.name}")
    if not store.complete:
        session.report.note(f"{store.name} is not finished; its whole shards hold {counted(store.rows, 'row')} so far")
    # Where the check could not be remembered, it would be made again by every command; reading looks at checksums too.
    if remembers(store.path) and (problems := check_changed(session.report, store)):
        raise StoreError(first_of(problems))
    return store


@contextmanager
def told_when_stopped(session: Session) -> Iterator[list[Path]]:
    """Say, where Ctrl-C ends a command that fills stores, what of them is kept.

    Yields:
        A list, empty, for the stores' folders as soon as they are known.
    """
    folders: list[Path] = []
    try:
        yield folders
    except (KeyboardInterrupt, PeerError):
        if rows := sum(saved_rows(folder) for folder in folders if (folder / STORE_MARKER).exists()):
            session.report.note(f"stopped; {counted(rows, 'row')} {'is' if rows == 1 else 'are'} saved, and the same "
                                "command goes on from there")
        elif folders:
            session.report.note("stopped before anything was saved; the same command begins again")
        else:
            session.report.note("stopped before it began; nothing was changed")
        raise


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


def say_stored(session: Session, stores: Sequence[tuple[ActivationStore, bool]]) -> None:
    """Print the result of a command that made stores, each with whether it was there already."""
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
    session.report.result(documents[0] if len(documents) == 1 else {"stores": documents}, *tables)


def _sizes(norms: Norms) -> str:
    return f"mean {number(norms.mean)}, max {number(norms.max)}"
