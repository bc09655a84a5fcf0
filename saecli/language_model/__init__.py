"""Hugging Face causal language models: finding, loading, reading and splicing; only this package imports transformers.
"""

from .model import SITES, LanguageModel, Place
from .source import BUNDLED, MODEL_DTYPES, TINY_GEMMA2, ModelSource, find_model
from .tokens import OutputTokens, TokenTexts, Unembedding

__all__ = ["BUNDLED", "MODEL_DTYPES", "SITES", "TINY_GEMMA2", "LanguageModel", "ModelSource", "OutputTokens", "Place",
           "TokenTexts", "Unembedding", "find_model"]
