"""What the latents of an SAE do, gathered for all of them in one pass over rows, in constant memory."""

from .blocks import COLUMNS, Block, in_blocks
from .examples import Examples
from .survey import Magnitudes, Survey, bin_edges, neighbours, survey

__all__ = ["COLUMNS", "Block", "Examples", "Magnitudes", "Survey", "bin_edges", "in_blocks", "neighbours", "survey"]
