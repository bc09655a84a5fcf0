"""How often latents fire on rows, and pictures of it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..console import Listener, listening
from ..home import Home
from ..metrics import Firing, firing
from .sae_and_rows import Measured, RowsLike, SAELike, measured

PICTURED_ROWS = 200
NAMED = 40  # letters of a run's name in that of its picture: a folder's whole path may be too long for a file's name


def sparsity(sae: SAELike = None, data: RowsLike = None, *, split: str = "test", device: str = "auto",
             home: str | Path | None = None, progress: bool = False) -> dict[str, Any]:
    """Count how often an SAE's latents fire on rows, as `sae sparsity` does.

    Args:
        sae: as of `evaluate`, which explains the others too.

    Returns:
        What `sae sparsity --json` prints of a run: `run`, `data` and `split`, the measures of `Firing.result`, among
        them `frequency`, the share of the rows that each latent fires on, and `dead_fraction`.

    Raises:
        SaeError: as of `evaluate`.
    """
    listener = listening(progress)
    one = measured(Home.at(home), sae, data, split, device, listener)
    return sparsity_document(one, firing(one.sae, one.batches(listener)))


def tallied(everything: Sequence[Measured], pictured: bool, listener: Listener) -> list[Firing]:
    """How often the latents of each SAE fire on its rows.

    Args:
        everything: the SAEs and their rows.
        pictured: keep the first rows' codes, for `draw_sparsity`.
        listener: told how far it has come.
    """
    return [firing(one.sae, one.batches(listener), PICTURED_ROWS if pictured else 0) for one in everything]


def sparsity_document(one: Measured, counts: Firing) -> dict[str, Any]:
    """What `sae sparsity --json` prints of a run."""
    return one.heading | counts.result() | {"dead_fraction": one.subject.dead_fraction}


def draw_sparsity(path: Path, tallies: Mapping[str, Firing]) -> list[Path]:
    """Draw histograms of L0 and of frequencies, and beside them, one a run, the first rows' codes.

    Args:
        path: where the histograms go; the others' names begin as its does.
        tallies: by run, as of `tallied`.

    Returns:
        The pictures' paths.
    """
    from ..plots import firing as histograms  # matplotlib takes a second to import
    from ..plots import patterns

    histograms(path, {name: (one.l0_histogram, one.frequency) for name, one in tallies.items()})
    drawn = [path]
    for name, one in tallies.items():
        which = "-" + re.sub(r"[^\w.-]+", "-", name)[-NAMED:] if len(tallies) > 1 else ""
        picture = path.with_stem(f"{path.stem}-patterns{which}")
        drawn.append(path.with_stem(f"{picture.stem}-{len(drawn)}") if picture in drawn else picture)
        patterns(drawn[-1], one.patterns, name)
    return drawn
