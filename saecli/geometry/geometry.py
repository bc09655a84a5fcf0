"""The geometry of one SAE or of several, measured and held against the theorem on the power diagram."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..base.console import Listener, listening
from ..base.home import Home
from ..measure.measured import Measured, RowsLike, measured
from ..sae.library import SAELike
from .measures import Bridges, Found, Wanted, find_out, penalty_of
from .partition import check_cells
from .survey import SAMPLE_ROWS


def geometry(sae: SAELike = None, data: RowsLike = None, *, split: str = "test", rows: int = 100_000,
             fit_rows: int = SAMPLE_ROWS, radius: float = 0.01, lambda_: str | float = "auto",
             home: str | Path | None = None, progress: bool = False) -> dict[str, Any]:
    """Measure the spline that an SAE is: cells, power diagram, margins, references. CLI equivalent: `sae geometry`.

    Args:
        sae: as in `evaluate`.
        data: as in `evaluate`; a store or rows of one, since the references are fitted on its training rows.
        split: as in `evaluate`.
        rows: most rows to measure; of more, a random sample.
        fit_rows: most training rows that the references are fitted on.
        radius: of the local complexity, as a fraction of the rows' median distance to their mean; above 0.
        lambda_: cost per row of a dimension of local PCA's variable rank, in squared units of the rows; auto: the one
            at which the mean rank is the SAE's.
        home: as in `evaluate`.
        progress: as in `evaluate`.

    Returns:
        The document that `sae geometry --json` prints for a run. `saecli.draw("geometry", ...)` draws it.
    """
    wanted, listener = Wanted(rows, fit_rows, radius, penalty_of(lambda_)), listening(progress)
    return next(found_in([measured(Home.at(home), sae, data, split, "cpu", listener)], wanted, listener)).document


def found_in(everything: Sequence[Measured], wanted: Wanted, listener: Listener) -> Iterator[Found]:
    """Measure SAEs, on the CPU, one after the other; ConfigError at once where an activation has no cells."""
    for one in everything:
        check_cells(one.sae.activation)
    bridges = Bridges()
    return (find_out(one, wanted, bridges, listener) for one in everything)
