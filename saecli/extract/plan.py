"""Which stores an extraction fills, of which models and text, and their hashes."""

import os
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import product
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import numpy as np
import torch

from ..base.errors import ConfigError
from ..base.home import Shelf, checked_name
from ..base.processes import Communicator
from ..base.words import unknown_choice
from ..model import ModelDtype
from ..model.tokenizer import affixes
from ..store.opening import DERIVED, finished_store
from ..store.origin import SITES, HookPoint, module_site
from ..store.schema import hash_request
from .options import DEFAULT_CONTEXT, ExtractConfig
from .texts import Mixture

if TYPE_CHECKING:  # transformers takes seconds to import
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


class Selection(NamedTuple):
    layer: int | Sequence[int] | str | None  # a number, several, "all", or None for the middle one
    sites: Sequence[str]  # each known, or a module of the block with its side
    modules: Sequence[str] = ()  # names with their side, in place of layers and sites

    @classmethod
    def of(
        cls,
        layer: int | Sequence[int] | str | None,
        site: str | Sequence[str],
        module: str | Sequence[str] | None,
    ) -> Self:
        modules = [module] if isinstance(module, str) else [*(module or ())]
        if modules and ((layer is not None and np.size(layer)) or site != "resid_post"):
            raise ConfigError(
                "cannot use both --module and --layer or --site at the same time; use one of them"
            )
        sites = [site] if isinstance(site, str) else site
        return cls(layer, sites, [*map(module_site, modules)])

    @classmethod
    def at(cls, layer: int | None, site: str) -> Self:
        return cls(None, [], [site]) if layer is None and ":" in site else cls(layer, [site])

    @staticmethod
    def is_several(layer: Any, site: Any, module: Any) -> bool:
        """Whether the user asks for a list, perhaps of one hook point."""
        if not isinstance(layer, Integral | None) or not isinstance(site, str):
            return True
        return not isinstance(module, str | None) or "*" in (module or "")

    def points(self, models: Sequence["ModelSource"]) -> list[HookPoint]:
        """The hook points, of every model; ConfigError for one that a model lacks."""
        if self.modules:
            return self._modules(models)
        for site in self.sites:
            if not HookPoint(0, site).is_known:
                raise unknown_choice("site", site, SITES)
        layers = self._layers(models[0])
        for model, number in product(models, layers):
            if not 0 <= number < model.layers:
                raise ConfigError(
                    f"{model.name} has layers 0 to {model.layers - 1}, got --layer {number}"
                )
        places = product(range(len(models)), dict.fromkeys(layers), dict.fromkeys(self.sites))
        return [HookPoint(number, site, model) for model, number, site in places]

    def _modules(self, models: Sequence["ModelSource"]) -> list[HookPoint]:
        from ..model.language_model import modules_of

        trees = [modules_of(model) for model in models]
        named = product(enumerate(trees), self.modules)
        found = [point for (number, tree), name in named for point in tree.points(name, number)]
        return list(dict.fromkeys(found))

    def _layers(self, model: "ModelSource") -> list[int]:
        layers = [] if self.layer is None else np.atleast_1d(self.layer).tolist()  # maybe NumPy's
        if not layers:
            return [model.default_layer()]
        if layers == ["all"]:
            return list(range(model.layers))
        if not all(isinstance(number, int) for number in layers):
            raise ConfigError(
                f"--layer must be a number, a list of numbers, or all, got {self.layer!r}"
            )
        return layers


@dataclass(frozen=True)
class StoreRequest:
    point: HookPoint
    folder: Path
    source: dict[str, Any]  # the entries of `store.json` that determine its rows
    hash: str  # by which a finished store of the same rows is recognised


@dataclass(frozen=True)
class ExtractionPlan:
    config: ExtractConfig  # without `auto` and None
    sources: Sequence["ModelSource"]
    text: Mixture  # pinned
    requests: Sequence[StoreRequest]
    device: torch.device

    def finished(self) -> set[HookPoint]:
        requests = self.requests
        return {each.point for each in requests if finished_store(each.folder, each.hash)}


def plan_extraction(
    config: ExtractConfig,
    given: Set[str],
    models: "Sequence[str | ModelSource]",
    selection: Selection,
    name: str | None,
    shelf: Shelf,
    device: torch.device,
    processes: Communicator,
) -> ExtractionPlan:
    """Find models and text; loads no weights. `given` names the options that the user set; the first model is that of
    the options."""
    from ..model.source import find_model  # transformers takes seconds to import

    text = config.text(given)
    sources = [
        find_model(model, config.model_revision) if isinstance(model, str) else model
        for model in models
    ]
    config = replace(
        config,
        context=config.context or min(DEFAULT_CONTEXT, sources[0].positions or DEFAULT_CONTEXT),
        model_dtype=cast(ModelDtype, sources[0].dtype_on(device, config.model_dtype)),
    )
    for source in sources:
        source.check_context(config.window)
    text = processes.broadcast_object(text.pinned)
    config.check_chat(text, given)
    _check_same_tokens(sources, config)
    points = selection.points(sources)
    requests = store_requests(config, sources, text, points, name, shelf)
    return ExtractionPlan(config, sources, text, requests, device)


def _check_same_tokens(sources: Sequence["ModelSource"], config: ExtractConfig) -> None:
    """Refuse several models unless the tokens that they share have the same ids."""
    from ..model.language_model import load_tokenizer

    for number, source in enumerate(sources[1:], 1):
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


def store_requests(
    config: ExtractConfig,
    models: Sequence["ModelSource"],
    text: Mixture,
    points: Sequence[HookPoint],
    name: str | None,
    shelf: Shelf,
) -> list[StoreRequest]:
    """A store for each hook point, all of the same tokens. A row dropped from one is dropped from all, so each `source`
    lists the other hook points, as `beside`, and the other `models`; derived names end in one hash."""
    labels = _labels(points, models)
    identities = [model.identity() for model in models]
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
    whole |= points[0].to_json() if len(points) == 1 else {"places": list(labels.values())}
    if len(models) > 1:
        whole["models"] = identities
    suffix = hash_request(whole)[:6]
    requests = []
    for point in points:
        source = common | identities[point.model] | point.to_json()
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
    return requests


def _names(models: Sequence["ModelSource"]) -> list[str]:
    names = [Path(os.path.abspath(model.name)).name for model in models]
    if len(set(names)) < len(names):
        return [f"{name}-{number}" for number, name in enumerate(names)]
    return names


def _labels(points: Sequence[HookPoint], models: Sequence["ModelSource"]) -> dict[HookPoint, str]:
    """What tells hook points apart in names of stores, in their order."""
    prefixes = [f"{name}-" for name in _names(models)] if len(models) > 1 else [""]
    ordered = sorted(points, key=lambda point: (point.layer is None, point))
    return {point: prefixes[point.model] + _label(point) for point in ordered}


def _label(point: HookPoint) -> str:
    site = point.site.replace(":", "-")
    return site if point.layer is None else f"l{point.layer}-{site.lstrip('-')}"
