"""SAEs on the Hugging Face hub: their addresses, fetching them, and uploading them with a model card."""

from .fetch import Address, fetch, is_cached
from .upload import Entry, Repository, card_with

__all__ = ["Address", "Entry", "Repository", "card_with", "fetch", "is_cached"]
