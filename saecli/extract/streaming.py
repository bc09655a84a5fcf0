"""Rows of one hook point of a model, as it gives them, in place of stores."""

from collections.abc import Callable, Generator, Set
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from ..base.console import Listener
from ..base.devices import device_named
from ..base.errors import ConfigError
from ..base.files import expanded
from ..base.home import Home
from ..base.processes import ALONE
from ..model import TINY_GEMMA2
from ..store.blocks import ADMITTED, Admission
from ..store.origin import Origin, last_layer
from ..store.schema import StoreMeta
from .extraction import Extraction
from .filling import ahead, check_some_stored
from .options import ExtractConfig
from .plan import ExtractionPlan, Selection, plan_extraction
from .readers import STDLIB_DOCS

Blocks = Callable[
    [Callable[[int, int], None]], Generator[tuple[np.ndarray, np.ndarray], None, None]
]


@dataclass(frozen=True)
class Streamed:
    """One hook point of a model, in place of the stores that a run names.

    `blocks(show)` yields rows in the storage dtype, (R, D), and the numbers of their documents, (R,); `show` takes each
    batch's numbers of tokens and rows.
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
    def origin(self) -> Origin:
        return self.meta.origin

    def names(self) -> dict[str, Any]:
        """The entries of `run.json`."""
        return {"data": self.name, "data_hash": self.hash, "streamed": self.given}

    def options(self) -> dict[str, Any]:
        return self.given


def open_stream(
    config: ExtractConfig,
    *,
    given: Set[str],
    selection: Selection,
    device: str,
    home: Home,
    listener: Listener,
    whole: bool = False,
) -> tuple[Streamed, Extraction]:
    """Load a model, `whole` or up to the layer of one hook point, and open a text; `given` names the user's options."""
    from ..model.language_model import LanguageModel  # transformers takes seconds to import

    plan = plan_extraction(
        config, given, [config.model], selection, None, home.stores, device_named(device), ALONE
    )
    plan.text.check_readable()
    if len(plan.requests) > 1:
        raise ConfigError(
            f"--module must name one module to train on, got {len(plan.requests)} for "
            f"{selection.modules[0]}; name a layer"
        )
    (request,), (source,) = plan.requests, plan.sources
    model = LanguageModel(
        source,
        plan.device,
        head=whole,
        dtype=plan.config.model_dtype,
        last=None if whole else last_layer([request.point]),
    )
    extraction = Extraction(plan, [model], listener)
    meta = extraction.metas[request.point]
    place = request.point.to_json()
    if selection.modules:
        place = {"module": model.modules.named(request.point)}
    chosen = _options(plan, given) | place
    blocks = partial(_blocks, extraction, meta)
    return Streamed(request.folder.name, meta, chosen, blocks), extraction


def _options(plan: ExtractionPlan, given: Set[str]) -> dict[str, Any]:
    """The options of `sae train` that determine the rows, but for the hook point."""
    config, sources = plan.config, plan.text.sources
    chosen = {name: value for name, value in asdict(config).items() if name in given}
    chosen |= {
        "model": _absolute(config.model),
        "rows": config.rows,
        "context": config.context,
        "model_dtype": config.model_dtype,
        "dataset": [_absolute(source.dataset) for source in sources],
    }
    if plan.sources[0].revision:
        chosen["model_revision"] = plan.sources[0].revision
    revisions = [source.revision or "" for source in sources]
    if any(revisions):
        chosen["dataset_revision"] = revisions
    if config.chat_template is not None:
        chosen["chat_template"] = _absolute(config.chat_template)
    return chosen


def _blocks(
    extraction: Extraction, meta: StoreMeta, show: Callable[[int, int], None]
) -> Generator[tuple[np.ndarray, np.ndarray], None, None]:
    forward, admission, points = extraction.forward(), Admission(meta), [*extraction.metas]
    stored = offered = 0
    with closing(ahead(extraction.blocks())) as in_order:
        for block in in_order:
            activations = forward(block.windows.each(), points, show)
            if not activations:  # all its documents were left out
                continue
            rows, verdicts = admission.verdicts(activations[points[0]])
            admitted = verdicts == ADMITTED
            stored, offered = stored + int(admitted.sum()), block.offered
            check_some_stored(stored, meta.dtype, offered)
            yield rows[admitted], block.columns["document"][admitted]
    check_some_stored(stored, meta.dtype, offered, ended=True)


def _absolute(name: str) -> str:
    """A file's or folder's whole path; other names unchanged."""
    path = expanded(name)
    return str(path.resolve()) if path.exists() and name not in (TINY_GEMMA2, STDLIB_DOCS) else name
