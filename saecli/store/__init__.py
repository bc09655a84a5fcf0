"""The activation store: see `schema.py` for the format, `writer.py` and `reader.py` for its use."""

from .checks import remembers
from .dropped import Norms
from .dtypes import DTYPES
from .reader import ActivationStore
from .rows import Rows
from .schema import COLUMNS, Resume, ShardRecord, StoreMeta, hash_request, rows_per_chunk, rows_per_shard
from .shard_statistics import spread_of
from .split import TEST_FRACTION, Which, is_test
from .statistics import Spread
from .windows import window_starts
from .writer import StoreWriter

__all__ = ["COLUMNS", "DTYPES", "TEST_FRACTION", "ActivationStore", "Norms", "Resume", "Rows", "ShardRecord", "Spread",
           "StoreMeta", "StoreWriter", "Which", "hash_request", "is_test", "remembers", "rows_per_chunk",
           "rows_per_shard", "spread_of", "window_starts"]
