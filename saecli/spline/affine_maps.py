"""The affine map that an SAE is on one cell.

    x_hat = x A_S + a_S        A_S = W_enc[:, S] W_dec[S, :]        rank A_S <= min(|S|, D)

Source: the paper on SAEs as piecewise affine splines. Shapes: B rows, D = d_in, F = d_sae.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..dictionary import SAE


def rank(sae: SAE, support: Tensor) -> int:
    """The rank of the SAE's affine map on a cell, at most the latents that it keeps.

    Args:
        sae: the autoencoder, float64.
        support: the latents of S, (|S|,).

    Cost: O(D |S|^2) for two QR factorisations; the product of the triangles has the map's singular values.
    """
    if not len(support):
        return 0
    left, right = sae.W_enc[:, support], sae.W_dec[support]
    if len(support) >= sae.d_in:
        return int(torch.linalg.matrix_rank(left @ right))
    inner = torch.linalg.qr(left, mode="r").R @ torch.linalg.qr(right.T, mode="r").R.T
    return int(torch.linalg.matrix_rank(inner))


def ranks(sae: SAE, supports: Iterable[Tensor]) -> list[tuple[int, int]]:
    """For each of some supports, (F,) bool: how many latents it keeps, and the rank of its map."""
    sae = sae.copy_to(torch.float64)
    return [(int(support.sum()), rank(sae, support.nonzero()[:, 0])) for support in supports]
