"""Documents from a text source: the standard library's docstrings, a local file, or a Hugging Face dataset."""

from .source import LOCAL_SUFFIXES, STDLIB_DOCS, TextSource
from .steady import Document

__all__ = ["LOCAL_SUFFIXES", "STDLIB_DOCS", "Document", "TextSource"]
