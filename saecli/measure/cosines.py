"""Latents by cosines of decoder vectors or correlations of codes: known features found, matched, near each other.

Shapes: B rows of a batch, C chosen latents, D = d_in, F = d_sae, G features, or latents of another SAE, M = min(F, G).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from ..base.console import Listener
from ..sae.codes import Codes
from ..sae.dictionary import SAE

if TYPE_CHECKING:
    from .latents import CoFiring

LEAST_NORM = 1e-8  # a vector no longer than this has cosines of 0, or nearly so
BLOCK_COSINES = 1 << 24  # of neighbours, per product: 64 MB in float32
COST_ROWS = 1024  # rows of the matrix of cosines that are converted to float64 together


@torch.no_grad()
def best_pairs(first: Tensor, second: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Match the rows of two matrices, (F, D) and (G, D), one to one, to maximise the sum of their `|cosine|`.

    Returns the matched rows' indices, ascending, and their counterparts', (M,) each. The cosine with a vector of zeros
    is 0. The assignment is exact, of cosines in float32.

    Cost: F G D multiplications, and at worst M^2 max(F, G) steps of Jonker and Volgenant's assignment (which the field
    calls Hungarian), on one core whatever the device, 40 to 60 s for 16,384 latents; 8 F G bytes.

    Source: Crouse, "On implementing 2D rectangular assignment algorithms" (2016), as in scipy.
    """
    from scipy.optimize import linear_sum_assignment  # takes a fifth of a second to import

    # scipy copies a matrix that is higher than wide, or that is not of float64, or that it is to maximise.
    narrow, wide = (normalize(rows.double()).float() for rows in sorted((first, second), key=len))
    cost = np.empty((len(narrow), len(wide)))
    for start in range(0, len(narrow), COST_ROWS):
        cosines = narrow[start : start + COST_ROWS] @ wide.T
        cost[start : start + COST_ROWS] = cosines.abs_().neg_().cpu().numpy()
    pairs = np.stack(linear_sum_assignment(cost))
    if len(first) > len(second):
        pairs = pairs[::-1]
    of_first, of_second = pairs[:, np.argsort(pairs[0])]
    return of_first, of_second


@torch.no_grad()
def code_correlations(codes: Iterable[tuple[Codes, Codes]]) -> NDArray[np.float64]:
    """Pearson's correlation of each pair of two SAEs' latents, (F, G), 0 where one never fires, given their codes of
    batches of rows, (B, F) and (B, G).

    Memory: 8 F G bytes, three times.
    """
    rows, totals = 0, [np.zeros(1)] * 5
    for z, w in codes:
        rows += z.shape[0]
        sums = [z.sums(), z.squares(), w.sums(), w.squares(), z.transposed_times(w.dense())]
        parts = zip(totals, sums, strict=True)
        totals = [total + part.double().cpu().numpy() for total, part in parts]
    z_mean, z_square, w_mean, w_square, product = (total / rows for total in totals)
    variances = np.outer((z_square - z_mean**2).clip(0), (w_square - w_mean**2).clip(0))
    covariances = product - np.outer(z_mean, w_mean)
    spreads = np.sqrt(variances)
    correlations = np.divide(covariances, spreads, np.zeros_like(spreads), where=spreads > 0)
    return correlations.clip(-1, 1)


@dataclass(frozen=True, eq=False)
class Alignment:
    """Decoder vectors and directions of known features, of length 1; measures as in `sae_lens.synthetic.evals` 6.54."""

    latents: Tensor  # (F, D)
    features: Tensor  # (G, D)

    @classmethod
    def of(cls, W_dec: Tensor, directions: Tensor) -> "Alignment":
        return cls(
            normalize(W_dec.float(), eps=LEAST_NORM),
            normalize(directions.to(W_dec.device).float(), eps=LEAST_NORM),
        )

    @cached_property
    def cosines(self) -> Tensor:
        """(F, G), on the CPU."""
        return (self.latents @ self.features.T).cpu()

    @cached_property
    def nearest(self) -> Tensor:
        """The feature that each latent is taken to detect, of largest |cosine|, (F,), int64."""
        return self.cosines.abs().argmax(1)

    def mcc(self) -> float:
        """Mean |cosine| of the `best_pairs` of latents and features, in [0, 1]."""
        sizes = self.cosines.abs().numpy()
        return float(sizes[best_pairs(self.latents, self.features)].mean(dtype=np.float64))

    def uniqueness(self) -> float:
        """Number of features that are the nearest of some latent, over the number of latents, in (0, 1]."""
        return len(self.nearest.unique()) / len(self.nearest)


@torch.no_grad()
def neighbours(
    sae: SAE, chosen: Tensor, count: int, show: Callable[[int], None]
) -> tuple[Tensor, Tensor]:
    """The nearest other latents to chosen ones, (C,), by cosine of decoder vectors in the metric of training.

    Returns the cosines, descending, 0 for a vector of zeros, and the neighbours, (C, count at most F - 1), on the CPU.
    Cost: `2 C F D` operations; `BLOCK_COSINES` cosines are held.
    """
    directions = normalize(sae.W_dec / sae.normalisation.target_scale)
    parts = []
    done = 0
    for part in chosen.to(directions.device).split(max(1, BLOCK_COSINES // len(directions))):
        cosines = directions[part] @ directions.T
        cosines.scatter_(1, part[:, None], -torch.inf)
        parts.append(cosines.topk(min(count, len(directions) - 1), dim=1))
        done += len(part)
        show(done)
    values, latents = (torch.cat(each).cpu() for each in zip(*parts, strict=True))
    return values, latents


def near_latents(
    sae: SAE, chosen: Tensor, count: int, cofiring: "CoFiring", listener: Listener
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The `neighbours` of chosen latents, (C,), and their `CoFiring.partners`."""
    with listener.progress("comparing latents", len(chosen), "latents") as show:
        by_cosine = neighbours(sae, chosen, count, show)
    with listener.progress("counting pairs", len(chosen), "latents") as show:
        return by_cosine, cofiring.partners(chosen, count, show)
