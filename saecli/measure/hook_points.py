"""A crosscoder's latents by hook point.

With a crosscoder's rows at every hook point divided by their own spread, so that hook points compare, and W_ip latent
i's decoder at hook point p,

    share_ip = ||W_ip|| / sum_q ||W_iq||

is 1 for a latent of p alone, and 1/P for one that all P hook points have alike. L1 drives decoders of hook points that
need a latent less to zero, whether or not they lack it. Latent scaling asks the rows themselves: the multiple of the
latent's part, along its decoder where it is largest, that leaves the least squared error at p,

    beta_ip = argmin_b sum ||e_p + z_i W_ip - b z_i W_ip*||^2,    p* = argmax_q ||W_iq||

with e_p the error of p's reconstruction. A latent that only p* has gets 0 at the others, one with the same direction
there too gets 1, whatever its decoder norms. For a decoder without a ridge, e_p is orthogonal to z_i. The same multiple
for the reconstruction, r_p = sum_j z_j W_jp, instead of e_p + z_i W_ip, says what other latents carry there. Their
ratios to those at p* are nu^epsilon and nu^r of Minder et al.: a latent exclusive to p* by decoder norm may show

    complete shrinkage    nu^epsilon above `SHRUNK`: the error elsewhere holds what its decoder there lacks
    latent decoupling     nu^r above `DECOUPLED`: elsewhere other latents, firing with it, carry its direction

Source: Lindsey et al., "Sparse Crosscoders for Cross-Layer Features and Model Diffing" (2024), for norms; Minder et
al., "Robustly Identifying Concepts Introduced During Chat Fine-Tuning Using Crosscoders" (2025), for latent scaling.

Shapes: B rows, D = d_in, F = d_sae, P hook points.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.console import Listener
from ..sae.dictionary import SAE
from ..store.values import Spread
from .measured import Measured

EXCLUSIVE = 0.9  # a latent with a larger share belongs to that hook point alone
SHARED = 0.6  # a latent whose every share is larger than this over P is shared by all
SHRUNK, DECOUPLED = 0.2, 0.5  # Minder et al.'s thresholds


class PlaceSums:
    """Sums over rows for a crosscoder's `share` and both `beta`, float64."""

    def __init__(self, sae: SAE) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=sae.W_enc.device)

        self._sae = sae
        self._error = zeros(sae.d_out)
        self._z_square = zeros(sae.d_sae)
        self._z_error, self._z_predicted = (zeros(sae.d_sae, sae.d_out) for _ in range(2))

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Count a batch of rows, (B, D)."""
        codes = self._sae.codes(x)
        predicted = self._sae.predicted(x, codes)[:, -1]
        error = x - predicted
        self._error += error.double().square().sum(0)
        self._z_square += codes.map(torch.square).sums()
        self._z_error += codes.transposed_times(error)
        self._z_predicted += codes.transposed_times(predicted - self._sae.b_dec)

    def result(self, spread: Spread) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Given the spread of all rows counted: FVU by hook point, (P,), `share`, (F, P), `beta`, (F, P), NaN for a
        latent that never fired and between hook points of unlike widths, and `beta` for reconstructions; on the CPU."""
        places, W_dec = self._sae.places, self._sae.W_dec.double()
        scatter = torch.from_numpy(spread.scatter).to(W_dec.device)
        fvu = torch.stack([self._error[place].sum() / scatter[place].sum() for place in places])
        spreads = [(scatter[place].mean() / spread.rows).sqrt() for place in places]
        W = [W_dec[:, place] / deviation for place, deviation in zip(places, spreads, strict=True)]
        norms = torch.stack([part.norm(dim=1) for part in W], 1)
        share = norms / norms.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        largest = norms.argmax(1)
        beta = torch.full((2, *norms.shape), torch.nan, dtype=norms.dtype, device=norms.device)
        for best, direction in enumerate(W):
            own = (largest == best) & (self._z_square > 0)
            d = direction[own]
            for number, (place, part, deviation) in enumerate(zip(places, W, spreads, strict=True)):
                if part.shape[1] == d.shape[1]:
                    error, carried = (
                        (d * sums[own, place]).sum(1) / deviation / self._z_square[own]
                        for sums in (self._z_error, self._z_predicted)
                    )
                    beta[:, own, number] = torch.stack(
                        [(d * part[own]).sum(1) + error, carried]
                    ) / d.square().sum(1)
        return fvu.cpu(), share.cpu(), *beta.cpu()


def elsewhere(share: Tensor, beta: Tensor) -> Tensor:
    """The largest ratio of beta at another hook point to beta where the latent is largest, (F,)."""
    best = share.argmax(1, keepdim=True)
    return (beta / beta.gather(1, best)).scatter(1, best, -torch.inf).amax(1)


def classes(
    names: Sequence[str], share: Tensor, nu_error: Tensor, nu_reconstruction: Tensor
) -> list[str]:
    """Which hook points have each latent, in words, given `share`, (F, P), and nu, (F,) each."""
    found = []
    for own, error, carried in zip(
        share.tolist(), nu_error.tolist(), nu_reconstruction.tolist(), strict=True
    ):
        name = names[own.index(max(own))]
        if max(own) <= EXCLUSIVE:
            found.append(
                f"only {name} by latent scaling"
                if error < SHRUNK and carried < DECOUPLED
                else "shared"
                if min(own) > SHARED / len(own)
                else "in between"
            )
        else:
            found.append(
                f"only {name} by decoder norm"
                if error != error
                else f"looks only {name}: complete shrinkage"
                if error > SHRUNK
                else f"looks only {name}: latent decoupling"
                if carried > DECOUPLED
                else f"only {name}"
            )
    return found


def places_document(one: Measured, listener: Listener) -> dict[str, Any]:
    """What `saecli.sparsity` adds for a crosscoder, in one more pass over the rows; nothing for others.

    Returns:
        `places`: for each the `name` of its model, or if these do not differ of its store, `width`, `fvu`, and
        `exclusive`, the number of latents with a share above `EXCLUSIVE`; `shared`, the number of latents whose every
        share is above `SHARED` / P; `share` and `scaling` (beta), lists of P numbers per latent; `nu_error` and
        `nu_reconstruction`, largest over the other hook points; and `class`, per latent. None where unknown.
    """

    def known(value: float) -> float | None:
        return None if value != value else value

    if not (widths := one.sae.widths):
        return {}
    sums = PlaceSums(one.sae)
    for batch in one.inputs(listener):
        sums.update(batch)
    fvu, share, beta, carried = sums.result(one.rows.spread())
    names = [Path(str(rows.store.meta.source.get("model"))).name for rows in one.rows.inputs]
    if len(set(names)) < len(widths):
        names = [rows.name for rows in one.rows.inputs] or [
            f"place {number}" for number in range(len(widths))
        ]
    nu = elsewhere(share, beta), elsewhere(share, carried)
    exclusive = (share > EXCLUSIVE).sum(0).tolist()
    return {
        "places": [
            {"name": name, "width": width, "fvu": error, "exclusive": count}
            for name, width, error, count in zip(
                names, widths, fvu.tolist(), exclusive, strict=True
            )
        ],
        "shared": int((share.amin(1) > SHARED / len(widths)).sum()),
        "share": share.tolist(),
        "scaling": [[known(value) for value in row] for row in beta.tolist()],
        "nu_error": [*map(known, nu[0].tolist())],
        "nu_reconstruction": [*map(known, nu[1].tolist())],
        "class": classes(names, share, *nu),
    }
