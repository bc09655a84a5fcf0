"""The options of an extraction, the stores that it fills, and which rank stores which documents.

Rank r stores the documents i with i mod world_size = r.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..base.distributed import Communicator
from ..base.errors import ConfigError, flag_of
from ..base.home import Shelf, checked_name
from ..base.options import Config, option
from ..store.admission import MAX_NORM_HELP
from ..store.dtypes import DTYPES
from ..store.opening import DERIVED
from ..store.schema import hash_request
from .places import MODEL_DTYPES, TINY_GEMMA2, Place
from .steady import Document
from .texts import LOCAL_SUFFIXES, STDLIB_DOCS, TextSource
from .token_windows import POSITIONS, Windows

if TYPE_CHECKING:
    from .model_source import ModelSource

DEFAULT_DATASET = "Salesforce/wikitext"
DEFAULT_CONTEXT = 128
SHARD_ROWS = 32_768  # most rows in a shard by default
MOST = 2**31 - 1  # of any count, so that PyTorch and HDF5 can index with it


@dataclass(frozen=True)
class ExtractConfig(Config):
    """The options that determine an extraction's rows."""

    panel: ClassVar[str] = "Rows"

    model: str = option("google/gemma-2-2b", f"Hub id or folder of a causal language model, or {TINY_GEMMA2}, which "
                                             "is bundled and needs no network.")
    dataset: str | None = option(None, "Text: a hub dataset id, streamed; a .txt file (blank lines separate "
                                       f"documents), .jsonl or .parquet file; or {STDLIB_DOCS}, the docstrings of "
                                       f"Python's standard library; default: {DEFAULT_DATASET}, or with {TINY_GEMMA2} "
                                       f"{STDLIB_DOCS}.")
    dataset_config: str | None = option(None, "Configuration of a hub dataset; default: its own, for wikitext "
                                              "wikitext-103-raw-v1.")
    dataset_split: str = option("train", "Split of a hub dataset.")
    dataset_revision: str | None = option(None, "Commit, branch or tag of a hub dataset; default: its newest state; "
                                                "the store records the commit.")
    text_column: str = option("text", "Column that holds the text.")
    rows: int = option(100_000, "Rows to store; fewer if the text ends first.", minimum=1, maximum=MOST)
    min_tokens: int = option(1, "Texts of fewer tokens are skipped and counted.", minimum=1, maximum=MOST)
    context: int | None = option(None, "Most tokens in a window, including those before the text (BOS); default: "
                                       f"{DEFAULT_CONTEXT}, or the model's limit if lower.", minimum=1, maximum=MOST)
    packed: bool = option(False, "Concatenate documents into full windows, separated by BOS (by EOS where the "
                                 "tokenizer sets no BOS); a token then attends to all before it in its window, other "
                                 "documents' too. Without it, documents are cut into windows and never mixed.")
    positions: str = option("all", "all: one row per token that is not special; last: one row per document, its first "
                                   "window's last token, as in the paper.", choices=POSITIONS)
    max_norm_multiple: float | None = option(None, MAX_NORM_HELP, minimum=1)
    dtype: str = option("bfloat16", "Precision of the stored rows.", choices=tuple(DTYPES))
    model_dtype: str = option("auto", "Precision of weights and forward pass; auto: float32 on a CPU, elsewhere the "
                                      "checkpoint's own.", choices=("auto", *MODEL_DTYPES))
    batch_size: int | str = option("auto", "Windows of --context tokens per forward pass, or more windows that are "
                                           "shorter; halved if they do not fit in memory; auto: what fits on a CUDA "
                                           "device, elsewhere a fixed number. Rows depend on it only in their last "
                                           "bits.", choices=("auto",), minimum=1, maximum=MOST)
    shard_rows: int | None = option(None, f"Rows in a shard file; default: 64 MiB of them, {SHARD_ROWS:,} at most.",
                                    minimum=1, maximum=MOST)

    def text(self, given: Set[str]) -> TextSource:
        """Where the documents come from.

        Args:
            given: the options that the user set, as opposed to left at their defaults.

        Raises:
            ConfigError: the dataset's name is empty, or an option does nothing with the others.
        """
        dataset = self.dataset
        if dataset is None:
            dataset = STDLIB_DOCS if self.model == TINY_GEMMA2 else DEFAULT_DATASET
        if not dataset.strip():
            raise ConfigError("--dataset is empty: expected a hub dataset id, a .txt, .jsonl or .parquet file, or "
                              f"{STDLIB_DOCS}; name one, or leave it out", option="dataset")
        kind = STDLIB_DOCS if dataset == STDLIB_DOCS else Path(dataset).suffix.lower()
        unused = {"text_column"} if kind in (STDLIB_DOCS, ".txt") else set()
        if kind in (STDLIB_DOCS, *LOCAL_SUFFIXES):
            unused |= {"dataset_config", "dataset_split", "dataset_revision"}
        if refused := sorted(unused & given):
            raise ConfigError(f"{flag_of(refused[0])} does nothing with the dataset {dataset}; leave it out",
                              option=refused[0])
        if self.packed and self.positions == "last":
            raise ConfigError("--packed does nothing with --positions last, which takes one row from each document's "
                              "own window; leave it out", option="packed")
        return TextSource(dataset, self.dataset_config, self.dataset_split, self.text_column, self.dataset_revision)


# Options that determine the rows, beside model, text, layer and site; batch size and device do not.
DECIDING = ("rows", "min_tokens", "context", "packed", "positions", "dtype", "model_dtype", "shard_rows")


@dataclass(frozen=True)
class StoreRequest:
    """A requested store.

    Args:
        place: its layer and site.
        folder: where it is, or will be.
        source: the entries that determine its rows.
    """

    place: Place
    folder: Path
    source: dict[str, Any]

    @property
    def hash(self) -> str:
        """By which a finished store of the same rows is recognised."""
        return hash_request(self.source)


def store_requests(config: ExtractConfig, model: "ModelSource", text: TextSource, layers: Sequence[int],
                   sites: Sequence[str], name: str | None, shelf: Shelf) -> list[StoreRequest]:
    """The requested stores: every site of every layer, all of the same tokens.

    Since a row that one of several places drops is dropped from all, each store's `source` names the other places, as
    `beside`; the names derived for them end in one hash, that of the whole request.

    Args:
        config: with the context and the precision of the forward pass resolved.
        model: where the model is.
        text: where the documents come from, pinned.
        layers: blocks to read.
        sites: where in each.
        name: the store's name, for several stores the prefix of their names; None to derive it from the request.
        shelf: where stores are.

    Raises:
        ConfigError: the model has no such layer, or the name cannot be a folder's.
    """
    for layer in layers:
        model.check_layer(layer)
    places = [Place(*pair) for pair in product(dict.fromkeys(layers), dict.fromkeys(sites))]
    common = {field: getattr(config, field) for field in DECIDING} | model.identity() | text.identity()
    if config.max_norm_multiple is not None:  # else hash as before this option existed
        common["max_norm_multiple"] = config.max_norm_multiple
    labels = {place: f"l{place.layer}-{place.site}" for place in sorted(places)}
    whole = common | (places[0]._asdict() if len(places) == 1 else {"places": list(labels.values())})
    found = []
    for place in places:
        source = {**common, **place._asdict()}
        if beside := [label for other, label in labels.items() if other != place]:
            source["beside"] = beside
        if name is None:
            model_name = Path(os.path.abspath(config.model)).name
            named = checked_name(f"{model_name}-{labels[place]}-{hash_request(whole)[:6]}", DERIVED)
        else:
            named = checked_name(name if len(places) == 1 else f"{name}-{labels[place]}")
        found.append(StoreRequest(place, shelf.path / named, source))
    return found


COUNTED = 4096  # documents between two all_gathers of their row counts


class Quota(NamedTuple):
    """The documents and rows of one rank.

    Args:
        rank: its number.
        world_size: number of ranks.
        rows: how many of its documents' rows it stores, from the first on.
    """

    rank: int
    world_size: int
    rows: int

    def documents(self, documents: Iterable[Document]) -> Iterator[Document]:
        """This rank's documents among some."""
        return (document for document in documents if document.number % self.world_size == self.rank)


def rows_by_rank(documents: Iterable[Document], windows: Windows, rows: int, communicator: Communicator,
                 show: Callable[[float], None]) -> list[int]:
    """How many rows each rank stores, so that together they store the rows that one process would.

    Each rank tokenizes its own documents and counts their rows, until there are enough in all. Ranks then need not
    communicate while they extract.

    Args:
        documents: the whole text, in every rank.
        windows: cuts them into windows, and counts the documents skipped.
        rows: the number of rows wanted.
        communicator: the ranks.
        show: called with the number of rows counted so far.

    Returns:
        The number of rows by rank; in all fewer than wanted if the text ends first.
    """
    world_size, waiting = communicator.world_size, iter(documents)
    found, left = [0] * world_size, rows
    while some := list(islice(waiting, COUNTED)):
        own = [(document.number, windows.rows(document)) for document in some
               if document.number % world_size == communicator.rank]
        for number, count in sorted(one for every in communicator.all_gather_object(own) for one in every):
            taken = min(count, left)
            found[number % world_size] += taken
            left -= taken
        show(rows - left)
        if not left:
            break
    return found
