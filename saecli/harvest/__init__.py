"""From documents to rows of activations: windows of tokens, blocks of windows, forward passes, stores."""

from .blocks import Block, Cursor, in_blocks, look_ahead
from .forward import Forward, batch_tokens
from .stores import COLUMNS, Target, fill
from .together import SharedTarget, fill_together, mend_together
from .windows import POSITIONS, Spot, Windows

__all__ = ["COLUMNS", "POSITIONS", "Block", "Cursor", "Forward", "SharedTarget", "Spot", "Target", "Windows",
           "batch_tokens", "fill", "fill_together", "in_blocks", "look_ahead", "mend_together"]
