"""Pre-activations selected as codes, with gradients as sparse as the codes, and the exact gradient of soft-topk.

The smooth TopK takes each pre-activation times the probability that a random K-subset holds it:

    rho_T(v)_i = v_i P(i in S),    P(S) = exp(sum_{j in S} v_j / T) / e_K(exp(v / T)),    |S| = K

with e_K the elementary symmetric polynomial. S is distributed as the heads of independent coins of probability
`q_i = sigmoid(v_i / T - lam)`, given K heads, for any lam; with lam such that K heads are expected, nothing significant
overflows or underflows. The number of heads is distributed as the product of the polynomials `(1 - q_i) + q_i t`,
multiplied in a tree and cut off at degree K; a pass back down the tree gives for every coin the distribution of the
number of heads among the others. Both cost O(F K) per row.

Shapes: B rows, n entries, F = d_sae, K = k; polynomials (L, n, B), n of them per row, degree by degree.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..codes import DENSITY, Codes, DenseCodes, SparseCodes, few_entries, located

SATURATED = 50.0  # distance of v / T from the middle of the gap beyond which a coin's outcome is certain in float64
BISECTIONS = 16  # give lam to within 0.002; the result is exact for any lam


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
        return (
            torch.sparse_coo_tensor(
                torch.stack(ctx.saved_tensors), gradient, ctx.shape, check_invariants=False
            ),
            None,
            None,
        )


def at(
    pre: Tensor, indices: Tensor, function: Callable[[Tensor], Tensor] = lambda values: values
) -> Codes:
    """Codes of some distinct latents of each row, (B, K): a function of their pre-activations, (B, K)."""
    count = indices.shape[1]
    if count > DENSITY * pre.shape[1]:
        return DenseCodes(
            torch.zeros_like(pre).scatter(1, indices, function(pre.gather(1, indices)))
        )
    rows = torch.arange(len(pre), device=pre.device)
    values = function(
        _Taken.apply(pre, rows.repeat_interleave(count), indices.flatten()).view(indices.shape)
    )
    return SparseCodes(rows * count, indices.flatten(), values.flatten(), pre.shape[1], each=count)


def largest(pre: Tensor, count: int) -> Codes:
    """Codes of the `count` largest entries of the whole batch."""
    flat = pre.flatten()
    entries = _largest(flat.detach(), count)
    if count > DENSITY * len(flat):
        return DenseCodes(
            torch.zeros_like(flat).scatter(0, entries, flat.gather(0, entries)).view_as(pre)
        )
    return _at_ascending(pre, entries)


def _largest(values: Tensor, count: int) -> Tensor:
    """Ascending places of the `count` largest of some numbers, (n,)."""
    if values.device.type == "cpu":  # NumPy's partition takes a fifth of the time of torch's topk
        numbers = values.to(torch.promote_types(values.dtype, torch.float32)).numpy()
        found = np.flatnonzero(numbers >= np.partition(numbers, -count)[-count])
        if len(found) == count:  # else some are equal, or NaN
            return torch.from_numpy(found)
    return values.topk(count, sorted=False).indices.sort().values


def where(pre: Tensor, active: Tensor) -> Codes:
    """Codes that keep `pre` where a mask is true; no gradient flows through the zeros."""
    found = selected(pre, active)
    return found if isinstance(found, SparseCodes) else DenseCodes(pre * active)


def selected(pre: Tensor, active: Tensor) -> Codes:
    """As `where`, but all of `pre` if many entries are kept, for activations that zero the others."""
    few = few_entries(active)
    return DenseCodes(pre) if few is None else _at_ascending(pre, few)


def _at_ascending(pre: Tensor, entries: Tensor) -> SparseCodes:
    offsets, rows, indices = located(entries, (pre.shape[0], pre.shape[1]))
    return SparseCodes(offsets, indices, _Taken.apply(pre, rows, indices), pre.shape[1])


class Gate(torch.autograd.Function):
    """`pre * H(pre - threshold)`, with straight-through gradients (see `JumpRelu`) of the threshold and, if `to_pre`,
    of the pre-activation in the step."""

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


class Step(torch.autograd.Function):
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
    """The derivative of the step: 1 / width where `|pre - threshold| < width / 2`, else 0."""
    return torch.where((pre - threshold).abs() < width / 2, 1 / torch.as_tensor(width).to(pre), 0.0)


class SoftTopKCodes(torch.autograd.Function):
    """`rho_T(v)`, (B, F), with its exact gradient; `SoftTopKCodes.apply(v, k, temperature)`, k < F.

    With g0 and g1 the probabilities that K and K - 1 of the other coins fall heads, and R that K of all do,
    `P(i in S) = q_i g1_i / R`. Its gradient along a direction u of v / T is the covariance with `sum_{j in S} u_j`,

        q_i (1 - q_i) / R^2 * (g0_i g1_i u_i + g0_i g1'_i - g1_i g0'_i)

    where a prime is the derivative as each q_j t grows at the rate u_j; a second pass over the tree gives it.
    Only v is saved for it: the tree, some twenty numbers per entry, is built again.
    """

    @staticmethod
    def forward(ctx: Any, pre: Tensor, k: int, temperature: float) -> Tensor:
        ctx.save_for_backward(pre)
        ctx.k, ctx.temperature = k, temperature
        _, heads, levels, others = _tree(pre.T.contiguous(), k, temperature)
        return pre * (heads * others[-1][1, : len(heads)] / levels[-1][k]).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (pre,), k = ctx.saved_tensors, ctx.k
        v, upstream = pre.T.contiguous(), grad.T
        tails, heads, levels, others = _tree(v, k, ctx.temperature)
        u = upstream * v
        g0, g1 = others[-1][:, : len(v)]
        g0_change, g1_change = _change_of_the_others(levels, others, heads * u, k)
        covariance = (
            tails * heads / levels[-1][k].square() * (g0 * g1 * u + g0 * g1_change - g1 * g0_change)
        )
        return (
            (upstream * (heads * g1 / levels[-1][k]) + covariance / ctx.temperature).T,
            None,
            None,
        )


def _tree(
    v: Tensor, k: int, temperature: float
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    tails, heads = _coins(v, k, temperature)
    levels = _products(torch.stack([tails, heads]), k)
    return tails, heads, levels, _of_the_others(levels, k)


def _coins(v: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """`1 - q` and `q`, (F, B) each, to full relative precision, with sum q near k in each row."""
    largest = v.topk(k + 1, dim=0).values
    half_gap = (largest[k - 1] - largest[k]) / 2
    logits = (v - (largest[k] + half_gap)) / temperature
    # At these bounds, more than K heads are expected, or fewer.
    high = (half_gap / temperature).clamp(max=SATURATED) + math.log(len(v))
    low = -high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        too_many = (logits - middle).sigmoid().sum(0) > k
        low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
    logits = logits - (low + high) / 2
    return (-logits).sigmoid(), logits.sigmoid()


def _products(leaves: Tensor, degree: int) -> list[Tensor]:
    """The tree's levels from the leaves, (2, F, B), to their product, (degree + 1, 1, B), odd ones padded with 1."""
    levels = [leaves]
    while levels[-1].shape[1] > 1:
        levels[-1] = _evened(levels[-1], 1.0)
        levels.append(_times(*_halves(levels[-1]), degree))
    return levels


def _of_the_others(levels: list[Tensor], degree: int) -> list[Tensor]:
    """For each level from the root down, the derivative of the root's coefficient of degree `degree` in each
    coefficient; at the leaves, (2, F, B), the probabilities of `degree` and one less heads among the other coins."""
    root = torch.zeros_like(levels[-1])
    root[degree] = 1
    found = [root]
    for level in reversed(levels[:-1]):
        left, right = _halves(level)
        above = found[-1][:, : left.shape[1]]
        found.append(torch.cat([_pulled(above, right), _pulled(above, left)], 1))
    return found


def _change_of_the_others(
    levels: list[Tensor], others: list[Tensor], change: Tensor, degree: int
) -> Tensor:
    """The derivative of `_of_the_others` at the leaves as their coefficients of t change at the rate `change`."""
    changes = [torch.stack([torch.zeros_like(change), change])]
    for level in levels[:-1]:
        changes[-1] = _evened(changes[-1], 0.0)
        (left, right), (left_change, right_change) = _halves(level), _halves(changes[-1])
        changes.append(_times(left_change, right, degree) + _times(left, right_change, degree))
    found = torch.zeros_like(levels[-1])
    for level, level_change, above in zip(
        reversed(levels[:-1]), reversed(changes[:-1]), others, strict=False
    ):
        (left, right), (left_change, right_change) = _halves(level), _halves(level_change)
        above, found = above[:, : left.shape[1]], found[:, : left.shape[1]]
        found = torch.cat(
            [
                _pulled(found, right) + _pulled(above, right_change),
                _pulled(found, left) + _pulled(above, left_change),
            ],
            1,
        )
    return found[:, : change.shape[0]]


def _halves(level: Tensor) -> tuple[Tensor, Tensor]:
    half = level.shape[1] // 2
    return level[:, :half], level[:, half:]


def _evened(level: Tensor, constant: float) -> Tensor:
    if level.shape[1] % 2 == 0:
        return level
    added = torch.zeros_like(level[:, :1])
    added[0] = constant
    return torch.cat([level, added], 1)


def _times(left: Tensor, right: Tensor, degree: int) -> Tensor:
    """Products of polynomials, (L, n, B) each, cut off at a degree."""
    L = len(left)
    product = left.new_zeros(min(2 * (L - 1), degree) + 1, *left.shape[1:])
    for j in range(L):
        terms = min(L, len(product) - j)
        product[j : j + terms].addcmul_(left[j], right[:terms])
    return product


def _pulled(above: Tensor, sibling: Tensor) -> Tensor:
    """Derivatives in a factor's coefficients, given those in the product's, `above`."""
    found = torch.zeros_like(sibling)
    for j in range(len(sibling)):
        terms = min(len(sibling), len(above) - j)
        found[:terms].addcmul_(above[j : j + terms], sibling[j])
    return found
