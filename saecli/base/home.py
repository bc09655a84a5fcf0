"""The home folder: `activations/NAME/` holds stores, `runs/NAME/` holds trained SAEs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from .errors import ConfigError, RunError, SaeError, StoreError, did_you_mean
from .files import is_utf8

if TYPE_CHECKING:
    from .documents import Marker

STORE_MARKER = "store.json"
RUN_MARKER = "run.json"
UNREADABLE = "restore it, or remove the folder to go on without it"  # advice on a marker that cannot be read
KEPT = "kept"  # folder of a run that holds the run folders of its earlier epochs
LISTED = 3  # entries that a message names
NAME_BYTES = 200  # of UTF-8: file systems allow 255, and temporary names are longer


def now() -> str:
    """The time, for a marker's `created`, in ISO 8601 with microseconds, UTC."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def checked_name(name: str, what: str = "--name") -> str:
    """The name of a run or a store, `what` in messages; ConfigError if it cannot be a folder's name everywhere."""
    # Unprintable characters have no UTF-8, or control the terminal.
    if name and name.isprintable() and not name.startswith(".") and "/" not in name \
            and len(name.encode()) <= NAME_BYTES:
        return name
    shown = f"{name!r:.60}{'...' * (len(name) > 60)}" if name else "an empty one"
    raise ConfigError(f"{what} must be a plain folder name, of printable characters, without slashes or a leading dot, "
                      f"of at most {NAME_BYTES} bytes, got {shown}")


@dataclass(frozen=True)
class Shelf:
    """The stores or the runs of a home: folders in a folder, each with a JSON file `marker`, see `Marker`.

    An entry that is missing or unreadable raises `error`; messages call it a `noun`, and name the `remedy`.
    """

    path: Path
    noun: str
    marker: str
    error: type[SaeError]
    remedy: str

    def names(self) -> list[str]:
        """The names of all entries, newest first, and unreadable ones last."""
        return list(self.markers())

    def markers(self) -> dict[str, Marker | None]:
        """The marker of every entry by name, newest first; unreadable ones are None, and last."""
        names = [path.parent.name for path in self.path.glob(f"*/{self.marker}")]
        found = {name: self._marker_or_none(name) for name in names}
        return dict(sorted(found.items(), key=lambda entry: (entry[1].created if entry[1] else "", entry[0]),
                           reverse=True))

    def unfinished(self) -> list[str]:
        """The names of unfinished entries, newest first."""
        return [name for name, marker in self.markers().items() if marker and not marker.complete]

    def unmarked(self) -> dict[str, str]:
        """The folders that hold something but no marker, by name, each with advice. Hidden files do not count, such as
        the lock of a starting command."""
        folders = (path for path in self.path.glob("[!.]*") if path.is_dir() and not (path / self.marker).exists())
        return {path.name: f"{path} is no {self.noun}: expected {self.marker} in it, got none; {UNREADABLE}"
                for path in sorted(folders) if any(path.glob("[!.]*"))}

    def read_marker(self, name: str) -> Marker:
        """The marker of an entry; SaeError if it is missing or invalid."""
        from .documents import Marker, read_json

        path = self.path / name / self.marker
        try:
            return read_json(path, Marker)
        except (OSError, ValueError) as error:
            raise self.error(f"cannot read {path}: {error}; {UNREADABLE}") from error

    def _marker_or_none(self, name: str) -> Marker | None:
        # One damaged entry must not block commands on others.
        try:
            return self.read_marker(name)
        except self.error:
            return None

    def find(self, name: str | None) -> Path:
        """The folder of an entry; without a name, of the newest complete one, else of the newest."""
        markers = self.markers()
        if name is not None and name not in markers:
            raise self.error(f"there is no {self.noun} named {name!r}; {self.instead_of(name)}")
        if not markers:
            raise self.error(f"there is no {self.noun} in {self.path} yet; {self.remedy}")
        if name is None:
            complete = [n for n, marker in markers.items() if marker and marker.complete]
            name = (complete or list(markers))[0]
        self.read_marker(name)  # raises if it is unreadable
        return self.path / name

    def instead_of(self, name: str) -> str:
        """Entries with a name similar to one that does not exist, else the newest, in words."""
        names = self.names()
        if not names:
            return f"{self.path} holds none, {self.remedy}"
        if question := did_you_mean(name, names, LISTED):
            return question
        more = f" and {len(names) - LISTED:,} more, which `sae list` shows" if len(names) > LISTED else ""
        return f"there are: {', '.join(names[:LISTED])}{more}"


@dataclass(frozen=True)
class Home:
    """The folder that holds everything: `--home`, else `SAE_HOME`, else `./sae-data`."""

    path: Path

    DEFAULT: ClassVar[str] = "sae-data"

    def __post_init__(self) -> None:
        if self.path.is_file():
            raise ConfigError(f"cannot use {self.path} as the home: expected a folder, got a file; give another "
                              "--home")
        if self.path.is_symlink() and not self.path.exists():
            raise ConfigError(f"cannot use {self.path} as the home: it is a link to {self.path.readlink()}, which "
                              "does not exist; make that folder, or give another --home")
        if not is_utf8(self.path.absolute()):
            raise ConfigError(f"cannot use {self.path} as the home: expected a path in UTF-8, got "
                              f"{str(self.path)!r}; give another --home")

    @classmethod
    def at(cls, path: str | Path | Home | None) -> Self:
        """The home at a path; None for $SAE_HOME, else ./sae-data."""
        return cls(path.path if isinstance(path, Home) else Path(path or os.environ.get("SAE_HOME") or cls.DEFAULT))

    @property
    def stores(self) -> Shelf:
        """The activation stores."""
        return Shelf(self.path / "activations", "activation store", STORE_MARKER, StoreError,
                     "make one with `sae extract` or `sae import`")

    @property
    def runs(self) -> Shelf:
        """The training runs."""
        return Shelf(self.path / "runs", "run", RUN_MARKER, RunError, "make one with `sae train`")
