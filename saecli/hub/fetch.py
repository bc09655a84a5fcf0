"""Fetching an SAE from the Hugging Face hub: its own files, and no others, into the cache of the hub's client."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import HubError, one_line
from ..formats import FORMATS, format_of, known_files
from ..network import why_unreachable
from .address import Address, cached_snapshot
from .refusals import bars_on_terminals, is_passing, told

SHOWN = 8  # folders that a message lists


@dataclass(frozen=True)
class Fetched:
    """An SAE from the hub on this machine.

    Args:
        address: where on the hub it lies, the folder that was found included.
        folder: where on this machine.
    """

    address: Address
    folder: Path


def fetch(address: Address, note: Callable[[str], None]) -> Fetched:
    """Fetch the SAE at an address, or find it in the cache: what is there in its newest state is not fetched again.

    Args:
        address: a folder that holds an SAE in a known format, or one below which there is exactly one.
        note: told which folder was taken and where the hub cannot be reached.

    Raises:
        HubError: there is no such repository, revision, folder or SAE, it may not be read, or the hub cannot be
            reached and the cache has nothing.
    """
    from huggingface_hub import HfApi

    reason = why_unreachable()
    if reason is None:
        try:
            with told(address):
                info = HfApi().model_info(address.repo, revision=address.revision, timeout=30)
        except HubError as error:
            if not is_passing(error.__cause__) or cached_snapshot(address) is None:
                raise
            reason = one_line(error.__cause__)
        else:
            found, form = _choose(address, (file.rfilename for file in info.siblings or ()), note)
            return Fetched(found, _download(found, FORMATS[form].files, info.sha))
    snapshot = cached_snapshot(address)
    if snapshot is None:
        raise HubError(f"{address} is not in the cache, nor can the Hugging Face hub be reached ({reason}): connect to "
                       f"the network, or name a run or a folder that is here")
    names = (path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file())
    found, _ = _choose(address, names, note)
    note(f"the Hugging Face hub cannot be reached ({reason}); {found} is taken from the cache, as of {snapshot.name}")
    return Fetched(found, snapshot / found.folder)


def _choose(address: Address, names: Iterable[str], note: Callable[[str], None]) -> tuple[Address, str]:
    """The folder to take, and the format of its SAE."""
    folders: dict[str, list[str]] = {}
    for name in map(PurePosixPath, names):
        folders.setdefault("" if str(name.parent) == "." else str(name.parent), []).append(name.name)
    inside = {folder: form for folder, files in sorted(folders.items())
              if (form := format_of(files)) and PurePosixPath(folder).is_relative_to(address.folder)}
    if address.folder in inside:
        return address, inside[address.folder]
    if len(inside) == 1:
        ((folder, form),) = inside.items()
        note(f"{address} holds one SAE, in {folder}")
        return address.at(folder), form
    if inside:
        shown = ", ".join(str(address.at(folder)) for folder in list(inside)[:SHOWN])
        raise HubError(f"{address} holds {len(inside):,} SAEs: name one of them, {shown}"
                       f"{', ...' if len(inside) > SHOWN else ''}")
    there = ", ".join(sorted(folder or "files at its top" for folder in folders)[:SHOWN]) or "no file"
    raise HubError(f"no SAE found in {address}: expected a folder with {known_files()}, got {there}")


def _download(address: Address, files: Sequence[str], commit: str) -> Path:
    from huggingface_hub import hf_hub_download

    prefix = f"{address.folder}/" if address.folder else ""
    with told(address), bars_on_terminals():
        paths = [Path(hf_hub_download(address.repo, prefix + file, revision=commit)) for file in files]
        # The cache learns which commit the branch is, so that without a network it is found by its name.
        hf_hub_download(address.repo, prefix + files[0], revision=address.revision)
    return paths[0].parent
