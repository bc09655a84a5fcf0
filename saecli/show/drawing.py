"""The commands' pictures as matplotlib figures, for notebooks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from ..base.console import Listener, listening
from ..base.errors import ConfigError
from ..base.home import Home
from ..base.options import demand_known, options_of
from ..base.words import unknown_choice
from ..geometry import GeometryConfig
from ..geometry.geometry import measure_geometry
from ..geometry.plane import rows_of_slice
from ..measure.evaluate import compare_measured, sparsity_document
from ..measure.measured import ChosenRows, Measured, RowsLike
from ..measure.stability import MATCH_THRESHOLD, stability
from ..sae.library import SAELike
from ..sae.metrics import firing
from ..store.split import Which
from ..train.runs import read_metrics
from . import pictures
from .geometry import draw_geometry
from .measures import PICTURED_ROWS, sparsest_first


@dataclass(frozen=True)
class _Subjects:
    """SAEs to draw, and where they are measured."""

    saes: Sequence[SAELike]
    data: RowsLike
    split: Which
    device: str
    home: Home
    listener: Listener

    def measured(self, target: Any = None, device: str | None = None) -> list[Measured]:
        chosen = ChosenRows(
            self.home, self.data, self.split, device or self.device, self.listener, target
        )
        return chosen.with_all(self.saes)


def _losses(subjects: _Subjects) -> list[Figure]:
    names = [None if name is None else str(name) for name in subjects.saes or [None]]
    folders = [subjects.home.runs.find(name) for name in names]
    return [pictures.draw_losses(None, folder.name, read_metrics(folder)) for folder in folders]


def _frontier(subjects: _Subjects, target: Any = None) -> list[Figure]:
    runs = subjects.measured(target)
    ranked = sparsest_first(compare_measured(runs, None, None, subjects.listener))
    return [pictures.draw_frontier(None, ranked, {run.subject.name: run.family for run in runs})]


def _sparsity(subjects: _Subjects, target: Any = None) -> list[Figure]:
    runs, listener = subjects.measured(target), subjects.listener
    tallies = [firing(run.sae, run.inputs(listener), PICTURED_ROWS) for run in runs]
    documents = [
        sparsity_document(run, tally, listener) for run, tally in zip(runs, tallies, strict=True)
    ]
    return [drawn for _, drawn in pictures.draw_sparsity(None, tallies, documents)]


def _geometry(
    subjects: _Subjects, slice_: str | Sequence[int] = "pca", **settings: Any
) -> list[Figure]:
    if len(subjects.saes) > 1:
        raise ConfigError(
            f"geometry is drawn of one SAE, got {len(subjects.saes)}; draw each by itself"
        )
    config = GeometryConfig(**settings)
    (run,) = subjects.measured(device="cpu")
    marked = rows_of_slice(run.of_store, slice_)
    return [draw_geometry(None, measure_geometry(run, config, subjects.listener), marked)]


def _stability(subjects: _Subjects, match_threshold: float = MATCH_THRESHOLD) -> list[Figure]:
    document = stability(
        subjects.saes,
        subjects.data,
        match_threshold=match_threshold,
        split=subjects.split,
        device=subjects.device,
        home=subjects.home,
        progress=subjects.listener,
    )
    return [pictures.draw_stability(None, document)]


def _probes(subjects: _Subjects, **options: Any) -> list[Figure]:
    from ..measure.probes import probe  # imports transformers, which takes seconds

    document = probe(
        subjects.saes,
        device=subjects.device,
        home=subjects.home,
        progress=subjects.listener,
        **options,
    )
    return [pictures.draw_probes(None, document)]


class Picture(NamedTuple):
    figures: Callable[..., list[Figure]]
    options: Sequence[str] = ()


PICTURES = {
    "loss": Picture(_losses),
    "frontier": Picture(_frontier, ["target"]),
    "sparsity": Picture(_sparsity, ["target"]),
    "geometry": Picture(_geometry, [*options_of(GeometryConfig), "slice_"]),
    "stability": Picture(_stability, ["match_threshold"]),
    "probe": Picture(_probes, ["model", "layer", "site", "module", "sets", "rows", "k", "context"]),
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
    figures, names = PICTURES[picture]
    demand_known(picture, options, names)
    subjects = _Subjects(saes, data, split, device, Home.at(home), listening(progress))
    return figures(subjects, **options)
