"""Blocks of rows as producers give them: cut to the rows that a store admits and has room for.

Legend: R rows, D = d_in, W windows, n tokens.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from .schema import StoreMeta
from .values import DTYPES, Column, TextWindow, row_norms

WINDOWS = "windows"  # the group of a shard
WINDOW_DTYPES = {"offset": "<i8", "first": "<i8", "token_id": "<i4", "stored": "u1"}
ADMITTED, NONFINITE, HIGH_NORM = range(3)  # verdicts, one uint8 per row
REASONS = {"nonfinite": NONFINITE, "high_norm": HIGH_NORM}


@dataclass(frozen=True)
class Windows:
    """The windows of tokens that rows came from, in stored order; token j of window i is at `offset[i] + j`. The shard
    of a window's first row keeps it."""

    offset: np.ndarray  # (W + 1,) from 0
    first: np.ndarray  # (W,) number of its first row, within the block or the shard
    token_id: np.ndarray  # (n,)
    stored: np.ndarray  # (n,) bool, the tokens whose activations are rows

    @classmethod
    def of(cls, lengths: np.ndarray, token_ids: np.ndarray, stored: np.ndarray) -> Self:
        offset = np.concatenate([[0], np.cumsum(lengths)])
        before = np.concatenate([[0], np.cumsum(stored)])
        return cls(offset, before[offset[:-1]], token_ids, stored)

    def __len__(self) -> int:
        return len(self.first)

    @property
    def rows(self) -> np.ndarray:
        """(W,) number of rows of each window."""
        before = np.concatenate([[0], np.cumsum(self.stored)])
        return np.diff(before[self.offset])

    def with_rows(self, chosen: np.ndarray) -> Self:
        """The windows if only the chosen rows, (R,) bool, are stored."""
        stored = self.stored.copy()
        stored[self.stored] = chosen
        return type(self).of(np.diff(self.offset), self.token_id, stored)

    def between(self, begin: int, stop: int) -> Self:
        """The windows whose first row is from `begin` to before `stop`, numbered from `begin`."""
        chosen = (self.rows > 0) & (self.first >= begin) & (self.first < stop)
        lengths = np.diff(self.offset)
        tokens = np.repeat(chosen, lengths)
        offset = np.concatenate([[0], np.cumsum(lengths[chosen])])
        first = self.first[chosen] - begin
        return type(self)(offset, first, self.token_id[tokens], self.stored[tokens])

    @classmethod
    def concatenated(cls, parts: Sequence[Self], starts: Sequence[int]) -> Self:
        """The windows of several blocks, each of which starts at a row of the shard."""
        lengths = np.concatenate([np.diff(part.offset) for part in parts])
        firsts = [part.first + start for part, start in zip(parts, starts, strict=True)]
        return cls(
            offset=np.concatenate([[0], np.cumsum(lengths)]),
            first=np.concatenate(firsts),
            token_id=np.concatenate([part.token_id for part in parts]),
            stored=np.concatenate([part.stored for part in parts]),
        )

    def datasets(self) -> dict[str, np.ndarray]:
        return {
            f"{WINDOWS}/{name}": getattr(self, name).astype(kind)
            for name, kind in WINDOW_DTYPES.items()
        }

    def each(self) -> Iterator[TextWindow]:
        for begin, end in zip(self.offset[:-1].tolist(), self.offset[1:].tolist(), strict=True):
            yield TextWindow(self.token_id[begin:end], self.stored[begin:end])


@dataclass(frozen=True)
class RowBlock:
    """Rows that a producer gives together, and what is stored with them."""

    rows: np.ndarray  # (R, D) float, or uint16 bits if the store is bfloat16; R may be 0
    columns: Mapping[str, Column] = field(default_factory=dict)
    # By reason, for each row that is left out, the number of the block's rows before it, (n,).
    dropped: Mapping[str, np.ndarray] = field(default_factory=dict)
    windows: Windows | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def counts(self) -> Counter[str]:
        counts = {reason: len(before) for reason, before in self.dropped.items()}
        return Counter({reason: count for reason, count in counts.items() if count})

    def admitted(self, verdicts: np.ndarray) -> Self:
        chosen = verdicts == ADMITTED
        if chosen.all():
            return self
        before = np.concatenate([[0], np.cumsum(chosen)])  # chosen rows before each, and in all
        dropped = {reason: before[numbers] for reason, numbers in self.dropped.items()}
        dropped |= {name: before[:-1][verdicts == code] for name, code in REASONS.items()}
        return replace(
            self,
            rows=self.rows[chosen],
            columns={name: column[chosen] for name, column in self.columns.items()},
            dropped=dropped,
            windows=None if self.windows is None else self.windows.with_rows(chosen),
        )

    def up_to(self, stop: int) -> Self:
        """The first rows, and those dropped before the last of them."""
        dropped = {reason: before[before < stop] for reason, before in self.dropped.items()}
        if stop >= len(self):
            return replace(self, dropped=dropped)
        columns = {name: column[:stop] for name, column in self.columns.items()}
        windows = self.windows
        if windows is not None:
            windows = windows.with_rows(np.arange(len(self)) < stop)
        return type(self)(self.rows[:stop], columns, dropped, windows)

    def between(self, begin: int, stop: int) -> Self:
        """The rows from `begin` to before `stop`, and the windows whose first row is one of them."""
        columns = {name: column[begin:stop] for name, column in self.columns.items()}
        windows = None if self.windows is None else self.windows.between(begin, stop)
        return type(self)(self.rows[begin:stop], columns, windows=windows)


class Admission:
    """Drops rows that are not finite in the stored type, or have a norm above `max_norm_multiple` times the median of
    the first block that has a finite row."""

    def __init__(self, meta: StoreMeta) -> None:
        self._meta = meta
        self.median = meta.median_norm

    def verdicts(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows, (R, D), as stored, and the verdict on each, (R,)."""
        multiple, dtype, stored = self._meta.max_norm_multiple, DTYPES[self._meta.dtype], rows
        if rows.dtype != dtype.storage:
            with np.errstate(over="ignore"):  # overflow gives infinities, which are dropped
                rows = rows.astype(np.float32, copy=False)
            stored = dtype.encode_rows(rows)
        finite = dtype.keeps(stored)
        verdicts = np.where(finite, np.uint8(ADMITTED), np.uint8(NONFINITE))
        if multiple is not None and finite.any():
            candidates = rows[finite]
            if candidates.dtype.kind != "f":
                candidates = dtype.decode_rows(candidates)
            norms = row_norms(candidates)
            if self.median is None:
                self.median = float(np.median(norms))
            verdicts[np.flatnonzero(finite)[norms > multiple * self.median]] = HIGH_NORM
        return stored, verdicts
