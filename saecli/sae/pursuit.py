"""Matching pursuit: each row's latents, chosen one after another, and their codes.

Shapes: B rows, D = d_in, F = d_sae, K = k.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..base.devices import product_dtype
from .codes import Codes, SparseCodes, at

MOST_COSINES = 1 << 28  # 1 GiB in float32
# Of codes, next to a cosine of 1: two latents of one direction share what they explain.
RIDGE = 1e-3
PANEL, ROWS = 192, 256  # columns of cosines, and rows pursued, at a time


def pursued(pre: Tensor, W_enc: Tensor, k: int, least_squares: bool) -> Codes:
    """The codes of pre-activations, (B, F), as `MatchingPursuit` defines them; differentiable in both."""
    W, tiny = W_enc.detach().T, torch.finfo(pre.dtype).tiny
    # In float64, since squares need not be finite in the weights' precision.
    norms = torch.linalg.vector_norm(W, dim=1, dtype=torch.float64).to(W.dtype).clamp(min=tiny)
    directions = (W / norms[:, None]).to(product_dtype(W.dtype))
    choose = _chosen_on_cpu if pre.device.type == "cpu" else chosen
    latents, v = choose(pre.detach(), norms, directions, k)
    given = v, latents, norms, directions, least_squares
    return at(pre, latents, lambda own: _Codes.apply(own, W_enc, *given))


def chosen(pre: Tensor, norms: Tensor, directions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Each row's latents in order of choice, and their v, (B, K); `directions`, (F, D), are of norm 1."""
    d_sae, cosines = len(directions), None
    if d_sae <= k * len(pre) and d_sae**2 <= MOST_COSINES:  # else those of latents chosen cost less
        cosines = cosines_of(directions)
    blocks = (pre,) if cosines is None else pre.split(ROWS)
    precision = torch.promote_types(pre.dtype, torch.float32)
    pairs = [
        _chosen_of_block((rows / norms).to(precision), directions, cosines, k) for rows in blocks
    ]
    latents, v = zip(*pairs, strict=True)
    return torch.cat(latents), torch.cat(v).to(pre.dtype)


# One operation, since each of its own would pass through the mode of `products_in`.
_chosen_on_cpu = torch.library.custom_op("saecli::chosen", chosen, mutates_args=())


def _chosen_of_block(
    left: Tensor, directions: Tensor, cosines: Tensor | None, k: int
) -> tuple[Tensor, Tensor]:
    """`chosen`, given s, (B, F), which is overwritten."""
    tiny = torch.finfo(left.dtype).tiny
    latents, parts = [], []
    for _ in range(k):
        part, latent = largest_of(left)
        part.clamp_(min=tiny)  # so that a latent of no part is not chosen again either
        if cosines is None:
            explained = directions.index_select(0, latent) @ directions.T
            explained.scatter_(1, latent[:, None], torch.inf)
        else:
            explained = cosines.index_select(0, latent)
        left.addcmul_(explained, part[:, None], value=-1)
        latents.append(latent)
        parts.append(part)
    v = torch.stack(parts, 1)
    return torch.stack(latents, 1), v.where(v > tiny, 0)


def largest_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest entry, (B,), and its column."""
    if rows.device.type != "cpu":
        return rows.max(1)
    numbers = rows.numpy()  # NumPy takes a tenth of PyTorch's time
    columns = numbers.argmax(1)
    return torch.from_numpy(numbers[np.arange(len(rows)), columns]), torch.from_numpy(columns)


def cosines_of(directions: Tensor) -> Tensor:
    """`directions directions'`, (F, F), half of it mirrored; infinite on the diagonal, so that none is chosen again."""
    cosines = directions.new_empty(len(directions), len(directions))
    for begin in range(0, len(directions), PANEL):
        end = begin + PANEL
        panel = directions[begin:] @ directions[begin:end].T
        cosines[begin:, begin:end] = panel
        cosines[begin:end, end:] = panel[PANEL:].T
    return cosines.fill_diagonal_(torch.inf)


class _Codes(torch.autograd.Function):
    """`z = max(v, 0) ||w||`, where `A v = s = pre / ||w||`. With latents held, differentiable in their pre-activations,
    (B, K), and W_enc.

    C being the cosines of those of a row's latents that add to it, A is C + RIDGE I for `least_squares`, else I plus
    the part of C below the diagonal: a latent explains what those chosen before it have left. That v is the pursuit's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        pre: Tensor,
        W_enc: Tensor,
        v: Tensor,
        latents: Tensor,
        norms: Tensor,
        directions: Tensor,
        least_squares: bool,
    ) -> Tensor:
        adds = v > 0
        sizes = norms[latents].to(torch.promote_types(norms.dtype, torch.float32))
        s = pre / sizes
        if least_squares:
            _, cosines = _of_latents(directions, latents, s.dtype)
            A, _ = _system(cosines, adds, least_squares)
            v = torch.linalg.solve(A, (s * adds)[..., None])[..., 0]
        ctx.save_for_backward(s, v, adds, latents, sizes, directions)
        ctx.least_squares = least_squares
        return (v.relu() * sizes).to(pre.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        s, v, adds, latents, sizes, directions = ctx.saved_tensors
        own, cosines = _of_latents(directions, latents, s.dtype)
        A, related = _system(cosines, adds, ctx.least_squares)
        to_z = gradient.where(v > 0, 0)
        to_s = torch.linalg.solve(A.mT, (to_z * sizes)[..., None])[..., 0]
        to_A = -(to_s[:, :, None] * v[:, None]).where(related, 0)  # (B, K, K)
        to_cosines = (to_A + to_A.mT) / sizes[..., None]
        # Of a norm; and a direction has no gradient along itself.
        along = to_z * v - to_s * s / sizes - (to_cosines * cosines).sum(2)
        factors = (to_cosines + along.diag_embed()).to(own.dtype)
        to_w = (factors @ own).flatten(0, 1)  # (B K, D), by choice
        choices = torch.arange(len(to_w), device=to_w.device)
        ones = torch.ones_like(to_w[:, 0])
        by_choice = SparseCodes(ones, choices, latents.flatten(), len(directions))
        to_W_enc = by_choice.transposed_times(to_w).T.to(gradient)
        return (to_s / sizes).to(gradient), to_W_enc, None, None, None, None, None


def _of_latents(
    directions: Tensor, latents: Tensor, precision: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Directions, (B, K, D), and cosines, (B, K, K), of each row's latents."""
    own = directions.index_select(0, latents.flatten())
    own = own.view(*latents.shape, directions.shape[1])
    return own, (own @ own.mT).to(precision)


def _system(cosines: Tensor, adds: Tensor, least_squares: bool) -> tuple[Tensor, Tensor]:
    """A, (B, K, K), and a mask of its cosines, which are off the diagonal."""
    both = adds[:, :, None] & adds[:, None]
    related, ridge = both.tril(-1), 0.0
    if least_squares:
        related, ridge = related | related.mT, RIDGE
    diagonal = torch.full_like(cosines[:, 0], 1 + ridge)
    return cosines.where(related, 0) + diagonal.diag_embed(), related
