"""Codes: an activation's output, every product with it, and pre-activations selected as codes.

Sparse codes are offsets, indices and values, as for `torch.nn.functional.embedding_bag`; with them a training step
costs 2 D F operations per row instead of 10 D F, and gradients are as sparse. Activations search for non-zeros on a CPU
only: on a GPU the host would wait for their count.

Shapes: B rows, n entries, D = d_in, F = d_sae, K = k, C columns of a right side, L prefixes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from ..base.devices import add_at, moved

DENSITY = 0.1  # fraction of non-zeros above which dense products are faster
# Pairs of entries over the Gram matrix' size up to which products are added pair by pair.
PAIRS_FRACTION = 0.06
PRODUCT_PAIRS, DEVICE_PAIRS = 1 << 19, 1 << 23  # pairs multiplied at a time, on a CPU and on a GPU
CACHED_CODES = 1 << 18  # 1 MiB in float32
# Columns of a Gram matrix at a time; a sparse block's must stay in a core's cache.
PANEL, SPARSE_PANEL = 256, 128

# Numbers of leading latents, ascending, the last being F; empty if not nested.
Prefixes = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Codes:
    """Codes z of a batch as a matrix, (B, F)."""

    values: Tensor  # differentiable in the pre-activations

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def dense(self) -> Tensor:
        """The matrix, (B, F)."""
        return self.values

    def dense_rows(self, numbers: Tensor) -> Tensor:
        """Distinct rows of the matrix, (m, F)."""
        return self.values[numbers]

    def times(self, right: Tensor) -> Tensor:
        """`z right`, (B, C), for (F, C); differentiable in both."""
        return self.values @ right

    def transposed_times(self, right: Tensor) -> Tensor:
        """`z' right`, (F, C), for (B, C)."""
        return self.values.T @ right

    def prefix_times(self, right: Tensor, prefixes: Prefixes) -> Tensor:
        """`z[:, :m] right[:m]` for each prefix m, (B, L, C), for (F, C), at the cost of `times`; differentiable."""
        if not prefixes:
            return self.times(right)[:, None]
        return self._block_times(right, prefixes).cumsum(1)

    def prefix_transposed_times(self, right: Tensor, prefixes: Prefixes) -> Tensor:
        """`sum_l Z_l' right_l`, (F, C), for (B, L, C); Z_l is zero outside prefix l."""
        if not prefixes:
            return self.transposed_times(right[:, 0])
        return self._block_transposed_times(right.flip(1).cumsum(1).flip(1), prefixes)

    def _block_times(self, right: Tensor, ends: Prefixes) -> Tensor:
        """`times` by each block of latents that ends before one of `ends`, (B, L, C)."""
        blocks = pairwise((0, *ends))
        return torch.stack(
            [self.values[:, begin:end] @ right[begin:end] for begin, end in blocks], 1
        )

    def _block_transposed_times(self, right: Tensor, ends: Prefixes) -> Tensor:
        blocks = zip(pairwise((0, *ends)), right.unbind(1), strict=True)
        return torch.cat([self.values[:, begin:end].T @ part for (begin, end), part in blocks])

    def sums(self) -> Tensor:
        """The sum of each latent's codes, (F,), differentiable."""
        return self.values.sum(0)

    def squares(self) -> Tensor:
        """The sum of each latent's squared codes, (F,)."""
        return self.map(Tensor.square).sums()

    def add_gram(self, gram: Tensor) -> None:
        """Add `z' z` to the lower triangle of `gram`, (F, F), in its precision; entries above it may be overwritten."""
        z = self.values
        for begin in range(0, len(gram), PANEL):
            end = begin + PANEL
            gram[begin:end, :end] += z[:, begin:end].T @ z[:, :end]

    def by_latent(self, vector: Tensor) -> Tensor:
        """A vector's entry, (F,), for the latent of each value; broadcasts against `values`."""
        return vector

    def with_values(self, values: Tensor) -> Self:
        return replace(self, values=values)

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """An elementwise function that takes 0 to 0."""
        return self.with_values(function(self.values))

    def detach(self) -> Self:
        return self.map(Tensor.detach)

    def count(self) -> Tensor:
        """Non-zero codes, a scalar."""
        return self.values.count_nonzero()

    def latent_counts(self) -> Tensor:
        """Rows on which each latent fires, (F,), int64."""
        counts = torch.zeros(self.shape[1], dtype=torch.int64, device=self.values.device)
        for rows in in_cache(self.values):
            counts += (rows != 0).sum(0, dtype=torch.int32)
        return counts

    def row_counts(self) -> Tensor:
        """Latents that fire on each row, (B,), int64."""
        blocks = in_cache(self.values)
        return torch.cat([(rows != 0).sum(1, dtype=torch.int32) for rows in blocks]).long()

    def fired(self) -> Tensor:
        """Latents that fire on any row, a mask, (F,)."""
        return self.latent_counts() > 0

    def l1(self) -> Tensor:
        """The sum of all codes' magnitudes, a scalar, float64."""
        # Each row is summed in its own precision: converting every code to float64 takes as long as encoding.
        precision = torch.promote_types(self.values.dtype, torch.float32)
        by_row = [rows.abs().sum(1, dtype=precision) for rows in in_cache(self.values)]
        return torch.stack([sums.sum(dtype=torch.float64) for sums in by_row]).sum()

    def bytes(self) -> int:
        return self.values.numel() * self.values.element_size()

    def compact(self) -> "Codes":
        """Sparse if few codes are non-zero; the host waits for their number."""
        few = few_entries(self.values != 0, wait=True)
        return self if few is None else _at_ascending(self.values, few)


@dataclass(frozen=True, eq=False)
class SparseCodes(Codes):
    """Some entries of the matrix, row after row, as `values`, (n,), perhaps some zero; all others are zero."""

    offsets: Tensor  # first entry of each row, (B,)
    indices: Tensor  # latents, (n,), distinct within a row, in any order
    width: int  # F
    each: int | None = None  # entries per row, if equal for all

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.offsets), self.width

    def compact(self) -> "Codes":
        return self

    def dense(self) -> Tensor:
        flat = self.values.new_zeros(self.shape[0] * self.width)
        return flat.scatter_(0, self.rows * self.width + self.indices, self.values).view(self.shape)

    def dense_rows(self, numbers: Tensor) -> Tensor:
        # One row more, for all that are not wanted.
        to = self.rows.new_full((len(self.offsets),), len(numbers))
        to[numbers] = torch.arange(len(numbers), device=to.device)
        flat = self.values.new_zeros((len(numbers) + 1) * self.width)
        flat.scatter_(0, to[self.rows] * self.width + self.indices, self.values)
        return flat.view(-1, self.width)[:-1]

    def times(self, right: Tensor) -> Tensor:
        return embedding_bag(
            self.indices, right, self.offsets, mode="sum", per_sample_weights=self.values
        )

    def transposed_times(self, right: Tensor) -> Tensor:
        return self._transposed.times(right)

    def _block_times(self, right: Tensor, ends: Prefixes) -> Tensor:
        return self._by_block(ends).times(right).view(len(self.offsets), len(ends), right.shape[1])

    def _block_transposed_times(self, right: Tensor, ends: Prefixes) -> Tensor:
        return self._by_block(ends).transposed_times(right.flatten(0, 1))

    def _by_block(self, ends: Prefixes) -> "SparseCodes":
        """With a row for each row and block of latents, (B L, F)."""
        blocks = torch.bucketize(self.indices, self.indices.new_tensor(ends), right=True)
        rows, order = (self.rows * len(ends) + blocks).sort(stable=True)
        offsets = offsets_of(rows, len(self.offsets) * len(ends))
        return SparseCodes(self.values[order], offsets, self.indices[order], self.width)

    def sums(self) -> Tensor:
        sums = self.values.new_zeros(self.width)
        add_at(sums, self.indices, self.values)
        return sums

    def by_latent(self, vector: Tensor) -> Tensor:
        return vector[self.indices]

    def latent_counts(self) -> Tensor:
        fires = (self.values != 0).long()
        return fires.new_zeros(self.width).index_add(0, self.indices, fires)

    def row_counts(self) -> Tensor:
        fires = (self.values != 0).long()
        return fires.new_zeros(self.shape[0]).index_add(0, self.rows, fires)

    def l1(self) -> Tensor:
        return self.values.double().abs().sum()

    def bytes(self) -> int:  # entries by row, and by latent: row, latent and value
        return 2 * len(self.values) * (2 * 8 + self.values.element_size())

    @cached_property
    def rows(self) -> Tensor:
        """The row of each entry, (n,)."""
        numbers = torch.arange(len(self.offsets), device=self.offsets.device)
        return numbers.repeat_interleave(self._sizes, output_size=len(self.values))

    @property
    def _sizes(self) -> Tensor:
        return torch.diff(self.offsets, append=self.offsets.new_full((1,), len(self.values)))

    @cached_property
    def _transposed(self) -> "SparseCodes":
        latents, order = self.indices.sort(stable=True)
        offsets = offsets_of(latents, self.width)
        return SparseCodes(self.values[order], offsets, self.rows[order], len(self.offsets))

    def add_gram(self, gram: Tensor) -> None:
        """By pairs of entries if few, 25 ns each on a CPU; the host waits for a GPU unless `each` is known."""
        each = self.each
        sizes = self._sizes.cpu() if each is None else torch.full((len(self.offsets),), each)
        if int(pairs_of(sizes).sum()) <= PAIRS_FRACTION * gram.numel():
            add_pairs(gram, self.indices, self.values, sizes)
        elif gram.device.type != "cpu":
            Codes(self.dense()).add_gram(gram)
        else:
            across = self._transposed
            panels = range(0, self.width, SPARSE_PANEL)
            firsts = [*across.offsets[::SPARSE_PANEL].tolist(), len(self.values)]
            for begin, (first, stop) in zip(panels, pairwise(firsts), strict=True):
                width = min(SPARSE_PANEL, self.width - begin)
                places = across.indices[first:stop] * width + across.rows[first:stop] - begin
                panel = self.values.new_zeros(len(self.offsets) * width)
                panel.scatter_(0, places, across.values[first:stop])
                below = SparseCodes(
                    across.values[first:],
                    across.offsets[begin:] - first,
                    across.indices[first:],
                    across.width,
                )
                gram[begin:, begin : begin + width] += below.times(panel.view(-1, width))


def offsets_of(bags: Tensor, count: int) -> Tensor:
    """First entry of each bag, given each entry's bag, (n,), ascending."""
    return torch.searchsorted(bags, torch.arange(count, device=bags.device))


def in_cache(values: Tensor) -> tuple[Tensor, ...]:
    """Blocks of rows that fit a CPU core's cache."""
    rows = CACHED_CODES // values.shape[1] if values.device.type == "cpu" else len(values)
    return values.split(max(1, rows))


def few_entries(mask: Tensor, wait: bool = False) -> Tensor | None:
    """Ascending flat indices of true entries, (n,); None if they are many, or on a GPU the host may not wait."""
    most = DENSITY * mask.numel()
    # NumPy counts and finds true entries several times faster than PyTorch.
    if mask.device.type == "cpu":
        flat_mask = mask.detach().flatten().numpy()
        if np.count_nonzero(flat_mask) > most:
            return None
        return torch.from_numpy(np.flatnonzero(flat_mask))
    if not wait:
        return None
    flat = mask.flatten().nonzero()[:, 0]
    return None if len(flat) > most else flat


def located(flat: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Row offsets, (B,), rows and latents, (n,) each, of ascending flat indices into a matrix (B, F)."""
    rows = flat.div(shape[1], rounding_mode="floor")
    return offsets_of(rows, shape[0]), rows, flat - rows * shape[1]


def joined(blocks: Sequence[Codes]) -> Codes:
    """Batches as one; sparse if all are."""
    sparse = [block for block in blocks if isinstance(block, SparseCodes)]
    if len(sparse) < len(blocks):
        return Codes(torch.cat([block.dense() for block in blocks]))
    begins = accumulate((len(block.values) for block in sparse), initial=0)
    each = {block.each for block in sparse}
    return SparseCodes(
        torch.cat([block.values for block in sparse]),
        torch.cat([block.offsets + begin for block, begin in zip(sparse, begins, strict=False)]),
        torch.cat([block.indices for block in sparse]),
        sparse[0].width,
        each.pop() if len(each) == 1 else None,
    )


def pairs_of(sizes: Tensor) -> Tensor:
    """Pairs of entries per row, an entry with itself included."""
    return sizes * (sizes + 1) // 2


def add_pairs(gram: Tensor, indices: Tensor, values: Tensor, sizes: Tensor) -> None:
    """Add `z' z` to the lower triangle of `gram`, (F, F), pair by pair; `sizes`, on the CPU: entries per row, (B,)."""
    device = gram.device
    most = PRODUCT_PAIRS if device.type == "cpu" else DEVICE_PAIRS
    ends = sizes.cumsum(0)
    pairs = pairs_of(sizes).cumsum(0)
    flat = gram.as_strided((len(gram) * gram.stride(0),), (1,))
    row = 0
    while row < len(sizes):
        seen = int(pairs[row - 1]) if row else 0
        stop = max(int(torch.searchsorted(pairs, seen + most, right=True)), row + 1)
        begin, end = int(ends[row] - sizes[row]), int(ends[stop - 1])
        latents, factors = indices[begin:end], values[begin:end]
        some_sizes = moved(sizes[row:stop], device)
        left, right = _within_rows(some_sizes, end - begin, int(pairs[stop - 1]) - seen)
        low, high = torch.aminmax(torch.stack([latents[left], latents[right]]), dim=0)
        add_at(flat, high * gram.stride(0) + low, (factors[left] * factors[right]).to(gram.dtype))
        row = stop


def _within_rows(sizes: Tensor, entries: int, pairs: int) -> tuple[Tensor, Tensor]:
    """Both entries of each pair, (pairs,)."""
    firsts = sizes.cumsum(0) - sizes  # (B,)
    first_of_own_row = firsts.repeat_interleave(sizes, output_size=entries)  # (n,)
    numbers = torch.arange(entries, device=sizes.device)
    partners = numbers + 1 - first_of_own_row  # entries of its row up to itself, (n,)
    left = numbers.repeat_interleave(partners, output_size=pairs)
    shift = (partners.cumsum(0) - partners - first_of_own_row)[left]
    return left, torch.arange(pairs, device=sizes.device) - shift


class _Taken(torch.autograd.Function):
    """Entries of a matrix, (n,), with a sparse gradient."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(rows, columns)
        ctx.shape = matrix.shape
        return matrix.flatten().gather(0, rows * matrix.shape[1] + columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        places = torch.stack(ctx.saved_tensors)
        # As an argument, check_invariants=False, torch 2.11 and 2.12 warn all the same.
        with torch.sparse.check_sparse_tensor_invariants(False):
            sparse = torch.sparse_coo_tensor(places, gradient, ctx.shape)
        return sparse, None, None


def at(
    pre: Tensor, indices: Tensor, function: Callable[[Tensor], Tensor] = lambda values: values
) -> Codes:
    """Codes of distinct latents of each row, (B, K): a function of their pre-activations, (B, K)."""
    count = indices.shape[1]
    if count > DENSITY * pre.shape[1]:
        values = function(pre.gather(1, indices))
        return Codes(torch.zeros_like(pre).scatter(1, indices, values))
    rows = torch.arange(len(pre), device=pre.device)
    flat = indices.flatten()
    taken = _Taken.apply(pre, rows.repeat_interleave(count), flat)
    values = function(taken.view(indices.shape)).flatten()
    return SparseCodes(values, rows * count, flat, pre.shape[1], each=count)


def largest(pre: Tensor, count: int) -> Codes:
    """Codes of the `count` largest entries of the whole batch."""
    flat = pre.flatten()
    entries = largest_of_rows(flat.detach()[None], count)[0]
    if count <= DENSITY * len(flat):
        return _at_ascending(pre, entries)
    largest_alone = torch.zeros_like(flat).scatter(0, entries, flat.gather(0, entries))
    return Codes(largest_alone.view_as(pre))


def largest_of_rows(values: Tensor, count: int) -> Tensor:
    """Ascending places of the `count` largest numbers of each row, (B, count)."""
    # NumPy's partition takes a fifth of topk's time, in rows of 2,000 numbers a third.
    if values.device.type == "cpu" and values.numel() and count:
        numbers = values.to(torch.promote_types(values.dtype, torch.float32)).numpy()
        smaller = numbers < np.partition(numbers, -count)[:, [-count]]
        entries = np.flatnonzero(~smaller)  # a NaN is larger than all numbers, for topk too
        if len(entries) == len(numbers) * count:  # else some are equal
            return torch.from_numpy(entries % numbers.shape[1]).view(-1, count)
    return values.topk(count, sorted=False).indices.sort().values


def where(pre: Tensor, active: Tensor) -> Codes:
    """Codes that keep `pre` where a mask is true; no gradient flows through the zeros."""
    few = few_entries(active)
    return Codes(pre * active) if few is None else _at_ascending(pre, few)


def selected(pre: Tensor, active: Tensor) -> Codes:
    """`where`, but all of `pre` if many entries are kept, for activations that zero the others."""
    few = few_entries(active)
    return Codes(pre) if few is None else _at_ascending(pre, few)


def _at_ascending(pre: Tensor, entries: Tensor) -> SparseCodes:
    offsets, rows, indices = located(entries, (pre.shape[0], pre.shape[1]))
    return SparseCodes(_Taken.apply(pre, rows, indices), offsets, indices, pre.shape[1])


class PreActivations(torch.autograd.Function):
    """`x W_enc + b_enc`, (B, F); multiplies a sparse gradient as sparse codes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, W_enc: Tensor, b_enc: Tensor) -> Tensor:
        ctx.save_for_backward(x, W_enc)
        return torch.addmm(b_enc, x, W_enc)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, W_enc = ctx.saved_tensors
        to_x, to_W_enc, to_b_enc = ctx.needs_input_grad
        if gradient.layout == torch.strided:
            codes = Codes(gradient)
        else:
            rows, columns = gradient._indices()
            offsets = offsets_of(rows, len(gradient))
            codes = SparseCodes(gradient._values(), offsets, columns, gradient.shape[1])
        return (
            codes.times(W_enc.T) if to_x else None,
            codes.transposed_times(x).T if to_W_enc else None,
            codes.sums() if to_b_enc else None,
        )


class Gate(torch.autograd.Function):
    """`pre * H(pre - threshold)`, with straight-through gradients of the threshold and, if `to_pre`, of the step's
    pre-activation."""

    @staticmethod
    def forward(
        ctx: Any, pre: Tensor, threshold: Tensor, width: Tensor | float, to_pre: bool
    ) -> Tensor:
        active = pre > threshold
        ctx.save_for_backward(active, _kernel(pre, threshold, width) * threshold)
        ctx.to_pre = to_pre
        return pre * active

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        active, jump = ctx.saved_tensors
        step = jump * gradient
        return gradient * active + step if ctx.to_pre else gradient * active, -step, None, None


class Heaviside(torch.autograd.Function):
    """`H(pre - threshold)`, elementwise, with straight-through gradients of both."""

    @staticmethod
    def forward(ctx: Any, pre: Tensor, threshold: Tensor, width: Tensor | float) -> Tensor:
        ctx.save_for_backward(_kernel(pre, threshold, width))
        return (pre > threshold).to(pre.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        step = ctx.saved_tensors[0] * gradient
        return step, -step, None


def _kernel(pre: Tensor, threshold: Tensor, width: Tensor | float) -> Tensor:
    """The step's derivative: 1 / width where `|pre - threshold| < width / 2`, else 0."""
    return torch.where((pre - threshold).abs() < width / 2, 1 / torch.as_tensor(width).to(pre), 0.0)
