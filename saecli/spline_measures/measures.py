"""What there is to find out about the spline that an SAE is, and the references beside it."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..console import Listener
from ..errors import ConfigError
from ..evaluation.sae_and_rows import Measured
from ..spline.bridge import Bridge, Visited
from ..spline.census import describe
from ..spline.degenerate import Degenerate
from ..spline.kmeans import Stream
from ..spline.margins import local_complexity, margin_measures, radius_of, visits
from ..spline.partition import cells_of
from ..spline.survey import SAMPLE_ROWS, Survey, gather
from .rows import held_out_sample, surveyed, training_sample, training_stream


@dataclass(frozen=True)
class Wanted:
    """How much to measure.

    Args:
        rows: rows to measure at most; of more, a random sample.
        fit_rows: training rows to fit the references on at most.
        radius: of the local complexity, as a share of the rows' median distance to their mean; above 0.
        penalty: lambda of local PCA's variable rank, in squared units of the rows; None for that of the SAE's own mean
            rank.
    """

    rows: int = 100_000
    fit_rows: int = SAMPLE_ROWS
    radius: float = 0.01
    penalty: float | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "fit_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(name, "must be at least 1, got {got}", got=getattr(self, name))
        if not 0 < self.radius < math.inf:
            raise ConfigError("radius", "must be a number above 0, got {got:g}", got=self.radius)


def penalty_of(value: str | float) -> float | None:
    """The lambda of local PCA's variable rank; None for `auto`.

    Raises:
        ConfigError: it is neither auto nor a number that is at least 0.
    """
    if value == "auto":
        return None
    try:
        penalty = float(value)
    except ValueError:
        penalty = -1.0
    if not 0 <= penalty < math.inf:
        raise ConfigError("lambda", "must be auto or a number that is at least 0, got {got!r}", got=value)
    return penalty


@dataclass(frozen=True)
class Found:
    """What was found out about one SAE.

    Args:
        one: the SAE and its rows.
        survey: what a pass over the rows gathered.
        bridge: the references.
        margins: of the rows measured and of those of the other split, by split.
        complexity: likewise.
        document: the command's JSON document.
    """

    one: Measured
    survey: Survey
    bridge: Bridge
    margins: dict[str, NDArray]
    complexity: dict[str, NDArray]
    document: dict[str, Any]


class Bridges:
    """Fits references once for runs that follow each other and share them: same training rows, as many latents, one
    rank. Holds no more than the last ones, which may take a GiB."""

    def __init__(self) -> None:
        self._fitted: dict[tuple, Bridge] = {}

    def of(self, one: Measured, train: NDArray[np.float32], stream: Stream | None, rank: int) -> Bridge:
        """The references of an SAE, fitted on training rows, (N, D), or on a stream that these are a sample of."""
        key = (one.store.name, one.subject.split_seed, one.subject.fraction, len(train), stream and stream.rows,
               one.sae.d_sae, min(rank, one.sae.d_in))
        if key not in self._fitted:
            self._fitted.clear()
            self._fitted[key] = Bridge.fit(one.sae, train, rank, stream=stream)
        return replace(self._fitted[key], sae=one.sae)


@torch.no_grad()
def find_out(one: Measured, wanted: Wanted, bridges: Bridges, listener: Listener) -> Found:
    """Measure one SAE.

    Raises:
        ConfigError: its activation has no cells.
    """
    cells, degenerate = cells_of(one.sae), Degenerate.of(one.sae)
    survey = gather(cells, surveyed(one, wanted.rows, listener))
    census, sample = survey.census, survey.sample.rows
    with listener.progress(f"{one.subject.name}: power diagram, k-means and local PCA", None, "steps"):
        train = training_sample(one, wanted.fit_rows)
        radius = radius_of(sample, wanted.radius)
        margins, complexity = {one.split: survey.margins.rows}, {one.split: local_complexity(cells, sample, radius)}
        train_keys, train_margins = visits(cells, train)
        held_out = held_out_sample(one) if one.split == "train" else None
        if one.split == "test":
            other, margins["train"] = "train", train_margins
            complexity["train"] = local_complexity(cells, train, radius)
        elif held_out is not None:
            other, margins["test"] = "test", visits(cells, held_out)[1]
            complexity["test"] = local_complexity(cells, held_out, radius)
        else:
            other = None
        bridge = bridges.of(one, train, training_stream(one, wanted.fit_rows), round(census.l0))
        visited = Visited(cells, train_keys, survey.sample_keys.rows.tolist())
        references = bridge.measure(sample, visited, wanted.penalty)
        diagram, rank = survey.agreement_measures(one.sae), survey.rank_measures()
    possible = cells.possible_log10
    elsewhere = other and {"split": other, "rows": len(margins[other]), "margin": margin_measures(margins[other]),
                           "complexity": describe(complexity[other].astype(float))}
    document = {
        **one.heading, "act": one.sae.activation.name, "rows": census.rows, "l0": census.l0,
        "cells_visited": census.visited, "cells_possible_log10": possible,
        "cells_share_log10": math.log10(census.visited) - possible, "occupancy": census.occupancy(), "rank": rank,
        "degenerate": asdict(degenerate), "power_diagram": diagram,
        "margin": margin_measures(survey.margins.rows),
        "complexity": {"radius": radius, "radius_fraction": wanted.radius, "boundary": cells.boundary,
                       "rows": len(complexity[one.split]), **describe(complexity[one.split].astype(float))},
        "other_split": elsewhere, "references": {**asdict(references), "held_out": one.split == "test"}}
    return Found(one, survey, bridge, margins, complexity, document)
