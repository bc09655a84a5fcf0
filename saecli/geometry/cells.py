"""Cells: the convex pieces on which an SAE is affine, and power diagrams, whose cells they are for topk and abs-topk.

A row's cell is its support S, the latents that it keeps. Its boundary is the nearest hyperplane where

    thresholded:  latent i switches at       v_i = t_i,   at distance  |v_i - t_i| / ||w_i||
    largest K:    i in S and j not in S swap, at distance  (v_i - v_j) / ||mu_i - mu_j||
    relu-topk:    as the largest K and v_i = 0 for i in S where K latents are positive, else as relu

with v = x @ W_enc + b_enc and mu the sites of the activation's power diagram (for abs-topk the 2F sites +-w_i):

    power of x to site i:   pi_i(x) = ||x - mu_i||^2 - alpha_i
    of an encoder:          mu_i = w_i,  alpha_i = ||w_i||^2 + 2 b_i   =>   pi_i(x) = ||x||^2 - 2 (w_i . x + b_i)

so the K largest pre-activations are the K smallest powers: the cells of a TopK encoder are the cells of the K-th order
power diagram of its columns:

    R_S = {x : TopK keeps S} = {x : pi_i(x) < pi_j(x) for i in S, j not in S}

Source: the paper on SAEs as piecewise affine splines, its theorem on TopK SAEs and K-th order power diagrams. All
float64. Shapes: B rows, D = d_in, F = d_sae, K = k, n sites.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..base.errors import ConfigError
from ..sae.activations import ACTIVATIONS, AbsTopK, Activation, Largest, ReluTopK, Thresholded, TopK
from ..sae.dictionary import SAE

# Candidates of the first round of the search for the nearest swap, enough for most rows.
SEARCH_WIDTH = 4
BLOCK = 2**23  # float64 numbers that one step of a search may hold, 64 MiB
EPSILON = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class PowerDiagram:
    centroids: Tensor  # mu of the sites, (n, D), float64
    weights: Tensor  # alpha, in squared units of the rows, (n,), float64; a constant added to all moves no cell

    def __post_init__(self) -> None:
        if self.centroids.ndim != 2 or self.weights.shape != self.centroids.shape[:1]:
            raise ConfigError(
                "a power diagram needs centroids (n, D) and weights (n,), got "
                f"{tuple(self.centroids.shape)} and {tuple(self.weights.shape)}"
            )
        # Sites are gathered by the million, three times faster from contiguous rows.
        object.__setattr__(self, "centroids", self.centroids.double().contiguous())
        object.__setattr__(self, "weights", self.weights.double())

    @classmethod
    def from_encoder(cls, W_enc: Tensor, b_enc: Tensor) -> Self:
        """The diagram whose K-th order cells are the TopK encoder's, (D, F), (F,)."""
        centroids = W_enc.double().T
        return cls(centroids, centroids.square().sum(1) + 2 * b_enc.double())

    def power(self, x: Tensor) -> Tensor:
        """`||x - mu_i||^2 - alpha_i`, (B, n), of rows (B, D), from true differences: an expanded square would compute
        the pre-activations again, and prove nothing. Cost: about ten times a product's time."""
        from scipy.spatial.distance import cdist  # twice as fast as torch's

        squares = cdist(x.double().numpy(), self.centroids.numpy(), "sqeuclidean")
        return torch.from_numpy(squares) - self.weights

    def nearest(self, x: Tensor, k: int) -> Tensor:
        """The k sites of smallest power, (B, k), nearest first."""
        return self.power(x).topk(k, dim=-1, largest=False).indices


@dataclass(frozen=True)
class Cells(ABC):
    """The partition that an SAE, in float64, makes of its input space."""

    boundary: ClassVar[str]  # the kind of its boundaries, in one word for tables
    sae: SAE

    @property
    @abstractmethod
    def possible_log10(self) -> float:
        """log10 of the number of possible supports."""

    def pre_activations(self, x: Tensor) -> Tensor:
        return self.sae.pre_activations(x.double())

    @abstractmethod
    def supports(self, pre: Tensor) -> Tensor:
        """The latents that each row keeps, (B, F), bool, also those with a pre-activation of 0."""

    @abstractmethod
    def margins(self, pre: Tensor) -> Tensor:
        """Exact distances to the boundary of each row's cell, (B,), in units of the rows; infinite without boundary."""

    @abstractmethod
    def crossings(self, pre: Tensor, radius: float) -> Tensor:
        """Local complexity, (B,): boundary hyperplanes within a radius, in units of the rows."""


@dataclass(frozen=True)
class ThresholdedCells(Cells):
    """Cells of latents that switch independently at thresholds t, (F,), each at one hyperplane."""

    boundary: ClassVar[str] = "hyperplanes"
    thresholds: Tensor

    @property
    def possible_log10(self) -> float:
        return self.sae.d_sae * math.log10(2)

    @cached_property
    def _norms(self) -> Tensor:
        return self.sae.W_enc.norm(dim=0)

    def distances(self, pre: Tensor) -> Tensor:
        """`|v_i - t_i| / ||w_i||`, (B, F)."""
        distances = (pre - self.thresholds).abs() / self._norms
        # A latent with no weights switches nowhere.
        return distances.masked_fill(self._norms == 0, torch.inf)

    def supports(self, pre: Tensor) -> Tensor:
        return pre > self.thresholds

    def margins(self, pre: Tensor) -> Tensor:
        return self.distances(pre).amin(1)

    def crossings(self, pre: Tensor, radius: float) -> Tensor:
        return (self.distances(pre) < radius).sum(1)


@dataclass(frozen=True)
class LargestCells(Cells):
    """Cells of a K-th order power diagram; site s is of latent `s % F`. Each pair of a kept and an unkept site is a
    hyperplane, K (n - K) per row.

    The K largest |v_i| of abs-topk are the K largest of the 2F numbers v_i and -v_i. The cells of its 2F sites +w_i and
    -w_i separate signs of the kept latents, which the SAE's do not.

    Few swaps are ever measured: with r_i = ||mu_i - c|| and c the mean of the sites, none is nearer than
    `(v_i - v_j) / (r_i + r_j)`.
    """

    boundary: ClassVar[str] = "swaps"
    diagram: PowerDiagram
    activation: Largest

    @property
    def k(self) -> int:
        return self.activation.k

    def kept(self, pre: Tensor) -> Tensor:
        return self.activation.ranking(pre).topk(self.k, dim=-1).indices

    def values(self, pre: Tensor) -> Tensor:
        """The values that rank the sites, (B, n); where n = 2F, pre-activations followed by their negatives."""
        return pre if len(self.diagram.weights) == self.sae.d_sae else torch.cat([pre, -pre], 1)

    def sites(self, kept: Tensor, pre: Tensor) -> Tensor:
        """The sites of latents, (B, K); where n = 2F, those with the pre-activation's sign."""
        if len(self.diagram.weights) == self.sae.d_sae:
            return kept
        return kept + self.sae.d_sae * (pre.gather(1, kept) < 0)

    @property
    def possible_log10(self) -> float:
        """log10 of C(F, K)."""
        F, K = self.sae.d_sae, self.k
        return (math.lgamma(F + 1) - math.lgamma(K + 1) - math.lgamma(F - K + 1)) / math.log(10)

    @cached_property
    def _reach(self) -> Tensor:
        return (self.diagram.centroids - self.diagram.centroids.mean(0)).norm(dim=1)

    def supports(self, pre: Tensor) -> Tensor:
        return torch.zeros_like(pre, dtype=torch.bool).scatter_(1, self.kept(pre), True)

    def _sides(self, pre: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Site values (B, n), kept sites (B, K), and the bound on each site's nearest swap (B, n)."""
        kept = self.kept(pre)
        values, inside = self.values(pre), self.sites(kept, pre)
        lowest = values.gather(1, inside).amin(1, keepdim=True)
        reach = self._reach + self._reach[inside].amax(1, keepdim=True)
        bound = torch.where(reach > 0, (lowest - values) / reach, torch.inf)
        # Where a latent has two sites, both are barred: before they could swap, every other latent has entered.
        for copy in range(values.shape[1] // pre.shape[1]):
            bound.scatter_(1, kept + copy * pre.shape[1], torch.inf)
        return values, inside, bound

    def margins(self, pre: Tensor) -> Tensor:
        """`min over i in S, j not in S of (v_i - v_j) / ||mu_i - mu_j||`, (B,), exact.

        Cost: O(n) per row, and O(D) for each swap that the bound does not rule out. The search widens until the
        candidates prove the minimum.
        """
        values, inside, bound = self._sides(pre)
        # Candidates are the sites of the latents not kept.
        outside = values.shape[1] // pre.shape[1] * (pre.shape[1] - self.k)
        margins = values.new_full((len(pre),), torch.inf)
        if not outside:
            return margins
        pending, width = torch.arange(len(pre)), SEARCH_WIDTH
        while len(pending):
            block = max(1, BLOCK // (max(self.k, self.sae.d_in) * width))
            proven = []
            for rows in pending.split(block):
                margins[rows], is_proven = self._nearest_swap(
                    values[rows], inside[rows], bound[rows], width, outside
                )
                proven.append(is_proven)
            pending, width = pending[~torch.cat(proven)], width * 8
        return margins

    def _nearest_swap(
        self, values: Tensor, inside: Tensor, bound: Tensor, width: int, outside: int
    ) -> tuple[Tensor, Tensor]:
        """The nearest of the `width` swaps of smallest bound, and whether the other bounds prove it, (B,)."""
        bounds, j = _smallest(bound, width, outside)  # (B, |j|)
        others = bounds[:, -1]
        gaps = values.gather(1, inside)[:, :, None] - values.gather(1, j)[:, None, :]
        reach = self._reach[inside][:, :, None] + self._reach[j][:, None, :]  # (B, K, |j|)
        pair_bound = torch.where(reach > 0, gaps / reach, torch.inf).flatten(1)

        bounds, pairs = _smallest(pair_bound, width, pair_bound.shape[1])
        others = torch.minimum(others, bounds[:, -1])
        distances = self._site_distances(
            inside.gather(1, pairs // j.shape[1]), j.gather(1, pairs % j.shape[1])
        )
        chosen = gaps.flatten(1).gather(1, pairs)
        nearest = torch.where(distances > 0, chosen / distances, torch.inf).amin(1)
        return nearest, ~(nearest > others)  # a row of NaN has margin NaN, and is done

    def _site_distances(self, i: Tensor, j: Tensor) -> Tensor:
        """`||mu_i - mu_j||` from true differences, of indices (B, P)."""
        mu = self.diagram.centroids
        step = max(1, BLOCK // mu.shape[1])
        pairs = zip(i.flatten().split(step), j.flatten().split(step), strict=True)
        return torch.cat([(mu[a] - mu[b]).norm(dim=-1) for a, b in pairs]).view_as(i)

    def crossings(self, pre: Tensor, radius: float) -> Tensor:
        values, inside, bound = self._sides(pre)
        mu = self.diagram.centroids
        counts = []
        for v, i, nearest in zip(values, inside, bound, strict=True):
            j = (nearest < radius).nonzero()[:, 0]
            distances = torch.cdist(mu[i], mu[j], compute_mode="use_mm_for_euclid_dist")
            counts.append((v[i][:, None] - v[j] < radius * distances).sum())  # of (K, |j|)
        return torch.stack(counts)


def _smallest(bounds: Tensor, width: int, count: int) -> tuple[Tensor, Tensor]:
    """The `width` smallest of `count` finite bounds per row and the next, infinite without one, (B, width + 1), and
    the indices of all but the next."""
    width = min(width, count)
    smallest = bounds.topk(min(width + 1, count), largest=False)
    values = smallest.values
    if width == count:
        values = torch.cat([values, values.new_full((len(values), 1), torch.inf)], 1)
    return values, smallest.indices[:, :width]


@dataclass(frozen=True)
class ReluTopKCells(Cells):
    """Cells of the K largest clipped at zero.

    A row with K positive latents or more lies in a topk cell, cut at `v_i = 0` of the kept latents; with fewer in a
    cell of relu, since no swap among the others matters.
    """

    boundary: ClassVar[str] = "hyperplanes"
    largest: LargestCells  # the cells without the clipping
    relu: ThresholdedCells  # the cells without the limit K

    @property
    def possible_log10(self) -> float:
        """log10 of sum_j C(F, j) up to j = K."""
        F = self.sae.d_sae
        j = torch.arange(self.largest.k + 1, dtype=torch.float64)
        logs = math.lgamma(F + 1) - torch.lgamma(j + 1) - torch.lgamma(F - j + 1)
        return float(torch.logsumexp(logs, 0)) / math.log(10)

    def _is_full(self, pre: Tensor) -> Tensor:
        return (pre > 0).sum(1) >= self.largest.k

    def supports(self, pre: Tensor) -> Tensor:
        return self.largest.supports(pre) & (pre > 0)

    def margins(self, pre: Tensor) -> Tensor:
        """The nearest swap or `min over i in S of v_i / ||w_i||`, (B,); relu's with fewer than K positive latents."""
        margins, full = self.relu.margins(pre), self._is_full(pre)
        kept = self.largest.supports(pre[full])
        zeros = self.relu.distances(pre[full]).masked_fill(~kept, torch.inf).amin(1)
        margins[full] = torch.minimum(self.largest.margins(pre[full]), zeros)
        return margins

    def crossings(self, pre: Tensor, radius: float) -> Tensor:
        counts, full = self.relu.crossings(pre, radius), self._is_full(pre)
        zeros = (self.relu.distances(pre[full]) < radius) & self.largest.supports(pre[full])
        if full.any():
            counts[full] = self.largest.crossings(pre[full], radius) + zeros.sum(1)
        return counts


def _thresholded(sae: SAE) -> ThresholdedCells:
    assert isinstance(sae.activation, Thresholded)
    thresholds = sae.activation.thresholds(sae.activation_parameters, sae.d_sae)
    return ThresholdedCells(sae, thresholds.double())


def _largest(sae: SAE) -> LargestCells:
    assert isinstance(sae.activation, Largest)
    return LargestCells(sae, PowerDiagram.from_encoder(sae.W_enc, sae.b_enc), sae.activation)


def _largest_magnitudes(sae: SAE) -> LargestCells:
    assert isinstance(sae.activation, Largest)
    W, b = sae.W_enc, sae.b_enc
    both_signs = PowerDiagram.from_encoder(torch.cat([W, -W], 1), torch.cat([b, -b]))
    return LargestCells(sae, both_signs, sae.activation)


def _largest_clipped(sae: SAE) -> ReluTopKCells:
    assert isinstance(sae.activation, ReluTopK)
    largest = _largest(sae.changed(TopK(sae.activation.k)))
    relu = ThresholdedCells(sae, torch.zeros(sae.d_sae, dtype=torch.float64))
    return ReluTopKCells(sae, largest, relu)


# The cells of a float64 SAE, by its kind of activation.
CELLS: dict[type[Activation], Callable[[SAE], Cells]] = {
    Thresholded: _thresholded,
    TopK: _largest,
    AbsTopK: _largest_magnitudes,
    ReluTopK: _largest_clipped,
}


def check_cells(activation: Activation) -> None:
    """ConfigError for an activation without known cells."""
    if not isinstance(activation, tuple(CELLS)):
        known = [name for name, kind in ACTIVATIONS.items() if issubclass(kind, tuple(CELLS))]
        raise ConfigError(
            f"the activation {activation.name} has no cells that this tool knows; expected one of "
            f"{', '.join(known)}; train such an SAE to see its geometry"
        )


def cells_of(sae: SAE) -> Cells:
    """The partition of an SAE's input space; ConfigError as by `check_cells`."""
    check_cells(sae.activation)
    kind = next(kind for kind in CELLS if isinstance(sae.activation, kind))
    return CELLS[kind](sae.copy_to(torch.float64))


def agreement(cells: Cells, batches: Iterable[Tensor]) -> dict[str, Any] | None:
    """Compare each row's support with its K nearest power cells; batches are (B, D) each.

    A row is a tie where a latent inside and one outside its support differ by less than the rounding errors,
    `(D + 8) eps ((||x|| + ||mu_i||)^2 + |alpha_i|)` for each.

    Returns:
        `agreement`, the fraction of `rows` less `ties` whose K nearest sites are their support, 1 by the theorem, None
        without any; `sites` and `order`, K, of the diagram. None for cells that are not a diagram's.
    """
    if not isinstance(cells, LargestCells):
        return None
    compared = [_compare(cells, x.double()) for x in batches]
    decided, same = (torch.cat(parts) for parts in zip(*compared, strict=True))
    return {
        "agreement": float(same[decided].double().mean()) if decided.any() else None,
        "ties": int((~decided).sum()),
        "rows": len(decided),
        "sites": len(cells.diagram.weights),
        "order": cells.k,
    }


def _compare(cells: LargestCells, x: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows' supports are beyond rounding, and which pairs of supports are equal, (B,) each."""
    pre, diagram = cells.pre_activations(x), cells.diagram
    kept = cells.kept(pre)  # (B, K)
    nearest = diagram.nearest(x, cells.k) % cells.sae.d_sae  # (B, K)
    same = (kept.sort(-1).values == nearest.sort(-1).values).all(-1)

    values = cells.values(pre)  # (B, n)
    reach = x.norm(dim=1, keepdim=True) + diagram.centroids.norm(dim=1)
    slack = (x.shape[1] + 8) * EPSILON * (reach.square() + diagram.weights.abs())
    inside = torch.zeros_like(values, dtype=torch.bool).scatter_(1, cells.sites(kept, pre), True)
    lowest = (values - slack).masked_fill(~inside, torch.inf).amin(1)
    highest = (values + slack).masked_fill(inside, -torch.inf).amax(1)
    return lowest > highest, same
