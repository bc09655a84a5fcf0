"""SAEs on the Hugging Face hub: where they are, fetching them, and putting them there with a model card."""

from .address import Address, is_cached
from .card import Entry, card_with
from .fetch import fetch
from .upload import Repository

__all__ = ["Address", "Entry", "Repository", "card_with", "fetch", "is_cached"]
