"""The home folder: `activations/NAME/` holds stores, `runs/NAME/` holds trained SAEs."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from .errors import ConfigError, RunError, SaeError, StoreError

STORE_MARKER = "store.json"
RUN_MARKER = "run.json"
UNREADABLE = "restore it, or remove the folder to go on without it"  # what to do about a marker that cannot be read


def now() -> str:
    """The time that a marker file records as its `created`, in ISO 8601 with microseconds, UTC."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


@dataclass(frozen=True)
class Shelf:
    """One kind of thing in the home: a folder of folders, each with a JSON marker file.

    A marker is a JSON object with `created` (see `now`) and `complete` (whether it was finished).

    Args:
        path: the folder that holds them.
        noun: what one is called in messages.
        marker: file name of the marker.
        error: the error raised when one is missing or unreadable.
        remedy: how one is made.
    """

    path: Path
    noun: str
    marker: str
    error: type[SaeError]
    remedy: str

    def names(self) -> list[str]:
        """The names of all entries, newest first."""
        return list(self.markers())

    def markers(self) -> dict[str, dict]:
        """The marker of every entry by its name, newest first, one that cannot be read last, as an empty object."""
        found = {path.parent.name: self._marker_or_nothing(path.parent.name)
                 for path in self.path.glob(f"*/{self.marker}")}
        return dict(sorted(found.items(), key=lambda entry: (_created(entry[1]), entry[0]), reverse=True))

    def unfinished(self) -> list[str]:
        """The names of entries that were begun and not finished, newest first."""
        return [name for name, marker in self.markers().items() if marker and not marker.get("complete")]

    def unmarked(self) -> dict[str, str]:
        """The folders that hold something but no marker, by name, each with a sentence on what to do about it.

        What a starting command holds, its hidden lock, is nothing.
        """
        folders = (path for path in self.path.glob("[!.]*") if path.is_dir() and not (path / self.marker).exists())
        return {path.name: f"{path} is no {self.noun}: expected {self.marker} in it, got none; {UNREADABLE}"
                for path in sorted(folders) if any(path.glob("[!.]*"))}

    def read_marker(self, name: str) -> dict:
        """The marker of an entry.

        Raises:
            SaeError: it is not a JSON object.
        """
        path = self.path / name / self.marker
        try:
            marker = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise self.error(f"cannot read {path}: {error}; {UNREADABLE}") from error
        if not isinstance(marker, dict):
            raise self.error(f"cannot read {path}: expected a JSON object, got {type(marker).__name__}; "
                             f"{UNREADABLE}")
        return marker

    def _marker_or_nothing(self, name: str) -> dict:
        # One damaged entry must not block the commands that are about others.
        try:
            return self.read_marker(name)
        except self.error:
            return {}

    def find(self, name: str | None) -> Path:
        """The folder of an entry; without a name, of the newest that is complete, else of the newest.

        Raises:
            SaeError: there is none of that name, or none at all, and the message lists what there is; or its
                marker cannot be read.
        """
        markers = self.markers()
        if name is not None and name not in markers:
            there = f"there are: {', '.join(markers)}" if markers else f"{self.path} holds none; {self.remedy}"
            raise self.error(f"no {self.noun} named {name!r}; {there}")
        if not markers:
            raise self.error(f"there is no {self.noun} in {self.path} yet; {self.remedy}")
        if name is None:
            complete = [n for n, marker in markers.items() if marker.get("complete")]
            name = (complete or list(markers))[0]
        self.read_marker(name)  # raises, where none can be read
        return self.path / name


def _created(marker: dict) -> str:
    created = marker.get("created")
    return created if isinstance(created, str) else ""


@dataclass(frozen=True)
class Home:
    """The folder that holds everything: `--home`, else `SAE_HOME`, else `./sae-data`."""

    path: Path

    DEFAULT: ClassVar[str] = "sae-data"

    def __post_init__(self) -> None:
        if self.path.is_file():
            raise ConfigError(f"cannot use {self.path} as the home: expected a folder, got a file; give another --home")

    @property
    def stores(self) -> Shelf:
        """The activation stores."""
        return Shelf(self.path / "activations", "activation store", STORE_MARKER, StoreError,
                     "make one with `sae extract` or `sae import`")

    @property
    def runs(self) -> Shelf:
        """The training runs."""
        return Shelf(self.path / "runs", "run", RUN_MARKER, RunError, "make one with `sae train`")
