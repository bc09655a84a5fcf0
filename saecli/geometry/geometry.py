"""The geometry of one SAE as a document: rows measured, references, the theorem on the power diagram.

Shapes: N training rows, B rows measured, D = d_in.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base.console import Listener, listening
from ..base.errors import ConfigError, demand_at_least
from ..base.home import Home
from ..measure.measured import Measured, RowsLike, open_measured
from ..sae.library import SAELike
from ..store.reader import Rows
from ..store.split import Which
from .cells import cells_of
from .references import Stream, measure_references
from .survey import (
    SAMPLE_ROWS,
    Census,
    agreement_measures,
    batch_size,
    degenerate,
    describe,
    local_complexity,
    margin_measures,
    margins_in_memory,
    radius_of,
    rank_measures,
    sample_capacity,
    survey_rows,
)

SAMPLE_SEED = 0
STREAM_BYTES = 2**26  # of streamed rows at a time, 64 MiB
HELD_OUT_ROWS = 10_000  # held-out rows whose margins are compared with training rows'


@dataclass(frozen=True)
class Settings:
    """Arguments of `geometry`, checked."""

    rows: int = 100_000
    fit_rows: int = SAMPLE_ROWS
    radius: float = 0.01

    def __post_init__(self) -> None:
        demand_at_least("rows", self.rows)
        demand_at_least("fit_rows", self.fit_rows)
        if not 0 < self.radius < math.inf:
            raise ConfigError(f"--radius must be a number above 0, got {self.radius:g}")


def geometry(
    sae: SAELike = None,
    data: RowsLike = None,
    *,
    split: Which = "test",
    rows: int = 100_000,
    fit_rows: int = SAMPLE_ROWS,
    radius: float = 0.01,
    home: str | Path | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Measure the spline that an SAE is: cells, power diagram, margins, references. CLI equivalent: `sae geometry`.

    Args:
        sae, data, split, home, progress: as in `evaluate`; data is a store or rows of one, since the references are
            fitted on its training rows.
        rows: most rows to measure; of more, a random sample.
        fit_rows: most training rows that the references are fitted on.
        radius: of the local complexity, as a fraction of the rows' median distance to their mean; above 0.

    Returns:
        The document that `sae geometry --json` prints for a run. `saecli.draw("geometry", ...)` draws it.
    """
    settings, listener = Settings(rows, fit_rows, radius), listening(progress)
    run = open_measured(Home.at(home), sae, data, split, "cpu", listener)
    return measure_geometry(run, settings, listener).document


@dataclass(frozen=True)
class Geometry:
    """The measures of one SAE, and what a picture of them needs."""

    run: Measured
    census: Census
    sample: NDArray[np.float32]  # of the rows measured, (any number, D)
    margins: dict[str, NDArray[np.float64]]  # (margin, margin / ||x||), (B, 2), by split
    complexity: dict[str, NDArray[np.int64]]  # (B,) by split
    document: dict[str, Any]  # the command's JSON


@torch.no_grad()
def measure_geometry(run: Measured, settings: Settings, listener: Listener) -> Geometry:
    """Measure an SAE on the CPU; ConfigError where its activation has no cells."""
    cells, split = cells_of(run.sae), run.split or "all"
    run.demand_reconstruction("the geometry")
    count = min(settings.rows, run.rows.rows)
    survey = survey_rows(cells, _batches(run, count, listener), count)
    census, sample = survey.census, survey.sample
    words = f"{run.subject.name}: power diagram, k-means and local PCA"
    with listener.progress(words, None, "steps"):
        train = _in_memory(_training_rows(run), sample_capacity(run.sae.d_in, settings.fit_rows))
        radius = radius_of(sample, settings.radius)
        margins = {split: survey.margins}
        complexity = {split: local_complexity(cells, sample, radius)}
        other = {"test": "train", "train": "test"}.get(split)
        if other is not None:
            rows = train if other == "train" else _held_out(run)
            margins[other] = margins_in_memory(cells, rows)
            complexity[other] = local_complexity(cells, rows, radius)
        stream = training_stream(run, settings.fit_rows)
        references = measure_references(run.sae, sample, train, round(census.l0), stream)
        diagram, rank = agreement_measures(run.sae, sample), rank_measures(cells, sample)
    possible = cells.possible_log10
    document = {
        **run.heading,
        "act": run.sae.activation.name,
        "rows": census.rows,
        "l0": census.l0,
        "cells_visited": census.visited,
        "cells_possible_log10": possible,
        "cells_share_log10": math.log10(census.visited) - possible,
        "occupancy": census.occupancy(),
        "rank": rank,
        "degenerate": degenerate(run.sae),
        "power_diagram": diagram,
        "margin": margin_measures(survey.margins),
        "complexity": {
            "radius": radius,
            "radius_fraction": settings.radius,
            "boundary": cells.boundary,
            "rows": len(complexity[split]),
            **describe(complexity[split].astype(float)),
        },
        "other_split": other and _split_measures(other, margins[other], complexity[other]),
        "references": {**references, "held_out": split == "test"},
    }
    return Geometry(run, census, sample, margins, complexity, document)


def _split_measures(split: str, margins: NDArray, complexity: NDArray) -> dict[str, Any]:
    return {
        "split": split,
        "rows": len(margins),
        "margin": margin_measures(margins),
        "complexity": describe(complexity.astype(float)),
    }


def _batches(run: Measured, count: int, listener: Listener) -> Iterator[Tensor]:
    done = 0
    with listener.progress(f"measuring {run.subject.name}", count, "rows") as show:
        for batch in _rows_or_sample(run.of_store, count, batch_size(run.sae.d_sae)):
            yield torch.from_numpy(batch)
            done += len(batch)
            show(done)


def training_stream(run: Measured, most: int) -> Stream | None:
    """At most `most` of the rows that the run was trained on; None if a sample in memory suffices.

    A sample suffices for up to 50,000 rows, even if memory holds few of them: scatter matrices of wide rows take so
    much memory that a stream leaves local PCA fewer cells.
    """
    rows = _training_rows(run)
    count = min(most, rows.rows)
    if count <= max(SAMPLE_ROWS, sample_capacity(rows.d_in, most)):
        return None
    return Stream(count, lambda: _sample(rows, count, max(1, STREAM_BYTES // (4 * rows.d_in))))


def _training_rows(run: Measured) -> Rows:
    return run.store.split("train", fraction=run.subject.fraction, seed=run.subject.split_seed)


def _held_out(run: Measured) -> NDArray[np.float32]:
    return _in_memory(run.store.split("test", seed=run.subject.split_seed), HELD_OUT_ROWS)


def _in_memory(rows: Rows, most: int) -> NDArray[np.float32]:
    return np.concatenate([batch.copy() for batch in _rows_or_sample(rows, most, 1024)])


def _rows_or_sample(rows: Rows, most: int, size: int) -> Iterator[NDArray[np.float32]]:
    """All rows in batches of `size`, or if there are more than `most`, `most` of them in random order."""
    return rows.sequential(size) if rows.rows <= most else _sample(rows, most, size)


def _sample(rows: Rows, count: int, size: int) -> Iterator[NDArray[np.float32]]:
    """`count` rows in batches of `size`, in the same random order each time."""
    for batch in islice(rows.batches(size, seed=SAMPLE_SEED, epoch=0), -(-count // size)):
        yield batch[:count]
        count -= len(batch)
