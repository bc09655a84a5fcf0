"""The stores that an extraction fills, and which rank stores which documents.

Rank r stores the documents i with i mod world_size = r.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.distributed import Communicator
from ..base.home import Shelf, checked_name
from ..store.opening import DERIVED
from ..store.schema import hash_request
from .options import ExtractConfig
from .places import Place
from .steady import Document
from .texts import TextSource
from .token_windows import Windows

if TYPE_CHECKING:
    from .model_source import ModelSource

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
