"""Latents of two SAEs matched one to one by their decoder vectors.

Shapes: D = d_in, F = latents of the first SAE, G = of the second, M = min(F, G).
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base.errors import MachineError
from ..base.memory import available_memory
from ..base.wording import size_words
from ..sae.dictionary import Dictionary

BLOCK_ROWS = 1024  # of the matrix of cosines at a time, so that no float32 copy of it stands beside the float64 one


@dataclass(frozen=True)
class Matching:
    """A one-to-one matching of two SAEs' latents, a pair a place.

    Args:
        first: latents of the first SAE, ascending, (M,), int64.
        second: their counterparts, latents of the second SAE, (M,), int64.
        decoder: `|cosine|` of the pair's decoder vectors, (M,), float64, in [0, 1].
        encoder: cosine of the pair's encoder vectors, its sign turned where the decoder vectors' is negative, (M,),
            float64, in [-1, 1]: latents (e, d) and (-e, -d) count as alike, (e, d) and (-e, d) do not.
    """

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    decoder: NDArray[np.float64]
    encoder: NDArray[np.float64]


@torch.no_grad()
def matching(one: Dictionary, other: Dictionary) -> Matching:
    """Match the latents of two SAEs one to one, so that the sum of their decoder vectors' `|cosine|` is largest.

        max over one-to-one p of sum_m |<w_m, v_p(m)>| / (||w_m|| ||v_p(m)||)

    where w are the decoder vectors of the SAE with fewer latents and v those of the other. The cosine with a vector of
    length 0 is 0. The assignment is exact; cosines are products in float32.

    Args:
        one: an SAE of F latents.
        other: one of G latents, of the same d_in, on the same device.

    Returns:
        The matching, of min(F, G) pairs.

    Raises:
        MachineError: the matrix of cosines takes more memory than is free.

    Cost: F G D multiplications for the cosines, and at worst M^2 max(F, G) steps for the assignment (of Jonker and
    Volgenant's kind, which the field calls Hungarian), which runs on one core whatever the device; the matrix takes
    8 F G bytes. On one busy core, both together, with the most memory beside the SAEs':

        latents    d_in    half of the vectors random    all of them random    memory
        4,096      768     2.2 s                         2.1 s                 0.4 GB
        16,384     768     39 s                          44 to 62 s            2.5 GB

    Source: Crouse, "On implementing 2D rectangular assignment algorithms" (2016), as in scipy.
    """
    from scipy.optimize import linear_sum_assignment  # a fifth of a second that only this needs

    swapped = one.d_sae > other.d_sae  # of a matrix that is higher than wide scipy makes a copy
    narrow, wide = (_directions(sae.decoder()) for sae in ((other, one) if swapped else (one, other)))
    needed, free = 8 * len(narrow) * len(wide), available_memory()
    if needed > free:
        raise MachineError(f"too little memory to match {one.d_sae:,} latents with {other.d_sae:,}: expected "
                           f"{size_words(needed)} or more free, got {size_words(free)}; end other programs, or match "
                           "SAEs with fewer latents")
    # Negated float64, which scipy takes as it is: to maximise, or of float32, it would make copies of its own.
    cost = np.empty((len(narrow), len(wide)))
    for start in range(0, len(narrow), BLOCK_ROWS):
        cosines = narrow[start:start + BLOCK_ROWS] @ wide.T
        cost[start:start + BLOCK_ROWS] = cosines.abs_().neg_().cpu().numpy()
    rows, columns = linear_sum_assignment(cost)
    first, second = (columns, rows) if swapped else (rows, columns)
    order = np.argsort(first)
    first, second = first[order], second[order]
    decoder = _cosines(one.decoder(), other.decoder(), first, second)
    encoder = _cosines(one.W_enc.T, other.W_enc.T, first, second)
    return Matching(first, second, np.abs(decoder), encoder * np.where(decoder < 0, -1, 1))


def _directions(vectors: Tensor) -> Tensor:
    """Rows of length 1, those of length 0 left as they are, in float32."""
    return _unit(vectors.double()).float()


def _unit(vectors: Tensor) -> Tensor:
    # Divided by its largest entry first, a row's squares neither vanish nor overflow.
    vectors = vectors / vectors.abs().amax(1, keepdim=True).clamp(min=torch.finfo(vectors.dtype).tiny)
    return vectors / vectors.norm(dim=1, keepdim=True).clamp(min=torch.finfo(vectors.dtype).tiny)


def _cosines(one: Tensor, other: Tensor, first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.float64]:
    """Cosines of pairs of rows in float64, in [-1, 1]."""
    pairs = [_unit(vectors[torch.from_numpy(places).to(vectors.device)].double())
             for vectors, places in ((one, first), (other, second))]
    return (pairs[0] * pairs[1]).sum(1).clamp(-1, 1).cpu().numpy()
