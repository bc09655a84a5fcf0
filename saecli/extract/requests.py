"""Which stores an extraction is to fill, and the hash by which a finished one is recognised."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError, counted
from ..base.home import Shelf, checked_name
from ..store.opening import DERIVED
from ..store.schema import hash_request
from .options import ExtractConfig, HookPoint
from .special import affixes
from .texts import Mixture

if TYPE_CHECKING:
    from .model_source import ModelSource

# Options that determine the rows, besides model, text, layer and site; batch size and device do not.
DECIDING = (
    "rows",
    "min_tokens",
    "context",
    "packed",
    "prepend_bos",
    "positions",
    "dtype",
    "model_dtype",
    "shard_rows",
)


def demand_same_tokens(
    sources: Sequence["ModelSource"], config: ExtractConfig, note: Callable[[str], None]
) -> None:
    """Refuse several models unless the tokens that they share have the same ids, and say which are of one alone; loads
    their tokenizers, and no weights."""
    from .language_model import load_tokenizer

    for number, source in enumerate(sources[1:], 1):
        source.check_context(config.window)
        if source.identity() in [other.identity() for other in sources[:number]]:
            raise ConfigError(f"--model names {source.name} twice; name each model once")
        both = [load_tokenizer(one) for one in (sources[0], source)]
        ours, theirs = (one.get_vocab() for one in both)
        prefixes = [affixes(one, config.begins).prefix for one in both]
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
        if alone := sorted(ours.keys() ^ theirs.keys()):
            note(
                f"{sources[0].name} and {source.name} share {counted(len(shared), 'token')}; "
                f"{counted(len(alone), 'token')} of one alone, such as {alone[0]}, must not be in the text"
            )


@dataclass(frozen=True)
class StoreRequest:
    """A requested store; `hash` identifies a finished store of the same rows."""

    point: HookPoint
    folder: Path
    source: dict[str, Any]  # the entries of `store.json` that determine its rows
    hash: str


def store_requests(
    config: ExtractConfig,
    models: Sequence["ModelSource"],
    text: Mixture,
    layers: Sequence[int],
    sites: Sequence[str],
    name: str | None,
    shelf: Shelf,
) -> list[StoreRequest]:
    """The requested stores: every site of every layer of every model, all of the same tokens. Since a row that one
    store drops is dropped from all, each `source` lists the other hook points, as `beside`, and of several models the
    other ones, as `models`; derived names end in one hash."""
    for model, layer in product(models, layers):
        if not 0 <= layer < model.layers:
            raise ConfigError(
                f"{model.name} has layers 0 to {model.layers - 1}, got --layer {layer}"
            )
    points = [
        HookPoint(layer, site, number)
        for number, layer, site in product(
            range(len(models)), dict.fromkeys(layers), dict.fromkeys(sites)
        )
    ]
    several, identities = len(models) > 1, [model.identity() for model in models]
    names = [Path(os.path.abspath(model.name)).name for model in models]
    if len(set(names)) < len(names):
        names = [f"{model_name}-{number}" for number, model_name in enumerate(names)]
    common = {field: getattr(config, field) for field in DECIDING} | identities[0] | text.identity()
    template = config.template()
    chat = {
        "control_tokens": config.control_tokens,
        "chat_template": template and hash_request({"": template}),
    }
    if text.chat:
        common |= chat
    # In place of what was recognised in the text, so that a request is the same without a network.
    asked = text.identity(asked=True) | chat
    if config.max_norm_multiple is not None:  # else hash as before this option existed
        common["max_norm_multiple"] = config.max_norm_multiple
    labels = {
        point: f"{names[point.model]}-" * several + f"l{point.layer}-{point.site}"
        for point in sorted(points)
    }
    whole = (
        common
        | asked
        | (points[0].place if len(points) == 1 else {"places": list(labels.values())})
        | ({"models": identities} if several else {})
    )
    found = []
    for point in points:
        source = {**common, **identities[point.model], **point.place}
        if beside := [label for other, label in labels.items() if other != point]:
            source["beside"] = beside
        if several:
            source["models"] = [
                one for number, one in enumerate(identities) if number != point.model
            ]
        if name is None:
            label = labels[point] if several else f"{names[0]}-{labels[point]}"
            named = checked_name(f"{label}-{hash_request(whole)[:6]}", DERIVED)
        else:
            named = checked_name(name if len(points) == 1 else f"{name}-{labels[point]}")
        hashed = hash_request(source | asked)
        found.append(StoreRequest(point, shelf.path / named, source, hashed))
    return found
