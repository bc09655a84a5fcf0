"""Rows of one hook point of a model, as it gives them, in place of stores."""

from collections.abc import Callable, Generator, Set
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..base.console import Listener
from ..base.devices import device_named
from ..base.errors import ConfigError
from ..base.files import expanded
from ..base.home import Home
from ..base.processes import ALONE
from ..model.names import TINY_GEMMA2
from ..store.origin import last_layer
from ..store.schema import StoreMeta
from ..store.shard_writer import ADMITTED, Admission
from .extraction import Extraction, resolved
from .filling import ahead, demand_some
from .options import ExtractConfig
from .readers import STDLIB_DOCS
from .requests import points_of, store_requests

Blocks = Callable[
    [Callable[[int, int], None]], Generator[tuple[np.ndarray, np.ndarray], None, None]
]


@dataclass(frozen=True)
class Streamed:
    """One hook point of a model, in place of the stores that a run names.

    `blocks` yields per block the rows in the storage dtype, (R, D), and the numbers of their documents, (R,). Its
    argument is called after each batch of the model with its numbers of tokens and rows.
    """

    name: str  # of the store that `sae extract` makes of the same options
    meta: StoreMeta  # its `store.json`
    given: dict[str, Any]  # the options of `sae train` that determine the rows
    blocks: Blocks

    @property
    def hash(self) -> str:
        return self.meta.request_hash

    @property
    def d_in(self) -> int:
        return self.meta.d_in

    @property
    def origin(self) -> dict[str, Any]:
        return self.meta.source

    def names(self) -> dict[str, Any]:
        """The entries of `run.json`: `data`, `data_hash`, and the options as `streamed`."""
        return {"data": self.name, "data_hash": self.hash, "streamed": self.given}

    def options(self) -> dict[str, Any]:
        return self.given


def open_stream(
    config: ExtractConfig,
    *,
    given: Set[str],
    at: tuple[int | None, str],
    device: str,
    home: Home,
    listener: Listener,
    whole: bool = False,
) -> tuple[Streamed, Extraction]:
    """Load a model, `whole` or up to the layer, and open a text; `given` names the options that the user set, `at`
    the layer, None for the middle one, and the site, or a module's name with its side."""
    from ..model.language_model import LanguageModel  # transformers takes seconds to import

    torch_device = device_named(device)
    config, source, text = resolved(config, given, torch_device, ALONE)
    text.demand_read()
    layer, site = at
    modules = [site] if layer is None and ":" in site else []
    points = points_of([source], layer, [site], modules)
    if len(points) > 1:
        raise ConfigError(
            f"--module must name one module to train on, got {len(points)} for {site}; name a layer"
        )
    (request,) = store_requests(config, [source], text, points, None, home.stores)
    last = None if whole else last_layer(points)
    model = LanguageModel(source, torch_device, head=whole, dtype=config.model_dtype, last=last)
    extraction = Extraction(config, [model], text, listener)
    meta, points = extraction.metas([request])[request.point], [request.point]
    forward = extraction.forward()

    def blocks(
        show: Callable[[int, int], None],
    ) -> Generator[tuple[np.ndarray, np.ndarray], None, None]:
        admission = Admission(meta)
        stored = offered = 0
        with closing(ahead(extraction.blocks())) as in_order:
            for block in in_order:
                activations = forward(block, points, show)
                if not activations:  # all its documents were left out
                    continue
                rows, verdicts = admission.verdicts(activations[request.point])
                admitted = verdicts == ADMITTED
                stored, offered = stored + int(admitted.sum()), block.offered
                demand_some(stored, meta.dtype, offered)
                yield rows[admitted], block.columns["document"][admitted]
        demand_some(stored, meta.dtype, offered, ended=True)

    chosen = {name: value for name, value in asdict(config).items() if name in given}
    revisions = [each.revision or "" for each in text.sources]
    chosen |= {
        "model": _absolute(config.model),
        **({"model_revision": source.revision} if source.revision else {}),
        **({"module": model.modules.named(request.point)} if modules else request.point.place),
        "rows": config.rows,
        "context": config.context,
        "model_dtype": config.model_dtype,
        "dataset": [_absolute(each.dataset) for each in text.sources],
        **({"dataset_revision": revisions} if any(revisions) else {}),
    }
    if config.chat_template is not None:
        chosen["chat_template"] = _absolute(config.chat_template)
    stream = Streamed(request.folder.name, meta, chosen, blocks)
    return stream, extraction


def _absolute(name: str) -> str:
    """A file's or folder's whole path, which holds in another working directory; other names unchanged."""
    path = expanded(name)
    return str(path.resolve()) if path.exists() and name not in (TINY_GEMMA2, STDLIB_DOCS) else name
