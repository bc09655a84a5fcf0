"""`sae import`."""

from typing import Annotated

import typer

from ...store.array_formats import SUFFIXES
from ...store.import_arrays import imported
from ...store.import_worlds import imported_world, is_world, refuse_options_of_worlds
from ...store.listing import stored
from ...store.options import ImportConfig, SyntheticConfig
from ..options import Given, Json, configured, start

File = Annotated[str, typer.Argument(
    metavar="FILE",
    help=f"A file ({SUFFIXES}); or digits: scikit-learn's handwritten digits; or patches: 16x16 grey patches of its "
         "two photographs, each less its mean, 8 per square of 32x32 pixels, which is trained on or held out whole; or "
         "synthetic: rows made of known features, which are stored beside them; or a folder in which SAELens saved "
         "such a world.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the store.", show_default="the file's name")]


@configured(ImportConfig, SyntheticConfig)
def command(ctx: typer.Context, file: File, options: Given, name: Name = None, json: Json = False) -> None:
    """Put an array, or rows made of known features, into the store.

    An array of more than two dimensions needs --flatten. Nothing in the file is executed, and no other file that it
    names is opened. The same command again resumes an interrupted import, and does nothing for a finished one.

    Of rows made of known features, `sae eval` tells which of them an SAE has found. Their structure is SynthSAEBench's
    (arXiv:2602.14687): Zipfian frequencies, a hierarchy, correlations.

    Example: sae import train-images-idx3-ubyte.gz --labels train-labels-idx1-ubyte.gz --name mnist
    """
    session = start(ctx, json)
    config = options.config(ImportConfig)
    if is_world(file):
        found = imported_world(file, options.config(SyntheticConfig), config, options.given, name, session.home,
                               session.console)
    else:
        refuse_options_of_worlds(file, options.given)
        found = imported(file, config, name, session.home, session.console)
    document, tables = stored([found])
    session.console.result(document, *tables)
