"""Hugging Face causal language models: finding, loading, reading and splicing; only this package imports transformers.

That takes seconds, so the names that need it are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .places import BUNDLED, MODEL_DTYPES, SITES, TINY_GEMMA2, Place

if TYPE_CHECKING:
    from .generation import continuation
    from .model import LanguageModel, intercepted
    from .source import ModelSource, find_model
    from .tokens import OutputTokens, TokenTexts, Unembedding
    from .weights import blocks_of

__all__ = ["BUNDLED", "MODEL_DTYPES", "SITES", "TINY_GEMMA2", "LanguageModel", "ModelSource", "OutputTokens", "Place",
           "TokenTexts", "Unembedding", "blocks_of", "continuation", "find_model", "intercepted"]

_MODULES = {"LanguageModel": "model", "ModelSource": "source", "OutputTokens": "tokens", "TokenTexts": "tokens",
            "Unembedding": "tokens", "blocks_of": "weights", "continuation": "generation", "find_model": "source",
            "intercepted": "model"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
