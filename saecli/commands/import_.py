"""`sae import`."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import typer

from ..arrays import SUFFIXES, ArraySource, open_array
from ..config import Config, option
from ..files import file_sha256
from ..report import Step
from ..store import DTYPES, ActivationStore, StoreMeta, StoreWriter, hash_request, rows_per_shard
from .options import Given, Json, configured, start
from .stores import MAX_NORM_HELP, filling, finished_store, say_stored, store_folder, told_when_stopped


@dataclass(frozen=True)
class ImportConfig(Config):
    """What decides the rows of an import, beside the file."""

    panel: ClassVar[str] = "Rows"

    key: str | None = option(None, "Which array of the file; needed where it holds several.")
    labels: str | None = option(None, "A label for each row: a file with one array of whole numbers, or the key of one "
                                      "in the same file.", metavar="FILE|KEY")
    max_norm_multiple: float | None = option(None, MAX_NORM_HELP, minimum=1)
    dtype: str | None = option(None, "Precision of the stored rows; default: the file's own where it is float16 or "
                                     "bfloat16, else float32.", choices=tuple(DTYPES))
    shard_rows: int | None = option(None, "Rows in a shard file; default: as many as take 256 MiB.", minimum=1,
                                    maximum=2**31 - 1)


File = Annotated[str, typer.Argument(
    help=f"A file ({SUFFIXES}); or digits: scikit-learn's handwritten digits; or patches: 16x16 grey patches of its "
         "two photographs, each less its mean, 8 in every square of 32x32 pixels, which is trained on or held out "
         "whole.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the store.", show_default="the file's name")]


@configured(ImportConfig)
def command(ctx: typer.Context, file: File, options: Given, name: Name = None, json: Json = False) -> None:
    """Put an array of activations or images into the store.

    Arrays of more than two dimensions are flattened to rows. Nothing in the file is executed. The same command again
    goes on where an interrupted one stopped, and does nothing where it is finished.

    Example: sae import train-images-idx3-ubyte.gz --labels train-labels-idx1-ubyte.gz --name mnist
    """
    session = start(ctx, json)
    with told_when_stopped(session) as folders:
        config = options.config(ImportConfig)
        array = open_array(file, config.key, config.labels)
        folder = store_folder(session.home, array.name if name is None else name)
        folders.append(folder)
        dtype = config.dtype or array.dtype
        shard_rows = config.shard_rows or rows_per_shard(array.features, dtype)
        source = {"kind": "array", "file": Path(file).name, "key": config.key, **_identity(file, array)}
        if config.max_norm_multiple is not None:  # otherwise the request is what it was before there was this option
            source["max_norm_multiple"] = config.max_norm_multiple
        wanted = hash_request({**source, "dtype": dtype, "shard_rows": shard_rows})
        if (finished := finished_store(session, folder, wanted)) is not None:
            return say_stored(session, [(finished, True)])
        meta = StoreMeta(source, wanted, dtype, array.features, shard_rows,
                         columns=tuple(_columns(array)), max_norm_multiple=config.max_norm_multiple)
        with (StoreWriter.open(folder, meta) as writer,
              filling(session, [writer], "importing", array.rows) as show):
            while not writer.complete:
                _fill(writer, array, show)
                writer.finish()
    return say_stored(session, [(ActivationStore.open(folder), False)])


def _identity(file: str, array: ArraySource) -> dict[str, Any]:
    """Hashes of what is imported: of the file's bytes, or of the numbers where there is no file, and of the labels."""
    content = file_sha256(Path(file)) if Path(file).exists() else _hash(array.read(0, array.rows))
    documents = {} if array.documents is None else {"documents_sha256": _hash(array.documents)}
    return {"sha256": content, "labels_sha256": None if array.labels is None else _hash(array.labels), **documents}


def _columns(array: ArraySource) -> dict[str, np.ndarray]:
    """What is kept beside the rows."""
    columns = {"label": array.labels, "document": array.documents}
    return {name: values for name, values in columns.items() if values is not None}


def _hash(numbers: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(numbers).data).hexdigest()


def _fill(writer: StoreWriter, array: ArraySource, show: Step) -> None:
    for begin, rows in array.blocks(writer.cursor["row"] if writer.cursor else 0):
        columns = {name: values[begin : begin + len(rows)] for name, values in _columns(array).items()}
        writer.append(rows, columns, {"row": begin})
        show(writer.rows)
        if writer.full:
            break
