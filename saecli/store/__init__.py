"""The activation store: see `schema.py` for the format, `writer.py` and `reader.py` for its use."""

from .checks import remembers
from .dropped import Norms
from .dtypes import DTYPES
from .reader import ActivationStore
from .rows import Rows
from .schema import COLUMNS, Resume, ShardRecord, StoreMeta, hash_request, rows_per_chunk, rows_per_shard
from .shard_statistics import spread_of
from .shared_writer import SharedWriter, made_by_several
from .split import TEST_FRACTION, Which, is_test
from .statistics import Spread
from .stream import Part
from .windows import window_starts
from .writer import SOURCE_CHANGED, StoreWriter

__all__ = ["COLUMNS", "DTYPES", "SOURCE_CHANGED", "TEST_FRACTION", "ActivationStore", "Norms", "Part", "Resume",
           "Rows", "ShardRecord", "SharedWriter", "Spread", "StoreMeta", "StoreWriter", "Which", "hash_request",
           "is_test", "made_by_several", "remembers", "rows_per_chunk", "rows_per_shard", "spread_of",
           "window_starts"]
