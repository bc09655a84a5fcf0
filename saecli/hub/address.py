"""How a user names an SAE on the Hugging Face hub: `user/repo`, `user/repo/folder`, `user/repo/folder@revision`."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

SCHEME = "hf://"
_PART = r"(?!\.{1,2}(?:/|$))[\w.-]+"  # a name between slashes, neither . nor ..
_PATH = re.compile(rf"({_PART}/{_PART})(?:/({_PART}(?:/{_PART})*))?/?")
_WEB = re.compile(r"https?://[^/]+/([^/]+/[^/]+)(?:/(?:tree|blob)/([^/]+)(?:/(.*?))?)?/?")
_REVISION = re.compile(r"(refs/(?:pr/\d+|convert/\w+)|[^/]+)(?:/(.*))?")


@dataclass(frozen=True)
class Address:
    """Where on the hub an SAE lies.

    Args:
        repo: the repository's id, `user/repo`.
        folder: the folder inside it; empty for its top.
        revision: a branch, tag or commit; None for the newest state.
    """

    repo: str
    folder: str = ""
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The address that a text says, or None where it says none.

        Args:
            text: `user/repo[/folder][@revision]`, `user/repo@revision/folder`, each also after `hf://`; or the page's
                address on the web.
        """
        if web := _WEB.fullmatch(text):
            return cls(web[1], web[3] or "", web[2])
        path, at, rest = text.removeprefix(SCHEME).partition("@")
        found = _PATH.fullmatch(path)
        if found is None or (at and not rest):
            return None
        repo, folder = found[1], found[2] or ""
        if not at or folder:
            return cls(repo, folder, rest or None)
        said = _REVISION.fullmatch(rest)
        return None if said is None else cls(repo, (said[2] or "").strip("/"), said[1])

    def at(self, folder: str) -> Self:
        """Another folder of the same repository and revision."""
        return replace(self, folder=folder)

    def __str__(self) -> str:
        path = f"{self.repo}/{self.folder}" if self.folder else self.repo
        return f"{path}@{self.revision}" if self.revision else path


def is_cached(address: Address) -> bool:
    """Whether anything of the repository was ever fetched to this machine; asks no one."""
    return _storage(address).is_dir()


def cached_snapshot(address: Address) -> Path | None:
    """The folder in which the hub's client keeps what it fetched of an address; None where it has nothing."""
    storage = _storage(address)
    revision = address.revision or "main"
    branch = storage / "refs" / revision
    snapshot = storage / "snapshots" / (branch.read_text().strip() if branch.is_file() else revision)
    return snapshot if snapshot.is_dir() else None


def _storage(address: Address) -> Path:
    from huggingface_hub import constants  # takes a while, and most commands do without

    return Path(constants.HF_HUB_CACHE) / f"models--{address.repo.replace('/', '--')}"
