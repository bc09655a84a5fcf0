"""The public function of the spline's geometry, see `measure.functions`."""

from typing import Annotated, Any

from ..base.console import listening
from ..base.home import Home
from ..base.options import Count, Positive, Shown, checked
from ..measure.arguments import Data, HomeLike, Progress, SAELike, Split


@checked
def geometry(
    sae: SAELike = None,
    data: Data = None,
    *,
    split: Split = "test",
    rows: Annotated[Count, Shown("Most rows to measure; of more, a random sample.")] = 100_000,
    fit_rows: Annotated[
        Count,
        Shown(
            "Most training rows to fit k-means and local PCA on, held in memory; up to 50,000, at most 256 MiB of them."
        ),
    ] = 50_000,
    radius: Annotated[
        Positive,
        Shown(
            "Radius of the local complexity, as a fraction of the rows' median distance to their mean."
        ),
    ] = 0.01,
    home: HomeLike = None,
    progress: Progress = False,
) -> dict[str, Any]:
    """Measure the spline that an SAE is: cells, power diagram, margins, references. CLI equivalent: `sae geometry`.

    Arguments as in `evaluate`; data is a store or rows of one: references are fitted on its training rows. Returns the
    document of `sae geometry --json` for a run, which `saecli.draw("geometry", ...)` draws.
    """
    from ..measure.measured import ChosenRows
    from .geometry import Limits, measure_geometry

    listener = listening(progress)
    run = ChosenRows(Home.at(home), data, split, "cpu", listener).with_sae(sae)
    return measure_geometry(run, Limits(rows, fit_rows, radius), listener).document
