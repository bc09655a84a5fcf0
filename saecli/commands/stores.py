"""What commands share that make or open activation stores."""

from dataclasses import asdict
from pathlib import Path

from ..errors import ConfigError, StoreError
from ..home import STORE_MARKER, Home
from ..report import number, table
from ..store import ActivationStore
from .options import Session


def checked_name(name: str) -> str:
    """The value of `--name`, which becomes a folder's name.

    Raises:
        ConfigError: it cannot.
    """
    if not name:
        raise ConfigError("--name must be a plain folder name, got an empty one; leave out --name for the default")
    if Path(name).name != name or name.startswith("."):
        raise ConfigError(f"--name must be a plain folder name, got {name!r}; leave out slashes and leading dots")
    return name


def store_folder(home: Home, name: str) -> Path:
    """Where the store of that name is, or will be."""
    return home.stores.path / checked_name(name)


def open_store(session: Session, name: str | None) -> ActivationStore:
    """The store of that name, or the newest, which is then named on stderr."""
    store = ActivationStore.open(session.home.stores.find(name))
    if name is None:
        session.report.note(f"using the newest store, {store.name}")
    if not store.complete:
        session.report.note(f"{store.name} is not finished; {store.rows:,} rows of it are there so far")
    return store


def finished_store(folder: Path, request_hash: str) -> ActivationStore | None:
    """The store in a folder, where it holds all that a request asks for; None where it has yet to be written.

    Raises:
        StoreError: the folder holds something else, or a shard of it is missing or truncated.
    """
    if not (folder / STORE_MARKER).exists():
        return None
    store = ActivationStore.open(folder)
    if store.meta.request_hash != request_hash:
        raise StoreError(f"there is a store named {folder.name!r} already, made from something else; give another "
                         f"--name")
    store.check_shards()
    return store if store.complete else None


def norms_json(store: ActivationStore) -> dict[str, dict[str, float]]:
    """Norms of the rows that a store left out, by reason: rows measured, mean and max."""
    return {reason: asdict(norms) for reason, norms in store.meta.dropped_norms.items()}


def _dropped(store: ActivationStore, reason: str) -> str:
    """How many rows were dropped for a reason, what share of all, and how large they were."""
    count, norms = store.meta.dropped[reason], store.meta.dropped_norms.get(reason)
    share = count / (store.rows + sum(store.meta.dropped.values()))
    sizes = f", norm {number(norms.mean)}, max {number(norms.max)}" if norms else ""
    return f"{count:,} ({100 * share:.2g}%){sizes}"


def say_stored(session: Session, store: ActivationStore, cached: bool) -> None:
    """Print the result of a command that made a store."""
    document = {"name": store.name, "path": str(store.path), "rows": store.rows, "d_in": store.d_in,
                "dtype": store.dtype, "shards": len(store.meta.shards), "cached": cached,
                "dropped": store.meta.dropped, "dropped_norms": norms_json(store)}
    shown = [[key, value if isinstance(value, int | str) else str(value)] for key, value in document.items()
             if key not in ("cached", "dropped", "dropped_norms")]
    shown += [[f"dropped: {reason}", _dropped(store, reason)] for reason in store.meta.dropped]
    heading = "stored already, by the same request" if cached else "stored"
    session.report.result(document, table(heading, ["", store.name], shown[1:]))
