"""A crosscoder's latents by hook point.

With a crosscoder's rows at every hook point divided by their own spread, so that hook points compare, and W_ip latent
i's decoder at hook point p,

    share_ip = ||W_ip|| / sum_q ||W_iq||

is 1 for a latent of p alone, and 1/P for one that all P hook points have alike. L1 drives decoders of hook points that
need a latent less to zero, whether or not they lack it. Latent scaling asks the rows themselves: the multiple of the
latent's part, along its decoder where it is largest, that leaves the least squared error at p,

    beta_ip = argmin_b sum ||e_p + z_i W_ip - b z_i W_ip*||^2,    p* = argmax_q ||W_iq||

with e_p the error of p's reconstruction. A latent that only p* has gets 0 at the others, one with the same direction
there too gets 1, whatever its decoder norms. For a decoder without a ridge, e_p is orthogonal to z_i.

Source: Lindsey et al., "Sparse Crosscoders for Cross-Layer Features and Model Diffing" (2024), for norms; Minder et
al., "Robustly Identifying Concepts Introduced During Chat Fine-Tuning Using Crosscoders" (2025), for latent scaling.

Shapes: B rows, D = d_in, F = d_sae, P hook points.
"""

from typing import Any

import torch
from torch import Tensor

from ..base.console import Listener
from ..sae.dictionary import SAE
from ..store.values import Spread
from .measured import Measured

EXCLUSIVE = 0.9  # a latent with a larger share belongs to that hook point alone
SHARED = 0.6  # a latent whose every share is larger than this over P is shared by all


class PlaceSums:
    """Sums over rows for a crosscoder's `share` and `beta`, float64."""

    def __init__(self, sae: SAE) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=sae.W_enc.device)

        self._sae = sae
        self._error = zeros(sae.d_out)
        self._z_square, self._z_error = zeros(sae.d_sae), zeros(sae.d_sae, sae.d_out)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Count a batch of rows, (B, D)."""
        codes = self._sae.codes(x)
        error = x - self._sae.predicted(x, codes)[:, -1]
        self._error += error.double().square().sum(0)
        self._z_square += codes.map(torch.square).sums()
        self._z_error += codes.transposed_times(error)

    def result(self, spread: Spread) -> tuple[Tensor, Tensor, Tensor]:
        """Given the spread of all rows counted: FVU by hook point, (P,), `share`, (F, P), and `beta`, (F, P), NaN for a
        latent that never fired and between hook points of unlike widths; on the CPU."""
        places, W_dec = self._sae.places, self._sae.W_dec.double()
        scatter = torch.from_numpy(spread.scatter).to(W_dec.device)
        fvu = torch.stack([self._error[place].sum() / scatter[place].sum() for place in places])
        spreads = [(scatter[place].mean() / spread.rows).sqrt() for place in places]
        W = [W_dec[:, place] / deviation for place, deviation in zip(places, spreads, strict=True)]
        along = [self._z_error[:, place] / deviation for place, deviation in zip(places, spreads, strict=True)]
        norms = torch.stack([part.norm(dim=1) for part in W], 1)
        share = norms / norms.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        largest = norms.argmax(1)
        beta = torch.full_like(norms, torch.nan)
        for best, direction in enumerate(W):
            own = (largest == best) & (self._z_square > 0)
            d = direction[own]
            for place, (part, error) in enumerate(zip(W, along, strict=True)):
                if part.shape[1] == d.shape[1]:
                    found = (d * part[own]).sum(1) + (d * error[own]).sum(1) / self._z_square[own]
                    beta[own, place] = found / d.square().sum(1)
        return fvu.cpu(), share.cpu(), beta.cpu()


def places_document(one: Measured, listener: Listener) -> dict[str, Any]:
    """What `saecli.sparsity` adds for a crosscoder, in one more pass over the rows; nothing for others.

    Returns:
        `places`: for each its store's `name`, `width`, `fvu`, and `exclusive`, the number of latents with a share above
        `EXCLUSIVE`; `shared`, the number of latents whose every share is above `SHARED` / P; `share` and `scaling`
        (beta), lists of P numbers per latent, None where unknown.
    """
    if not (widths := one.sae.widths):
        return {}
    sums = PlaceSums(one.sae)
    for batch in one.inputs(listener):
        sums.update(batch)
    fvu, share, beta = sums.result(one.rows.spread())
    names = [rows.name for rows in one.rows.inputs] or [f"place {number}" for number in range(len(widths))]
    exclusive = (share > EXCLUSIVE).sum(0).tolist()
    return {"places": [{"name": name, "width": width, "fvu": error, "exclusive": count} for name, width, error, count
                       in zip(names, widths, fvu.tolist(), exclusive, strict=True)],
            "shared": int((share.amin(1) > SHARED / len(widths)).sum()), "share": share.tolist(),
            "scaling": [[None if value != value else value for value in row] for row in beta.tolist()]}
