"""A survey of all latents of an SAE in one pass over rows, in constant memory."""

from .examples import COLUMNS, Block, Examples, in_blocks
from .survey import Magnitudes, Survey, bin_edges, neighbours, survey

__all__ = ["COLUMNS", "Block", "Examples", "Magnitudes", "Survey", "bin_edges", "in_blocks", "neighbours", "survey"]
