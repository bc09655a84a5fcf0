"""Opening a home's stores: what was changed since it was written is checked first."""

from pathlib import Path

from ..console import Listener
from ..errors import StoreError
from ..home import STORE_MARKER, Home
from ..store import ActivationStore, remembers
from ..wording import counted


def open_store(home: Home, name: str | None, listener: Listener) -> ActivationStore:
    """The store of that name, or the newest, which is then named.

    Raises:
        StoreError: there is none, or a shard that was changed since the store was written is damaged.
    """
    store = ActivationStore.open(home.stores.find(name))
    if name is None:
        listener.note(f"using the newest store, {store.name}")
    if not store.complete:
        listener.note(f"{store.name} is not finished; its whole shards hold {counted(store.rows, 'row')} so far")
    # Where the check could not be remembered, it would be made again by every command; reading looks at checksums too.
    if remembers(store.path) and (problems := _check_changed(store, listener)):
        raise StoreError(first_of(problems))
    return store


def finished_store(folder: Path, request_hash: str, listener: Listener) -> ActivationStore | None:
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
    problems = _check_changed(store, listener)
    if problems:
        listener.note(first_of(problems).partition(";")[0])
    return store if store.complete and not problems else None


def _check_changed(store: ActivationStore, listener: Listener) -> list[str]:
    """What is wrong with the shards that may have changed since the store was written, a sentence for each."""
    shards = store.changed()
    if not shards:
        return []
    rows = sum(store.meta.shards[index].rows for index in shards)
    with listener.progress(f"checking {store.name}, which has changed", rows * store.meta.row_bytes,
                           "bytes") as show:
        return store.verify(shards, show)


def first_of(problems: list[str]) -> str:
    """One sentence for all of several problems."""
    return f"found {len(problems)} problems, the first: {problems[0]}" if len(problems) > 1 else problems[0]
