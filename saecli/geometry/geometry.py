"""The geometry of one SAE or of several as documents: rows measured, references, the theorem on the power diagram.

Shapes: N training rows, D = d_in.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
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
from .bridge import Bridge, Visited
from .cells import cells_of, check_cells
from .local_pca import Stream
from .survey import (
    SAMPLE_ROWS,
    Survey,
    batch_size,
    degenerate,
    describe,
    gather,
    local_complexity,
    margin_measures,
    radius_of,
    sample_capacity,
    visits,
)

SAMPLE_SEED = 0
STREAM_BYTES = 2**26  # of streamed rows at a time, 64 MiB
HELD_OUT_ROWS = 10_000  # held-out rows whose margins are compared with training rows'


@dataclass(frozen=True)
class Wanted:
    """Arguments of `geometry`, checked; `penalty` is its lambda, None for auto."""

    rows: int = 100_000
    fit_rows: int = SAMPLE_ROWS
    radius: float = 0.01
    penalty: float | None = None

    def __post_init__(self) -> None:
        demand_at_least("rows", self.rows)
        demand_at_least("fit_rows", self.fit_rows)
        if not 0 < self.radius < math.inf:
            raise ConfigError(f"--radius must be a number above 0, got {self.radius:g}")


def penalty_of(value: str | float) -> float | None:
    """The lambda of local PCA's variable rank; None for `auto`."""
    if value == "auto":
        return None
    try:
        penalty = float(value)
    except ValueError:
        penalty = -1.0
    if not 0 <= penalty < math.inf:
        raise ConfigError(f"--lambda must be auto or a number that is at least 0, got {value!r}")
    return penalty


def geometry(
    sae: SAELike = None,
    data: RowsLike = None,
    *,
    split: Which = "test",
    rows: int = 100_000,
    fit_rows: int = SAMPLE_ROWS,
    radius: float = 0.01,
    lambda_: str | float = "auto",
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
        lambda_: cost per row of a dimension of local PCA's variable rank, in squared units of the rows; auto: the one
            at which the mean rank is the SAE's.

    Returns:
        The document that `sae geometry --json` prints for a run. `saecli.draw("geometry", ...)` draws it.
    """
    wanted, listener = Wanted(rows, fit_rows, radius, penalty_of(lambda_)), listening(progress)
    return next(
        found_in(
            [open_measured(Home.at(home), sae, data, split, "cpu", listener)], wanted, listener
        )
    ).document


@dataclass(frozen=True)
class Found:
    """The measures of one SAE, and what a picture of them needs."""

    one: Measured
    survey: Survey
    bridge: Bridge
    margins: dict[
        str, NDArray[np.float64]
    ]  # (margin, margin / ||x||), (B, 2), of rows of each split
    complexity: dict[str, NDArray[np.int64]]  # (B,) of rows of each split
    document: dict[str, Any]  # the command's JSON


def found_in(everything: Sequence[Measured], wanted: Wanted, listener: Listener) -> Iterator[Found]:
    """Measure SAEs, on the CPU, one after the other; ConfigError at once where an activation has no cells."""
    for one in everything:
        check_cells(one.sae.activation)
    bridges = Bridges()
    return (_find(one, wanted, bridges, listener) for one in everything)


class Bridges:
    """Fits references once for consecutive runs with the same rows, d_sae and rank; holds the last, up to a GiB."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._fitted: Bridge | None = None

    def of(self, one: Measured, train: NDArray[np.float32], most: int, rank: int) -> Bridge:
        """The references, fitted on training rows, (N, D), or on at most `most` that these are a sample of."""
        stream = training_stream(one, most)
        key = (
            one.store.name,
            one.subject.split_seed,
            one.subject.fraction,
            len(train),
            stream and stream.rows,
            one.sae.d_sae,
            min(rank, one.sae.d_in),
        )
        if self._fitted is None or key != self._key:
            self._fitted = None  # frees the memory first
            self._key, self._fitted = key, Bridge.fit(one.sae, train, rank, stream=stream)
        return replace(self._fitted, sae=one.sae)


@torch.no_grad()
def _find(one: Measured, wanted: Wanted, bridges: Bridges, listener: Listener) -> Found:
    cells, split = cells_of(one.sae), one.split or "all"
    survey = gather(cells, surveyed(one, wanted.rows, listener))
    census, sample = survey.census, survey.sample.rows
    with listener.progress(
        f"{one.subject.name}: power diagram, k-means and local PCA", None, "steps"
    ):
        train = _in_memory(
            _trained_on(one), sample_capacity(one.sae.d_in, wanted.fit_rows)
        )  # (N, D)
        radius = radius_of(sample, wanted.radius)
        margins, complexity = (
            {split: survey.margins.rows},
            {split: local_complexity(cells, sample, radius)},
        )
        train_keys, train_margins = visits(cells, train)
        other = {"test": "train", "train": "test"}.get(split)
        if other == "train":
            margins[other], complexity[other] = (
                train_margins,
                local_complexity(cells, train, radius),
            )
        elif other == "test":
            held_out = _in_memory(
                one.store.split("test", seed=one.subject.split_seed), HELD_OUT_ROWS
            )
            margins[other], complexity[other] = (
                visits(cells, held_out)[1],
                local_complexity(cells, held_out, radius),
            )
        bridge = bridges.of(one, train, wanted.fit_rows, round(census.l0))
        visited = Visited(cells, train_keys, survey.sample_keys.rows.tolist())
        references = bridge.measure(sample, visited, wanted.penalty)
        diagram, rank = survey.agreement_measures(one.sae), survey.rank_measures()
    possible = cells.possible_log10
    elsewhere = other and {
        "split": other,
        "rows": len(margins[other]),
        "margin": margin_measures(margins[other]),
        "complexity": describe(complexity[other].astype(float)),
    }
    document = {
        **one.heading,
        "act": one.sae.activation.name,
        "rows": census.rows,
        "l0": census.l0,
        "cells_visited": census.visited,
        "cells_possible_log10": possible,
        "cells_share_log10": math.log10(census.visited) - possible,
        "occupancy": census.occupancy(),
        "rank": rank,
        "degenerate": degenerate(one.sae),
        "power_diagram": diagram,
        "margin": margin_measures(survey.margins.rows),
        "complexity": {
            "radius": radius,
            "radius_fraction": wanted.radius,
            "boundary": cells.boundary,
            "rows": len(complexity[split]),
            **describe(complexity[split].astype(float)),
        },
        "other_split": elsewhere,
        "references": {**asdict(references), "held_out": split == "test"},
    }
    return Found(one, survey, bridge, margins, complexity, document)


def first(rows: Rows, most: int, size: int) -> Iterator[NDArray[np.float32]]:
    """All rows in batches of `size`, or if there are more than `most`, `most` of them in random order."""
    yield from rows.sequential(size) if rows.rows <= most else _at_random(rows, most, size)


def _at_random(rows: Rows, count: int, size: int) -> Iterator[NDArray[np.float32]]:
    """`count` rows in batches of `size`, in the same random order each time."""
    for batch in islice(rows.batches(size, seed=SAMPLE_SEED, epoch=0), -(-count // size)):
        yield batch[:count]
        count -= len(batch)


def surveyed(one: Measured, most: int, listener: Listener) -> Iterator[Tensor]:
    done = 0
    one.demand_reconstruction("the geometry")
    with listener.progress(
        f"measuring {one.subject.name}", min(most, one.rows.rows), "rows"
    ) as show:
        for batch in first(one.of_store, most, batch_size(one.sae.d_sae)):
            yield torch.from_numpy(batch)
            done += len(batch)
            show(done)


def training_stream(one: Measured, most: int) -> Stream | None:
    """At most `most` of the rows that the run was trained on; None if a sample in memory suffices.

    A sample suffices for up to 50,000 rows, even if memory holds few of them: scatter matrices of wide rows take so
    much memory that a stream leaves local PCA fewer cells.
    """
    rows = _trained_on(one)
    count = min(most, rows.rows)
    if count <= max(SAMPLE_ROWS, sample_capacity(rows.d_in, most)):
        return None
    return Stream(count, lambda: _at_random(rows, count, max(1, STREAM_BYTES // (4 * rows.d_in))))


def _trained_on(one: Measured) -> Rows:
    return one.store.split("train", fraction=one.subject.fraction, seed=one.subject.split_seed)


def _in_memory(rows: Rows, most: int) -> NDArray[np.float32]:
    return np.concatenate([batch.copy() for batch in first(rows, most, 1024)])
