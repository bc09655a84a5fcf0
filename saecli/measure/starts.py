"""Opening the SAE that a training starts from."""

from pathlib import Path

from ..base.console import Listener
from ..base.home import Home
from ..sae.dictionary import SAE
from ..train.starting import Start
from .sae_and_rows import opened


def start_of(home: Home, sae: SAE | str | Path, listener: Listener) -> Start:
    """The start of a training from an SAE, a run's name or whatever else `load_sae` takes.

    Its name opens the same SAE again from any working folder: a folder's path is absolute, and an address on the hub
    names the revision if the one given did.

    Raises:
        RunError, FormatError, HubError: it is missing or cannot be read.
    """
    subject, saved = opened(home, sae, listener)
    if isinstance(sae, SAE) or str(sae) in home.runs.names():
        return Start.of(subject.name, saved.sae)
    folder = Path(str(sae)).expanduser()
    here = folder.is_dir() and subject.folder.resolve() == folder.resolve()
    return Start.of(str(folder.resolve()) if here else f"hf://{subject.name}", saved.sae)
