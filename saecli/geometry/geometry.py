"""The geometry of one SAE or of several: measured, drawn, and held against the theorem on the power diagram.

Shapes: M rows, D = d_in.
"""

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..base.console import Listener, listening
from ..base.errors import ConfigError
from ..base.home import Home
from ..base.wording import number
from ..measure.measured import Measured, RowsLike, measured
from ..sae.library import SAELike
from ..show.geometry_tables import disagreement
from .census import spread_out
from .measures import Bridges, Found, Wanted, corners_of, find_out, penalty_of, rows_at
from .partition import cells_of, check_cells
from .plane_cells import Plane, keys_at, plane_cells, window_of
from .survey import SAMPLE_ROWS

ARROWS = 200  # rows whose reconstructions are drawn


@torch.no_grad()
def draw_one(path: Path, found: Found, through: Plane | None, marked: Mapping[int, Tensor]) -> None:
    """Draw the measures of an SAE on a plane: `through` the `marked` rows, (D,) each, by number; None for the principal
    plane."""
    from ..show.geometry_plots import GeometryPicture, geometry  # matplotlib takes a second to import

    one, document, sample = found.one, found.document, found.survey.sample.rows
    plane = through or Plane.principal(sample)
    x = torch.from_numpy(sample)
    points = plane.coordinates(x)
    marks = plane.coordinates(torch.stack(list(marked.values()))) if marked else points[:0]
    caption = (f"on the plane through rows {', '.join(map(str, marked))}" if marked
               else "on the plane of principal components 1 and 2" if one.sae.d_in > 2 else "in the space of the rows")
    section = cells_of(plane.section(one.sae))
    cells, fallen_on = plane_cells(section, window_of(points, marks)), keys_at(section, points)
    own = found.survey.sample_keys.rows.tolist()
    rows, near = spread_out(sample, ARROWS), document["complexity"]
    compared = document["references"]
    fvus = {"k-means": compared["kmeans_fvu"], "SAE": compared["sae_fvu"], "local PCA": compared["local_pca_fvu"]}
    ends = found.bridge.reconstructions(rows)
    geometry(path, GeometryPicture(
        title=f"{document['run']} on {document['data']}", caption=caption, d_in=one.sae.d_in, cells=cells,
        occupancy=cells.occupancy(fallen_on), points=points.numpy(), distance=float(plane.distances(x).median()),
        at_home=sum(map(operator.eq, fallen_on, own)),
        marks=dict(zip(marked, marks.numpy(), strict=True)),
        margins={split: some[:, 0] for split, some in found.margins.items()}, complexity=found.complexity,
        near=f"{near['boundary']} within {number(near['radius'])}", growth=found.survey.census.growth,
        sizes=found.survey.census.sizes(), rows=plane.coordinates(torch.from_numpy(rows)).numpy(),
        bridge={name: (plane.coordinates(torch.from_numpy(np.asarray(ends[name]))).numpy(), fvu)
                for name, fvu in fvus.items()}))


def geometry(sae: SAELike = None, data: RowsLike = None, *, split: str = "test", rows: int = 100_000,
             fit_rows: int = SAMPLE_ROWS, radius: float = 0.01, lambda_: str | float = "auto",
             plot: str | Path | None = None, slice_: str | Sequence[int] | None = None, home: str | Path | None = None,
             progress: bool = False) -> dict[str, Any]:
    """Find out about the spline that an SAE is, as `sae geometry` does: cells, power diagram, margins, references.

    Args:
        sae: as of `evaluate`.
        data: as of `evaluate`; a store or rows of one, since the references are fitted on its training rows.
        split: as of `evaluate`.
        rows: rows to measure at most; of more, a random sample.
        fit_rows: training rows that the references are fitted on at most.
        radius: of the local complexity, as a fraction of the rows' median distance to their mean; above 0.
        lambda_: the cost per row of a dimension of local PCA's variable rank, in squared units of the rows; auto: the
            one at which the mean rank is the SAE's.
        plot: a picture to draw, PNG, PDF or SVG by its ending; None for none.
        slice_: the plane that it shows: `pca`, or the numbers of three rows of the split, from 0.
        home: as of `evaluate`.
        progress: as of `evaluate`.

    Returns:
        The document that `sae geometry --json` prints for a run.

    Raises:
        ConfigError: an argument that cannot work, or the SAE's activation has no cells.
        SaeError: as of `evaluate`.
    """
    picture = None if plot is None else Path(plot)
    if picture is not None:
        from ..show.style import check_suffix  # matplotlib takes a second to import

        check_suffix(picture)
    wanted = Wanted(rows, fit_rows, radius, penalty_of(lambda_))
    corners = corners_on(slice_, picture, 1)
    listener = listening(progress)
    one = measured(Home.at(home), sae, data, split, "cpu", listener)
    return documents_of([one], wanted, picture, corners, listener)[0]


def corners_on(slice_: str | Sequence[int] | None, plot: Path | None, runs: int) -> tuple[int, ...]:
    """The rows that a picture's plane goes through; none for the plane of the principal components.

    Args:
        slice_: what the user gave, see `corners_of`; None for nothing.
        plot: the picture; None for none.
        runs: how many SAEs are looked at.

    Raises:
        ConfigError: there is no picture, or it is of several SAEs, or there are not three rows.
    """
    if slice_ is None:
        return ()
    if plot is None:
        raise ConfigError("--slice does nothing without --plot; leave it out, or name a picture with --plot",
                          option="slice")
    if runs > 1:
        raise ConfigError(f"--slice is for the picture of one SAE, got {runs} runs; leave it out, or name one",
                          option="slice")
    return corners_of(slice_)


def documents_of(everything: Sequence[Measured], wanted: Wanted, plot: Path | None, corners: tuple[int, ...],
                 listener: Listener) -> list[dict[str, Any]]:
    """Measure SAEs, and draw them: one by itself, several as they move.

    Args:
        everything: the SAEs, on the CPU, and their rows.
        wanted: how much to measure.
        plot: the picture; None for none.
        corners: rows that its plane goes through, as of `corners_on`.
        listener: shows progress, and notes the picture drawn and rows on which the power diagram disagrees.

    Returns:
        The document that `sae geometry --json` prints for each.

    Raises:
        ConfigError: an activation has no cells, or a row of `corners` does not exist.
    """
    for one in everything:
        check_cells(one.sae.activation)
    marked = rows_at(everything[0].of_store, corners)
    through = Plane.through(marked) if corners else None
    bridges = Bridges()
    if len(everything) == 1:
        found = find_out(everything[0], wanted, bridges, listener)
        documents = [found.document]
        if plot is not None:
            draw_one(plot, found, through, dict(zip(corners, marked, strict=True)))
    else:  # nothing but the documents is kept, so that memory does not grow with the runs
        documents = [find_out(one, wanted, bridges, listener).document for one in everything]
        if plot is not None:
            from ..show.geometry_plots import geometry_runs

            geometry_runs(plot, documents)
    if plot is not None:
        listener.note(f"drew {plot}")
    for document in documents:
        if where := disagreement(document["power_diagram"]):
            listener.note(f"{document['run']}: the power diagram disagrees {where}; by the theorem it agrees on all, "
                          f"so this is a bug or rounding, please report it")
    return documents
