"""Fetching an SAE from the Hugging Face hub into its client's cache: addresses, and the client's errors."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Self

from ..base.errors import HubError, SaeError, one_line
from ..base.network import LOG_IN, why_refused, why_unreachable
from .formats import FORMATS, Format, format_of, known_files

SCHEME = "hf://"
_PART = r"(?!\.{1,2}(?:/|$))[\w.-]+"  # a name between slashes, neither . nor ..
_PATH = re.compile(rf"({_PART}/{_PART})(?:/({_PART}(?:/{_PART})*))?/?")
_WEB = re.compile(r"https?://[^/]+/([^/]+/[^/]+)(?:/(?:tree|blob)/([^/]+)(?:/(.*?))?)?/?")
_REVISION = re.compile(r"(refs/(?:pr/\d+|convert/\w+)|[^/]+)(?:/(.*))?")


@dataclass(frozen=True)
class Address:
    """An SAE's address on the hub.

    Args:
        repo: the repository's id, `user/repo`.
        folder: the folder inside it; empty for its root.
        revision: a branch, tag or commit; None for the newest state.
    """

    repo: str
    folder: str = ""
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse an address; None if the text is not one.

        Args:
            text: `user/repo[/folder][@revision]`, `user/repo@revision/folder`, either also after `hf://`; or the URL of
                the web page.
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
    """Whether any of the repository was ever fetched to this machine, without asking the hub."""
    return _storage(address).is_dir()


def cached_snapshot(address: Address) -> Path | None:
    """The folder of the files that the hub's client has fetched from an address; None if there are none."""
    storage = _storage(address)
    revision = address.revision or "main"
    branch = storage / "refs" / revision
    snapshot = storage / "snapshots" / (branch.read_text().strip() if branch.is_file() else revision)
    return snapshot if snapshot.is_dir() else None


def _storage(address: Address) -> Path:
    from huggingface_hub import constants  # slow to import, and most commands do not need it

    return Path(constants.HF_HUB_CACHE) / f"models--{address.repo.replace('/', '--')}"


def is_passing(error: BaseException | None) -> bool:
    """Whether an error comes from the network or a busy hub, not from the request."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 425, 429) or error.response.status_code >= 500
    return isinstance(error, HTTPError | ConnectionError | TimeoutError)


@contextmanager
def hub_errors(address: Address, writing: bool = False) -> Iterator[None]:
    """Turn the hub client's exceptions into a HubError.

    Args:
        address: the address requested.
        writing: whether the request writes to it.

    Raises:
        HubError: the hub cannot be reached, or refuses.
    """
    from huggingface_hub.errors import HTTPError

    try:
        yield
    except SaeError:
        raise
    except (HTTPError, OSError, RuntimeError, ValueError) as error:  # those that the client raises by design
        if isinstance(error, OSError) and error.errno is not None and not is_passing(error):
            raise  # from the disk
        raise explained(address, error, writing) from error


@contextmanager
def bars_on_terminals() -> Iterator[None]:
    """Let the hub's client draw its progress bars only on a terminal."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def explained(address: Address, error: Exception, writing: bool = False) -> HubError:
    """Why a request to the hub failed, and what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import RevisionNotFoundError

    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the error of one upload among several
    repo, status = address.repo, getattr(getattr(error, "response", None), "status_code", None)
    if is_passing(error):
        return HubError(f"the Hugging Face hub cannot be reached for {repo}: expected an answer, got "
                        f"{one_line(error)}; connect to the network, or try again later")
    if reason := why_refused(repo, error):
        return HubError(reason)
    if isinstance(error, RevisionNotFoundError):
        return HubError(f"{repo} has no revision {address.revision}: expected a branch, a tag or a commit; check the "
                        f"part after @")
    if status == 401:
        return HubError(f"the Hugging Face hub does not accept the token: expected a valid one, got {_said(error)}; "
                        f"{LOG_IN} to another")
    if status == 403:
        right = "write to" if writing else "read"
        return HubError(f"the token may not {right} {repo}: got {_said(error)}; use one with that right, made at "
                        f"{constants.ENDPOINT}/settings/tokens")
    return HubError(f"the Hugging Face hub refused a request for {repo}: {_said(error)}")


def _said(error: Exception) -> str:
    """The hub's own message if it gave one, else the error's."""
    return getattr(error, "server_message", None) or one_line(error)


SHOWN = 8  # folders that a message lists


@dataclass(frozen=True)
class Fetched:
    """An SAE fetched from the hub.

    Args:
        address: its address, including the folder that was found.
        path: its folder on this machine, or its file there if the address names one of several layers' files.
    """

    address: Address
    path: Path


def fetch(address: Address, note: Callable[[str], None]) -> Fetched:
    """Fetch the SAE at an address; files that are up to date in the cache are not fetched again.

    Args:
        address: a folder that holds an SAE in a known format, or has exactly one such folder below it; or one of
            several layers' files in such a folder.
        note: called with a message on which folder was chosen, or that the hub cannot be reached.

    Raises:
        HubError: there is no such repository, revision, folder or SAE, it may not be read, or the hub cannot be
            reached and the cache has nothing.
    """
    from huggingface_hub import HfApi

    reason = why_unreachable()
    if reason is None:
        try:
            with hub_errors(address):
                info = HfApi().model_info(address.repo, revision=address.revision, timeout=30)
        except HubError as error:
            if not is_passing(error.__cause__) or cached_snapshot(address) is None:
                raise
            reason = one_line(error.__cause__)
        else:
            found = _choose(address, [file.rfilename for file in info.siblings or ()], note)
            return Fetched(found.address, _download(found, info.sha) / found.address.folder)
    snapshot = cached_snapshot(address)
    if snapshot is None:
        raise HubError(f"{address} is not in the cache, nor can the Hugging Face hub be reached ({reason}): connect to "
                       f"the network, or name a run or a folder that is here")
    names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
    found = _choose(address, names, note).address
    note(f"the Hugging Face hub cannot be reached ({reason}); {found} is taken from the cache, as of {snapshot.name}")
    return Fetched(found, snapshot / found.folder)


@dataclass(frozen=True)
class _Choice:
    """An SAE in a repository.

    Args:
        address: its folder's, or its file's if that is one of several layers'.
        form: its format.
        files: the names of its files in the repository, in the order of the format's.
    """

    address: Address
    form: Format
    files: list[str]


def _choose(address: Address, names: Sequence[str], note: Callable[[str], None]) -> _Choice:
    """The SAE at an address, among the names of a repository's files."""
    wanted, file = address.folder, None
    if wanted in names:
        wanted, _, file = wanted.rpartition("/")
    folders: dict[str, list[str]] = {}
    for name in names:
        folder, _, own = name.rpartition("/")
        folders.setdefault(folder, []).append(own)
    below = {folder: list(files) for folder, files in folders.items()}  # and the files in a folder of the folder
    for folder, files in folders.items():
        above, _, own = folder.rpartition("/")
        if folder and above in below:
            below[above] += [f"{own}/{name}" for name in files]
    inside = {folder: FORMATS[form] for folder, files in sorted(below.items())
              if PurePosixPath(folder).is_relative_to(wanted) and (file is None or folder == wanted)
              and (form := format_of(files, file))}
    found = wanted if wanted in inside else next(iter(inside)) if len(inside) == 1 else None
    if found is not None:
        if found != wanted:
            note(f"{address} holds one SAE, in {found}")
        at = address if file else address.at(found)
        own_files = inside[found].among(below[found], str(at), file)
        return _Choice(at, inside[found], [f"{found}/{name}" if found else name for name in own_files])
    if inside:
        shown = ", ".join(str(address.at(folder)) for folder in list(inside)[:SHOWN])
        raise HubError(f"{address} holds {len(inside):,} SAEs: name one of them, {shown}"
                       f"{', ...' if len(inside) > SHOWN else ''}")
    there = ", ".join(sorted(folder or "files at its top" for folder in folders)[:SHOWN]) or "no file"
    raise HubError(f"no SAE found in {address}: expected a folder with {known_files()}, got {there}")


def _download(found: _Choice, commit: str) -> Path:
    """Fetch an SAE's files, and return the folder on this machine of the repository's files."""
    from huggingface_hub import hf_hub_download

    first, *others = found.files
    with hub_errors(found.address), bars_on_terminals():
        path = Path(hf_hub_download(found.address.repo, first, revision=commit))
        if found.form.check is not None:
            found.form.check(path.parent)
        for name in others:
            hf_hub_download(found.address.repo, name, revision=commit)
        # Records in the cache which commit the branch is, so that it is found by name without a network.
        hf_hub_download(found.address.repo, first, revision=found.address.revision)
    return path.parents[first.count("/")]
