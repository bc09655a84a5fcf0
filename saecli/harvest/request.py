"""Which stores an extraction is asked for: what each holds, where it is, and what it is recognised by."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ..home import Shelf, checked_name
from ..inventory.filling import DERIVED
from ..language_model import ModelSource, Place
from ..store import hash_request
from ..texts import TextSource
from .config import ExtractConfig

# Options that decide the rows, beside model, text, layer and site; the size of a batch and the device do not.
DECIDING = ("rows", "min_tokens", "context", "packed", "positions", "dtype", "model_dtype", "shard_rows")


@dataclass(frozen=True)
class StoreRequest:
    """A store that is asked for.

    Args:
        place: layer and site that it holds.
        folder: where it is, or will be.
        source: what decides its rows.
    """

    place: Place
    folder: Path
    source: dict[str, Any]

    @property
    def hash(self) -> str:
        """By which a finished store of the same rows is recognised."""
        return hash_request(self.source)


def store_requests(config: ExtractConfig, model: ModelSource, text: TextSource, layers: Sequence[int],
                   sites: Sequence[str], name: str | None, shelf: Shelf) -> list[StoreRequest]:
    """The stores asked for: every site of every layer, each as if it were asked for alone.

    Args:
        config: with the context and the precision of the forward pass resolved.
        model: where the model is.
        text: where the documents come from, pinned.
        layers: blocks to read.
        sites: where in each.
        name: the store's name, of several what their names begin with; None to make them of what they hold.
        shelf: where stores are.

    Raises:
        ConfigError: the model has no such layer, or the name cannot be a folder's.
    """
    for layer in layers:
        model.check_layer(layer)
    places = [Place(*pair) for pair in product(dict.fromkeys(layers), dict.fromkeys(sites))]
    common = {field: getattr(config, field) for field in DECIDING} | model.identity() | text.identity()
    if config.max_norm_multiple is not None:  # otherwise the request is what it was before there was this option
        common["max_norm_multiple"] = config.max_norm_multiple
    found = []
    for place in places:
        source = {**common, **place._asdict()}
        suffix = f"l{place.layer}-{place.site}"
        if name is None:
            model_name = Path(os.path.abspath(config.model)).name
            named = checked_name(f"{model_name}-{suffix}-{hash_request(source)[:6]}", DERIVED)
        else:
            named = checked_name(name if len(places) == 1 else f"{name}-{suffix}")
        found.append(StoreRequest(place, shelf.path / named, source))
    return found
