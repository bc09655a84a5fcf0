"""`sae export`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from .. import formats
from ..errors import ConfigError
from ..subjects import find_subject
from .conversions import converted
from .options import Json, Run, start
from .subjects import Data

To = Annotated[Literal["saelens", "sparsify", "dictionary-learning", "gemma-scope"], typer.Option(
    "--to", help="The library, or gemma-scope for params.npz.")]
Out = Annotated[Path, typer.Option("--out", help="Folder to write; new or empty.")]


def command(ctx: typer.Context, to: To, out: Out, run: Run = None, data: Data = None, json: Json = False) -> None:
    """Write a run in another library's format.

    The folder appears whole or not at all. What the library cannot express is refused by name. These libraries'
    TopK clips at zero where topk here does not: such a run is written with it, and the difference measured on the
    held-out rows of --data.

    Example: sae export first --to saelens --out exported
    """
    session = start(ctx, json, out=out)
    subject = find_subject(session.home, run, session.console.note)
    if run is None:
        session.console.note(f"using the newest run, {subject.name}")
    saved = formats.load(subject.folder)
    found = converted(session, subject.name, saved, to, data)
    if found.deviation is None and data is not None:
        raise ConfigError(f"--data does nothing here: {to} expresses {saved.sae.activation.name} exactly; leave it out")
    formats.save(found.written, to, out)
    document = {"run": subject.name, "format": to, "path": str(out), "activation": saved.sae.activation.name,
                "written_as": found.written.sae.activation.name, "deviation": found.deviation,
                "files": sorted(path.name for path in out.iterdir())}
    if found.told is not None:
        session.console.note(found.told)
    session.console.result(document, f"wrote {subject.name} to {out} for {to}: {', '.join(document['files'])}")
