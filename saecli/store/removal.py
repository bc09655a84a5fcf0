"""Removing stores and runs."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..base.documents import read_run
from ..base.errors import ConfigError, SaeError, did_you_mean
from ..base.files import LOCK, lock_folder
from ..base.home import Home, Shelf
from .listing import folder_bytes

Kind = Literal["store", "run"]


@dataclass(frozen=True)
class Removable:
    """A store or a run, readable or not.

    Args:
        kind: which.
        shelf: where it stands.
        name: its folder's.
        bytes: of its files.
        users: folders of the runs that were trained on this store.
    """

    kind: Kind
    shelf: Shelf
    name: str
    bytes: int
    users: tuple[Path, ...] = ()

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.shelf.path / self.name

    def remove(self) -> None:
        """Remove it with all of its files; of a link, the link. Its marker goes first, so that what a kill leaves is no
        store or run, and can be removed by its name.

        Raises:
            SaeError: another process is writing it or training on it, or the system refuses.
        """
        for run in self.users:
            try:
                os.close(lock_folder(run))
            except BlockingIOError as error:
                raise self.shelf.error(f"cannot remove {self.name}: {run.name} is being trained on it; wait for it, or "
                                       "stop it") from error
        try:
            if self.path.is_symlink():
                self.path.unlink()
                return
            lock = lock_folder(self.path)
            try:
                (self.path / self.shelf.marker).unlink(missing_ok=True)
                for path in self.path.iterdir():
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path)
                    elif path.name != LOCK:
                        path.unlink()
                shutil.rmtree(self.path)
            finally:
                os.close(lock)
        except BlockingIOError as error:
            raise self.shelf.error(f"cannot remove {self.name}: another process is writing it; wait for it, or stop "
                                   "it") from error
        except OSError as error:
            raise self.shelf.error(f"cannot remove {error.filename or self.path}: {error.strerror or error}; see who "
                                   f"owns {self.path}") from error


def removable(home: Home, names: Sequence[str], kind: Kind | None = None) -> list[Removable]:
    """The stores and runs of these names.

    Args:
        home: the folder of stores and runs.
        names: their names, different ones.
        kind: which of them; None where a name is that of only one.

    Raises:
        ConfigError: there is none of a name, a store and a run have it, or it is given twice.
    """
    shelves: dict[Kind, Shelf] = {"store": home.stores, "run": home.runs}
    there = {which: _folders(shelf) for which, shelf in shelves.items() if kind in (None, which)}
    found = []
    for name in dict.fromkeys(names):
        kinds = [which for which, folders in there.items() if name in folders]
        if len(kinds) > 1:
            raise ConfigError(f"{name} is a store and a run; say which by --kind store or --kind run")
        if not kinds:
            question = did_you_mean(name, sorted(set().union(*there.values()))) or "`sae list` shows what there is"
            raise ConfigError(f"there is no {kind or 'store and no run'} named {name!r} in {home.path}; {question}")
        shelf = shelves[kinds[0]]
        found.append(Removable(kinds[0], shelf, name, folder_bytes(shelf.path / name),
                               _trained_on(home, name) if kinds[0] == "store" else ()))
    return found


def _folders(shelf: Shelf) -> set[str]:
    return {path.name for path in shelf.path.glob("[!.]*") if path.is_dir()}


def _trained_on(home: Home, store: str) -> tuple[Path, ...]:
    """The readable runs that were trained on a store."""
    users = []
    for name in home.runs.names():
        try:
            run = read_run(home.runs.path / name / home.runs.marker)
        except SaeError:
            continue
        if store in (run.data, *run.beside, run.target):
            users.append(home.runs.path / name)
    return tuple(users)
