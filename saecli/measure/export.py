"""`export`: an SAE in another library's format, and what changes where only a stand-in can be written."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..base.console import Listener, listening
from ..base.errors import ConfigError, FormatError, StoreError, unknown_choice
from ..base.home import Home
from ..sae import formats
from ..sae.dictionary import SAE, Batch
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
        change = (f"{CLIPPING.format(to=self.format)}: wrote {self.written.sae.activation.name}, which {self.format} "
                  "calls topk")
        if not found["rows_that_differ"]:
            return f"{change}; both give the same codes on all {found['rows']:,} held-out rows of {found['data']}"
        return (f"{change}; {found['rows_that_differ'] / found['rows']:.2%} of the {found['rows']:,} held-out rows of "
                f"{found['data']} have negative codes, which become 0: predictions change by up to "
                f"{found['max_difference']:.3g}, and fvu goes from {found['fvu']:.4g} to {found['fvu_written']:.4g}")


def converted(saved: SavedSAE, to: str, held_out: Callable[[], Measured], listener: Listener) -> Conversion:
    """Convert an SAE to a format; if that takes a stand-in, measure the difference on held-out rows.

    Args:
        held_out: opens the SAE and its held-out rows, if they are needed.

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
    try:
        one = held_out()
    except StoreError as error:
        raise ConfigError(f"{CLIPPING.format(to=to)}; writing {instead.sae.activation.name} instead needs rows to "
                          f"measure the difference on, but {error}") from error
    return Conversion(to, instead, _deviation(one, instead.sae, listener))


def can_be_written(saved: SavedSAE, to: str) -> bool:
    """Whether a format can express an SAE or its stand-in."""
    return any(one is not None and not FORMATS[to].lacks(one) for one in (saved, stand_in(saved)))


@torch.no_grad()
def _deviation(one: Measured, instead: SAE, listener: Listener) -> dict[str, Any]:
    """The differences between an SAE and its stand-in on the held-out rows."""
    sae, instead = one.sae, instead.copy_to(one.sae.W_enc.device)
    exact, changed = (Reconstruction(sae.d_out, sae.d_sae) for _ in range(2))
    differ, largest = 0, 0.0
    for rows in one.batches(listener):
        batch = Batch.of(rows, sae.d_in)
        z, other = sae.codes(batch.x), instead.codes(batch.x)
        y_hat, other_hat = sae.predicted(batch.x, z)[:, -1], instead.predicted(batch.x, other)[:, -1]
        exact.update(batch.y, y_hat, z)
        changed.update(batch.y, other_hat, other)
        differ += int((z.dense() != other.dense()).any(1).sum())
        largest = max(largest, float((y_hat - other_hat).abs().max()))
    return {"data": one.heading["data"], "rows": one.rows.rows, "rows_that_differ": differ,
            "max_difference": largest, "fvu": exact.result()["fvu"], "fvu_written": changed.result()["fvu"]}


def export(sae: SAELike, to: str, out: str | Path, data: RowsLike = None, *, home: str | Path | Home | None = None,
           progress: bool | Listener = False) -> dict[str, Any]:
    """Write an SAE in another library's format; CLI equivalent: `sae export`.

    If the format lacks the activation but has one that can stand in for it, that is written, and the difference is
    measured on held-out rows; `save_sae` refuses instead.

    Args:
        sae, home, progress: as in `evaluate`.
        to: saelens, sparsify, dictionary-learning, gemma-scope, gemma-scope-2, circuit-tracer or native; also with _
            for -.
        out: folder to write, new or empty; it appears whole or not at all.
        data: rows to measure the difference on, as in `evaluate`.

    Returns:
        The document that `sae export --json` prints; its `deviation` is the difference measured, None without one.

    Raises:
        FormatError: the folder is in use, or the format cannot express the SAE.
        ConfigError: there are no rows to measure the difference on, or `data` is given and there is no difference.
    """
    if (to := formats.named(to)) not in WRITABLE:
        raise unknown_choice("to", to, WRITABLE)
    home, listener, out = Home.at(home), listening(progress), Path(out)
    subject, saved = open_sae(home, sae, listener)
    found = converted(saved, to, lambda: measured(home, sae, data, "test", "auto", listener), listener)
    if found.deviation is None and data is not None:
        raise ConfigError(f"--data does nothing here: {to} expresses {saved.sae.activation.name} exactly; leave it "
                          "out", option="data")
    formats.save(found.written, to, out)
    if found.remark is not None:
        advice = f"; train with --act {found.written.sae.activation.name} to have the same SAE in both"
        listener.note(found.remark + (advice if found.deviation and found.deviation["rows_that_differ"] else ""))
    return {"run": subject.name, "format": to, "path": str(out), "activation": saved.sae.activation.name,
            "written_as": found.written.sae.activation.name, "deviation": found.deviation,
            "files": sorted(path.name for path in out.iterdir())}
