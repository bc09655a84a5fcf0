"""Products of sparse codes with themselves, pair of entries by pair.

Shapes: B rows, n entries, F = d_sae.
"""

import torch
from torch import Tensor

from ..base.devices import add_at, moved

PAIRS, DEVICE_PAIRS = 1 << 19, 1 << 23  # multiplied at a time, on a CPU and on a GPU


def pairs_of(sizes: Tensor) -> Tensor:
    """Number of pairs of entries, an entry with itself included, for rows of these numbers of entries."""
    return sizes * (sizes + 1) // 2


def add_pairs(gram: Tensor, indices: Tensor, values: Tensor, sizes: Tensor) -> None:
    """Add `z' z` to the lower triangle of a matrix: the products of all pairs of entries in a row, some rows at a time.

    Args:
        gram: (F, F), which may be the left part of a wider array; products are added in its precision.
        indices: the latent of each entry, row after row, (n,).
        values: the entries, (n,).
        sizes: number of entries of each row, (B,), on the CPU.
    """
    device = gram.device
    most = PAIRS if device.type == "cpu" else DEVICE_PAIRS
    ends, pairs = sizes.cumsum(0), pairs_of(sizes).cumsum(0)
    flat = gram.as_strided((len(gram) * gram.stride(0),), (1,))
    begun = 0
    while begun < len(sizes):
        seen = int(pairs[begun - 1]) if begun else 0
        stop = max(int(torch.searchsorted(pairs, seen + most, right=True)), begun + 1)
        begin, end = int(ends[begun] - sizes[begun]), int(ends[stop - 1])
        chosen, factors = indices[begin:end], values[begin:end]
        left, right = _within_rows(moved(sizes[begun:stop], device), end - begin, int(pairs[stop - 1]) - seen)
        low, high = torch.aminmax(torch.stack([chosen[left], chosen[right]]), dim=0)
        places, products = high * gram.stride(0) + low, (factors[left] * factors[right]).to(gram.dtype)
        add_at(flat, places, products)
        begun = stop


def _within_rows(sizes: Tensor, entries: int, pairs: int) -> tuple[Tensor, Tensor]:
    """The numbers of both entries of each pair, (pairs,), for rows of these numbers of entries, of so many in all."""
    firsts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes, output_size=entries)  # of each entry's row, (n,)
    numbers = torch.arange(entries, device=sizes.device)
    partners = numbers + 1 - firsts  # number of entries of its row up to itself, (n,)
    left = numbers.repeat_interleave(partners, output_size=pairs)
    return left, torch.arange(pairs, device=sizes.device) - (partners.cumsum(0) - partners - firsts)[left]
