"""What the processes that write one store know of its blocks, and tell each other at every turn.

Legend: R rows, D = d_in.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .admission import Columns
from .dropped import Dropped
from .schema import Piece, ShardRecord
from .statistics import Statistics


@dataclass
class Known:
    """What is known of a block: where it begins, how many rows of it are kept in all, and how many are stored."""

    cursor: dict[str, Any]
    kept: int
    stored: int


@dataclass(frozen=True)
class Held:
    """A block's rows that are kept, before it is known how many of them fall before the limit."""

    block: int
    cursor: dict[str, Any]
    rows: np.ndarray
    columns: Columns
    left_out: Dropped


class Offer(NamedTuple):
    """What a process tells the others of the block that it holds."""

    block: int
    cursor: dict[str, Any]
    kept: int
    median: float | None


class Finished(NamedTuple):
    """A whole shard, for `store.json`."""

    number: int
    record: ShardRecord
    statistics: Statistics | None


@dataclass(frozen=True)
class Rest:
    """What a process holds in the end that is no whole shard: so many rows in a file from a byte offset on, where there
    are any, and their columns."""

    pieces: list[Piece]
    left_out: Dropped
    rows: int = 0
    file: Path = Path()
    start: int = 0
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
