"""The closed-form decoder from its normal equations, and the way to solve for it within a budget of memory.

F = d_sae, D skipped dimensions, E targets proper. All float64.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...sae.codes import Codes, Prefixes
from .iterative import SOLVED_COLUMNS, StreamedCodes
from .sums import HeldRows, Sums, cholesky
from .system import Factorisation, Inverse, SkipSums, System, Terms

# Effect over the median one, below which a latent may be needless. FVU of SmolLM2-135M-Instruct, topk: 0.169, without
# such a limit 0.172; F1 of the world with hierarchy: 0.695, 0.700.
LEAST_EFFECT = 0.3
TURNS = 64  # between waits for the device


@dataclass(frozen=True)
class Method:
    kind: str  # "direct" by sums over the rows, "dual" by the rows themselves, "iterative" by products with codes
    bytes: int  # peak memory, without the codes that an iteration keeps
    budget: float = 0.0  # for those
    prefixes: Prefixes = ()

    def system(self, start: Tensor, reread: Callable[[], Iterator[Codes]]) -> System:
        """A "dual" one is empty, and replaced after the pass by one of all rows."""
        d_sae, d_out = start.shape
        if self.kind == "direct":
            return Sums(d_sae, d_out, start.device, self.prefixes)
        if self.kind == "dual":
            return HeldRows(start.new_empty(0, d_sae), start.new_empty(0, d_out))
        return StreamedCodes(start, reread, self.budget, self.prefixes)


def method_for(
    rows: int,
    d_sae: int,
    d_out: int,
    memory: float = math.inf,
    solve: str = "auto",
    prefixes: Prefixes = (),
) -> Method:
    """With "auto" a factorisation if it fits in bytes of memory, else an iteration."""
    solution = 6 * d_sae * d_out  # numbers of float64
    if rows < d_sae and not prefixes:
        # Codes, their centred and weighted copies, targets, products of N x N and their factor.
        held = rows * (5 * d_sae + d_out) + 2 * rows * rows
        factorised = Method("dual", 8 * (held + solution))
    else:  # the Gram matrix and its factor
        factorised = Method("direct", 8 * (2 * d_sae * d_sae + solution), prefixes=prefixes)
    # Vectors of the iteration, for each column; of all columns at once if codes come again for each product.
    streaming = 8 * (solution + 6 * d_sae * d_out)
    keeping = 8 * (solution + 6 * d_sae * min(SOLVED_COLUMNS, d_out))
    if solve == "direct" or (solve == "auto" and factorised.bytes <= max(memory, streaming)):
        return factorised
    budget = 0.8 * max(memory - keeping, 0)  # the rest for what codes take while they are joined
    return Method("iterative", streaming, budget, prefixes)


@dataclass(frozen=True)
class DecoderState:
    """A solved decoder, `W = c T0 + Delta`; float64."""

    c: float  # 0 without a direction
    Delta: Tensor  # (F, E); W itself without a direction
    b: Tensor
    alpha: float
    relative_alpha: float  # alpha over A's mean diagonal
    ridge: float  # alpha + mu
    raised: bool  # whether a smaller ridge did not factorise
    condition: float  # of a factorised matrix; else nan
    residual: float  # of an iteration's worst column, over its right side; else nan
    skip: Tensor | None = None  # (D, E)
    needless: Tensor | None = None  # 1 for the latents that are missed least, else 0, (F,)

    def W(self, direction: Tensor | None) -> Tensor:  # noqa: N802
        if direction is None:
            return self.Delta
        return torch.add(self.Delta, direction.double(), alpha=self.c)


def optimal_decoder(
    system: System, terms: Terms, factorisation: Factorisation | None = None, needless: int = 0
) -> DecoderState:
    """The decoder that minimises the package's objective; a `factorisation` has its own alpha.

    Cost: one factorisation if none is given; 2 F^2 E operations for each of W and T0, F^3 / 3 for needless latents.
    """
    plain = factorisation or system.factorise(terms)
    E, alpha = terms.d_out, plain.alpha
    T0 = None if terms.direction is None else terms.direction.double()
    s, centre = terms.shrink(system.rows), terms.centre(system.rows, system.y_bar)
    M = plain if terms.skip is None else WithSkip(plain, terms.skip, centre)

    W = M.solve_cross(centre)
    if terms.mu:
        W += M.solve(terms.mu * terms.W_t.double())
    c = 0.0
    if T0 is not None:
        along = M.solve(T0)
        c = best_multiple(T0, (T0 * W).sum().item(), along, alpha)
        W.add_(along, alpha=c * alpha)
    S = M.skip_for(W)
    b = centre[:E] - s * (system.u @ W + system.y_bar[E:] @ S)

    condition, residual = M.condition(), M.residual()
    missed_least = None
    if needless:  # last, since the inverse may overwrite the factor
        varies = system.diagonal(s) > 0
        missed_least = least_missed(W, M.inverse(), varies, needless)
    return DecoderState(
        c=c,
        Delta=W if T0 is None else W.sub_(T0, alpha=c),
        b=b,
        alpha=alpha,
        relative_alpha=alpha / max(system.scale(s), sys.float_info.min),
        ridge=plain.ridge.total,
        raised=plain.raised,
        condition=condition,
        residual=residual,
        skip=None if terms.skip is None else S,
        needless=missed_least,
    )


class WithSkip(Factorisation):
    """An affine skip S, (D, E), eliminated from a factorisation M: solutions are optimal jointly with S.

    The system's targets are (y, x) side by side, and M is solved once for `M C_y` and `P = M C_x`. With

        A_xx = sum x x' - N x_bar (s x_bar)'        A_xy = sum x y' - N x_bar (s y_bar + t b_t)'

    and a right side G that holds C_y,

        K = A_xx - C_x' P        W = M G - P K^-1 (A_xy - C_x' M G)        S = A_xx^-1 (A_xy - C_x' W)

    W alone has the inverse `M + P K^-1 P'`; right sides without C_y have no A_xy.
    """

    def __init__(self, M: Factorisation, skip: SkipSums, centre: Tensor) -> None:
        super().__init__(M.system, M.ridge, M.raised)
        self._M, E = M, skip.d_out
        self._cross, self._P = M.solve_cross(centre).tensor_split([E], 1)  # M C_y; (F, D)
        self._C_x = M.system.cross(centre)[:, E:]
        A_xx, self._A_xy = skip.blocks(M.system.rows, M.system.y_bar[E:], centre)
        K = A_xx - self._C_x.T @ self._P
        K = (K + K.T) / 2
        # A ridge, raised against rounding: dimensions of x that codes explain, or that never vary, get no skip.
        ridge = 1e-9 * max(A_xx.diagonal().mean().item(), sys.float_info.min)
        unit = torch.eye(len(K)).to(K)
        self._R, ridge = cholesky(lambda ridge: K + ridge * unit, ridge)
        self._A_xx = A_xx + ridge * unit

    def solve(self, right: Tensor) -> Tensor:
        return self._eliminated(self._M.solve(right), 0.0)

    def solve_cross(self, centre: Tensor) -> Tensor:
        return self._eliminated(self._cross, self._A_xy)

    def _eliminated(self, W: Tensor, A_xy: Tensor | float) -> Tensor:
        S = torch.cholesky_solve(A_xy - self._C_x.T @ W, self._R, upper=True)
        return W - self._P @ S

    def skip_for(self, W: Tensor) -> Tensor:
        return torch.linalg.solve(self._A_xx, self._A_xy - self._C_x.T @ W)

    def inverse(self) -> Inverse:
        plain = self._M.inverse()
        root = torch.linalg.solve_triangular(self._R.mT, self._P.T, upper=False)  # (D, F)
        return Inverse(
            plain.diagonal + root.square().sum(0),
            lambda latents: plain.block(latents) + root[:, latents].T @ root[:, latents],
        )

    def condition(self) -> float:
        return self._M.condition()

    def residual(self) -> float:
        return self._M.residual()


def best_multiple(T0: Tensor, fitted: float, along: Tensor, alpha: float) -> float:
    """The c that minimises the objective jointly with `W(c) = W(0) + c alpha along`, where W(0) is M (C + mu W_t),
    `along` M T0, (F, E) each, their columns perhaps mixed alike, and `fitted` <T0, W(0)>:

        -2 alpha <T0, W(c) - c T0> = 0        c = <T0, W(0)> / <T0, T0 - alpha along>

    If no code varies every c is equally good; 1 keeps the encoder's gradient.
    """
    curvature = (T0 * (T0 - alpha * along)).sum().item()
    if curvature <= 1e-14 * T0.square().sum().item():  # rounding
        return 1.0
    return fitted / curvature


def least_missed(W: Tensor, inverse: Inverse, varies: Tensor, most: int) -> Tensor:
    """1 for at most `most` of the varying latents, a mask (F,), that are missed least, else 0, (F,), float64.

    Without latent i the optimum grows by `||W_i||^2 / M_ii`, here far below the median. Each is found without those
    before, so that one of several copies stays.

    Source: Hassibi and Stork, "Second order derivatives for network pruning: Optimal Brain Surgeon" (1993).
    """
    effect = W.square().sum(1) / inverse.diagonal
    missed_least = torch.zeros_like(effect)
    if not varies.any():
        return missed_least
    low = LEAST_EFFECT * effect[varies].median()
    effect[~varies] = torch.inf
    latents = effect.argsort()[: 2 * most]
    latents = latents[effect[latents] < low]
    W, M = W[latents], inverse.block(latents).clone()
    taken = torch.zeros(len(latents), dtype=torch.bool, device=W.device)
    for turn in range(min(most, len(latents))):
        effect = (W.square().sum(1) / M.diagonal()).masked_fill(taken, torch.inf)
        least = effect.argmin(keepdim=True)  # of one entry, which a GPU is not waited for
        found = effect[least] < low
        if turn % TURNS == 0 and not found:
            break
        taken[least] = found
        along = torch.where(found, M[:, least] / M.diagonal()[least], 0.0)
        W.addmm_(along, W[least], alpha=-1)
        M.addmm_(along, M[least], alpha=-1)
    missed_least[latents] = taken.double()
    return missed_least
