"""The commands' pictures as matplotlib figures, for notebooks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from ..base.console import listening
from ..base.errors import ConfigError
from ..base.home import Home
from ..base.options import all_arguments, demand_known
from ..base.words import unknown_choice
from ..geometry.functions import geometry
from ..geometry.geometry import Limits, measure_geometry, rows_of_slice
from ..measure.evaluate import compare_measured, sparsity_document
from ..measure.functions import probe
from ..measure.measured import ChosenRows, RowsLike
from ..measure.stability import MATCH_THRESHOLD, MatchBy, demand_several, stability_of
from ..sae.library import SAELike
from ..sae.metrics import firing
from ..store.split import Which
from ..train.runs import read_metrics
from . import pictures
from .geometry import draw_geometry
from .measures import PICTURED_ROWS, sparsest_first

SAEs = Sequence[SAELike]


def _losses(saes: SAEs, chosen: ChosenRows) -> list[Figure]:
    names = [None if name is None else str(name) for name in saes or [None]]
    folders = [chosen.home.runs.find(name) for name in names]
    return [pictures.draw_losses(None, folder.name, read_metrics(folder)) for folder in folders]


def _frontier(saes: SAEs, chosen: ChosenRows, target: Any = None) -> list[Figure]:
    runs = replace(chosen, target=target).with_all(saes)
    ranked = sparsest_first(compare_measured(runs, None, None, chosen.listener))
    return [pictures.draw_frontier(None, ranked, {run.subject.name: run.family for run in runs})]


def _sparsity(saes: SAEs, chosen: ChosenRows, target: Any = None) -> list[Figure]:
    runs, listener = replace(chosen, target=target).with_all(saes), chosen.listener
    tallies = [firing(run.sae, run.inputs(listener), PICTURED_ROWS) for run in runs]
    documents = [
        sparsity_document(run, tally, listener) for run, tally in zip(runs, tallies, strict=True)
    ]
    return [figure for _, figure in pictures.draw_sparsity(None, tallies, documents)]


def _geometry(
    saes: SAEs, chosen: ChosenRows, slice_: str | Sequence[int] = "pca", **options: Any
) -> list[Figure]:
    if len(saes) > 1:
        raise ConfigError(f"geometry is drawn of one SAE, got {len(saes)}; draw each by itself")
    arguments = all_arguments(geometry, options)
    limits = Limits(arguments["rows"], arguments["fit_rows"], arguments["radius"])
    (run,) = replace(chosen, device="cpu").with_all(saes)
    marked = rows_of_slice(run.of_store, slice_)
    return [draw_geometry(None, measure_geometry(run, limits, chosen.listener), marked)]


def _stability(
    saes: SAEs,
    chosen: ChosenRows,
    match_threshold: float = MATCH_THRESHOLD,
    match_by: MatchBy = "decoder",
) -> list[Figure]:
    demand_several(len(saes))
    document = stability_of(chosen.with_all(saes), chosen.listener, match_threshold, match_by)
    return [pictures.draw_stability(None, document)]


def _probes(saes: SAEs, chosen: ChosenRows, **options: Any) -> list[Figure]:
    device, home, listener = chosen.device, chosen.home, chosen.listener
    return [
        pictures.draw_probes(
            None, probe(saes, device=device, home=home, progress=listener, **options)
        )
    ]


class Picture(NamedTuple):
    figures: Callable[..., list[Figure]]  # of SAEs, rows and options
    options: Sequence[str] = ()


PROBE_OPTIONS = ("model", "layer", "site", "module", "sets", "rows", "k", "context")
PICTURES = {
    "loss": Picture(_losses),
    "frontier": Picture(_frontier, ["target"]),
    "sparsity": Picture(_sparsity, ["target"]),
    "geometry": Picture(_geometry, ["rows", "fit_rows", "radius", "slice_"]),
    "stability": Picture(_stability, ["match_threshold", "match_by"]),
    "probe": Picture(_probes, PROBE_OPTIONS),
}


def draw(
    picture: str,
    *saes: SAELike,
    data: RowsLike = None,
    split: Which = "test",
    device: str = "auto",
    home: str | Path | None = None,
    progress: bool = False,
    **options: Any,
) -> list[Figure]:
    """Figures as by a command's `--plot`: loss, frontier (`sae eval`), sparsity, geometry, stability or probe.

    Args:
        saes: none for the newest run. loss takes names of runs, a figure each; geometry one SAE.
        data, split, device, home, progress: as in `evaluate`; loss and probe need neither data nor split.
        **options: further options of `geometry` (with `slice_`), `probe`, `stability`; `target` of frontier, sparsity.
    """
    if picture not in PICTURES:
        raise unknown_choice("picture", picture, PICTURES)
    figures, names = PICTURES[picture]
    demand_known(picture, options, names)
    chosen = ChosenRows(Home.at(home), data, split, device, listening(progress))
    return figures(saes, chosen, **options)
