"""Write a run in another library's format.

Refuses an SAE that the library cannot express, except topk: their TopK applies a ReLU to the k largest
pre-activations, so negative codes become 0.

With --to circuit-tracer several runs, one transcoder for each layer of the model, make one folder, which
circuit-tracer opens: sae export 't-*' --to circuit-tracer --out set. Its version 0.5.0 does not read topk; later
ones do.

Example: sae export first --to saelens --out exported
"""

from collections.abc import Mapping
from typing import Any

import typer

from ..base.files import expanded
from ..derive.functions import export
from .options import Json, Runs, configured, start


@configured(export)
def command(
    ctx: typer.Context, options: Mapping[str, Any], runs: Runs = None, json: Json = False
) -> None:
    session = start(ctx, new=expanded(options["out"]))
    document = session.call(export, sae=runs, **options)
    files, written = document["files"], document.get("run")
    if written is None:  # a set
        count = len(document["runs"])
        written = f"{count} transcoders"
        files = ["config.yaml", f"{count} layer_*.safetensors"]
    session.console.print_result(
        document,
        f"wrote {written} to {options['out']} for {document['format']}: {', '.join(files)}",
    )
