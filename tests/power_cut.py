"""What a disk may hold after a power cut.

A file's contents are those of its last `fsync`, none before the first. A folder's entries are those of its own last
`fsync`; or those of the moment, as a system may write them early.
"""

import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WATCHED = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}
State = dict[str, bytes | None]  # by path; None for a folder


class Disk:
    """Notes in a folder `out` what a power cut could leave of `root`, before all that this process does to a file."""

    def __init__(self, root: Path, out: Path) -> None:
        self._root, self._out = root, out
        self._contents: dict[int, bytes] = {}
        self._entries: dict[int, dict[str, int]] = {}
        self._held: dict[int, int] = {}  # open, so that no number of a removed file is used again
        self._seen: list[State] = []
        self._busy = False
        self._scan()
        for number, descriptor in self._held.items():
            self._flushed(number, descriptor)
        self._fsync, os.fsync = os.fsync, self._noted_fsync
        sys.addaudithook(self._hook)

    def cut(self, last: bool = False) -> None:
        """Note what a power cut now could leave; but for the `last`, not what has just been noted."""
        self._scan()
        for early in (False, True):
            state: State = {}
            self._collect(self._root.stat().st_ino, "", early, state)
            if last or state not in self._seen[-2:]:
                self._seen.append(state)
                (self._out / f"{len(self._seen):05d}").write_bytes(pickle.dumps(state))

    def _hook(self, event: str, _: tuple) -> None:
        if event in WATCHED and not self._busy:
            with self._quiet():
                self.cut()

    def _noted_fsync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        with self._quiet():
            self._scan()
            self._flushed(os.fstat(descriptor).st_ino, descriptor)
            self.cut()

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _scan(self) -> None:
        for path in (self._root, *self._root.rglob("*")):
            number = path.stat().st_ino
            if number not in self._held:
                self._held[number] = os.open(path, os.O_RDONLY)
                if path.is_dir():
                    self._entries[number] = {}
                else:
                    self._contents[number] = b""

    def _flushed(self, number: int, descriptor: int) -> None:
        if number in self._entries:
            self._entries[number] = self._now(number)
        elif number in self._contents:
            self._contents[number] = os.pread(self._held[number], os.fstat(descriptor).st_size, 0)

    def _now(self, folder: int) -> dict[str, int]:
        with os.scandir(self._held[folder]) as entries:
            return {entry.name: entry.stat(follow_symlinks=False).st_ino for entry in entries}

    def _collect(self, folder: int, path: str, early: bool, state: State) -> None:
        for name, number in (self._now(folder) if early else self._entries[folder]).items():
            below = f"{path}{name}"
            state[below] = self._contents.get(number)
            if number in self._entries:
                self._collect(number, f"{below}/", early, state)


def restore(state: State, folder: Path) -> None:
    """Make a folder hold what a power cut left."""
    for path, content in state.items():
        if content is None:
            (folder / path).mkdir(parents=True)
        else:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
