"""The exact decoder of an SAE for given rows, as `functions.refit` says; measured, and saved as a run.

T0 is the SAE's W_dec, unless that was fitted to the same rows: it fits each of them better than others, which
leave-one-out cannot know. Latents that never fire keep their weights, on other rows times c.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.console import Listener
from ..base.devices import batches_on, free_memory
from ..base.errors import MachineError, RunError, TrainingError
from ..base.files import folder_appearing_whole, is_free, write_json
from ..base.home import RUN_MARKER, Home, checked_name, now
from ..base.processes import ALONE
from ..measure.evaluate import evaluate_all, note_doubts
from ..measure.measured import Measured
from ..sae.activations import activation_to_json
from ..sae.codes import Codes
from ..sae.dictionary import SAE, Batch, Normalisation
from ..sae.formats import SavedSAE, save_native
from ..sae.run_documents import RUN_VERSION
from ..store.origin import Origin
from ..store.reader import RowSource
from ..train.moments import Moments, sampled_bytes
from ..train.ridge import (
    TOLERANCE,
    DecoderState,
    System,
    Terms,
    choose_alpha,
    method_for,
    optimal_decoder,
)
from ..train.rows import BLOCK_ROWS

HELD = 100  # if the ridge over the mean Gram diagonal is larger, the decoder is c T0
FIGURES = ("alpha", "relative_alpha", "c", "condition")  # of the solve, in `run.json`
NO_DECODER = (
    "the decoder cannot be solved for: expected finite products of codes and rows, got others; look "
    "at the SAE and at the rows for huge numbers"
)


@dataclass(frozen=True, eq=False)
class Refitted:
    sae: SAE  # acting on raw rows
    target: str  # T0, in words
    # In the SAE's metric, relative to T0; alpha is in units of the codes squared, times rows.
    decoder: DecoderState
    rows: int  # N
    dead_fraction: float  # of the latents, which fire on none of these rows


@torch.no_grad()
def refit_decoder(sae: SAE, rows: RowSource, listener: Listener, own: bool = False) -> Refitted:
    """The SAE with the exact decoder for these rows; `own`: on which it was trained. RunError if products are not
    finite, MachineError if memory is short.

    Cost: per row, codes and `K^2 + 2 D K` operations for K active latents; some seven factorisations, of F^3 / 3
    operations. Rows are read once; in each iteration too if neither normal equations nor codes fit in memory.
    """
    raw, metric = sae, sae.normalisation
    sae = raw.on_raw_rows(metric.inverse())
    with listener.progress("refitting the decoder", rows.rows, "rows") as show:
        moments = Moments(_system(sae, rows, metric), sae, "none", rows.rows)
        done = 0
        for batch in _batches(sae, rows, metric):
            moments.add(sae.codes(batch.x), batch)
            done += batch.size
            show(done)
        moments.reduce(ALONE)
        show(rows.rows, "choosing alpha")
        direction: Tensor | None = None
        if not own:
            target, direction = "the old decoder", sae.W_dec
        elif sae.widths or rows.d_target:
            target = "0"
        else:
            target, direction = "W_enc'", sae.W_enc.T.contiguous()
        state = _solve(sae, moments, direction)
    W_dec, b_dec = (tensor.to(sae.W_dec) for tensor in (state.W(direction), state.b))
    if own:
        W_dec[~moments.fired] = sae.W_dec[~moments.fired]
    if not (W_dec.isfinite().all() and b_dec.isfinite().all()):
        raise RunError(NO_DECODER)
    tensors = {"W_dec": W_dec, "b_dec": b_dec}
    if state.skip is not None and sae.W_skip is not None:
        tensors["W_skip"] = sae.W_skip + state.skip.to(sae.W_dec)
    on_raw_rows = sae.changed(None, **tensors).on_raw_rows(metric)
    tensors = {name: getattr(on_raw_rows, name) for name in tensors}
    row_major = raw.changed(None, **tensors).copy_to(raw.W_enc.device)  # as from its file
    dead_fraction = 1 - moments.fired.double().mean().item()
    return Refitted(row_major, target, state, rows.rows, dead_fraction)


def _solve(sae: SAE, moments: Moments, direction: Tensor | None) -> DecoderState:
    terms = Terms(
        alpha=0.0,
        direction=direction,
        W_t=sae.W_dec,
        b_t=sae.b_dec.new_zeros(moments.y.shape[1]),
        skip=moments.skip,
    )
    try:
        factorisation = choose_alpha(moments.system, terms, moments.z, moments.y, None)
        return optimal_decoder(moments.system, terms, factorisation)
    except TrainingError as error:  # which advises on training
        raise RunError(NO_DECODER) from error


def _system(sae: SAE, rows: RowSource, metric: Normalisation) -> System:
    width = sae.d_out + (0 if sae.W_skip is None else sae.d_in)
    batch_bytes = 3 * sae.W_enc.itemsize * BLOCK_ROWS * sae.d_sae
    other_bytes = sampled_bytes(rows.rows, width, sae.d_sae) + batch_bytes
    free = free_memory(sae.W_enc.device)
    memory_plan = method_for(rows.rows, sae.d_sae, width, free - other_bytes, prefixes=sae.prefixes)
    needed = memory_plan.bytes + other_bytes
    if needed > free:
        raise MachineError(
            f"refitting {sae.d_sae:,} latents needs {needed / 2**30:.1f} GiB of memory, "
            f"{free / 2**30:.1f} GiB are free; end other programs, or use a machine with more"
        )

    def codes_again() -> Iterator[Codes]:
        return (sae.codes(batch.x) for batch in _batches(sae, rows, metric))

    skip = sae.W_dec.new_zeros(sae.d_sae, width - sae.d_out)
    return memory_plan.system(torch.cat([sae.W_dec, skip], 1), codes_again)


def _batches(sae: SAE, rows: RowSource, metric: Normalisation) -> Iterable[Batch]:
    for batch in batches_on(rows.sequential(BLOCK_ROWS), sae.W_enc.device):
        yield Batch.of(metric(batch.to(sae.W_enc.dtype)), sae.d_in)


def run_folder(home: Home, measured: Measured, name: str | None) -> Path:
    source = measured.subject.name  # a run, a path, or an address on the hub
    path = Path(source if Path(source).exists() else source.partition("@")[0])
    folder = home.runs.path / checked_name(name or f"refit-{path.resolve().name or 'sae'}")
    if not is_free(folder):
        raise RunError(f"there is a run named {folder.name!r} already; give another --name")
    return folder


def refit_measured(
    before: Measured, folder: Path, model: str | None, tokens: int | None, listener: Listener
) -> dict[str, Any]:
    created, began = now(), time.monotonic()
    refitted = refit_decoder(before.sae, training_rows(before), listener, is_trained_on(before))
    seconds = time.monotonic() - began
    origin = before.stores.origin.trained(before.subject.split_seed, 1.0)
    after = replace(
        before,
        subject=replace(before.subject, name=folder.name, dead_fraction=refitted.dead_fraction),
        saved=SavedSAE(
            refitted.sae, Origin.from_json(before.saved.origin.to_json() | origin.to_json())
        ),
    )
    measures = evaluate_all([before, after], model, tokens, listener)
    _demand_gain(measures, before.sae.normalisation.metric, refitted.rows)
    note_doubts(measures[1:], [after], listener)
    result = _result(refitted, before, measures[1], seconds)
    _save(after, folder, before.subject.name, created, result)
    return {
        "run": folder.name,
        "path": str(folder),
        "source": before.subject.name,
        "act": refitted.sae.activation.name,
        "data": before.stores.name,
        "d_in": before.stores.d_in,
        "d_sae": refitted.sae.d_sae,
        "ridge_target": refitted.target,
        **result,
        "before": measures[0],
        "after": measures[1],
    }


def _demand_gain(measures: Sequence[dict[str, Any]], metric: str, rows: int) -> None:
    old, new = (document["metric_fvu"] for document in measures)
    if new > old:
        raise RunError(
            f"nothing is saved: expected the exact decoder for {rows:,} rows to lower FVU ({metric} metric) on "
            f"held-out rows, {old:.4g}, got {new:.4g}; keep the old one, or refit on more rows"
        )


def _result(
    refitted: Refitted, before: Measured, measures: dict[str, Any], seconds: float
) -> dict[str, Any]:
    return {
        "rows_train": refitted.rows,
        "rows_test": before.rows.rows,
        "seconds": seconds,
        "metric": before.sae.normalisation.metric,
        "notes": _notes(refitted),
        "final": {
            **{f"test_{name}": measures[name] for name in ("fvu", "mse", "l0")},
            "dead_fraction": refitted.dead_fraction,
            **{name: getattr(refitted.decoder, name) for name in FIGURES},
        },
    }


def _save(after: Measured, folder: Path, source: str, created: str, result: dict[str, Any]) -> None:
    seed = after.subject.split_seed
    document = {
        "format_version": RUN_VERSION,
        "created": created,
        "complete": True,
        **after.stores.names(),
        "training": {"split_seed": seed, "fraction": 1.0, "d_sae": after.sae.d_sae},
        "solver": {"name": "refit", "source": source},
        "activation": activation_to_json(after.sae.activation),
        "result": result,
    }
    with folder_appearing_whole(folder) as temporary:
        save_native(after.saved, temporary)
        write_json(temporary / RUN_MARKER, document)


def training_rows(measured: Measured) -> RowSource:
    return measured.stores.split("train", seed=measured.subject.split_seed)


def is_trained_on(measured: Measured) -> bool:
    in_stores = bool(measured.rows.inputs)
    return in_stores and measured.stores.hash == measured.subject.data_hash


def _notes(refitted: Refitted) -> list[str]:
    decoder, notes = refitted.decoder, []
    if refitted.sae.scale is None:
        notes.append("its file has no metric of training: ridge and FVU are of raw rows")
    if decoder.relative_alpha > HELD:
        notes.append(
            f"the decoder is {refitted.target} times {decoder.c:.3g}: {refitted.rows:,} rows are too few to improve it"
        )
    if decoder.residual > 2 * TOLERANCE:
        notes.append(
            f"the decoder was solved to a residual of {decoder.residual:.1g} only, where {TOLERANCE:g} "
            "was wanted; on a machine with more memory it would be solved directly"
        )
    return notes
