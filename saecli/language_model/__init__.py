"""Hugging Face causal language models, found, loaded, read or spliced; alone in importing transformers."""

from .model import LanguageModel
from .sites import SITES, Place
from .source import BUNDLED, MODEL_DTYPES, TINY_GEMMA2, ModelSource, find_model
from .tokens import TokenTexts
from .unembedding import OutputTokens, Unembedding

__all__ = ["BUNDLED", "MODEL_DTYPES", "SITES", "TINY_GEMMA2", "LanguageModel", "ModelSource", "OutputTokens", "Place",
           "TokenTexts", "Unembedding", "find_model"]
