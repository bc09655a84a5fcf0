"""The activation store: see `schema.py` for the format, `writer.py` and `reader.py` for its use."""

from .admission import MAX_NORM_HELP, Admission
from .checks import remembers
from .dtypes import DTYPES
from .ranks import RankedStore, joining_began, rank_folder, rank_meta, saved_rows
from .reader import ActivationStore, Rows, spread_of
from .schema import COLUMNS, Resume, ShardRecord, StoreMeta, hash_request, rows_per_chunk, rows_per_shard
from .split import TEST_FRACTION, Which, is_test, window_starts
from .statistics import Norms, Spread
from .stream import Part
from .writer import StoreWriter

__all__ = ["COLUMNS", "DTYPES", "MAX_NORM_HELP", "TEST_FRACTION", "ActivationStore", "Admission", "Norms", "Part",
           "RankedStore", "Resume", "Rows", "ShardRecord", "Spread", "StoreMeta", "StoreWriter", "Which",
           "hash_request", "is_test", "joining_began",
           "rank_folder", "rank_meta", "remembers", "rows_per_chunk", "rows_per_shard", "saved_rows", "spread_of",
           "window_starts"]
