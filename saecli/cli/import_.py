from functools import partial
from typing import Annotated, Any

import typer

from ..store.options import ImportConfig, SyntheticConfig
from .options import Json, configured, start


@configured(ImportConfig, SyntheticConfig)
def command(
    ctx: typer.Context,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A file (.npy, .npz, .safetensors, .pt, .pth, .h5, .hdf5, .idx or idx3-ubyte, the last two also with "
            ".gz); digits or patches: scikit-learn's handwritten digits, or 16x16 grey patches of its two photographs, "
            "each less its mean; synthetic: rows made of known features.",
        ),
    ],
    options: dict[str, Any],
    name: Annotated[
        str | None, typer.Option(help="Name of the store.", show_default="the file's name")
    ] = None,
    json: Json = False,
) -> None:
    """Store an array, or synthetic rows made of known features.

    An array of more than two dimensions needs --flatten. Nothing in the file is executed, and no other file that it
    names is opened. The same command again resumes an interrupted import, and does nothing for a finished one.

    For synthetic rows, `sae eval` reports which known features an SAE has found. Their structure is SynthSAEBench's
    (arXiv:2602.14687): Zipfian frequencies, a hierarchy, correlations.

    Example: sae import train-images-idx3-ubyte.gz --name mnist
    """
    from ..show.tables import stored_tables
    from ..store.importing import import_array, import_synthetic, is_world
    from ..store.opening import stores_document

    session = start(ctx)
    importer = import_synthetic if is_world(file) else partial(import_array, file)
    store = importer(name=name, home=session.home.path, progress=session.console, **options)
    document = stores_document([store])
    session.console.print_result(document, *stored_tables(document))
