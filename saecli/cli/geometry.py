"""Measure the spline: cells, power diagram, margins, k-means and local PCA.

An SAE is affine on each of its cells, the sets of rows that keep the same latents; counts those that rows visit. For
topk and abs-topk they are the cells of a power diagram, by a theorem; reports the fraction of rows on which they
agree. The margin is a row's exact distance to the boundary of its cell; the local complexity, the number of
boundaries within --radius of it.

References are fitted on training rows: k-means, and local PCA, the best map affine on each of its cells, with the
SAE's rank. Several runs make one table, and they or a pattern a JSON document with a list "runs".

Example: sae geometry first --plot geometry.png
"""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ..base.errors import ConfigError
from ..base.options import all_arguments
from ..base.words import does_nothing
from ..geometry.functions import geometry
from .options import SEVERAL, Json, Plot, Runs, configured, start

PRINCIPAL = "pca"


@configured(geometry)
def command(
    ctx: typer.Context,
    options: Mapping[str, Any],
    runs: Runs = None,
    corners: Annotated[
        str | None,
        typer.Option(
            "--slice",
            metavar="<pca|I,J,K>",
            show_default=PRINCIPAL,
            help="Plane of --plot: the first two principal components, or through three rows, by number in the split "
            "from 0.",
        ),
    ] = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    from ..geometry.cells import check_cells
    from ..geometry.geometry import Limits, measure_geometry
    from ..measure.measured import ChosenRows
    from ..show.tables import geometries_table, geometry_table

    session, arguments = start(ctx), all_arguments(geometry, options)
    if corners is not None and plot is None:
        raise does_nothing("slice", "without --plot; leave it out, or name a picture with --plot")
    if plot is not None and len(runs or ()) > 1:
        raise ConfigError(f"--plot draws one SAE, got {len(runs or ())} runs; name one of them")
    data, split = arguments.pop("data"), arguments.pop("split")
    limits = Limits(**arguments)
    measured = ChosenRows(session.home, data, split, "cpu", session.console).with_all(runs or [])
    for run in measured:
        check_cells(run.sae.activation)
    if plot is not None:
        from ..geometry.geometry import rows_of_slice
        from ..show.geometry import draw_geometry  # matplotlib takes a second

        marked = rows_of_slice(measured[0].of_store, corners or PRINCIPAL)
    documents = []
    for run in measured:
        result = measure_geometry(run, limits, session.console)
        documents.append(result.document)
        if plot is not None:
            draw_geometry(plot, result, marked)
            session.console.note(f"drew {plot}")
    document = {"runs": documents} if ctx.meta.get(SEVERAL) else documents[0]
    table = geometries_table(documents) if len(documents) > 1 else geometry_table(documents[0])
    session.console.print_result(document, table)
