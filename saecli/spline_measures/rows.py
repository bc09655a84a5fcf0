"""Which rows `sae geometry` looks at. Shapes: N training rows, D = d_in."""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..console import Listener
from ..errors import ConfigError
from ..evaluation.sae_and_rows import Measured
from ..spline.kmeans import Stream
from ..spline.margins import HELD_OUT_ROWS, batch_size
from ..spline.survey import SAMPLE_ROWS, sample_capacity
from ..store import Rows

SAMPLE_SEED = 0
STREAM_BYTES = 2**26  # of streamed rows at a time, 64 MiB


def corners_of(text: str | Sequence[int]) -> tuple[int, ...]:
    """The numbers of the rows that a picture's plane goes through; none for `pca`.

    Args:
        text: `pca`, or three numbers, as they are or as in `0,5,9`.

    Raises:
        ConfigError: it is neither.
    """
    if text == "pca":
        return ()
    words = text.split(",") if isinstance(text, str) else [str(number) for number in text]
    if len(words) != 3 or not all(word.strip().isdecimal() for word in words):
        raise ConfigError("slice", "must be pca or three row numbers like 0,5,9, got {got!r}", got=text)
    return tuple(int(word) for word in words)


def rows_at(rows: Rows, numbers: tuple[int, ...]) -> Tensor:
    """The rows of those numbers in stored order, (len(numbers), D).

    Raises:
        ConfigError: there are not so many rows.
    """
    if numbers and max(numbers) >= rows.rows:
        raise ConfigError("slice", "names row {number}, but the split has {rows:,} rows, counted from 0",
                          "choose lower numbers", number=max(numbers), rows=rows.rows)
    found: dict[int, Tensor] = {}
    start_of = 0
    for batch in rows.sequential(1024) if numbers else ():
        found |= {n: torch.from_numpy(batch[n - start_of].copy()) for n in numbers
                  if start_of <= n < start_of + len(batch)}
        start_of += len(batch)
        if len(found) == len(set(numbers)):
            break
    return torch.stack([found[n] for n in numbers]) if numbers else torch.empty(0, rows.d_in)


def first(rows: Rows, most: int, size: int) -> Iterator[NDArray[np.float32]]:
    """All rows in batches of `size`, or where there are more than `most`, so many in random order."""
    yield from rows.sequential(size) if rows.rows <= most else _at_random(rows, most, size)


def _at_random(rows: Rows, count: int, size: int) -> Iterator[NDArray[np.float32]]:
    """So many rows in batches of `size`, in a random order that is the same each time."""
    for batch in islice(rows.batches(size, seed=SAMPLE_SEED, epoch=0), -(-count // size)):
        yield batch[:count]
        count -= len(batch)


def surveyed(one: Measured, most: int, listener: Listener) -> Iterator[Tensor]:
    """The rows to measure, progress shown."""
    done = 0
    with listener.progress(f"measuring {one.subject.name}", min(most, one.rows.rows), "rows") as show:
        for batch in first(one.of_store, most, batch_size(one.sae.d_sae)):
            yield torch.from_numpy(batch)
            done += len(batch)
            show(done)


def training_sample(one: Measured, most: int) -> NDArray[np.float32]:
    """Rows that the references are fitted on, (N, D): those that the run was trained on, or a sample of them."""
    rows = _trained_on(one)
    return _in_memory(rows, sample_capacity(rows.d_in, most))


def training_stream(one: Measured, most: int) -> Stream | None:
    """So many of the rows that the run was trained on; None where a sample in memory does.

    A sample does for up to 50,000, however few of them it holds: of wide rows scatter matrices take so much memory that
    a stream leaves local PCA fewer cells.
    """
    rows = _trained_on(one)
    count = min(most, rows.rows)
    if count <= max(SAMPLE_ROWS, sample_capacity(rows.d_in, most)):
        return None
    return Stream(count, lambda: _at_random(rows, count, max(1, STREAM_BYTES // (4 * rows.d_in))))


def _trained_on(one: Measured) -> Rows:
    return one.store.split("train", fraction=one.subject.fraction, seed=one.subject.split_seed)


def held_out_sample(one: Measured) -> NDArray[np.float32] | None:
    """Rows that the run was not trained on, at most as many as margins are measured of; None where there are none."""
    rows = one.store.split("test", seed=one.subject.split_seed)
    return _in_memory(rows, HELD_OUT_ROWS) if rows.rows else None


def _in_memory(rows: Rows, most: int) -> NDArray[np.float32]:
    """What `first` gives of rows, (N, D)."""
    return np.concatenate([batch.copy() for batch in first(rows, most, 1024)])
