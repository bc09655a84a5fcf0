"""From documents to rows of activations: windows of tokens, blocks of windows, forward passes, stores."""

from .blocks import Block, Cursor, in_blocks
from .forward import Forward, batch_tokens
from .stores import COLUMNS, Target, fill
from .windows import POSITIONS, Spot, Windows

__all__ = ["COLUMNS", "POSITIONS", "Block", "Cursor", "Forward", "Spot", "Target", "Windows", "batch_tokens", "fill",
           "in_blocks"]
