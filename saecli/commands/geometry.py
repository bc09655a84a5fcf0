"""`sae geometry`."""

from typing import Annotated

import typer

from ..errors import ConfigError
from ..spline.partition import check_cells
from ..spline.planes import Plane
from ..spline.survey import SAMPLE_ROWS
from .geometry_measures import Bridges, Wanted, find_out
from .geometry_pictures import draw_one
from .geometry_rows import corners_of, rows_at
from .geometry_tables import disagreement, one_table, several_table
from .options import Json, Plot, Runs, start
from .subjects import Data, SplitName, all_measured

Most = Annotated[int, typer.Option("--rows", min=1, help="Rows to measure at most; of more, a random sample.")]
FitRows = Annotated[int, typer.Option(
    "--fit-rows", min=1, help="Training rows that the references are fitted on at most. Memory holds 256 MiB of "
                              "them; where more than 50,000 are asked for, the others are streamed.")]
Slice = Annotated[str, typer.Option(
    "--slice", metavar="pca|I,J,K", help="The plane that --plot shows: of the rows' first two principal components, "
                                         "or through three rows, by their numbers in the split from 0.")]
Radius = Annotated[float, typer.Option(
    "--radius", help="Radius of the local complexity, as a share of the rows' median distance to their mean.")]
Lambda = Annotated[str, typer.Option(
    "--lambda", metavar="auto|FLOAT", help="What a dimension of local PCA's variable rank costs a row, in squared "
                                           "units of the rows; auto: so much that the mean rank is the SAE's.")]


def command(ctx: typer.Context, runs: Runs = None, data: Data = None, split: SplitName = "test", rows: Most = 100_000,
            fit_rows: FitRows = SAMPLE_ROWS, radius: Radius = 0.01, lambda_: Lambda = "auto", plot: Plot = None,
            slice_: Slice = "pca", json: Json = False) -> None:
    """Show the spline: cells, power diagram, margins, references.

    An SAE is affine on each of its cells, the sets of rows that keep the same latents. Counted are the cells that the
    rows visit. For topk and abs-topk they are the cells of a power diagram, by a theorem: on how many rows the two
    agree is said, in one line. The margin is a row's exact distance to the boundary of its cell; the local complexity,
    how many boundaries pass within --radius of it.

    The references are fitted on training rows: a k-means autoencoder, and local PCA, the best that is affine on each
    of its cells, with the SAE's rank in every cell and with a rank of each cell's own. On the SAE's own cells, those
    that hold enough training rows, local PCA of the SAE's own rank tells the price of shared dictionary vectors: where
    that rests on 100 rows, in 20 cells or in fewer that hold nine tenths of all rows. --json has it always.

    Several runs, or the epochs of one that `sae train --keep-every` keeps (RUN/kept/*), make one table, and --plot
    draws how they move.

    Example: sae geometry first --plot geometry.png
    """
    session = start(ctx, json, plot)
    if not 0 < radius < float("inf"):
        raise ConfigError(f"--radius must be a number above 0, got {radius:g}")
    wanted = Wanted(rows, fit_rows, radius, _penalty(lambda_))
    sliced = ctx.get_parameter_source("slice_").name != "DEFAULT"
    if plot is None and sliced:
        raise ConfigError("--slice does nothing without --plot; leave it out, or name a picture with --plot")
    names = list(dict.fromkeys(runs or ()))
    if len(names) > 1 and sliced:
        raise ConfigError(f"--slice is for the picture of one SAE, got {len(names)} runs; leave it out, or name one")
    corners = corners_of(slice_)
    everything = all_measured(session, names, data, split, "cpu")
    for one in everything:
        check_cells(one.sae.activation)
    marked = rows_at(everything[0].rows, corners)
    through = Plane.through(marked) if corners else None
    bridges = Bridges()
    if len(everything) == 1:
        found = find_out(session, everything[0], wanted, bridges)
        documents = [found.document]
        if plot is not None:
            draw_one(plot, found, through, dict(zip(corners, marked, strict=True)))
    else:  # nothing but the documents is kept, so that memory does not grow with the runs
        documents = [find_out(session, one, wanted, bridges).document for one in everything]
        if plot is not None:
            from ..plots import geometry_runs  # matplotlib takes a second to import

            geometry_runs(plot, documents)
    if plot is not None:
        session.console.note(f"drew {plot}")
    for document in documents:
        if where := disagreement(document["power_diagram"]):
            session.console.note(f"{document['run']}: the power diagram disagrees {where}; by the theorem it agrees on "
                                f"all, so this is a bug or rounding, please report it")
    if len(documents) == 1:
        session.console.result(documents[0], one_table(documents[0]))
    else:
        session.console.result({"runs": documents}, several_table(documents))


def _penalty(text: str) -> float | None:
    """The lambda of `--lambda`; None for `auto`."""
    if text == "auto":
        return None
    try:
        penalty = float(text)
    except ValueError:
        penalty = -1.0
    if not 0 <= penalty < float("inf"):
        raise ConfigError(f"--lambda must be auto or a number that is at least 0, got {text!r}")
    return penalty
