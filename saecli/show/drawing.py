"""The commands' pictures as matplotlib figures, for notebooks."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..base.console import Listener, listening
from ..base.errors import ConfigError, unknown_choice
from ..base.home import Home
from ..geometry.geometry import found_in
from ..geometry.measures import Wanted, penalty_of
from ..geometry.plane_cells import rows_of_slice
from ..measure.evaluate import compare, sparsity_document
from ..measure.measured import RowsLike, all_measured, measured
from ..measure.stability import stability
from ..sae.dictionary import SAE
from ..sae.library import SAELike
from ..sae.metrics import firing
from ..train.logs import read_metrics
from .measures import sparsest_first

NOWHERE = Path("figure.png")  # a path for what draws, of which no file is written


def draw(picture: str, *saes: SAELike, data: RowsLike = None, split: str = "test", device: str = "auto",
         home: str | Path | None = None, progress: bool = False, **options: Any) -> list[Any]:
    """Draw what a command draws, as figures of matplotlib instead of a file; a notebook shows them.

    Args:
        picture: loss, the curves of runs' training; frontier, FVU against L0, as `sae eval --plot`; sparsity, geometry
            and probe, as those commands' --plot; stability, as of `sae eval --stability`.
        saes: runs' names, or whatever else `load_sae` takes; none for the newest run. loss takes runs alone, geometry
            one SAE.
        data: as of `evaluate`; loss and probe need none.
        split: as of `evaluate`.
        device: as of `evaluate`.
        home: as of `evaluate`.
        progress: as of `evaluate`.
        **options: further options of `geometry`, `probe` or `stability`.

    Returns:
        A list of `matplotlib.figure.Figure`; sparsity has one more for each SAE, and another for each crosscoder.

    Raises:
        ConfigError: there is no such picture, or an argument cannot work.
        SaeError: as of `evaluate`.
    """
    if picture not in PICTURES:
        raise unknown_choice("picture", picture, PICTURES)
    from .style import kept_figures  # matplotlib takes a second to import

    rows = {"data": data, "split": split, "device": device}
    with kept_figures() as figures:
        PICTURES[picture](saes, Home.at(home), listening(progress), rows, options)
    return figures


def _loss(saes: Sequence[SAELike], home: Home, listener: Listener, rows: dict[str, Any], options: Any) -> None:
    from .run_plots import loss_curves

    if any(isinstance(sae, SAE) for sae in saes):
        raise ConfigError("loss is drawn of runs, got an SAE in memory; name runs")
    folders = [home.runs.find(None if name is None else str(name)) for name in saes or [None]]
    loss_curves(NOWHERE, {folder.name: read_metrics(folder) for folder in folders}, **options)


def _frontier(saes: Sequence[SAELike], home: Home, listener: Listener, rows: dict[str, Any], options: Any) -> None:
    from .run_plots import frontier

    everything = all_measured(home, saes, listener=listener, **rows, **options)
    ranked = sparsest_first(compare(everything, progress=listener))
    kinds = {one.subject.name: one.sae.activation.name for one in everything}
    frontier(NOWHERE, {run["run"]: (run["l0"], run["fvu"], kinds[run["run"]], run["unbeaten"]) for run in ranked})


def _sparsity(saes: Sequence[SAELike], home: Home, listener: Listener, rows: dict[str, Any], options: Any) -> None:
    from .run_plots import sparsity

    everything = all_measured(home, saes, listener=listener, **rows, **options)
    tallies = [firing(one.sae, one.inputs(listener), 200) for one in everything]
    found = [sparsity_document(one, counts, listener) for one, counts in zip(everything, tallies, strict=True)]
    sparsity(NOWHERE, tallies, found)


def _geometry(saes: Sequence[SAELike], home: Home, listener: Listener, rows: dict[str, Any], options: Any) -> None:
    if len(saes) > 1:
        raise ConfigError(f"geometry is drawn of one SAE, got {len(saes)}; draw each by itself")
    from .geometry_plots import draw_geometry

    slice_, lambda_ = options.pop("slice_", "pca"), penalty_of(options.pop("lambda_", "auto"))
    one = measured(home, saes[0] if saes else None, rows["data"], rows["split"], "cpu", listener)
    marked = rows_of_slice(one.of_store, slice_)
    draw_geometry(NOWHERE, next(found_in([one], Wanted(**options, penalty=lambda_), listener)), marked)


def _stability(saes: Sequence[SAELike], home: Home, listener: Listener, rows: dict[str, Any], options: Any) -> None:
    from .stability_plots import stability as draw_stability

    draw_stability(NOWHERE, stability(saes, home=home.path, **rows, **options))


def _probe(saes: Sequence[SAELike], home: Home, listener: Listener, rows: dict[str, Any], options: Any) -> None:
    from ..measure.probe import probe  # imports transformers, which takes seconds
    from .probe_plots import probes

    probes(NOWHERE, probe(saes, home=home.path, device=rows["device"], **options))


PICTURES: dict[str, Callable[[Sequence[SAELike], Home, Listener, dict[str, Any], Any], None]] = {
    "loss": _loss, "frontier": _frontier, "sparsity": _sparsity, "geometry": _geometry, "stability": _stability,
    "probe": _probe}
