"""The home folder: `activations/NAME/` holds stores, `runs/NAME/` trained SAEs. The package brings some."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import filter as matches_of
from pathlib import Path
from typing import ClassVar, Self

from .errors import ConfigError, RunError, SaeError, StoreError
from .files import Marker, expanded, read_json
from .words import did_you_mean

STORE_MARKER = "store.json"
RUN_MARKER = "run.json"
ASSETS = Path(__file__).parents[1] / "assets"  # laid out as a home, and never written
TINY_GEMMA2 = "tiny-gemma2"  # a bundled model, and a bundled run on it
# Advice on a marker that cannot be read.
UNREADABLE = "restore it, or remove the folder to go on without it"
NAME_BYTES = 200  # of UTF-8: file systems allow 255, and temporary names are longer


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def checked_name(name: str, what: str = "--name") -> str:
    """The name; ConfigError if it cannot be a folder's name everywhere."""
    # Unprintable characters have no UTF-8, or control the terminal.
    is_plain = name.isprintable() and not name.startswith(".") and "/" not in name
    if name and is_plain and len(name.encode()) <= NAME_BYTES:
        return name
    raise ConfigError(
        f"{what} must be a plain folder name, of printable characters, without slashes or a leading dot, "
        f"of at most {NAME_BYTES} bytes, got {name!r:.60}"
    )


def natural_order(name: str) -> list[int | str]:
    """A key that sorts names with the numbers in them: layer 2 before layer 10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


@dataclass(frozen=True)
class Shelf:
    """The stores or the runs of a home: folders, each with a JSON file `marker`, see `Marker`.

    A name that is not here may be a bundled entry's, which is neither listed nor the newest.
    """

    path: Path
    noun: str  # of an entry in messages
    marker: str
    error: type[SaeError]  # for an entry that is missing or unreadable
    remedy: str

    def __contains__(self, name: str | None) -> bool:
        return self._folder(name) is not None

    def _folder(self, name: str | None) -> Path | None:
        """Of an entry here, else of a bundled one. Cost: at most two `stat`, whatever the number of entries."""
        if not name or name.startswith(".") or "/" in name:
            return None
        folders = (self.path / name, ASSETS / self.path.name / name)
        return next((each for each in folders if os.path.isfile(each / self.marker)), None)

    def names(self) -> list[str]:
        return sorted(path.parent.name for path in self.marker_files())

    def markers(self) -> dict[str, Marker | SaeError]:
        """The marker of every entry by name, newest first; of unreadable ones the error, last."""
        entries = [(path.parent.name, self._marker(path)) for path in self.marker_files()]
        entries.sort(key=lambda entry: (getattr(entry[1], "created", ""), entry[0]), reverse=True)
        return dict(entries)

    def marker_files(self) -> list[Path]:
        """The marker of every entry; a hidden folder is one that was not finished."""
        return [*self.path.glob(f"[!.]*/{self.marker}")]

    def _marker(self, path: Path) -> Marker | SaeError:
        try:
            return read_json(path, Marker)
        except (OSError, ValueError) as error:
            # One damaged entry must not block commands on others.
            return self.error(f"cannot read {path}: {error}; {UNREADABLE}")

    def unfinished(self) -> list[str]:
        markers = self.markers()
        return [name for name in markers if getattr(markers[name], "complete", None) is False]

    def find(self, name: str | None) -> Path:
        """The folder of an entry; without a name, of the newest complete one, else of the newest."""
        folder = self._newest() if name is None else self._folder(name)
        if folder is None:
            raise self.error(
                f"there is no {self.noun} named {name!r}; {self.instead_of(str(name))}"
            )
        marker = self._marker(folder / self.marker)
        if isinstance(marker, SaeError):
            raise marker
        return folder

    def _newest(self) -> Path:
        markers = self.markers()
        if not markers:
            raise self.error(f"there is no {self.noun} in {self.path} yet; {self.remedy}")
        complete = [key for key in markers if getattr(markers[key], "complete", False)]
        return self.path / [*complete, *markers][0]

    def matching(self, words: Sequence[str]) -> list[str]:
        """The words, each once, with the names that match instead of a shell-style pattern, layer 2 before layer 10."""
        names = self.names()
        chosen: list[str] = []
        for word in words:
            is_name = word in self or "://" in word  # of a run, or a URL
            is_pattern = not is_name and not {*"*?["}.isdisjoint(word)
            matches = matches_of(names, word) if is_pattern else [word]
            if not matches:
                raise self.error(f"no {self.noun} matches {word!r}; {self.instead_of(word)}")
            chosen += sorted(matches, key=natural_order)
        return list(dict.fromkeys(chosen))

    def instead_of(self, name: str) -> str:
        question = did_you_mean(name, self.names())
        return question or f"`sae list` shows every {self.noun}, or {self.remedy}"


@dataclass(frozen=True)
class Home:
    """The folder that holds everything: `--home`, else `SAE_HOME`, else `./sae-data`."""

    path: Path

    DEFAULT: ClassVar[str] = "sae-data"

    @classmethod
    def at(cls, path: str | Path | Home | None) -> Self:
        if isinstance(path, Home):
            return cls(path.path)
        return cls(expanded(path or os.environ.get("SAE_HOME") or cls.DEFAULT))

    @property
    def stores(self) -> Shelf:
        return Shelf(
            self.path / "activations",
            "activation store",
            STORE_MARKER,
            StoreError,
            "make one with `sae extract` or `sae import`",
        )

    @property
    def runs(self) -> Shelf:
        return Shelf(
            self.path / "runs",
            "run",
            RUN_MARKER,
            RunError,
            f"make one with `sae train`, or try the bundled one: {TINY_GEMMA2}",
        )
