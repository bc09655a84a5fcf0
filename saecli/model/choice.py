"""Which language model: named or loaded by the user, or recorded with rows; loads no weights."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..base.errors import ConfigError, StoreError
from ..store.reader import Rows
from ..store.schema import StoreMeta

if TYPE_CHECKING:  # transformers takes seconds to import
    from .language_model import LanguageModel
    from .source import ModelSource

ModelLike = str | torch.nn.Module  # a name, or a loaded model
READ = 1 << 16  # rows of the columns per read


def model_given(model: Any, tokenizer: Any) -> Any:
    """A model, or a list, as `source_of` takes them: names, and sources of loaded models with their tokenizer; None and
    booleans, a choice of the store's, as they are. ConfigError for others."""
    if isinstance(model, bool | None):
        if tokenizer is not None:
            raise ConfigError(
                "tokenizer does nothing without a loaded model; leave it out, or give both"
            )
        return model
    from .source import loaded_sources

    several = isinstance(model, list | tuple)
    models = list(model) if several else [model]
    sources = loaded_sources(models, tokenizer, (), "auto") or models
    return sources if several else sources[0]


def source_of(model: "str | ModelSource", recorded: Iterable[str | None]) -> "ModelSource":
    """A model from `model_given`, at the revision of the only recorded spec of it."""
    from .source import find_model

    if not isinstance(model, str):
        return model
    specs = {spec for spec in recorded if spec is not None and spec.startswith(f"{model}@")}
    revision = specs.pop().removeprefix(f"{model}@") if len(specs) == 1 else None
    return find_model(model, revision)


def at_commit(model: Any) -> Any:
    """A model from `model_given`, at the commit of a branch or tag."""
    return source_of(model, ()) if isinstance(model, str) and "@" in model else model


def unlike(model: "LanguageModel", meta: StoreMeta) -> str | None:
    """How a model is not, or may not be, a store's; None if it is, wherever its files are."""
    from .source import LoadedSource, state_hash

    source, spec, known = model.source, meta.origin.spec, meta.source.get("weights")
    given, recorded = isinstance(source, LoadedSource), "loaded" in meta.source
    if recorded and not given:
        same = meta.source.get("state") == state_hash(model.model, meta.source["model_dtype"])
    else:
        same = given == recorded and (known == source.content)
    if known is not None and same:
        return None
    if spec != source.spec:
        return f"came from {spec}, and is run through {source.spec}"
    if given and not recorded:
        return f"came from {spec}, and is run through a loaded model: its weights may have changed since"
    change = "with other weights or hooks" if recorded else "before its files changed"
    return None if known is None else f"came from {spec} {change}: what it computes may differ"


def check_rows(rows: Rows, source: "ModelSource") -> None:
    """Refuse rows without windows, or that do not fit a model."""
    origin = rows.store.meta.origin
    point, longest = origin.read[0], origin.context
    expected = f"{rows.name} cannot be run through a model: expected"
    windows = rows.store.meta.windows
    if origin.model is None or not point.site or longest is None or not windows:
        raise StoreError(
            f"{expected} a store that `sae extract` made, got one that names no layer, or keeps no windows of tokens; "
            "leave --model out, or name another store"
        )
    if point.has_model_width and source.d_model != rows.d_in:
        raise _unfit(rows, source, f"activations of {rows.d_in} dimensions, got {source.d_model}")
    if point.layer is not None and point.layer >= source.layers:
        raise _unfit(rows, source, f"a layer {point.layer}, got layers 0 to {source.layers - 1}")
    most = source.positions
    if most is not None and longest > most:
        raise _unfit(rows, source, f"windows of {longest:,} tokens, got at most {most:,}")


def _unfit(rows: Rows, source: "ModelSource", expected: str) -> ConfigError:
    return ConfigError(
        f"{rows.name} cannot be run through {source.name}: expected {expected}; name the model that the rows came from"
    )
