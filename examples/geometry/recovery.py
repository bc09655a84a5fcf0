"""Test whether a power diagram is a K-th order one, by a least-squares fit of the sites.

    nu_S = (1/K) sum_{i in S} mu_i        ||nu_S||^2 - beta_S = (1/K) sum_{i in S} (||mu_i||^2 - alpha_i)

A power diagram of C(d, K) cells is the K-th order diagram of d sites where these linear equations in mu and in
`||mu||^2 - alpha` have a solution, for some way to call its cells by the K-subsets S of the sites. Source: the paper's
definition of K-th order power diagrams, and its remark that not every diagram with C(d, K) cells is one.
Shapes: d sites, C = C(d, K) cells, D dimensions.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saecli.base.errors import ConfigError
from saecli.geometry.cells import PowerDiagram

TOLERANCE = 1e-9  # residual up to which the equations hold
SEARCHED = (
    6  # cells whose every labelling is tried; 10, the next number of interest, would take 3,628,800
)


@dataclass(frozen=True)
class Recovery:
    """The K-th order diagram that comes nearest to a given power diagram.

    Args:
        diagram: its d sites, mu and alpha.
        supports: which S each cell of the given diagram was called, (C, K).
        residual: of the equations, relative: for centroids, the root mean square of both sides' difference over the
            root mean square of the centroids about their mean; for weights, over the mean square of the centroids about
            their mean plus the root mean square of the weights' side about its mean; the larger of the two.
    """

    diagram: PowerDiagram
    supports: Tensor
    residual: float

    @property
    def is_kth_order(self) -> bool:
        """Whether the given diagram is this K-th order diagram, to rounding."""
        return self.residual <= TOLERANCE


def sites_for(cells: int, k: int) -> int:
    """The d with C(d, K) cells; ConfigError where there is none above K, or K is below 1."""
    if k < 1:
        raise ConfigError(
            f"the order of a power diagram must be at least 1, got {k}; choose another K"
        )
    for d in itertools.count(k + 1):
        if (possible := math.comb(d, k)) == cells:
            return d
        if possible > cells:
            raise ConfigError(
                f"a K-th order power diagram of K = {k} has C(d, {k}) cells, got {cells}; leave out or "
                "add cells, or choose another K"
            )
    raise AssertionError  # the count has no end


def recover(
    diagram: PowerDiagram, k: int, supports: Sequence[Sequence[int]] | None = None
) -> Recovery:
    """Find the sites whose K-th order diagram a given diagram is, or comes nearest to.

    Args:
        diagram: centroids nu and weights beta of its cells, C of them.
        k: K.
        supports: the S that each cell is called, (C, K), each K-subset of 0 .. d - 1 once; None to try every
            labelling, which for 6 cells are 720, and take the one of least residual.

    Returns:
        The sites, mu with the mean of nu as their own and alpha up to a constant, which moves no cell, and the
        residual that decides.

    Raises:
        ConfigError: C is no C(d, K), or `supports` do not name each subset once, or are wanted: where the labelling
            matters (1 < K < d - 1) and there are more than 6 cells.

    Cost: one factorisation of (C, d), and where labellings are searched a product (C, C) (C, D + 1) for each.
    """
    C = len(diagram.weights)
    d = sites_for(C, k)
    every = list(itertools.combinations(range(d), k))
    if supports is not None:
        named = sorted(tuple(sorted(support)) for support in supports)
        if named != every:
            raise ConfigError(
                f"--supports must name each of the {C} subsets of {k} out of {d} sites once, got "
                f"{len(set(named) & set(every))} of them; list each once"
            )
    elif 1 < k < d - 1 and C > SEARCHED:
        raise ConfigError(
            f"of {C} cells not every labelling can be tried; expected at most {SEARCHED} cells, or the "
            "--supports that they are called by"
        )
    nu, side = diagram.centroids, diagram.centroids.square().sum(1) - diagram.weights
    member = torch.zeros(C, d, dtype=torch.float64)
    member[torch.arange(C)[:, None], torch.tensor(every)] = 1 / k
    if supports is not None:
        number = {support: at for at, support in enumerate(every)}
        labellings = torch.tensor([[number[tuple(sorted(support))] for support in supports]])
    elif 1 < k < d - 1:
        labellings = torch.tensor(list(itertools.permutations(range(C))))
    else:  # any permutation of the cells is one of the sites
        labellings = torch.arange(C)[None]
    order = labellings.argsort(1)  # which cell is called by each of `every`
    inverse = torch.linalg.pinv(member)  # (d, C)
    left = torch.eye(C, dtype=torch.float64) - member @ inverse
    residuals = _residuals(left, nu[order], side[order])
    best = int(residuals.argmin())
    mu, mean_side = inverse @ nu[order[best]], inverse @ side[order[best]]
    return Recovery(
        PowerDiagram(mu, mu.square().sum(1) - mean_side),
        torch.tensor(every)[labellings[best]],
        float(residuals[best]),
    )


def _residuals(left: Tensor, nu: Tensor, side: Tensor) -> Tensor:
    """The residual of each labelling, (L,), given both sides' right-hand sides (L, C, D) and (L, C)."""
    spread = (nu - nu.mean(1, keepdim=True)).square().sum(-1).mean(1)  # (L,)
    scale = spread + (side - side.mean(1, keepdim=True)).square().mean(1).sqrt()
    of_nu = (left @ nu).square().sum(-1).mean(1).sqrt() / spread.sqrt()
    of_weights = (side @ left).square().mean(1).sqrt() / scale
    # Where all cells have one centroid and one weight, nothing is left over either.
    return torch.maximum(of_nu.nan_to_num(0.0, torch.inf), of_weights.nan_to_num(0.0, torch.inf))
