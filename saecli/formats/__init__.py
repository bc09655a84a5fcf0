"""SAEs in folders, in this tool's own format and in other libraries'.

To add a format, write `saecli/formats/NAME.py` and a line in `FORMATS`. No format runs code from a file.
"""

import fnmatch
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ..activations import ACTIVATIONS, Activation, ReluTopK, TopK
from ..dictionary import SAE
from ..errors import FormatError
from ..files import folder_appearing_whole, is_free, is_utf8
from . import circuit_tracer, dictionary_learning, gemma_scope, native, saelens, sparsify
from .common import SavedSAE, the_files
from .native import load_native, save_native

__all__ = ["FORMATS", "STAND_INS", "Format", "SavedSAE", "format_of", "known_files", "load", "load_native", "recognise",
           "save", "save_native", "stand_in", "the_files"]


@dataclass(frozen=True)
class Format:
    """A format of SAEs.

    Args:
        files: patterns of the names of the files that a folder of this format holds, one file of each.
        load: reads the SAE in a folder.
        save: writes an SAE into an existing folder.
        activations: the activations of SAEs that `save` can express; none if it writes no SAEs.
        transcoders: likewise, of transcoders.
        one_width: whether a transcoder's targets must be as wide as its rows.
    """

    files: tuple[str, ...]
    load: Callable[[Path], SavedSAE]
    save: Callable[[SavedSAE, Path], None]
    activations: Collection[type[Activation]]
    transcoders: Collection[type[Activation]] = ()
    one_width: bool = False

    def lacks(self, saved: SavedSAE) -> str | None:
        """What `save` cannot express of an SAE, in words with what it can; None if it can express it."""
        sae, kind = saved.sae, "a transcoder" if saved.is_transcoder else "an SAE that is no transcoder"
        able = self.transcoders if saved.is_transcoder else self.activations
        if not able:
            return kind
        if type(sae.activation) not in able:
            of = " of a transcoder" if saved.is_transcoder else ""
            return (f"the activation {sae.activation.name}{of}; expected one of "
                    f"{', '.join(activation.name for activation in able)}")
        if self.one_width and sae.d_out != sae.d_in:
            return (f"targets of {sae.d_out} dimensions predicted from rows of {sae.d_in}; expected as many as the "
                    "rows'")
        return None


FORMATS: dict[str, Format] = {  # the first whose files are all present is used: sparsify before native
    "saelens": Format((saelens.CONFIG, saelens.TENSORS), saelens.load_saelens, saelens.save_saelens,
                      saelens.ARCHITECTURES, saelens.TRANSCODERS),
    "sparsify": Format((sparsify.CONFIG, sparsify.TENSORS), sparsify.load_sparsify, sparsify.save_sparsify,
                       sparsify.LATENTS_KEPT, sparsify.LATENTS_KEPT, one_width=True),
    "dictionary-learning": Format((dictionary_learning.CONFIG, dictionary_learning.TENSORS),
                                  dictionary_learning.load_dictionary_learning,
                                  dictionary_learning.save_dictionary_learning, dictionary_learning.WRITTEN_AS),
    "gemma-scope": Format((gemma_scope.TENSORS,), gemma_scope.load_gemma_scope, gemma_scope.save_gemma_scope,
                          gemma_scope.WRITTEN),
    "circuit-tracer": Format((circuit_tracer.CONFIG, circuit_tracer.TENSORS), circuit_tracer.load_circuit_tracer,
                             circuit_tracer.save_circuit_tracer, (), circuit_tracer.WRITTEN, one_width=True),
    "native": Format((native.FILE_NAME,), load_native, save_native, ACTIVATIONS.values(), ACTIVATIONS.values()),
}

# For activations that other libraries lack, the nearest SAE that they have.
STAND_INS: dict[type[Activation], Callable[[SAE], SAE]] = {
    TopK: lambda sae: sae.changed(activation=ReluTopK(k=sae.activation.k)),
}


def stand_in(saved: SavedSAE) -> SavedSAE | None:
    """The SAE to write where a format lacks an SAE's activation; None if there is none."""
    instead = STAND_INS.get(type(saved.sae.activation))
    return None if instead is None else replace(saved, sae=instead(saved.sae))


def recognise(folder: Path) -> str | None:
    """The name of a folder's format; None if it is unknown."""
    return format_of(path.name for form in FORMATS.values() for pattern in form.files for path in folder.glob(pattern)
                     if path.is_file())


def format_of(names: Iterable[str]) -> str | None:
    """The name of the format whose files are all among `names`; None if there is none."""
    there = set(names)
    return next((name for name, form in FORMATS.items()
                 if all(fnmatch.filter(there, pattern) for pattern in form.files)), None)


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
        FormatError: the folder is in use, or the format cannot express the SAE.
    """
    _demand_utf8(folder)
    form = FORMATS[name]
    if lacking := form.lacks(saved):
        able = [key for key, other in FORMATS.items() if not other.lacks(saved)]
        raise FormatError(f"{name} cannot express {lacking}; it can be written as {' or '.join(able)}")
    if not is_free(folder):
        raise FormatError(f"cannot write to {folder}: expected an empty or a new folder, got one in use; "
                          f"name another")
    with folder_appearing_whole(folder) as temporary:
        form.save(saved, temporary)
