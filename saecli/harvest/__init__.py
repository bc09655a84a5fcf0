"""From documents to stored rows: windows of tokens, blocks of windows, forward passes, stores."""

from .config import ExtractConfig
from .extraction import extract, extract_stores
from .fill import COLUMNS, Ahead, Target, fill
from .forward import Forward, batch_tokens
from .streaming import Streamed, open_stream
from .token_windows import POSITIONS, Spot, Windows
from .window_blocks import Block, Cursor, in_blocks

__all__ = ["COLUMNS", "POSITIONS", "Ahead", "Block", "Cursor", "ExtractConfig", "Forward", "Spot", "Streamed",
           "Target", "Windows", "batch_tokens", "extract", "extract_stores", "fill", "in_blocks", "open_stream"]
