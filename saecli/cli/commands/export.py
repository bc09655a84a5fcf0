"""`sae export`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ...sae.formats import WRITABLE, named
from ..options import Json, Run, start
from .eval import Data

To = Annotated[Literal[tuple(name for name in WRITABLE if name != "native")], typer.Option(
    "--to", help="The library, or gemma-scope for params.npz, gemma-scope-2 for params.safetensors; of a transcoder "
                 "saelens, sparsify, gemma-scope-2 or circuit-tracer.")]
Out = Annotated[Path, typer.Option("--out", help="Folder to write; new or empty.")]


def command(ctx: typer.Context, to: To, out: Out, run: Run = None, data: Data = None, json: Json = False) -> None:
    """Write a run in another library's format.

    An SAE that the library cannot express is refused. These libraries' TopK applies a ReLU to the k largest
    pre-activations, while topk here keeps their signs: such a run is written with theirs, and the difference measured
    on held-out rows of --data. For circuit-tracer, export one run for each layer and put all files into one folder.

    Example: sae export first --to saelens --out exported
    """
    from ...measure.export import export

    session = start(ctx, json, out=out)
    document = export(run, to, out, data, home=session.home, progress=session.console)
    session.console.result(document, f"wrote {document['run']} to {out} for {to}: {', '.join(document['files'])}")


command.spelling = named
