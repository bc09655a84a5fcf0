"""An SAE and its latents as static pages that open from disk: one HTML file, and data that it loads when needed."""

from .details import Details, Readings, Texts, TokenNumbers
from .overview import overview
from .write import write_pages

__all__ = ["Details", "Readings", "Texts", "TokenNumbers", "overview", "write_pages"]
