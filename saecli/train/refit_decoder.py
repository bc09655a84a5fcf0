"""The exact decoder of an SAE for given rows; its codes stay as they are.

With T0 the SAE's own decoder weights, minimise over W, b and c

    sum ||z W + b - y||^2 + alpha ||W - c T0||_F^2

by `ridge/`, alpha being the best by leave-one-out; of a nested SAE the squared error is the mean over its prefixes. The
targets y are the rows x, or a transcoder's, whose affine skip is solved for too. Latents that never fire keep their
direction, times c. Rows are raw: b is free, and W - c T0 grows as they do.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ..base.console import Listener
from ..base.devices import carried, free_memory
from ..base.errors import MachineError, RunError, TrainingError
from ..base.processes import ALONE
from ..sae.codes import Codes
from ..sae.dictionary import SAE, Batch
from .decoder_step import DecoderPass, Observed, sampled_bytes
from .ridge import DecoderState, System, Terms, choose_alpha, plan, solve
from .rows import SUMMED_ROWS, RowSource


@dataclass(frozen=True, eq=False)
class Refitted:
    """A refitted SAE, acting on raw rows."""

    sae: SAE
    decoder: DecoderState  # relative to the direction T0; alpha is in units of the codes squared, times rows
    rows: int  # N
    dead_fraction: float  # of the latents, which fire on none of these rows


@torch.no_grad()
def refitted(sae: SAE, rows: RowSource, listener: Listener) -> Refitted:
    """The SAE with the exact decoder for these rows. RunError if their products with the codes are not finite,
    MachineError if there is too little memory.

    Cost: per row, codes and `K^2 + 2 D K` operations for K active latents; some seven factorisations, of F^3 / 3
    operations each. Rows are read once; in each iteration too if neither normal equations nor codes fit in memory.
    """
    with listener.progress("refitting the decoder", rows.rows, "rows") as show:
        collected, done = DecoderPass(_system(sae, rows), sae, "none", rows.rows), 0
        for batch in _batches(sae, rows):
            collected.add(sae.codes(batch.x), batch)
            done += batch.size
            show(done)
        observed = collected.finish(ALONE)
        show(rows.rows, "choosing alpha")
        state = _solved(sae, observed)
    W_dec, b_dec = (tensor.to(sae.W_dec) for tensor in (state.W(sae.W_dec), state.b))
    if not (W_dec.isfinite().all() and b_dec.isfinite().all()):
        raise _not_finite()
    tensors = {"W_dec": W_dec, "b_dec": b_dec}
    if state.skip is not None and sae.W_skip is not None:
        tensors["W_skip"] = sae.W_skip + state.skip.to(sae.W_dec)
    return Refitted(sae.changed(None, **tensors), state, rows.rows, 1 - observed.fired.double().mean().item())


def _solved(sae: SAE, observed: Observed) -> DecoderState:
    W_dec, b_t = sae.W_dec, sae.b_dec.new_zeros(observed.y.shape[1])
    terms = Terms(alpha=0.0, beta=0.0, mu=0.0, nu=0.0, direction=W_dec, W_t=W_dec, b_t=b_t,
                  decay=torch.zeros(sae.d_sae, dtype=torch.float64, device=W_dec.device), skip=observed.skip)
    try:
        factorisation = choose_alpha(observed.system, terms, observed.z, observed.y, None)
        return solve(observed.system, terms, factorisation, observed.z)
    except TrainingError as error:  # which advises on training
        raise _not_finite() from error


def _not_finite() -> RunError:
    return RunError("the decoder cannot be solved for: expected finite products of codes and rows, got others; look "
                    "at the SAE and at the rows for huge numbers")


def _system(sae: SAE, rows: RowSource) -> System:
    device, d_sae, skipped = sae.W_enc.device, sae.d_sae, 0 if sae.W_skip is None else sae.d_in
    other = sampled_bytes(rows.rows, sae.d_out + skipped, d_sae) + 3 * sae.W_enc.itemsize * SUMMED_ROWS * d_sae
    free = free_memory(device)
    chosen = plan(rows.rows, d_sae, sae.d_out + skipped, free - other, prefixes=sae.prefixes)
    if chosen.bytes + other > free:
        raise MachineError(f"refitting {d_sae:,} latents needs {(chosen.bytes + other) / 2**30:.1f} GiB of memory, "
                           f"{free / 2**30:.1f} GiB are free; end other programs, or use a machine with more")

    def codes_again() -> Iterator[Codes]:
        return (sae.codes(batch.x) for batch in _batches(sae, rows))

    return chosen.system(torch.cat([sae.W_dec, sae.W_dec.new_zeros(d_sae, skipped)], 1), codes_again)


def _batches(sae: SAE, rows: RowSource) -> Iterable[Batch]:
    for batch in carried(rows.sequential(SUMMED_ROWS), sae.W_enc.device):
        yield Batch.of(batch.to(sae.W_enc.dtype), sae.d_in)
