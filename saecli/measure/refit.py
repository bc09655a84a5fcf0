"""The exact decoder for a store's rows, measured and saved as a run."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.console import Listener, listening
from ..base.documents import RUN_VERSION
from ..base.errors import RunError
from ..base.files import folder_appearing_whole, is_free, write_json
from ..base.home import RUN_MARKER, Home, checked_name, now
from ..sae.activations import activation_to_json
from ..sae.dictionary import SAE
from ..sae.formats import SavedSAE, save_native
from ..sae.library import SAELike, origin_of
from ..store.joined import Joined
from ..store.reader import ActivationStore, RowSource
from ..train.refit_decoder import Refitted, refitted
from ..train.ridge import TOLERANCE
from ..train.rows import ArrayLike
from .evaluate import check_model, check_tokens_of_model, evaluated, note_doubts
from .measured import Measured, RowsLike, measured

HELD = 100  # if the ridge over the mean Gram diagonal is larger, the old decoder is kept but for its scale
WORSE = 1.001  # FVU ratio above which the refit is worse


def refit(sae: SAELike = None, data: RowsLike = None, *, target: ArrayLike | str | None = None, device: str = "auto",
          home: str | Path | Home | None = None, progress: bool | Listener = False) -> SAE:
    """An SAE with the exact decoder for given rows, its codes as they are; no files are written.

        sum over rows of ||z W_dec + b_dec - y||^2 + alpha ||W_dec - c T0||_F^2

    is minimised over W_dec, b_dec and c, T0 being the SAE's own W_dec, and alpha the best by leave-one-out; y are the
    rows x, or a transcoder's targets, to which its skip, `x W_skip`, is fitted too.

    Args:
        sae, target, device, home, progress: as in `evaluate`.
        data: a store or its name in the home, whose training rows are read; otherwise as in `evaluate`.

    Returns the SAE, on the device, acting on raw activations. Cost: one pass over the rows.
    """
    listener = listening(progress)
    one = measured(Home.at(home), sae, data, "train", device, listener, target)
    rows = _training_rows(one) if data is None or isinstance(data, ActivationStore | Joined | str) else one.rows
    return refitted(one.sae, rows, listener).sae.copy_to(one.sae.W_enc.device)  # row-major, as from a file


def refitted_run(run: SAELike = None, data: RowsLike = None, *, target: str | None = None, name: str | None = None,
                 model: str | None = None, tokens: int | None = None, device: str = "auto",
                 home: str | Path | Home | None = None, progress: bool | Listener = False) -> dict[str, Any]:
    """Refit an SAE on a store's training rows, measure both on its held-out rows, and save a run, by default
    `refit-NAME`; returns the document that `sae refit --json` prints."""
    home, listener = Home.at(home), listening(progress)
    check_tokens_of_model(tokens, model)
    before = measured(home, run, data, "test", device, listener, target)
    folder = home.runs.path / checked_name(name or default_name(before.subject.name))
    if not is_free(folder):
        raise RunError(f"there is a run named {folder.name!r} already; give another --name")
    if model is not None:
        check_model(before, model)
    created, began, rows = now(), time.monotonic(), _training_rows(before)
    found = refitted(before.sae, rows, listener)
    seconds = time.monotonic() - began
    stores, source = before.stores, before.subject.name
    sae = found.sae.copy_to(found.sae.W_enc.device)  # row-major, as from its file
    saved = SavedSAE(sae, before.saved.origin | origin_of(stores, before.subject.split_seed))
    after = replace(before, subject=replace(before.subject, name=folder.name, dead_fraction=found.dead_fraction),
                    saved=saved)
    measures = evaluated([before, after], model, tokens, listener)
    note_doubts(measures[1:], [after], listener)
    decoder = found.decoder
    final = {"test_fvu": measures[1]["fvu"], "test_mse": measures[1]["mse"], "test_l0": measures[1]["l0"],
             "dead_fraction": found.dead_fraction, "alpha": decoder.alpha, "relative_alpha": decoder.relative_alpha,
             "c": decoder.c, "condition": decoder.condition, "dof": decoder.dof}
    result = {"rows_train": found.rows, "rows_test": before.rows.rows, "seconds": seconds,
              "notes": _notes(found, *measures), "final": final}
    with folder_appearing_whole(folder) as temporary:
        save_native(saved, temporary)
        write_json(temporary / RUN_MARKER, {
            "format_version": RUN_VERSION, "created": created, "complete": True, **stores.names(),
            "training": {"split_seed": before.subject.split_seed, "fraction": 1.0, "d_sae": found.sae.d_sae},
            "solver": {"name": "refit", "source": source}, "activation": activation_to_json(found.sae.activation),
            "result": result})
    return {"run": folder.name, "path": str(folder), "source": source, "act": found.sae.activation.name,
            "data": stores.name, "d_in": stores.d_in, "d_sae": found.sae.d_sae, **result, "before": measures[0],
            "after": measures[1]}


def default_name(source: str) -> str:
    """The name of the run refitted from a source: a run's name, a path, or an address on the hub."""
    path, _, _ = source.partition("@") if not Path(source).exists() else (source, "", "")
    return f"refit-{Path(path).resolve().name or 'sae'}"


def _training_rows(one: Measured) -> RowSource:
    """All of them, whatever fraction the SAE was trained on."""
    return one.stores.split("train", seed=one.subject.split_seed)


def _notes(found: Refitted, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    decoder, said = found.decoder, []
    if decoder.relative_alpha > HELD:
        said.append(f"the old decoder is kept, times {decoder.c:.3g}: {found.rows:,} rows are too few to improve it")
    if after["fvu"] > WORSE * before["fvu"]:
        said.append(f"warning: FVU on held-out rows rose from {before['fvu']:.4g} to {after['fvu']:.4g}, so the old "
                    "decoder is the better one there; refit on more rows, on which the encoder was not trained")
    if decoder.residual > 2 * TOLERANCE:
        said.append(f"the decoder was solved to a residual of {decoder.residual:.1g} only, where {TOLERANCE:g} was "
                    "wanted; on a machine with more memory it would be solved directly")
    return said
