"""`sae import`."""

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import typer

from ..arrays import FLATTEN, SUFFIXES, ArraySource, open_array
from ..config import Config, option
from ..errors import StoreError
from ..files import file_sha256
from ..home import STORE_MARKER, checked_name
from ..report import Step, counted, size_words
from ..store import (
    COLUMNS,
    DTYPES,
    MAX_NORM_HELP,
    ActivationStore,
    StoreMeta,
    StoreWriter,
    filling,
    finished_store,
    hash_request,
    rows_per_shard,
)
from .options import Given, Json, configured, start
from .stores import DERIVED, say_stored, told_when_stopped


@dataclass(frozen=True)
class ImportConfig(Config):
    """What decides the rows of an import, beside the file."""

    panel: ClassVar[str] = "Rows"

    key: str | None = option(None, "Which array of the file; needed where it holds several.")
    labels: str | None = option(None, "A label for each row: a file with one array of whole numbers, or the key of one "
                                      "in the same file.", metavar="FILE|KEY")
    flatten: str | None = option(None, "What a row is of an array of more than two dimensions: positions, each vector "
                                       "along the last of (batch, position, width), split into training and test rows "
                                       "by whole sequences; features, each whole element of the first, such as an "
                                       "image. Default: features for idx files, others are refused.", choices=FLATTEN)
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

    An array of more than two dimensions needs --flatten. Nothing in the file is executed, and no other file that it
    names is opened. The same command again goes on where an interrupted one stopped, and does nothing where it is
    finished.

    Example: sae import train-images-idx3-ubyte.gz --labels train-labels-idx1-ubyte.gz --name mnist
    """
    session = start(ctx, json)
    with told_when_stopped(session) as folders:
        config = options.config(ImportConfig)
        named = checked_name(Path(file).stem, DERIVED) if name is None else checked_name(name)
        folder = session.home.stores.path / named
        array = open_array(file, config.key, config.labels, config.flatten)
        folders.append(folder)
        dtype = config.dtype or array.dtype
        _check_room(folder, array, dtype)
        shard_rows = config.shard_rows or rows_per_shard(array.features, dtype)
        source = {"kind": "array", "file": Path(file).name, "key": config.key, **_identity(file, array)}
        # Otherwise the request is what it was before there were these options.
        if config.max_norm_multiple is not None:
            source["max_norm_multiple"] = config.max_norm_multiple
        if config.flatten == "positions":
            source["flatten"] = config.flatten
        wanted = hash_request({**source, "dtype": dtype, "shard_rows": shard_rows})
        if (finished := finished_store(session.report, folder, wanted)) is not None:
            return say_stored(session, [(finished, True)])
        meta = StoreMeta(source, wanted, dtype, array.features, shard_rows,
                         columns=tuple(array.columns(0, 0)), max_norm_multiple=config.max_norm_multiple)
        with (StoreWriter.open(folder, meta) as writer,
              filling(session.report, [writer], "importing", array.rows) as show):
            while not writer.complete:
                _fill(writer, array, show)
                writer.finish()
    return say_stored(session, [(ActivationStore.open(folder), False)])


def _check_room(folder: Path, array: ArraySource, dtype: str) -> None:
    """Refuse rows that the disk has no room for, before the first is read: a header can claim any number of them.

    Raises:
        StoreError: it has not.
    """
    rows = array.rows
    if (folder / STORE_MARKER).exists():
        store = ActivationStore.open(folder)
        rows = 0 if store.complete else rows - store.rows
    columns = sum(COLUMNS[name].itemsize for name in array.columns(0, 0))
    needed = rows * (array.features * DTYPES[dtype].storage.itemsize + columns)
    free = shutil.disk_usage(next(place for place in folder.absolute().parents if place.exists())).free
    if needed > free:
        raise StoreError(f"cannot store {folder.name}: expected {size_words(needed)} of free disk for "
                         f"{counted(rows, 'row')} of {array.features:,} dimensions, got {size_words(free)}; free some, "
                         f"or choose another --home")


def _identity(file: str, array: ArraySource) -> dict[str, Any]:
    """Hashes of what is imported: of the file's bytes, or of the numbers where there is no file, and of the labels."""
    content = file_sha256(Path(file)) if Path(file).exists() else _hash(array.read((slice(None),)))
    documents = {} if array.documents is None else {"documents_sha256": _hash(array.documents)}
    return {"sha256": content, "labels_sha256": None if array.labels is None else _hash(array.labels), **documents}


def _hash(numbers: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(numbers).data).hexdigest()


def _fill(writer: StoreWriter, array: ArraySource, show: Step) -> None:
    for begin, rows in array.blocks(writer.cursor["row"] if writer.cursor else 0):
        end = begin + len(rows)
        writer.append(rows, array.columns(begin, end), {"row": begin}, after={"row": end})
        show(writer.rows)
        if writer.full:
            break
