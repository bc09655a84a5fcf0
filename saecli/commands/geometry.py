"""`sae geometry`."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ConfigError
from ..geometry.degenerate import Degenerate
from ..geometry.partition import cells_of
from ..geometry.piecewise_affine import references
from ..geometry.planes import Plane, cell_map, pixels_for, window_of
from ..geometry.survey import Survey, batch_size, gather, sample_capacity
from ..report import number, table
from ..store import Rows
from .options import Json, Plot, Session, start
from .subjects import Data, Measured, SplitName, measured

SAMPLE_SEED = 0

Run = Annotated[str | None, typer.Argument(
    help="Run name, or folder that holds an SAE.", show_default="the newest run")]
Most = Annotated[int, typer.Option("--rows", min=2, help="Rows to measure at most; of more, a random sample.")]
Slice = Annotated[str, typer.Option(
    "--slice", metavar="pca|I,J,K", help="The plane that --plot shows: of the rows' first two principal components, "
                                         "or through three rows, by their numbers in the split from 0.")]
Radius = Annotated[float, typer.Option(
    "--radius", help="Radius of the local complexity, as a share of the rows' median distance to their mean.")]


def command(ctx: typer.Context, run: Run = None, data: Data = None, split: SplitName = "test", rows: Most = 100_000,
            radius: Radius = 0.01, plot: Plot = None, slice_: Slice = "pca", json: Json = False) -> None:
    """Show the spline: cells, power diagram, margins, references.

    An SAE is affine on each of its cells, the sets of rows that keep the same latents. Counted are the cells that the
    rows visit, and for topk and abs-topk how many rows lie in the cell of their nearest power sites: the theory says
    all. The margin is a row's exact distance to the boundary of its cell; the local complexity, how many boundaries
    pass within --radius of it. The references are fitted on training rows: a k-means autoencoder, and local PCA of
    the SAE's rank, the best that is affine on each of its cells.

    Example: sae geometry first --plot geometry.png
    """
    session = start(ctx, json, plot)
    if not radius > 0:
        raise ConfigError(f"--radius must be above 0, got {radius:g}")
    if plot is None and ctx.get_parameter_source("slice_").name != "DEFAULT":
        raise ConfigError("--slice does nothing without --plot; leave it out, or name a picture with --plot")
    corners = _corners(slice_)
    one = measured(session, run, data, split, "cpu")
    marked = _rows_at(one.rows, corners)
    cells, degenerate = cells_of(one.sae), Degenerate.of(one.sae)
    with torch.no_grad():
        survey = gather(cells, _batches(session, one, rows))
        document = _measure(session, one, survey, degenerate, radius)
        if plot is not None:
            _draw(plot, one, survey, document, corners, marked)
            session.report.note(f"drew {plot}")
    title = f"{document['run']} on {document['data']}, {split} rows"
    session.report.result(document, table(title, ["measure", "value", "detail"], _shown(document)))


def _corners(text: str) -> tuple[int, ...]:
    """The row numbers of `--slice`; none for `pca`."""
    if text == "pca":
        return ()
    words = text.split(",")
    if len(words) != 3 or not all(word.strip().isdecimal() for word in words):
        raise ConfigError(f"--slice must be pca or three row numbers like 0,5,9, got {text!r}")
    return tuple(int(word) for word in words)


def _rows_at(rows: Rows, numbers: tuple[int, ...]) -> Tensor:
    """The rows of those numbers in stored order, (len(numbers), D)."""
    if numbers and max(numbers) >= rows.rows:
        raise ConfigError(f"--slice names row {max(numbers)}, but the split has {rows.rows:,} rows, counted from 0; "
                          f"choose lower numbers")
    found: dict[int, Tensor] = {}
    start_of = 0
    for batch in rows.sequential(1024) if numbers else ():
        found |= {n: torch.from_numpy(batch[n - start_of].copy()) for n in numbers
                  if start_of <= n < start_of + len(batch)}
        start_of += len(batch)
        if len(found) == len(set(numbers)):
            break
    return torch.stack([found[n] for n in numbers]) if numbers else torch.empty(0, rows.d_in)


def _first(rows: Rows, most: int, size: int) -> Iterator[NDArray[np.float32]]:
    """All rows in batches of `size`, or where there are more than `most`, so many in random order."""
    most = min(most, rows.rows)
    batches = rows.sequential(size) if rows.rows == most else rows.batches(size, seed=SAMPLE_SEED, epoch=0)
    left = most
    for batch in islice(batches, -(-most // size)):
        yield batch[:left]
        left -= len(batch)


def _batches(session: Session, one: Measured, most: int) -> Iterator[Tensor]:
    """The rows to measure, progress shown."""
    done = 0
    with session.report.progress(f"measuring {one.subject.name}", min(most, one.rows.rows), "rows") as show:
        for batch in _first(one.rows, most, batch_size(one.sae.d_sae)):
            yield torch.from_numpy(batch)
            done += len(batch)
            show(done)


def _training_sample(one: Measured) -> NDArray[np.float32]:
    """Rows that the references are fitted on, (N, D): those that the run was trained on, or a sample of them."""
    rows = one.rows.store.split("train", fraction=one.subject.fraction, seed=one.subject.split_seed)
    return np.concatenate([batch.copy() for batch in _first(rows, sample_capacity(rows.d_in), 1024)])


def _measure(session: Session, one: Measured, survey: Survey, degenerate: Degenerate, radius: float) -> dict[str, Any]:
    """The command's document."""
    census = survey.census
    with session.report.progress("comparing with power diagram, k-means and local PCA", None, "steps"):
        diagram = survey.agreement_measures(one.sae)
        complexity = survey.complexity_measures(radius)
        compared = references(one.sae, _training_sample(one), survey.sample.rows, round(census.l0))
    possible = survey.cells.possible_log10
    return {**one.heading, "act": one.sae.activation.name, "rows": census.rows, "l0": census.l0,
            "cells_visited": census.visited, "cells_possible_log10": possible,
            "cells_share_log10": math.log10(census.visited) - possible, "occupancy": census.occupancy(),
            "rank": survey.rank_measures(), "degenerate": asdict(degenerate),
            "power_diagram": diagram, "margin": survey.margin_measures(),
            "complexity": complexity, "references": asdict(compared)}


def _shown(document: dict[str, Any]) -> list[list[Any]]:
    """The lines that people see: what, how much, and of what."""
    occupancy, margin, near = document["occupancy"], document["margin"], document["complexity"]
    diagram, compared = document["power_diagram"], document["references"]
    bad, rank = document["degenerate"], document["rank"]
    own = diagram and diagram["own_sites"]
    agreement = [] if diagram is None else [
        ["rows in their nearest power cell", diagram["agreement"],
         f"of {diagram['rows'] - diagram['ties']:,} rows, {diagram['ties']:,} ties left out; order {diagram['order']}, "
         f"{diagram['sites']:,} sites"],
        ["rows nearest to their own cell's site", own["agreement"],
         f"of {own['rows'] - own['ties']:,} rows, {own['ties']:,} ties left out; {own['cells']:,} cells compared"]]
    return [
        ["rows", document["rows"], f"{number(document['l0'])} latents kept in a row"],
        ["cells visited", document["cells_visited"], f"of 10^{document['cells_possible_log10']:.1f} possible"],
        ["cells with one row", occupancy["singletons"], f"fullest cell {occupancy['max']:,} rows"],
        ["effective number of cells", occupancy["effective"], f"entropy {number(occupancy['entropy'])} nats"],
        ["rank of the map on a cell, median", rank["median"],
         f"{100 * rank['full']:.3g}% of {rank['cells']:,} cells as high as their latents allow"],
        *([["latents without a direction", bad["zero_encoder"], f"{bad['zero_decoder']:,} with a decoder of zeros"]]
          if bad["zero_encoder"] or bad["zero_decoder"] else []),
        *([["latents equal to another", bad["equal_encoder"], f"{bad['equal_decoder']:,} with another's decoder"]]
          if bad["equal_encoder"] or bad["equal_decoder"] else []),
        *agreement,
        ["margin, median", margin["median"], f"middle nine tenths {number(margin['p5'])} to {number(margin['p95'])}"],
        ["margin over row norm, median", margin["relative"]["median"],
         f"middle nine tenths {number(margin['relative']['p5'])} to {number(margin['relative']['p95'])}"],
        ["local complexity, median", near["median"],
         f"{near['boundary']} within {number(near['radius'])} of a row, over {near['rows']:,} rows"],
        ["FVU of k-means", compared["kmeans_fvu"],
         f"{compared['kmeans_cells']:,} cells, fitted on {compared['rows_fitted']:,} training rows"],
        ["FVU of the SAE", compared["sae_fvu"], f"over {compared['rows_measured']:,} rows, as the other two"],
        ["FVU of local PCA", compared["local_pca_fvu"],
         f"{compared['local_pca_cells']:,} cells of rank {compared['local_pca_rank']:,}"]]


def _draw(path: Path, one: Measured, survey: Survey, document: dict[str, Any], corners: tuple[int, ...],
          marked: Tensor) -> None:
    from ..plots import GeometryPicture, geometry

    plane = Plane.through(marked) if corners else Plane.principal(survey.sample.rows)
    points = plane.coordinates(torch.from_numpy(survey.sample.rows))
    places = plane.coordinates(marked)
    caption = (f"on the plane through rows {', '.join(map(str, corners))}, rows projected on it" if corners
               else "on the plane of principal components 1 and 2, rows projected on it" if one.sae.d_in > 2
               else "and the rows")
    compared = document["references"]
    geometry(path, GeometryPicture(
        title=f"{document['run']} on {document['data']}", caption=caption,
        map=cell_map(cells_of(plane.section(one.sae)), window_of(points, places), pixels_for(one.sae.d_sae)),
        points=points.numpy(), marks=dict(zip(corners, places.numpy(), strict=True)),
        margins=survey.margins.rows[:, 0], sizes=survey.census.sizes(),
        references={"k-means": compared["kmeans_fvu"], "SAE": compared["sae_fvu"],
                    "local PCA": compared["local_pca_fvu"]}))
