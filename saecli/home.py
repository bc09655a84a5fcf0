"""The home folder: `activations/NAME/` holds stores, `runs/NAME/` holds trained SAEs."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from .errors import RunError, SaeError, StoreError

STORE_MARKER = "store.json"
RUN_MARKER = "run.json"


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
        found = [path.parent.name for path in self.path.glob(f"*/{self.marker}")]
        return sorted(found, key=lambda name: (self.read_marker(name).get("created", ""), name), reverse=True)

    def read_marker(self, name: str) -> dict:
        """The marker of an entry.

        Raises:
            SaeError: it is not a JSON object.
        """
        path = self.path / name / self.marker
        try:
            marker = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self.error(f"cannot read {path}: {error}; remove the folder to go on without it") from error
        if not isinstance(marker, dict):
            raise self.error(f"cannot read {path}: expected a JSON object, got {type(marker).__name__}")
        return marker

    def find(self, name: str | None) -> Path:
        """The folder of an entry; without a name, of the newest that is complete, else of the newest.

        Raises:
            SaeError: there is none of that name, or none at all; the message lists what there is.
        """
        names = self.names()
        if name is not None:
            if name in names:
                return self.path / name
            there = f"there are: {', '.join(names)}" if names else f"{self.path} holds none; {self.remedy}"
            raise self.error(f"no {self.noun} named {name!r}; {there}")
        if not names:
            raise self.error(f"there is no {self.noun} in {self.path} yet; {self.remedy}")
        complete = [n for n in names if self.read_marker(n).get("complete")]
        return self.path / (complete or names)[0]


@dataclass(frozen=True)
class Home:
    """The folder that holds everything: `--home`, else `SAE_HOME`, else `./sae-data`."""

    path: Path

    DEFAULT: ClassVar[str] = "sae-data"

    @property
    def stores(self) -> Shelf:
        """The activation stores."""
        return Shelf(self.path / "activations", "activation store", STORE_MARKER, StoreError,
                     "make one with `sae extract` or `sae import`")

    @property
    def runs(self) -> Shelf:
        """The training runs."""
        return Shelf(self.path / "runs", "run", RUN_MARKER, RunError, "make one with `sae train`")
