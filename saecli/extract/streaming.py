"""Rows of a model that nothing stores, and the description that stands in a run for its store."""

from collections.abc import Callable, Iterator, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..base.console import Listener
from ..base.devices import device_named
from ..base.distributed import ALONE
from ..base.home import Home
from ..store.schema import StoreMeta
from .config import StoreRequest, store_requests
from .extraction import Extraction, settled
from .options import ExtractConfig
from .places import TINY_GEMMA2
from .texts import STDLIB_DOCS

GPU_TOKENS = 1 << 14  # per forward pass
Blocks = Callable[[Callable[[int, int], None]], Iterator[tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True)
class Streamed:
    """One place of a model, in the place of the stores that a run names.

    Args:
        request: the store that `sae extract` makes of the same options.
        meta: what it would record.
        given: the options that determine the rows, as `sae train` takes them.
        blocks: reads the rows; see `Extraction.stream`.
        block_rows: about the number of rows in a block.
    """

    request: StoreRequest
    meta: StoreMeta
    given: dict[str, Any]
    blocks: Blocks
    block_rows: int

    @property
    def name(self) -> str:
        """The name that its store would have."""
        return self.request.folder.name

    @property
    def hash(self) -> str:
        """The hash that its store would have."""
        return self.request.hash

    @property
    def d_in(self) -> int:
        """Width of the rows."""
        return self.meta.d_in

    @property
    def origin(self) -> dict[str, Any]:
        """Where the rows come from; see `Joined.origin`."""
        return self.meta.source

    def names(self) -> dict[str, Any]:
        """The entries of a run's document: `data`, `data_hash`, and the options as `streamed`."""
        return {"data": self.name, "data_hash": self.hash, "streamed": self.given}

    def options(self) -> dict[str, Any]:
        """The options of `sae train` that name the rows."""
        return self.given


def open_stream(config: ExtractConfig, *, given: Set[str], layer: int | None, site: str, device: str, home: Home,
                listener: Listener) -> Streamed:
    """Load a model and open a text, to read the rows of one place.

    Args:
        config: the options that determine the rows.
        given: names of the options that the user set.
        layer: block to read; None for the middle one.
        site: where in it.
        device: where to compute.
        home: the folder of stores and runs.
        listener: shows notes.

    Raises:
        ConfigError: an option is invalid, or does nothing with the others.
        ModelError: the model or the text cannot be loaded.
    """
    from .language_model import LanguageModel  # transformers takes seconds to import

    where = device_named(device)
    config, source, text = settled(config, given, where, listener, ALONE)
    if where.type == "cuda":  # what fits in all memory that is free would leave none for the training beside it
        config = replace(config, batch_size=max(1, GPU_TOKENS // config.context))
    layer = source.default_layer() if layer is None else layer
    (request,) = store_requests(config, source, text, [layer], [site], None, home.stores)
    extraction = Extraction(config, LanguageModel(source, where, dtype=config.model_dtype, last=layer), text, listener,
                            ALONE)
    meta = extraction.prepare([request])[request.place]
    chosen = {name: value for name, value in asdict(config).items() if name in given}
    chosen |= {"model": _found_again(config.model), "layer": layer, "site": site, "rows": config.rows,
               "context": config.context, "model_dtype": config.model_dtype, "dataset": _found_again(text.dataset)}
    if text.revision is not None:
        chosen["dataset_revision"] = text.revision
    return Streamed(request, meta, chosen, extraction.stream, extraction.block_rows)


def _found_again(name: str) -> str:
    """A model or text by a name that holds in another working directory: a file's or folder's whole path."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() and name not in (TINY_GEMMA2, STDLIB_DOCS) else name
