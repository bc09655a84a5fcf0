"""The spline of a trained SAE as documents and arrays; pictures and tables are made in `show`.

geometry.py       saecli.geometry: a pass over rows (cells visited, margins, local complexity, ranks), and its document
cells.py          a row's cell, margin and nearby boundaries; power diagrams, and a test of their theorem
plane.py          the cells that a plane through rows meets
references.py     FVU of k-means, the SAE and local PCA on the same rows
"""

from dataclasses import dataclass
from typing import Annotated

from ..base.options import Config, Count, Positive, Shown

SAMPLE_ROWS = 50_000  # rows kept for the references


@dataclass(frozen=True)
class GeometryConfig(Config):
    rows: Annotated[Count, Shown("Most rows to measure; of more, a random sample.")] = 100_000
    fit_rows: Annotated[
        Count,
        Shown(
            "Most training rows to fit k-means and local PCA on, held in memory; up to 50,000, "
            "at most 256 MiB of them."
        ),
    ] = SAMPLE_ROWS
    radius: Annotated[
        Positive,
        Shown(
            "Radius of the local complexity, as a fraction of the rows' median distance to their mean."
        ),
    ] = 0.01
