"""The commands' pictures as matplotlib figures, for notebooks."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..base.console import listening
from ..base.errors import ConfigError, unknown_choice
from ..base.home import Home
from ..geometry.geometry import Settings, measure_geometry
from ..geometry.plane import rows_of_slice
from ..measure.evaluate import compare, sparsity_document
from ..measure.measured import RowsLike, open_all_measured
from ..measure.stability import stability
from ..sae.library import SAELike
from ..sae.metrics import firing
from ..store.split import Which
from ..train.files import read_metrics
from . import pictures
from .geometry import draw_geometry
from .measures import sparsest_first

PICTURED_ROWS = 200  # whose codes are drawn
PICTURES = ("loss", "frontier", "sparsity", "geometry", "stability", "probe")


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
        saes: as in `load_sae`; none for the newest run. loss takes names of runs, geometry one SAE.
        data, split, device, home, progress: as in `evaluate`.
        **options: further options of `geometry` (with `slice_`), `probe` or `stability`.
    """
    if picture not in PICTURES:
        raise unknown_choice("picture", picture, PICTURES)
    at, listener = Home.at(home), listening(progress)
    if picture == "loss":
        folders = [at.runs.find(None if name is None else str(name)) for name in saes or [None]]
        return [
            pictures.loss_curves(
                None, {folder.name: read_metrics(folder) for folder in folders}, **options
            )
        ]
    if picture == "probe":
        from ..measure.probes import probe  # imports transformers, which takes seconds

        return [
            pictures.probes(
                None, probe(saes, device=device, home=at.path, progress=progress, **options)
            )
        ]
    if picture == "stability":
        rows: dict[str, Any] = {
            "split": split,
            "device": device,
            "home": at.path,
            "progress": progress,
        }
        return [pictures.stability(None, stability(saes, data, **rows, **options))]
    if picture == "geometry":
        if len(saes) > 1:
            raise ConfigError(f"geometry is drawn of one SAE, got {len(saes)}; draw each by itself")
        corners, settings = options.pop("slice_", "pca"), Settings(**options)
        (run,) = open_all_measured(at, saes, data, split, "cpu", listener)
        marked = rows_of_slice(run.of_store, corners)
        return [draw_geometry(None, measure_geometry(run, settings, listener), marked)]
    everything = open_all_measured(at, saes, data, split, device, listener, **options)
    if picture == "frontier":
        ranked = sparsest_first(compare(everything, progress=progress))
        families = {one.subject.name: one.family for one in everything}
        return [
            pictures.frontier(
                None,
                {
                    run["run"]: (run["l0"], run["fvu"], families[run["run"]], run["unbeaten"])
                    for run in ranked
                },
            )
        ]
    tallies = [firing(one.sae, one.inputs(listener), PICTURED_ROWS) for one in everything]
    documents = [
        sparsity_document(one, counts, listener)
        for one, counts in zip(everything, tallies, strict=True)
    ]
    return [drawn for _, drawn in pictures.sparsity(None, tallies, documents)]
