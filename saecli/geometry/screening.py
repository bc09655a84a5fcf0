"""Supports and margins in float32, proved in float64: what float32 leaves in doubt is computed again, and no more.

A dot product of D float32 numbers is off by at most `g ||x|| ||w||`, g = D u / (1 - D u), u = 2^-24, in whatever order
it is summed. So float32 tells which few latents could decide a row's support or its margin, and only these are
multiplied in float64. The results are those of float64, in half the time of its product.
Source of the bound: Higham, "Accuracy and Stability of Numerical Algorithms" (2002), section 3.1.
Shapes: B rows, D = d_in, F = d_sae, K = k, L listed latents, P pairs.
"""

import torch
from torch import Tensor

ENTRANTS = 16  # latents outside the support that are candidates for the nearest swap
PAIRS = (4, 32)  # swaps whose distance is computed exactly, and for rows for which these do not prove the minimum


def rounding(D: int) -> float:
    """g, with a few roundings more: of the inputs, of the bias and of what is done to the product."""
    n = (D + 8) * 2.0**-24
    return n / (1 - n)


class Switches:
    """The hyperplanes `w_i . x + b_i = 0` of latents that switch each on its own.

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

    def look(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Which latents are above zero, (B, F), and the distance to the nearest hyperplane, (B,), of rows, (B, D)."""
        v = torch.addmm(self._quick[1], x.float(), self._quick[0])
        above = v > 0
        lower = v.abs_().mul_(self._inverse).sub_(self._slack)  # of the distance, but for what grows with the row
        x = x.double()
        least, nearest = lower.min(1)
        error = self._slack[nearest].double().clamp(min=0) + rounding(len(self._W)) * x.norm(dim=1)
        reach = least.double() + 2 * error
        row, latent = (lower <= (reach * (1 + 1e-6)).float()[:, None]).nonzero().T
        exact = (x[row] * self._W.T[latent]).sum(1) + self._b[latent]
        above[row, latent] = exact > 0
        distances = torch.where(self._norms[latent] > 0, exact.abs() / self._norms[latent], torch.inf)
        none = torch.where(reach.isnan(), reach, torch.inf)  # of a row that is no number
        return above, none.scatter_reduce(0, row, distances, "amin")


class Swaps:
    """The hyperplanes on which one of the K largest of `w_i . x + b_i` and another change places.

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

        What is not proved must be computed otherwise.
        """
        K = self._k
        top = torch.addmm(self._quick[1], x.float(), self._quick[0]).topk(min(K + ENTRANTS + 1, len(self._b)), dim=1)
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
            i, j = (some[pending].gather(1, place) for some, place in (
                (inside, best.indices[:, :pairs] // width), (outside, best.indices[:, :pairs] % width)))
            margins[pending] = self._nearest(x[pending], i, j)
            pending = pending[~(margins[pending] <= others)]  # not proved where either is no number
        proved[pending] = False
        return inside, margins, proved

    def _nearest(self, x: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The least distance of rows, (B, D), to swaps of latents, (B, P) each, from true differences: (B,)."""
        apart = self._sites[i] - self._sites[j]  # (B, P, D)
        exact = torch.bmm(apart, x[:, :, None])[:, :, 0] + self._b[i] - self._b[j]
        distances = apart.square().sum(2).sqrt()
        return torch.where(distances > 0, exact / distances, torch.inf).amin(1)

    def _settled(self, x: Tensor, values: Tensor, latents: Tensor, error: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values and latents, (B, L) each, the K largest of all first, and whether that is beyond doubt, (B,).

        In doubt are latents that the last inside or the first outside could change places with; their values are made
        exact. No value is moved by more than the error, so that those beyond doubt keep their side.
        """
        if values.shape[1] == self._k:
            return values, latents, torch.ones(len(x), dtype=torch.bool)
        last, following = values[:, self._k - 1, None], values[:, self._k, None]
        doubtful = (values <= following + 2 * error) & (values >= last - 2 * error)
        settled = ~doubtful[:, -1] | (values.shape[1] == len(self._b))
        row, place = doubtful.nonzero().T
        latent = latents[row, place]
        values[row, place] = (x[row] * self._sites[latent]).sum(1) + self._b[latent]
        order = values.sort(dim=1, descending=True, stable=True).indices
        return values.gather(1, order), latents.gather(1, order), settled
