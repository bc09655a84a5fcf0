"""A survey of all latents of an SAE in one pass over rows, in constant memory."""

from .cofiring import CoFiring, Partners
from .examples import COLUMNS, Block, Examples, at_random, by_size, in_blocks
from .survey import Magnitudes, Survey, bin_edges, neighbours, survey

__all__ = ["COLUMNS", "Block", "CoFiring", "Examples", "Magnitudes", "Partners", "Survey", "at_random", "bin_edges",
           "by_size", "in_blocks", "neighbours", "survey"]
