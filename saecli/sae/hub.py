"""SAEs on the Hugging Face hub: addresses, fetching into its client's cache, uploading, and the client's errors.

Importing the client is slow: each function imports what it uses.
"""

import glob
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Self
from urllib.parse import unquote

from ..base.console import Listener
from ..base.errors import ConfigError, HubError, SaeError, one_line
from ..base.machine import LOG_IN, is_passing, why_refused, why_unreachable
from .formats import FORMATS, found_among, known_files, recognise

NAME = r"(?!\.{1,2}(?:/|$))[\w.-]+"  # a name between slashes, neither . nor ..
_INNER = NAME.replace("[", "[:+")  # of a folder or file in a repository
_PATH = re.compile(
    rf"(?:hf://)?({NAME}/{NAME})(?:@(refs/(?:pr/\d+|convert/\w+)|[^/@]+))?"
    rf"(?:/({_INNER}(?:/{_INNER})*))?(?:@(.+))?/?"
)
_PAGE = re.compile(
    rf"/(?!(?:datasets|spaces)/)({NAME}/{NAME})"
    r"(?:/(?:tree|blob|resolve|raw)/(refs/pr/\d+|[^/]+)(?:/(.*?))?)?/?"
)
HOSTS = ("huggingface.co", "hf.co")  # and HF_ENDPOINT's
SHOWN = 8  # folders that a message lists


@dataclass(frozen=True)
class Address:
    repo: str  # user/repo
    folder: str = ""
    revision: str | None = None  # branch, tag or commit; None for the newest state

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """`user/repo[/folder][@revision]` or `user/repo@revision/folder`, also after `hf://`, or its page's URL;
        HubError for other URLs."""
        if "://" in text and not text.startswith("hf://"):
            return cls._of_page(text)
        path = _PATH.fullmatch(text)
        return None if path is None else cls(path[1], path[3] or "", path[2] or path[4])

    @classmethod
    def _of_page(cls, url: str) -> Self:
        from huggingface_hub import constants

        scheme, _, rest = url.partition("://")
        host, _, path = re.split("[?#]", rest)[0].partition("/")
        page = _PAGE.fullmatch(f"/{path}")
        hosts = {constants.ENDPOINT.partition("://")[2], *HOSTS}
        if scheme.lower() not in ("https", "http") or host.lower() not in hosts or page is None:
            shown = f"{scheme}://{host.rpartition('@')[2]}/{path}"  # without a password
            raise HubError(
                f"{shown} is no page of an SAE on the Hugging Face hub: expected https://{HOSTS[0]}/USER/REPO, or with "
                "/tree/REVISION/FOLDER; for files elsewhere, download them and name their folder"
            )
        return cls(page[1], unquote(page[3] or ""), page[2] and unquote(page[2]))

    def __str__(self) -> str:
        path = f"{self.repo}/{self.folder}" if self.folder else self.repo
        return f"{path}@{self.revision}" if self.revision else path


def fetch(address: Address, listener: Listener) -> tuple[str, Path]:
    """Fetch an SAE, or without a network take it from the cache; returns its own address, and its folder or file.

    The address is a folder that holds an SAE or has one such folder below it, or a layer's file.
    """
    from huggingface_hub import HfApi, snapshot_download

    try:
        with hub_errors(address):
            info = HfApi().model_info(address.repo, revision=address.revision, timeout=30)
    except HubError as error:
        snapshot = _cached(address) if is_passing(error.__cause__) else None
        if snapshot is None:
            raise
        files = [path for path in snapshot.rglob("*") if path.is_file()]
        names = [path.relative_to(snapshot).as_posix() for path in files]
        chosen, _ = _choose(address, names, listener)
        listener.warn(
            f"the Hugging Face hub cannot be reached ({one_line(error.__cause__ or error)}); {chosen} is taken from "
            f"the cache, as of {snapshot.name}"
        )
        return str(chosen), snapshot / chosen.folder
    chosen, names = _choose(address, [file.rfilename for file in info.siblings or ()], listener)
    with hub_errors(address):
        patterns = [glob.escape(name) for name in names]
        # By the branch's name, which the cache then knows without a network.
        folder = snapshot_download(address.repo, revision=address.revision, allow_patterns=patterns)
        if Path(folder).name != info.sha:  # another commit came in between
            folder = snapshot_download(address.repo, revision=info.sha, allow_patterns=patterns)
    return str(chosen), Path(folder) / chosen.folder


def _cached(address: Address) -> Path | None:
    """The repository's cached snapshot, if any."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    settings: dict[str, Any] = {"revision": address.revision, "allow_patterns": []}
    try:
        return Path(snapshot_download(address.repo, local_files_only=True, **settings))
    except LocalEntryNotFoundError:
        return None


def _choose(
    address: Address, names: Sequence[str], listener: Listener
) -> tuple[Address, list[str]]:
    wanted = PurePosixPath(address.folder)
    folder = wanted.parent if address.folder in names else wanted
    paths = [path for path in map(PurePosixPath, names) if path.is_relative_to(folder)]
    found = {
        key: each
        for key, each in found_among(map(str, paths)).items()
        if PurePosixPath(key).is_relative_to(wanted)
    }
    key = str(wanted)
    if key not in found and len(found) == 1:
        (key,) = found
        listener.note(f"{address} holds one SAE, in {key}")
    if key in found:
        return replace(address, folder="" if key == "." else key), found[key].files
    if found:
        shown = ", ".join(str(replace(address, folder=key)) for key in [*found][:SHOWN])
        more = ", ..." if len(found) > SHOWN else ""
        raise HubError(f"{address} holds {len(found):,} SAEs: name one of them, {shown}{more}")
    got = ", ".join(names[:SHOWN]) or "no file"
    raise HubError(f"no SAE found in {address}: expected a folder with {known_files()}, got {got}")


def demand_writable(address: Address, private: bool) -> None:
    """HubError or ConfigError unless the user may write to or create the repository."""
    from huggingface_hub import HfApi

    api = HfApi()
    with hub_errors(address):
        if api.whoami().get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise HubError(
                f"the token may only read: expected one that may write to {address.repo}, {LOG_IN}"
            )
        if private and api.repo_exists(address.repo) and not api.model_info(address.repo).private:
            raise ConfigError(
                f"{address.repo} exists and is public; leave --private out, push to another, or make it "
                "private in its settings on the hub"
            )


def upload(folder: Path, address: Address, private: bool) -> str:
    """Upload a folder to the root of a repository, created if missing; returns the commit's URL.

    A README.md there stays. The same commit removes files of other formats at the address: a reader might take those.
    """
    from huggingface_hub import HfApi

    written = recognise(folder / address.folder)
    others = [
        f"{glob.escape(address.folder)}/{pattern}"
        for form in FORMATS.values()
        if written is None or form.files[-1] not in FORMATS[written].files
        for pattern in form.files
    ]
    api = HfApi()
    with hub_errors(address):
        api.create_repo(address.repo, private=private or None, exist_ok=True)
        has_card = api.file_exists(address.repo, "README.md")
        return api.upload_folder(
            repo_id=address.repo,
            folder_path=folder,
            ignore_patterns=["README.md"] if has_card else None,
            delete_patterns=others,
            commit_message=f"Add {address.folder} with sae push",
        ).commit_url


@contextmanager
def hub_errors(address: Address) -> Iterator[None]:
    """Turn the client's exceptions into a HubError, at once if the hub does not answer, which the client asks for
    minutes; draw its progress bars only on a terminal."""
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    hides = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if hides:
        disable_progress_bars()
    try:
        if reason := why_unreachable():
            raise ConnectionError(reason)
        yield
    except SaeError:
        raise
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None and not is_passing(error):
            raise  # from the disk
        cause = error.__cause__  # of one upload among several
        said = cause if isinstance(error, RuntimeError) and isinstance(cause, Exception) else error
        raise HubError(_explained(address, said)) from error
    finally:
        if hides:
            enable_progress_bars()


def _explained(address: Address, error: Exception) -> str:
    said = getattr(error, "server_message", None) or one_line(error)
    if is_passing(error):
        return f"the Hugging Face hub cannot be reached for {address.repo}: got {said}; connect, or try again later"
    if reason := why_refused(address.repo, error):
        return reason
    status = getattr(getattr(error, "response", None), "status_code", None)
    advice = f"; {LOG_IN}, with a token that has the right" if status in (401, 403) else ""
    return f"the Hugging Face hub refused a request for {address}: {said}{advice}"
