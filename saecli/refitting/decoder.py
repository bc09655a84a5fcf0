"""The exact decoder of an SAE for given rows; its codes stay as they are.

With T0 the SAE's own decoder weights, minimise over W, b and c

    sum ||z W + b - x||^2 + alpha ||W - c T0||_F^2

by `saecli/ridge`, alpha being the best by leave-one-out; of a nested SAE the squared error is the mean over its
prefixes. Latents that never fire keep their direction, times c.

Rows are taken as they are: to centre them, or to multiply all by one number, would change nothing, since b is free and
W - c T0 grows as the rows do.

Shapes: N rows, D = d_in, F = d_sae.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import Batch
from ..codes import Codes
from ..console import Listener
from ..devices import free_memory, moved
from ..dictionary import SAE
from ..distributed import ALONE
from ..errors import MachineError, RunError, TrainingError
from ..ridge import DecoderState, System, Terms, choose_alpha, plan, solve
from ..solvers.decoder_pass import DecoderPass, Observed, choosing_bytes
from ..store import Rows
from ..training.rows import SUMMED_ROWS, ArrayRows


@dataclass(frozen=True, eq=False)
class Refitted:
    """A refitted SAE.

    Args:
        sae: it, acting on raw rows, in the dtype and on the device of the SAE before.
        decoder: what was solved, relative to the direction T0; alpha is in units of the codes squared, times rows.
        rows: N.
        dead_fraction: fraction of the latents that fire on none of these rows.
    """

    sae: SAE
    decoder: DecoderState
    rows: int
    dead_fraction: float


@torch.no_grad()
def refitted(sae: SAE, rows: Rows | ArrayRows, listener: Listener) -> Refitted:
    """The SAE with the exact decoder for these rows.

    Args:
        sae: acting on raw rows, (N, D).
        rows: read once; if the matrix of the normal equations does not fit in memory, and neither do the codes, once
            for each iteration of the solution too.
        listener: shows progress.

    Raises:
        RunError: codes or rows are so large that their products are not finite.
        MachineError: there is too little memory.
        StoreError: a shard is missing or damaged.

    Cost: per row, codes and `K^2 + 2 D K` operations for K active latents; some seven factorisations, of F^3 / 3
    operations each.
    """
    with listener.progress("refitting the decoder", rows.rows, "rows") as show:
        collected, done = DecoderPass(_system(sae, rows), sae, "none", rows.rows), 0
        for x in _batches(sae, rows):
            collected.add(sae.codes(x), Batch.of(x))
            done += len(x)
            show(done)
        observed = collected.finish(ALONE)
        show(rows.rows, "choosing alpha")
        state = _solved(sae, observed)
    W_dec, b_dec = (tensor.to(sae.W_dec) for tensor in (state.W(sae.W_dec), state.b))
    if not (W_dec.isfinite().all() and b_dec.isfinite().all()):
        raise _not_finite()
    return Refitted(sae.changed(W_dec=W_dec, b_dec=b_dec), state, rows.rows,
                    1 - observed.fired.double().mean().item())


def _solved(sae: SAE, observed: Observed) -> DecoderState:
    terms = Terms(alpha=0.0, beta=0.0, mu=0.0, nu=0.0, direction=sae.W_dec, W_t=sae.W_dec, b_t=sae.b_dec,
                  decay=torch.zeros(sae.d_sae, dtype=torch.float64, device=sae.W_dec.device))
    try:
        factorisation = choose_alpha(observed.system, terms, observed.z, observed.y, None)
        return solve(observed.system, terms, factorisation, observed.z)
    except TrainingError as error:  # which advises on training
        raise _not_finite() from error


def _not_finite() -> RunError:
    return RunError("the decoder cannot be solved for: expected finite products of codes and rows, got others; look at "
                    "the SAE and at the rows, one of which has huge numbers")


def _system(sae: SAE, rows: Rows | ArrayRows) -> System:
    """Empty normal equations that fit in memory."""
    device, (d_in, d_sae) = sae.W_enc.device, sae.W_enc.shape
    beside = choosing_bytes(rows.rows, d_in, d_sae) + 3 * sae.W_enc.itemsize * SUMMED_ROWS * d_sae
    free = free_memory(device)
    chosen = plan(rows.rows, d_sae, d_in, free - beside, prefixes=sae.prefixes)
    if chosen.bytes + beside > free:
        raise MachineError(f"refitting {d_sae:,} latents needs {(chosen.bytes + beside) / 2**30:.1f} GiB of memory, "
                           f"{free / 2**30:.1f} GiB are free; end other programs, or use a machine with more")

    def codes_again() -> Iterator[Codes]:
        return map(sae.codes, _batches(sae, rows))

    return chosen.system(sae.W_dec, codes_again)


def _batches(sae: SAE, rows: Rows | ArrayRows) -> Iterable[Tensor]:
    """The rows in stored order, in batches (B, D), in the SAE's dtype and on its device."""
    for batch in rows.sequential(SUMMED_ROWS):
        yield moved(torch.from_numpy(batch), sae.W_enc.device).to(sae.W_enc.dtype)
