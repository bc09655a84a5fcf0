"""Store an array, or synthetic rows made of known features.

Executes nothing in a file, and opens no other file that it names, but those next to an index.json. The same command
again resumes an interrupted import, and does nothing for a finished one.

Files of rows follow each other: 'acts/*.npy'. One of several arrays: acts.h5 --key layer_6. All of
them: acts.safetensors.index.json --key '*'. A column of lists: acts.parquet --key activation. Padded batches:
batch.npz --flatten positions --mask attention_mask. One layer of (tokens, layers, width): vllm/ --index ':,2'.
Raw binary: acts.bin --shape -1,768 --dtype bfloat16.

Synthetic rows have SynthSAEBench's structure (arXiv:2602.14687): Zipfian frequencies, a hierarchy, correlations.
`sae eval` reports which of their features an SAE has found.

Example: sae import train-images-idx3-ubyte.gz --name mnist
"""

from functools import partial
from typing import Annotated, Any

import typer

from ..store.options import SUFFIXES, ImportConfig, SyntheticConfig
from .options import Json, configured, start


@configured(ImportConfig, SyntheticConfig)
def command(
    ctx: typer.Context,
    file: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help=f"Files, a folder of them, or a pattern in quotes ('acts/*.npy'): {SUFFIXES}; "
            "digits or patches: scikit-learn's handwritten digits, or 16x16 grey patches of its two photographs, each "
            "less its mean; synthetic: rows made of known features.",
        ),
    ],
    options: dict[str, Any],
    name: Annotated[
        str | None, typer.Option(help="Name of the store.", show_default="the file's name")
    ] = None,
    json: Json = False,
) -> None:
    from ..show.tables import stored_tables
    from ..store.importing import import_array, import_synthetic, is_world
    from ..store.opening import stores_document

    session = start(ctx)
    is_synthetic = len(file) == 1 and is_world(file[0])
    importer = import_synthetic if is_synthetic else partial(import_array, file)
    store = importer(name=name, home=session.home.path, progress=session.console, **options)
    document = stores_document([store])
    session.console.print_result(document, *stored_tables(document))
