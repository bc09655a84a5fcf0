"""What is said while stores are filled: how far they are, what they go on with, what is kept where they stop."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..console import Listener, Step
from ..errors import PeerError
from ..home import STORE_MARKER
from ..store import StoreWriter, saved_rows
from ..wording import counted

DERIVED = "the store's name, which {name} sets,"  # where it is made of what the store comes from


@contextmanager
def told_when_stopped(listener: Listener) -> Iterator[list[Path]]:
    """Say, where Ctrl-C ends a command that fills stores, what of them is kept.

    Yields:
        A list, empty, for the stores' folders as soon as they are known.
    """
    folders: list[Path] = []
    try:
        yield folders
    except (KeyboardInterrupt, PeerError):
        if rows := sum(saved_rows(folder) for folder in folders if (folder / STORE_MARKER).exists()):
            listener.note(f"stopped; {counted(rows, 'row')} {'is' if rows == 1 else 'are'} saved, and the same "
                          "command goes on from there")
        elif folders:
            listener.note("stopped before anything was saved; the same command begins again")
        else:
            listener.note("stopped before it began; nothing was changed")
        raise


@contextmanager
def filling(writers: Sequence[StoreWriter], label: str, rows: int, listener: Listener) -> Iterator[Step]:
    """Show how stores are filled, say what they go on with, and in the end what became of damaged shards.

    Args:
        writers: the stores' writers.
        label: what is being done.
        rows: how many rows there are to come.
        listener: told of all that.
    """
    for writer in writers:
        if writer.damaged:
            listener.note(f"{writer.path.name}: writing anew {_named(writer.damaged)}")
        elif writer.rows:
            listener.note(f"{writer.path.name}: going on after {writer.rows:,} rows")
    with listener.progress(label, rows, "rows") as show:
        yield show
    for writer in writers:
        if writer.altered:
            listener.note(f"{writer.path.name}: {_named(writer.altered)} came out with other bytes than were "
                          f"recorded, as another machine or version of a library rounds in other ways")


def _named(shards: list[str]) -> str:
    """Some shards in words, not all of their names where they are many."""
    return f"{', '.join(shards[:3])}" + (f" and {len(shards) - 3} more shards" if len(shards) > 3 else "")
