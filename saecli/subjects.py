"""SAEs to look at, and finding the one that a user means.

A run folder holds `run.json` (`format_version`, `created`, `complete`, `data`: the store's name, `training`,
`solver`, `activation`, `result`), `config.toml`, `metrics.jsonl`, and from the first checkpoint on `sae.safetensors`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import formats
from .errors import HubError, RunError
from .home import Home, read_run
from .hub import Address, fetch, is_cached


@dataclass(frozen=True)
class Subject:
    """An SAE to look at.

    Args:
        name: what it is called in tables: its run's name, its path below the runs, or the path that was given.
        folder: where it lies; None for an SAE in memory.
        data: name of the store that it was trained on; None where no one knows.
        split_seed: seed of the split into training and held-out rows.
        fraction: share of the training rows that it was trained on, in (0, 1].
        complete: whether its training was finished.
        data_hash: request hash of the store that it was trained on; None where no one knows.
        dead_fraction: share of its latents that fire on none of the rows that it was trained on, in [0, 1], as training
            counted; None where no one knows.
    """

    name: str
    folder: Path | None = None
    data: str | None = None
    split_seed: int = 0
    fraction: float = 1.0
    complete: bool = True
    data_hash: str | None = None
    dead_fraction: float | None = None


def find_subject(home: Home, text: str | None, note: Callable[[str], None] = lambda _: None) -> Subject:
    """The SAE that a user means.

    Args:
        home: the folder of stores and runs.
        text: name of a run in the home, else a folder that holds an SAE in any known format, else where on the
            Hugging Face hub one lies (see `hub.Address`; after `hf://` that alone); None for the newest run.
        note: told what was chosen where another reading was possible.

    Raises:
        RunError: there is no such run or folder, and the message names the nearest runs; or the run has no SAE yet, or
            was written by a newer version.
        FormatError: it is a folder, but holds no SAE in a known format.
        HubError: it is none here, and the hub has none there, or cannot be asked.
    """
    marker = home.runs.marker
    if text is None or text in home.runs.names():
        folder = home.runs.find(text)
        return _run(folder, marker, folder.name)
    address = Address.parse(text)
    if address is not None and text.startswith(("hf://", "https://")):
        return _hosted(address, note)
    folder = Path(text).expanduser()
    if folder.is_file():
        raise RunError(f"{text} is a file: expected a run's name or a folder that holds an SAE; name the file's "
                       f"folder, {folder.parent}")
    if address is not None and folder.is_dir() and is_cached(address):
        note(f"{text} is a folder here, which is taken; hf://{text} is what the hub has")
    if (folder / marker).is_file():
        inside = folder.resolve().is_relative_to(home.runs.path.resolve())  # an epoch that a run has kept
        name = str(folder.resolve().relative_to(home.runs.path.resolve())) if inside else text
        return _run(folder, marker, name)
    if formats.recognise(folder) is not None:
        return Subject(text, folder)
    if folder.is_dir():
        formats.load(folder)  # raises, and says what a folder would have to hold
    if address is not None:
        try:
            return _hosted(address, note)
        except HubError as error:
            raise HubError(f"no run and no folder here is named {text!r}, and {error}") from error
    raise RunError(f"there is no run and no folder named {text!r}; {home.runs.instead_of(text)}")


def _hosted(address: Address, note: Callable[[str], None]) -> Subject:
    found = fetch(address, note)
    return Subject(str(found.address), found.folder)


def _run(folder: Path, marker: str, name: str) -> Subject:
    run = read_run(folder / marker)
    if formats.recognise(folder) is None:
        raise RunError(f"the run {name!r} holds no SAE yet: expected {formats.native.FILE_NAME} in {folder}, which the "
                       f"first epoch writes; go on with it by `sae train --resume --name {folder.name}`")
    dead = run.result.final.get("dead_fraction") if run.result else None
    return Subject(name, folder, run.data, run.training.split_seed, run.training.fraction, run.complete, run.data_hash,
                   dead)
