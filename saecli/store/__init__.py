"""The activation store: see `schema.py` for the format, `writer.py`, `reader.py` and `rows.py` for its use."""

from .admission import MAX_NORM_HELP, Admission, jointly
from .checks import damaged_world, remembers
from .claim import other_number
from .dtypes import DTYPES
from .joined import Joined, JoinedRows, in_words
from .ranks import RankedStore, joining_began, rank_folder, rank_meta, saved_rows
from .reader import ActivationStore
from .rows import Rows
from .schema import (
    COLUMNS,
    WORLD_FILE,
    Resume,
    ShardRecord,
    StoreMeta,
    WorldRecord,
    hash_request,
    rows_per_chunk,
    rows_per_shard,
)
from .sparse_rows import CODES, SparseRows, offsets_of
from .split import TEST_FRACTION, Which, is_test, window_starts
from .statistics import Norms, Spread
from .stream import Part
from .writer import StoreWriter

__all__ = ["CODES", "COLUMNS", "DTYPES", "MAX_NORM_HELP", "TEST_FRACTION", "WORLD_FILE", "ActivationStore",
           "Admission", "Joined", "JoinedRows", "Norms", "Part", "RankedStore", "Resume", "Rows", "ShardRecord",
           "SparseRows", "Spread", "StoreMeta", "StoreWriter", "Which", "WorldRecord", "damaged_world", "hash_request",
           "in_words", "is_test", "joining_began", "jointly", "offsets_of", "other_number", "rank_folder", "rank_meta",
           "remembers", "rows_per_chunk", "rows_per_shard", "saved_rows", "window_starts"]
