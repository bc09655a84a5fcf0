"""Writing an SAE in another library's format."""

from pathlib import Path
from typing import Any

from .. import formats
from ..console import Listener, listening
from ..errors import ConfigError
from ..evaluation.sae_and_rows import RowsLike, SAELike, measured, opened
from ..formats import FORMATS
from ..home import Home
from .conversion import converted


def export(sae: SAELike, to: str, out: str | Path, data: RowsLike = None, *, home: str | Path | None = None,
           progress: bool = False) -> dict[str, Any]:
    """Write an SAE in another library's format, as `sae export` does.

    Where the format lacks the activation, and has one that can stand in for it, that is written, and the difference
    measured on held-out rows; `save_sae` refuses instead.

    Args:
        sae: as of `evaluate`.
        to: saelens, sparsify, dictionary-learning, gemma-scope or native.
        out: folder to write, new or empty; it appears whole or not at all.
        data: rows to measure the difference on, as of `evaluate`.
        home: as of `evaluate`.
        progress: as of `evaluate`.

    Returns:
        What `sae export --json` prints: among it `deviation`, the difference measured; None where nothing stands in.

    Raises:
        ConfigError: there is no such format, there are no rows to measure the difference on, or `data` is given and
            there is no difference.
        FormatError: the folder is in use, or the format cannot express the SAE's activation.
        SaeError: as of `evaluate`.
    """
    if to not in FORMATS:
        raise ConfigError("to", "must be one of {choices}, got {got!r}", choices=", ".join(FORMATS), got=to)
    return exported(Home.at(home), sae, to, Path(out), data, listening(progress))


def exported(home: Home, sae: SAELike, to: str, out: Path, data: RowsLike, listener: Listener) -> dict[str, Any]:
    """As `export`; a listener is told what was chosen, and of the difference."""
    subject, saved = opened(home, sae, listener)
    found = converted(saved, to, lambda: measured(home, sae, data, "test", "auto", listener), listener)
    if found.deviation is None and data is not None:
        raise ConfigError("data", "does nothing here: {to} expresses {activation} exactly", "leave it out", to=to,
                          activation=saved.sae.activation.name)
    formats.save(found.written, to, out)
    if found.told is not None:
        listener.note(found.told)
    return {"run": subject.name, "format": to, "path": str(out), "activation": saved.sae.activation.name,
            "written_as": found.written.sae.activation.name, "deviation": found.deviation,
            "files": sorted(path.name for path in out.iterdir())}
