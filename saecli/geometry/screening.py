"""Supports and margins in float32, proved in float64: only what float32 leaves in doubt is computed again.

A dot product of D float32 numbers is off by at most `g ||x|| ||w||`, g = D u / (1 - D u), u = 2^-24, in whatever order
it is summed; where m pieces of p numbers are summed each from zero, and then added up, p + m takes the place of D. So
float32 tells which few latents could decide a row's support or its margin, and only these are multiplied in float64.
The results are those of float64, in half the time of its product.
Source of the bounds: Higham, "Accuracy and Stability of Numerical Algorithms" (2002), sections 3.1 and 4.2.
Shapes: B rows, D = d_in, F = d_sae, K = k, L listed latents, P pairs.
"""

import math

import torch
from torch import Tensor

ENTRANTS = 16  # latents outside the support that are candidates for the nearest swap
PAIRS = (4, 32)  # swaps whose distance is computed exactly, and for rows for which these do not prove the minimum
PIECE = 512  # numbers of a dot product that are summed from zero: fewer bound its rounding better, and cost more time
CACHED = 2**18  # numbers at a time, so that intermediate results stay in a core's own cache


def rounding(D: int) -> float:
    """g, with a few roundings more: of the inputs, of the bias and of operations on the product."""
    n = (min(D, PIECE) + math.ceil(D / PIECE) + 8) * 2.0**-24
    return n / (1 - n)


def product(x: Tensor, W: Tensor, b: Tensor) -> Tensor:
    """`x W + b` in float32, (B, F), off by at most `rounding(D) (||x_i|| ||w_j|| + |b_j|)`, of (B, D), (D, F), (F,)."""
    pieces = [slice(begin, begin + PIECE) for begin in range(0, len(W), PIECE)]
    total = torch.addmm(b, x[:, pieces[0]], W[pieces[0]])
    piece = torch.empty_like(total)
    for some in pieces[1:]:
        total += torch.mm(x[:, some], W[some], out=piece)
    return total


def dots(x: Tensor, sites: Tensor, row: Tensor, latent: Tensor) -> Tensor:
    """`x_row . w_latent` of pairs, (P,) each, in float64, of x, (B, D), and sites, (F, D): (P,)."""
    step = max(1, CACHED // x.shape[1])
    found = [(x[some] * sites[others]).sum(1) for some, others in zip(row.split(step), latent.split(step), strict=True)]
    return torch.cat(found)


class Switches:
    """The hyperplanes `w_i . x + b_i = 0` of latents that switch independently.

    Args:
        W: encoder weights, (D, F), float64, each column in one piece.
        b: bias less threshold, (F,), float64.
    """

    def __init__(self, W: Tensor, b: Tensor) -> None:
        self._W, self._b, self._norms = W, b, W.norm(dim=0)
        self._quick = W.float(), b.float()
        never = self._norms == 0  # such a latent switches nowhere
        self._inverse = (1 / self._norms).masked_fill(never, 0).float()
        slack = rounding(len(W)) * b.abs() / self._norms
        self._slack = slack.masked_fill(never, -torch.inf).float()
        self._width = 2 * self._slack.clamp(min=0)  # from the lower to the upper bound of a distance

    def look(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Which latents are above zero, (B, F), and the distance to the nearest hyperplane, (B,), of rows, (B, D)."""
        v = product(x.float(), *self._quick)
        x = x.double()
        above, reach = torch.empty_like(v, dtype=torch.bool), 2 * rounding(len(self._W)) * x.norm(dim=1)
        rows, near = max(1, CACHED // v.shape[1]), []
        for values, over, far in zip(v.split(rows), above.split(rows), reach.split(rows), strict=True):
            torch.gt(values, 0, out=over)
            lower = values.abs_().mul_(self._inverse).sub_(self._slack)  # but for what grows with the row
            far += (lower + self._width).amin(1)
            within = (lower <= (far * (1 + 1e-6)).float()[:, None]).nonzero()
            near.append(within + torch.tensor([len(near) * rows, 0]))
        row, latent = torch.cat(near).T
        exact = dots(x, self._W.T, row, latent) + self._b[latent]
        above[row, latent] = exact > 0
        distances = torch.where(self._norms[latent] > 0, exact.abs() / self._norms[latent], torch.inf)
        none = torch.where(reach.isnan(), reach, torch.inf)  # of a row that is no number
        return above, none.scatter_reduce(0, row, distances, "amin")


class Swaps:
    """The hyperplanes on which one of the K largest of `w_i . x + b_i` and another one swap.

    Args:
        sites: w_i, (F, D), float64.
        b: (F,), float64.
        reach: r_i, so that no two sites are farther apart than r_i + r_j, (F,).
        k: K.
    """

    def __init__(self, sites: Tensor, b: Tensor, reach: Tensor, k: int) -> None:
        self._sites, self._b, self._reach, self._k = sites, b, reach, k
        self._quick = sites.T.float(), b.float()
        self._longest, self._bias, self._farthest = sites.norm(dim=1).max(), b.abs().max(), reach.max()

    def look(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The K latents kept, (B, K), the margin, (B,), and whether both are proved, (B,), of rows, (B, D).

        Unproved rows must be computed otherwise.
        """
        K = self._k
        top = product(x.float(), *self._quick).topk(min(K + ENTRANTS + 1, len(self._b)), dim=1)
        x = x.double()
        error = rounding(x.shape[1]) * (x.norm(dim=1) * self._longest + self._bias)
        values, latents, proved = self._settled(x, top.values.double(), top.indices, error[:, None])
        inside, outside = latents[:, :K], latents[:, K:]
        width = outside.shape[1]
        if not width:
            return inside, x.new_full((len(x),), torch.inf), proved
        gaps = values[:, :K, None] - values[:, None, K:] - 2 * error[:, None, None]
        reach = self._reach[inside][:, :, None] + self._reach[outside][:, None, :]
        bound = torch.where(reach > 0, gaps / reach, torch.inf).flatten(1)  # (B, K (L - K))
        unlisted = x.new_full((len(x),), torch.inf)
        if latents.shape[1] < len(self._b):
            gap = values[:, :K].amin(1) - top.values[:, -1].double() - 2 * error
            unlisted = gap / (self._farthest + self._reach[inside].amax(1))
        margins, pending = torch.empty_like(unlisted), torch.arange(len(x))
        for pairs in PAIRS:
            best = bound[pending].topk(min(pairs + 1, bound.shape[1]), largest=False)
            others = unlisted[pending]
            if best.values.shape[1] > pairs:
                others = torch.minimum(others, best.values[:, pairs])
            i, j = (some[pending].gather(1, index) for some, index in (
                (inside, best.indices[:, :pairs] // width), (outside, best.indices[:, :pairs] % width)))
            margins[pending] = self._nearest(x[pending], i, j)
            pending = pending[~(margins[pending] <= others)]  # not proved where either is no number
        proved[pending] = False
        return inside, margins, proved

    def _nearest(self, x: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The least distance of rows, (B, D), to swaps of latents, (B, P) each, from true differences: (B,)."""
        found = []
        step = max(1, CACHED // (i.shape[1] * x.shape[1]))
        for some, own, others in zip(x.split(step), i.split(step), j.split(step), strict=True):
            apart = self._sites[own] - self._sites[others]  # (B, P, D)
            exact = torch.bmm(apart, some[:, :, None])[:, :, 0] + self._b[own] - self._b[others]
            distances = apart.square().sum(2).sqrt()
            found.append(torch.where(distances > 0, exact / distances, torch.inf).amin(1))
        return torch.cat(found)

    def _settled(self, x: Tensor, values: Tensor, latents: Tensor, error: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values and latents, (B, L) each, the K largest of all first, and whether that is beyond doubt, (B,).

        In doubt are latents that could swap with the last inside or the first outside; their values are made exact. No
        value moves by more than the error, so that those beyond doubt keep their side.
        """
        if values.shape[1] == self._k:
            return values, latents, torch.ones(len(x), dtype=torch.bool)
        last, following = values[:, self._k - 1, None], values[:, self._k, None]
        doubtful = (values <= following + 2 * error) & (values >= last - 2 * error)
        settled = ~doubtful[:, -1] | (values.shape[1] == len(self._b))
        row, rank = doubtful.nonzero().T
        latent = latents[row, rank]
        values[row, rank] = dots(x, self._sites, row, latent) + self._b[latent]
        order = values.sort(dim=1, descending=True, stable=True).indices
        return values.gather(1, order), latents.gather(1, order), settled
