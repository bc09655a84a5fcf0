"""Putting an SAE into a repository on the Hugging Face hub, as one commit."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ..errors import ConfigError, HubError
from ..formats import FORMATS
from ..network import why_unreachable
from .address import Address
from .refusals import LOG_IN, bars_on_terminals, told

README = "README.md"


@dataclass(frozen=True)
class Repository:
    """A repository on the hub that the user may write to, or may make.

    Args:
        address: the repository, and the folder in it that the SAE goes to.
        files: the names of its files, all folders'; None where it does not exist yet.
        card: its README.md; None where it has none.
    """

    address: Address
    files: frozenset[str] | None = None
    card: str | None = None

    @classmethod
    def find(cls, address: Address, private: bool) -> Self:
        """Look the repository up before anything is measured, with the token that the hub's client knows.

        Args:
            address: as of the class.
            private: refuse a repository that is there and public.

        Raises:
            HubError: there is no token, or one that may only read, or the hub cannot be reached or refuses.
            ConfigError: the repository is public, where a private one is asked for.
        """
        from huggingface_hub import HfApi, get_token, hf_hub_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        if reason := why_unreachable():
            raise HubError(f"the Hugging Face hub cannot be reached to push to {address.repo}: {reason}; connect to "
                           f"the network")
        if get_token() is None:
            raise HubError(f"pushing to {address.repo} needs a token that may write: {LOG_IN}")
        api = HfApi()
        with told(address, writing=True):
            token = api.whoami().get("auth", {}).get("accessToken", {})
            if token.get("role") == "read":
                raise HubError(f"the token may only read: expected one that may write to {address.repo}, {LOG_IN}")
            try:
                info = api.model_info(address.repo, timeout=30)
            except GatedRepoError:
                raise
            except RepositoryNotFoundError:
                return cls(address)
            if private and not info.private:
                raise ConfigError(None, "{repo} exists and is public", "leave {private} out, push to another, or make "
                                        "it private in its settings on the hub", repo=address.repo)
            files = frozenset(file.rfilename for file in info.siblings or ())
            if README not in files:
                return cls(address, files)
            text = Path(hf_hub_download(address.repo, README)).read_text(encoding="utf-8")
            return cls(address, files, text)

    def push(self, folder: Path, card: str | None, private: bool, message: str) -> str:
        """Put the files of a folder on this machine into the repository's folder, all in one commit.

        Files of an SAE that lie there in another format are removed by the same commit, since a reader would take
        whichever it knows first.

        Args:
            folder: holds the files, and nothing else.
            card: the new README.md; None leaves the one there is.
            private: make the repository private, if it is made.
            message: the commit's.

        Returns:
            The commit's address on the web.

        Raises:
            HubError: the hub cannot be reached, or refuses.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        api, repo = HfApi(), self.address.repo
        new = {self._inside(path.name): path for path in sorted(folder.iterdir())}
        known = {self._inside(name) for form in FORMATS.values() for name in form.files}
        additions: Mapping[str, Path | bytes] = new if card is None else {**new, README: card.encode()}
        operations = [*(CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
                        for name, content in additions.items()),
                      *(CommitOperationDelete(name) for name in sorted((known - new.keys()) & (self.files or set())))]
        with told(self.address, writing=True), bars_on_terminals():
            if self.files is None:
                api.create_repo(repo, private=private or None, exist_ok=True)
            return api.create_commit(repo, operations, commit_message=message).commit_url

    def _inside(self, name: str) -> str:
        return f"{self.address.folder}/{name}" if self.address.folder else name
