"""What is said while stores are checked and filled."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import StoreError
from ..home import STORE_MARKER
from ..report import Report, Step
from .reader import ActivationStore
from .writer import StoreWriter


def finished_store(report: Report, folder: Path, request_hash: str) -> ActivationStore | None:
    """The store in a folder, where it holds all that a request asks for.

    Returns:
        None where it has yet to be written, or shards of it have.

    Raises:
        StoreError: the folder holds something else.
    """
    if not (folder / STORE_MARKER).exists():
        return None
    store = ActivationStore.open(folder)
    if store.meta.request_hash != request_hash:
        raise StoreError(f"there is a store named {folder.name!r} already, made from something else; give another "
                         f"--name")
    problems = check_changed(report, store)
    if problems:
        report.note(first_of(problems).partition(";")[0])
    return store if store.complete and not problems else None


def check_changed(report: Report, store: ActivationStore) -> list[str]:
    """What is wrong with the shards that may have changed since the store was written, a sentence for each."""
    shards = store.changed()
    if not shards:
        return []
    rows = sum(store.meta.shards[index].rows for index in shards)
    with report.progress(f"checking {store.name}, which has changed", rows * store.meta.row_bytes, "bytes") as show:
        return store.verify(shards, show)


def first_of(problems: list[str]) -> str:
    """One sentence for all of several problems."""
    return f"found {len(problems)} problems, the first: {problems[0]}" if len(problems) > 1 else problems[0]


@contextmanager
def filling(report: Report, writers: Sequence[StoreWriter], label: str, rows: int) -> Iterator[Step]:
    """Show how stores are filled, say what they go on with, and in the end what became of damaged shards.

    Args:
        report: where it is said.
        writers: the stores' writers.
        label: what is being done.
        rows: how many rows there are to come.
    """
    for writer in writers:
        if writer.damaged:
            report.note(f"{writer.path.name}: writing anew {_named(writer.damaged)}")
        elif writer.rows:
            report.note(f"{writer.path.name}: going on after {writer.rows:,} rows")
    with report.progress(label, rows, "rows") as show:
        yield show
    for writer in writers:
        if writer.altered:
            report.note(f"{writer.path.name}: {_named(writer.altered)} came out with other bytes than were "
                        f"recorded, as another machine or version of a library rounds in other ways")


def _named(shards: list[str]) -> str:
    """Some shards in words, not all of their names where they are many."""
    return f"{', '.join(shards[:3])}" + (f" and {len(shards) - 3} more shards" if len(shards) > 3 else "")
