"""Opening a home's stores, with a check of changed shards; and messages while stores are filled."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..base import interrupts
from ..base.console import Listener, Step
from ..base.errors import ConfigError, PeerError, StoreError, counted
from ..base.home import STORE_MARKER, Home
from .joined import Joined
from .ranks import saved_rows
from .reader import ActivationStore
from .writer import StoreWriter


def found_store(home: Home, name: str | None) -> ActivationStore:
    """The store of that name in the home, else in the folder of that path; None for the newest. StoreError if there is
    none, or its `store.json` is damaged."""
    shelf = home.stores
    folder = None if name is None or name in shelf.names() else Path(name).expanduser()
    if folder is None or not (folder / STORE_MARKER).is_file():
        return ActivationStore.open(shelf.find(name))
    return ActivationStore.open(folder, homed=folder.resolve().parent == shelf.path.resolve())


def open_store(home: Home, name: str | None, listener: Listener) -> ActivationStore:
    """As `found_store`, with a note that names the newest; StoreError also if a shard is missing or truncated."""
    store = found_store(home, name)
    if name is None:
        listener.note(f"using the newest store, {store.name}")
    if not store.complete:
        listener.note(f"{store.name} is not finished; its whole shards hold {counted(store.rows, 'row')} so far")
    store.demand_shards()
    return store


def open_joined(home: Home, data: Sequence[str], target: str | None, listener: Listener) -> Joined:
    """The stores of these names or folders side by side, none for the newest, and that of a target, None for the
    inputs.

    Raises:
        StoreError: as of `open_store`.
        ConfigError: one is named twice among the inputs, or they are not row for row the same tokens.
    """
    inputs = tuple(open_store(home, name, listener) for name in data or [None])
    places = [store.path.resolve() for store in inputs]
    if twice := [store.name for index, store in enumerate(inputs) if places[index] in places[:index]]:
        raise ConfigError(f"--data names {twice[0]} twice; name each store once", option="data")
    joined = Joined(inputs, None if target is None else open_store(home, target, listener))
    joined.demand_alike()
    return joined


def finished_store(folder: Path, request_hash: str) -> ActivationStore | None:
    """The store in a folder; None if it is yet to be finished.

    Raises:
        StoreError: the folder holds something else, or a shard is missing or truncated.
    """
    if not (folder / STORE_MARKER).exists():
        return None
    store = ActivationStore.open(folder)
    if store.meta.request_hash != request_hash:
        raise StoreError(f"there is a store named {folder.name!r} already, made from something else; give another "
                         "--name")
    store.demand_shards()
    return store if store.complete else None


def first_of(problems: list[str]) -> str:
    """One sentence for one or more problems."""
    return f"found {len(problems)} problems, the first: {problems[0]}" if len(problems) > 1 else problems[0]


DERIVED = "the store's name, which --name sets,"  # in messages on a name that the user did not give


@contextmanager
def told_when_stopped(listener: Listener) -> Iterator[list[Path]]:
    """If Ctrl-C ends a command that fills stores, say how many rows are saved; yields an empty list, to which the
    stores' folders are to be added once known."""
    folders: list[Path] = []
    try:
        yield folders
    except (KeyboardInterrupt, PeerError) as stop:
        interrupts.told(stop)
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
    """Show progress up to `rows` while stores are filled, with notes on where they resume."""
    for writer in writers:
        if writer.rows:
            listener.note(f"{writer.path.name}: going on after {writer.rows:,} rows")
    with listener.progress(label, rows, "rows") as show:
        yield show
