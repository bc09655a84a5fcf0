"""`sae import`."""

from typing import Annotated, Any

import typer

from ...show.listing import stored_tables
from ...store.import_arrays import import_array
from ...store.import_worlds import import_synthetic, is_world, refuse_options_of_worlds
from ...store.opening import stored
from ...store.options import SUFFIXES, ImportConfig, SyntheticConfig
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

    With known features, `sae eval` measures which of them an SAE has found. Their structure is SynthSAEBench's
    (arXiv:2602.14687): Zipfian frequencies, a hierarchy, correlations.

    Example: sae import train-images-idx3-ubyte.gz --labels train-labels-idx1-ubyte.gz --name mnist
    """
    session = start(ctx, json)
    given = {option: options.values[option] for option in options.given}
    asked: dict[str, Any] = {"home": session.home.path, "progress": session.console, **given}
    if is_world(file):
        store = import_synthetic(file, name, **asked)
    else:
        refuse_options_of_worlds(file, options.given)
        store = import_array(file, name, **asked)
    document = stored([store])
    session.console.result(document, *stored_tables(document))
