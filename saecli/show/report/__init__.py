"""An SAE and its latents as static pages opened from disk: one HTML file, and data that it loads when needed."""

from .report import write_pages

__all__ = ["write_pages"]
