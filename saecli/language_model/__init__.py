"""Hugging Face causal language models: finding, loading, reading and splicing; only this package imports transformers.
"""

from .generation import continuation
from .model import SITES, LanguageModel, Place, intercepted
from .source import BUNDLED, MODEL_DTYPES, TINY_GEMMA2, ModelSource, find_model
from .tokens import OutputTokens, TokenTexts, Unembedding
from .weights import blocks_of

__all__ = ["BUNDLED", "MODEL_DTYPES", "SITES", "TINY_GEMMA2", "LanguageModel", "ModelSource", "OutputTokens", "Place",
           "TokenTexts", "Unembedding", "blocks_of", "continuation", "find_model", "intercepted"]
