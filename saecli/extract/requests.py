"""Which stores an extraction is to fill, and the hash by which a finished one is recognised."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.errors import ConfigError
from ..base.home import STORE_MARKER, Shelf, checked_name
from ..base.words import unknown_choice
from ..model.tokenizer import affixes
from ..store.opening import DERIVED
from ..store.origin import SITES, HookPoint
from ..store.schema import hash_request, read_meta
from .options import ExtractConfig
from .texts import Mixture

if TYPE_CHECKING:
    from ..model.source import ModelSource

# Options that determine the rows, besides model, text, layer and site; batch size and device do not.
DECIDING = (
    "rows",
    "context",
    "packed",
    "prepend_bos",
    "positions",
    "dtype",
    "model_dtype",
    "shard_rows",
)


def demand_same_tokens(sources: Sequence["ModelSource"], config: ExtractConfig) -> None:
    """Refuse several models unless the tokens that they share have the same ids; loads their tokenizers, and no
    weights."""
    from ..model.language_model import load_tokenizer

    for number, source in enumerate(sources[1:], 1):
        source.check_context(config.window)
        if source.identity() in [other.identity() for other in sources[:number]]:
            raise ConfigError(f"--model names {source.name} twice; name each model once")
        tokenizers = [load_tokenizer(each) for each in (sources[0], source)]
        ours, theirs = (tokenizer.get_vocab() for tokenizer in tokenizers)
        prefixes = [affixes(tokenizer, config.begins).prefix for tokenizer in tokenizers]
        shared = ours.keys() & theirs.keys()
        moved = [token for token in shared if ours[token] != theirs[token]]
        got = None
        if moved or not shared:
            got = f"{len(ours):,} and {len(theirs):,} tokens, {len(shared) - len(moved):,} of them with the same id"
        elif prefixes[0] != prefixes[1]:
            got = f"windows that begin with the special tokens {prefixes[0]} and {prefixes[1]}"
        if got is not None:
            raise ConfigError(
                f"{sources[0].name} and {source.name} do not read the same tokens: expected one "
                f"tokenizer, got {got}; name models that share one by --model"
            )


@dataclass(frozen=True)
class StoreRequest:
    point: HookPoint
    folder: Path
    source: dict[str, Any]  # the entries of `store.json` that determine its rows
    hash: str  # by which a finished store of the same rows is recognised


def store_requests(
    config: ExtractConfig,
    models: Sequence["ModelSource"],
    text: Mixture,
    points: Sequence[HookPoint],
    name: str | None,
    shelf: Shelf,
    dated: bool = True,
) -> list[StoreRequest]:
    """The requested stores, one for each of the hook points, all of the same tokens. Since a row that is
    dropped from one store is dropped from all, each `source` lists the other hook points, as `beside`, and of several
    models the other ones, as `models`; derived names end in one hash. If `dated`, those of models known by the times of
    their files, as older stores are, if any of them is there."""
    labels = _labels(points, models)
    identities = [model.identity(dated) for model in models]
    template = config.template()
    chat = {
        "control_tokens": config.control_tokens,
        "chat_template": template and hash_request({"": template}),
    }
    common = {field: getattr(config, field) for field in DECIDING} | identities[0] | text.identity()
    if text.chat:
        common |= chat
    if config.max_norm_multiple is not None:  # else hash as before this option existed
        common["max_norm_multiple"] = config.max_norm_multiple
    # In place of what was recognised in the text, so that a request is the same without a network.
    asked = text.identity(asked=True) | chat
    whole = common | asked
    whole |= points[0].place if len(points) == 1 else {"places": list(labels.values())}
    if len(models) > 1:
        whole["models"] = identities
    suffix = hash_request(whole)[:6]
    requests = []
    for point in points:
        source = common | identities[point.model] | point.place
        if len(points) > 1:
            source["beside"] = [label for other, label in labels.items() if other != point]
        if len(models) > 1:
            source["models"] = identities[: point.model] + identities[point.model + 1 :]
        if name is None:
            label = labels[point] if len(models) > 1 else f"{_names(models)[0]}-{labels[point]}"
            folder = checked_name(f"{label}-{suffix}", DERIVED)
        else:
            folder = checked_name(name if len(points) == 1 else f"{name}-{labels[point]}")
        request_hash = hash_request(source | asked)
        requests.append(StoreRequest(point, shelf.path / folder, source, request_hash))
    if dated and not any(map(_is_begun, requests)):
        return store_requests(config, models, text, points, name, shelf, dated=False)
    return requests


def _is_begun(request: StoreRequest) -> bool:
    marker = request.folder / STORE_MARKER
    return marker.exists() and read_meta(request.folder).request_hash == request.hash


def points_of(
    models: Sequence["ModelSource"],
    layer: int | Sequence[int] | str | None,
    sites: Sequence[str],
    modules: Sequence[str] = (),
) -> list[HookPoint]:
    """Every module of such a name, with its side, of every model; else every site of every layer: a number, several,
    "all", or None for the middle one; a site may be a module of the block with its side. ConfigError for one that a
    model lacks."""
    if modules:
        from ..model.language_model import modules_of

        trees = [modules_of(model) for model in models]
        named = product(enumerate(trees), modules)
        found = [point for (number, tree), name in named for point in tree.points(name, number)]
        return list(dict.fromkeys(found))
    for site in sites:
        if not HookPoint(0, site).is_known:
            raise unknown_choice("site", site, SITES)
    layers = [] if layer is None else np.atleast_1d(layer).tolist()  # numbers may be NumPy's
    if not layers:
        layers = [models[0].default_layer()]
    elif layers == ["all"]:
        layers = list(range(models[0].layers))
    if not all(isinstance(number, int) for number in layers):
        raise ConfigError(f"--layer must be a number, a list of numbers, or all, got {layer!r}")
    for model, number in product(models, layers):
        if not 0 <= number < model.layers:
            raise ConfigError(
                f"{model.name} has layers 0 to {model.layers - 1}, got --layer {number}"
            )
    places = product(range(len(models)), dict.fromkeys(layers), dict.fromkeys(sites))
    return [HookPoint(number, site, model) for model, number, site in places]


def _names(models: Sequence["ModelSource"]) -> list[str]:
    """The models' folder names, equal ones with a number."""
    names = [Path(os.path.abspath(model.name)).name for model in models]
    if len(set(names)) < len(names):
        return [f"{name}-{number}" for number, name in enumerate(names)]
    return names


def _labels(points: Sequence[HookPoint], models: Sequence["ModelSource"]) -> dict[HookPoint, str]:
    """What tells the hook points apart in names of stores, in order of the points."""
    prefixes = [f"{name}-" for name in _names(models)] if len(models) > 1 else [""]
    ordered = sorted(points, key=lambda point: (point.layer is None, point))
    return {point: prefixes[point.model] + _label(point) for point in ordered}


def _label(point: HookPoint) -> str:
    site = point.site.replace(":", "-")
    return site if point.layer is None else f"l{point.layer}-{site.lstrip('-')}"
