"""Converting an SAE to another library's format, measuring the difference, and writing it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..base.console import Listener, listening
from ..base.errors import ConfigError, FormatError, StoreError
from ..base.home import Home
from ..sae import formats
from ..sae.batch import Batch
from ..sae.dictionary import SAE
from ..sae.formats import FORMATS, WRITABLE, SavedSAE, stand_in
from ..sae.library import SAELike, open_sae
from ..sae.metrics import Reconstruction
from .measured import Measured, RowsLike, measured

CLIPPING = ("the topk of {to} applies a ReLU to the k largest pre-activations, and topk here keeps their "
            "signs")  # why `stand_in` stands in


@dataclass(frozen=True)
class Conversion:
    """An SAE converted to a format.

    Args:
        format: one of `FORMATS`.
        written: the SAE to write: the one given, or its stand-in if the format lacks the activation.
        deviation: of a stand-in from the one given on held-out rows: `data`, `rows`, `rows_that_differ`,
            `max_difference`, `fvu`, `fvu_written`.
    """

    format: str
    written: SavedSAE
    deviation: dict[str, Any] | None = None

    @property
    def remark(self) -> str | None:
        """A sentence on the deviation, if any."""
        if (found := self.deviation) is None:
            return None
        instead = self.written.sae.activation.name
        change = f"{CLIPPING.format(to=self.format)}: wrote {instead}, which {self.format} calls topk"
        if not found["rows_that_differ"]:
            return (f"{change}; the two agree on all {found['rows']:,} held-out rows of {found['data']}, none of which "
                    "has a negative code")
        return (f"{change}; {found['rows_that_differ'] / found['rows']:.2%} of the {found['rows']:,} held-out rows of "
                f"{found['data']} have negative codes, which become 0: predictions change by up to "
                f"{found['max_difference']:.3g}, and fvu goes from {found['fvu']:.4g} to {found['fvu_written']:.4g}")


def converted(saved: SavedSAE, to: str, held_out: Callable[[], Measured], listener: Listener) -> Conversion:
    """Convert an SAE to a format; if that takes a stand-in, measure the difference on held-out rows.

    Args:
        saved: the SAE.
        to: one of `FORMATS`.
        held_out: opens the SAE and its held-out rows, if they are needed.
        listener: shows progress.

    Raises:
        FormatError: the format can express neither the SAE nor its stand-in.
        ConfigError: there are no rows to measure the difference on.
    """
    lacking, instead = FORMATS[to].lacks(saved), stand_in(saved)
    if lacking is None:
        return Conversion(to, saved)
    if instead is None or not can_be_written(saved, to):
        others = [name for name in FORMATS if name != "native" and can_be_written(saved, name)]
        advice = (f"use {' or '.join(others)}" if others else "no library here can: hand on the run folder, whose "
                                                              "sae.safetensors this tool reads")
        raise FormatError(f"{to} cannot express {lacking}; {advice}")
    return Conversion(to, instead, _deviation(saved.sae, instead.sae, to, held_out, listener))


def can_be_written(saved: SavedSAE, to: str) -> bool:
    """Whether a format can express an SAE or its stand-in."""
    return any(one is not None and not FORMATS[to].lacks(one) for one in (saved, stand_in(saved)))


@torch.no_grad()
def _deviation(sae: SAE, stand_in: SAE, to: str, held_out: Callable[[], Measured],
               listener: Listener) -> dict[str, Any]:
    """The differences between an SAE and its stand-in on the held-out rows."""
    try:
        one = held_out()
    except StoreError as error:
        raise ConfigError(f"{CLIPPING.format(to=to)}; writing {stand_in.activation.name} in its place needs rows to "
                          f"measure the difference on, but {error}") from error
    sae, stand_in = one.sae, stand_in.copy_to(one.sae.W_enc.device)
    exact, instead = (Reconstruction(sae.d_out, sae.d_sae) for _ in range(2))
    differ, largest = 0, 0.0
    for rows in one.batches(listener):
        batch = Batch.of(rows, sae.d_in)
        x, y = batch.x, batch.y
        z, other = sae.codes(x), stand_in.codes(x)
        y_hat, other_hat = sae.predicted(x, z)[:, -1], stand_in.predicted(x, other)[:, -1]
        exact.update(y, y_hat, z)
        instead.update(y, other_hat, other)
        differ += int((z.dense() != other.dense()).any(1).sum())
        largest = max(largest, float((y_hat - other_hat).abs().max()))
    return {"data": one.heading["data"], "rows": one.rows.rows, "rows_that_differ": differ,
            "max_difference": largest, "fvu": exact.result()["fvu"], "fvu_written": instead.result()["fvu"]}


def export(sae: SAELike, to: str, out: str | Path, data: RowsLike = None, *, home: str | Path | None = None,
           progress: bool = False) -> dict[str, Any]:
    """Write an SAE in another library's format, as `sae export` does.

    If the format lacks the activation but has one that can stand in for it, that is written, and the difference is
    measured on held-out rows; `save_sae` refuses instead.

    Args:
        sae: as in `evaluate`.
        to: saelens, sparsify, dictionary-learning, gemma-scope, gemma-scope-2, circuit-tracer or native; also with _
            for -.
        out: folder to write, new or empty; it appears whole or not at all.
        data: rows to measure the difference on, as in `evaluate`.
        home: as in `evaluate`.
        progress: as in `evaluate`.

    Returns:
        The document that `sae export --json` prints; its `deviation` is the difference measured, None without one.

    Raises:
        ConfigError: there is no such format, there are no rows to measure the difference on, or `data` is given and
            there is no difference.
        FormatError: the folder is in use, or the format cannot express the SAE.
        SaeError: as in `evaluate`.
    """
    if formats.named(to) not in WRITABLE:
        raise ConfigError(f"--to must be one of {', '.join(WRITABLE)}, got {to!r}", option="to")
    return exported(Home.at(home), sae, formats.named(to), Path(out), data, listening(progress))


def exported(home: Home, sae: SAELike, to: str, out: Path, data: RowsLike, listener: Listener) -> dict[str, Any]:
    """As `export`, with a listener for notes and progress."""
    subject, saved = open_sae(home, sae, listener)
    found = converted(saved, to, lambda: measured(home, sae, data, "test", "auto", listener), listener)
    if found.deviation is None and data is not None:
        raise ConfigError(f"--data does nothing here: {to} expresses {saved.sae.activation.name} exactly; leave it "
                          "out", option="data")
    formats.save(found.written, to, out)
    if found.remark is not None:
        advice = f"; train with --act {found.written.sae.activation.name} to have the same SAE in both"
        listener.note(found.remark + (advice if found.deviation["rows_that_differ"] else ""))
    return {"run": subject.name, "format": to, "path": str(out), "activation": saved.sae.activation.name,
            "written_as": found.written.sae.activation.name, "deviation": found.deviation,
            "files": sorted(path.name for path in out.iterdir())}
