"""SAEs in folders, in this tool's own format and in other libraries'.

To add a format, write `saecli/formats/NAME.py` and a line in `FORMATS`. No format runs code from a file.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from ..activations import ACTIVATIONS, Activation, ReluTopK, TopK
from ..dictionary import SAE
from ..errors import FormatError
from ..files import folder_appearing_whole, is_free, is_utf8
from . import dictionary_learning, gemma_scope, native, saelens, sparsify
from .common import SavedSAE
from .native import load_native, save_native

__all__ = ["FORMATS", "STAND_INS", "Format", "SavedSAE", "format_of", "known_files", "load", "load_native", "recognise",
           "save", "save_native"]


@dataclass(frozen=True)
class Format:
    """A format of SAEs.

    Args:
        files: names of the files that a folder of this format holds.
        load: reads the SAE in a folder.
        save: writes an SAE into an existing folder.
        activations: the activations that `save` can express.
    """

    files: tuple[str, ...]
    load: Callable[[Path], SavedSAE]
    save: Callable[[SavedSAE, Path], None]
    activations: Collection[type[Activation]]


FORMATS: dict[str, Format] = {  # the first whose files are all present is used: sparsify before native
    "saelens": Format((saelens.CONFIG, saelens.TENSORS), saelens.load_saelens, saelens.save_saelens,
                      saelens.ARCHITECTURES),
    "sparsify": Format((sparsify.CONFIG, sparsify.TENSORS), sparsify.load_sparsify, sparsify.save_sparsify,
                       sparsify.LATENTS_KEPT),
    "dictionary-learning": Format((dictionary_learning.CONFIG, dictionary_learning.TENSORS),
                                  dictionary_learning.load_dictionary_learning,
                                  dictionary_learning.save_dictionary_learning, dictionary_learning.WRITTEN_AS),
    "gemma-scope": Format((gemma_scope.TENSORS,), gemma_scope.load_gemma_scope, gemma_scope.save_gemma_scope,
                          gemma_scope.WRITTEN),
    "native": Format((native.FILE_NAME,), load_native, save_native, ACTIVATIONS.values()),
}

# For activations that other libraries lack, the nearest SAE that they have.
STAND_INS: dict[type[Activation], Callable[[SAE], SAE]] = {
    TopK: lambda sae: sae.changed(activation=ReluTopK(k=sae.activation.k)),
}


def recognise(folder: Path) -> str | None:
    """The name of a folder's format; None if it is unknown."""
    return format_of(file for form in FORMATS.values() for file in form.files if (folder / file).is_file())


def format_of(names: Iterable[str]) -> str | None:
    """The name of the format whose files are all among `names`; None if there is none."""
    there = set(names)
    return next((name for name, form in FORMATS.items() if there.issuperset(form.files)), None)


def known_files() -> str:
    """The files of the known formats, in words."""
    return "; ".join(f"{' and '.join(form.files)} ({name})" for name, form in FORMATS.items())


def load(folder: Path) -> SavedSAE:
    """Read the SAE in a folder, in any known format; FormatError if there is none, or it is damaged or cannot be
    expressed here."""
    name = recognise(folder)
    if name is None:
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) if folder.is_dir() else "no such folder"
        raise FormatError(f"no SAE found in {folder}; expected {known_files()}, got {there or 'an empty folder'}")
    _demand_utf8(folder)
    return FORMATS[name].load(folder)


def _demand_utf8(folder: Path) -> None:
    if not is_utf8(folder):
        raise FormatError(f"cannot use {str(folder)!r}: expected a path in UTF-8, got another; rename it")


def save(saved: SavedSAE, name: str, folder: Path) -> None:
    """Write an SAE in a format; the folder appears whole or not at all.

    Args:
        saved: the SAE.
        name: one of `FORMATS`.
        folder: does not exist yet, or is empty; its parents are created.

    Raises:
        FormatError: the folder is in use, or the format cannot express the SAE's activation.
    """
    _demand_utf8(folder)
    form, activation = FORMATS[name], saved.sae.activation
    if type(activation) not in form.activations:
        able = [key for key, other in FORMATS.items() if type(activation) in other.activations]
        raise FormatError(f"{name} cannot express the activation {activation.name}; expected one of "
                          f"{', '.join(kind.name for kind in form.activations)}; {activation.name} can be written "
                          f"as {' or '.join(able)}")
    if not is_free(folder):
        raise FormatError(f"cannot write to {folder}: expected an empty or a new folder, got one in use; "
                          f"name another")
    with folder_appearing_whole(folder) as temporary:
        form.save(saved, temporary)
