"""The commands' pictures as matplotlib figures, for notebooks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..base.console import listening
from ..base.errors import ConfigError
from ..base.home import Home
from ..base.options import demand_known, options_of
from ..base.words import unknown_choice
from ..geometry import GeometryConfig
from ..geometry.geometry import measure_geometry
from ..measure.evaluate import compare_measured, sparsity_document
from ..measure.measured import ChosenRows, RowsLike
from ..measure.stability import stability
from ..sae.library import SAELike
from ..sae.metrics import firing
from ..store.split import Which
from ..train.runs import read_metrics
from . import pictures
from .geometry import draw_geometry, rows_of_slice
from .measures import PICTURED_ROWS, sparsest_first

PICTURES: dict[str, Sequence[str]] = {  # and their options
    "loss": (),
    "frontier": ("target",),
    "sparsity": ("target",),
    "geometry": (*options_of(GeometryConfig), "slice_"),
    "stability": ("match_threshold",),
    "probe": ("model", "layer", "site", "module", "sets", "rows", "k", "context"),
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
        saes: as in `load_sae`; none for the newest run. loss takes names of runs, a figure each; geometry one SAE.
        data, split, device, home, progress: as in `evaluate`; loss and probe need neither data nor split.
        **options: further options of `geometry` (with `slice_`), `probe`, `stability`; `target` of frontier, sparsity.
    """
    if picture not in PICTURES:
        raise unknown_choice("picture", picture, PICTURES)
    demand_known(picture, options, PICTURES[picture])
    at, listener = Home.at(home), listening(progress)
    if picture == "loss":
        names = [None if name is None else str(name) for name in saes or [None]]
        folders = [at.runs.find(name) for name in names]
        return [pictures.loss_curves(None, folder.name, read_metrics(folder)) for folder in folders]
    if picture == "probe":
        from ..measure.probes import probe  # imports transformers, which takes seconds

        probes = probe(saes, device=device, home=at.path, progress=progress, **options)
        return [pictures.probes(None, probes)]
    if picture == "stability":
        document = stability(
            saes, data, split=split, device=device, home=at.path, progress=progress, **options
        )
        return [pictures.stability(None, document)]
    if picture == "geometry":
        if len(saes) > 1:
            raise ConfigError(f"geometry is drawn of one SAE, got {len(saes)}; draw each by itself")
        corners, settings = options.pop("slice_", "pca"), GeometryConfig(**options)
        (run,) = ChosenRows(at, data, split, "cpu", listener).with_all(saes)
        marked = rows_of_slice(run.of_store, corners)
        return [draw_geometry(None, measure_geometry(run, settings, listener), marked)]
    runs = ChosenRows(at, data, split, device, listener, **options).with_all(saes)
    if picture == "frontier":
        ranked = sparsest_first(compare_measured(runs, None, None, listener))
        families = {run.subject.name: run.family for run in runs}
        return [pictures.frontier(None, ranked, families)]
    tallies = [firing(run.sae, run.inputs(listener), PICTURED_ROWS) for run in runs]
    documents = [
        sparsity_document(run, tally, listener) for run, tally in zip(runs, tallies, strict=True)
    ]
    return [drawn for _, drawn in pictures.sparsity(None, tallies, documents)]
