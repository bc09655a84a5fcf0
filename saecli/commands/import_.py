"""`sae import`."""

from typing import Annotated

import typer

from ..arrays import SUFFIXES
from ..inventory.importing import ImportConfig, imported
from ..inventory.listing import stored
from ..options import Given, Json, configured, start

File = Annotated[str, typer.Argument(
    help=f"A file ({SUFFIXES}); or digits: scikit-learn's handwritten digits; or patches: 16x16 grey patches of its "
         "two photographs, each less its mean, 8 per square of 32x32 pixels, which is trained on or held out whole.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the store.", show_default="the file's name")]


@configured(ImportConfig)
def command(ctx: typer.Context, file: File, options: Given, name: Name = None, json: Json = False) -> None:
    """Put an array of activations or images into the store.

    An array of more than two dimensions needs --flatten. Nothing in the file is executed, and no other file that it
    names is opened. The same command again resumes an interrupted import, and does nothing for a finished one.

    Example: sae import train-images-idx3-ubyte.gz --labels train-labels-idx1-ubyte.gz --name mnist
    """
    session = start(ctx, json)
    document, tables = stored([imported(file, options.config(ImportConfig), name, session.home, session.console)])
    session.console.result(document, *tables)
