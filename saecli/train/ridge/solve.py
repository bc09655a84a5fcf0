"""The closed-form decoder from its normal equations, and the way to solve for it within a budget of memory.

An affine skip is solved for exactly together with the decoder. Over (W, S, b) the squared error is
`||z W + x S + b - y||^2`. The system has the targets (y, x) side by side, so that one factorisation M gives both
`M C_y` and `P = M C_x`. With the rows' own blocks, centred like C,

    A_xx = sum x x' - N x_bar (s x_bar)'        A_xy = sum x y' - N x_bar (s y_bar + t b_t)'

W follows S, `W = M (C_y + alpha T) - P S`, and S solves what is left, K its Schur complement:

    K = A_xx - C_x' P        S = K^-1 (A_xy - C_x' M (C_y + alpha T))

N rows, n sampled; F = d_sae, D skipped dimensions, E targets proper. All float64; symbols as in the package.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...sae.codes import Codes, Prefixes
from .iterative import COLUMNS, StreamedCodes
from .sums import HeldRows, Sums
from .system import PIECE, Factorisation, Inverse, System, Terms

FLAT = 1e-14  # fraction of ||T0||^2 up to which the objective's curvature in c is rounding
KEPT_FRACTION = 0.8  # of the remaining memory, for the codes that an iteration keeps
MATRICES = 6  # F x E matrices of float64 that a solution takes
LEAST_TOLERANCE = 0.1  # of a latent that others cannot replace: a variance inflation factor of 10
RIDGE = 1e-9  # over A_xx's mean diagonal: dimensions of x that codes explain, or that never vary, get no skip


@dataclass(frozen=True)
class Plan:
    kind: str  # "direct" by sums over the rows, "dual" by the rows themselves, "iterative" by products with codes
    bytes: int  # peak memory, without the codes that an iteration keeps
    budget: float = 0.0  # for those
    prefixes: Prefixes = ()

    def system(self, start: Tensor, again: Callable[[], Iterator[Codes]]) -> System:
        if self.kind == "direct":
            d_sae, d_out = start.shape
            return Sums(d_sae, d_out, start.device, self.prefixes)
        return (
            HeldRows()
            if self.kind == "dual"
            else StreamedCodes(start, again, self.budget, self.prefixes)
        )


def plan(
    rows: int,
    d_sae: int,
    d_out: int,
    memory: float = math.inf,
    solve: str = "auto",
    prefixes: Prefixes = (),
) -> Plan:
    """The way to solve a decoder step: with `solve` "auto" by a factorisation if it fits in bytes of memory, else by
    iteration."""
    if rows < d_sae and not prefixes:
        # Codes, their centred and weighted copies, targets, products of N x N and their factor.
        factorised = Plan(
            "dual", 8 * (rows * (5 * d_sae + d_out) + 2 * rows * rows + MATRICES * d_sae * d_out)
        )
    else:  # the Gram matrix and its factor
        factorised = Plan("direct", 8 * d_sae * (2 * d_sae + MATRICES * d_out), prefixes=prefixes)
    streaming, keeping = (
        8 * d_sae * (MATRICES * d_out + 6 * columns)  # vectors of the iteration, for each column
        for columns in (d_out, min(COLUMNS, d_out))
    )
    if solve == "direct" or (solve == "auto" and factorised.bytes <= max(memory, streaming)):
        return factorised
    return Plan("iterative", streaming, KEPT_FRACTION * max(memory - keeping, 0), prefixes)


@dataclass(frozen=True)
class DecoderState:
    """A solved decoder, `W = c T0 + Delta`, and figures on its solution; float64."""

    c: float  # 0 without a direction
    Delta: Tensor  # (F, E); W itself without a direction
    b: Tensor
    alpha: float
    relative_alpha: float
    ridge: float  # alpha + mu
    raised: bool  # whether a smaller ridge did not factorise
    condition: float
    residual: float  # of an iteration's worst column, over its right side; else nan
    dof: float  # effective degrees of freedom of each target coordinate, without a skip's; nan if not asked for
    skip: Tensor | None = None  # (D, E)
    replaceable: Tensor | None = None  # 1 for latents that others can replace, else 0, (F,)

    def W(self, direction: Tensor | None) -> Tensor:  # noqa: N802
        """(F, E), given T0."""
        return (
            self.Delta
            if direction is None
            else torch.add(self.Delta, direction.double(), alpha=self.c)
        )


def solve(
    system: System,
    terms: Terms,
    factorisation: Factorisation | None = None,
    z: Tensor | None = None,
    most_replaceable: int = 0,
) -> DecoderState:
    """The decoder that minimises the package's objective, jointly with c if there is a direction. The alpha of a
    `factorisation` replaces the terms'. `z`: codes of some rows, or of all in the system's order, (n, F), for the
    degrees of freedom. At most `most_replaceable` latents are found that others can replace.

    Cost: one factorisation if none is given; 2 F^2 E operations for each of W and T0, n F^2 for the degrees of freedom,
    F^3 / 3 for replaceable latents.
    """
    factorisation = factorisation or system.factorise(terms)
    rows, y_bar, E, alpha = system.rows, system.y_bar, terms.d_out, factorisation.alpha
    centre = terms.centre(rows, y_bar)
    bias, c, skip, eliminated = terms.bare_bias(rows, y_bar)[:E], 0.0, None, None
    dof = math.nan if z is None else effective_dof(factorisation, terms, z)
    relative_alpha = factorisation.relative_alpha
    solution = _solved(factorisation, terms, most_replaceable > 0)
    W, along = solution.W[:, :E], solution.along
    if terms.skip is not None:
        A_xx, A_xy = terms.skip.blocks(rows, y_bar[E:], centre)
        eliminated = _Elimination.of(solution.W[:, E:], system.cross(centre)[:, E:], A_xx)
    if along is not None and terms.direction is not None:
        free = (W, along) if eliminated is None else (eliminated(W, A_xy), eliminated(along))
        c = best_multiple(terms.direction.double(), *free, alpha)
        W.add_(along, alpha=c * alpha)
    if eliminated is not None:
        skip = eliminated.skip(W, A_xy)
        W, bias = eliminated(W, A_xy), bias - terms.rows_fraction(rows) * (y_bar[E:] @ skip)
    b = bias - terms.rows_fraction(rows) * (system.u @ W)
    replaceable = None
    if solution.inverse is not None:
        diagonal = system.diagonal(terms.shrink(rows))
        inverse = solution.inverse if eliminated is None else eliminated.inverse(solution.inverse)
        replaceable = replaced_by_others(diagonal, inverse, most_replaceable)
    if terms.direction is not None:
        W.sub_(terms.direction.double(), alpha=c)
    return DecoderState(
        c,
        W,
        b,
        alpha,
        relative_alpha,
        solution.ridge,
        solution.raised,
        solution.condition,
        solution.residual,
        dof,
        skip,
        replaceable,
    )


class _Solution(NamedTuple):
    W: Tensor  # M (C + mu W_t), (F, E + D)
    along: Tensor | None  # M T0, (F, E)
    condition: float
    residual: float
    ridge: float
    raised: bool
    inverse: Inverse | None  # M


def _solved(factorisation: Factorisation, terms: Terms, inverts: bool) -> _Solution:
    system = factorisation.system
    W = factorisation.solve_cross(terms.centre(system.rows, system.y_bar))
    if terms.mu:
        W[:, : terms.d_out] += factorisation.solve(terms.mu * terms.W_t.double())
    along = None if terms.direction is None else factorisation.solve(terms.direction.double())
    # The figures after the solutions: an iteration estimates them from its steps.
    condition, residual = factorisation.condition(), factorisation.residual()
    return _Solution(
        W,
        along,
        condition,
        residual,
        factorisation.ridge,
        factorisation.raised,
        factorisation.inverse() if inverts else None,
    )


def replaced_by_others(diagonal: Tensor, inverse: Inverse, most: int) -> Tensor:
    """1 for at most `most` latents that others can replace, else 0, (F,), float64; `diagonal` is A's.

    A latent's tolerance `1 / (A_ii M_ii)`, the reciprocal of the variance inflation factor, is the fraction of its
    variance that the others' codes do not explain, however rare it is; with a ridge it is larger. They are found one
    after another, each without those before, so that one of several copies stays.

    Source: Belsley, Kuh and Welsch, "Regression Diagnostics" (1980), chapter 3.
    """
    inflation, order = (diagonal * inverse.diagonal).sort(descending=True)
    latents = order[: 2 * most][inflation[: 2 * most] > 1 / LEAST_TOLERANCE]
    found = torch.zeros_like(diagonal)
    if not len(latents):
        return found
    M, own = inverse.block(latents), diagonal[latents]
    for _ in range(min(most, len(latents))):
        inflation = own * M.diagonal()
        worst = inflation.argmax()
        if inflation[worst] <= 1 / LEAST_TOLERANCE:
            break
        found[latents[worst]] = 1
        M = M - torch.outer(M[:, worst], M[worst]) / M[worst, worst]
        own[worst] = 0
    return found


def best_multiple(T0: Tensor, untargeted: Tensor, along: Tensor, alpha: float) -> float:
    """The c that minimises the objective jointly with W.

    Of T0, `untargeted` M (C + mu W_t) and `along` M T0, (F, E) each, columns may be left out, or mixed alike. At
    W(c) = M (C + mu W_t) + c alpha M T0 the objective's derivative in c, `-2 alpha <T0, W(c) - c T0>`, vanishes at
    `<T0, M (C + mu W_t)> / <T0, T0 - alpha M T0>`. If no code varies every c is equally good; 1 keeps the encoder's
    gradient.
    """
    curvature = (T0 * (T0 - alpha * along)).sum().item()
    if curvature <= FLAT * T0.square().sum().item():
        return 1.0
    return (T0 * untargeted).sum().item() / curvature


def effective_dof(factorisation: Factorisation, terms: Terms, z: Tensor) -> float:
    """The trace of the matrix from targets to all prefixes' reconstructions, estimated from codes z, (n, F):
    `sum_i h_i` with c fixed, from 1, the bias alone, to min(N, F + 1). n F^2 operations."""
    system = factorisation.system
    prefixes, rows = max(1, len(system.prefixes)), system.rows
    most = min(prefixes * rows, len(system.u) + 1)
    if terms.joint:
        return min(rows * (1 - slack_of(factorisation, terms, z)).mean().item(), most)
    fitted = factorisation.quadratic(system.centred(z, 0.0).flatten(0, 1)).mean() * rows
    overlap = terms.rows_fraction(rows) * (1 - rows * factorisation.quadratic(system.u[None]))
    return min((fitted + overlap).item(), most)


def slack_of(factorisation: Factorisation, terms: Terms, z: Tensor) -> Tensor:
    """`1 - h_i`, (n,), for codes z, (n, F), if n = N in the system's order. h_i is the leverage,
    `1 / (N + beta + nu) + psi_i' M psi_i`; with prefixes the trace of `choice`'s H_i."""
    system = factorisation.system
    if len(z) == system.rows:
        own = [
            factorisation.own(some) for some in torch.arange(len(z), device=z.device).split(PIECE)
        ]
        held = [rows.slack for rows in own if rows is not None]
        if held:
            return torch.cat(held)
    psi = system.centred(z, terms.shrink(system.rows))
    leverages = factorisation.quadratic(psi.flatten(0, 1)).view(psi.shape[:2]).mean(1)
    return 1 - 1 / (system.rows + terms.beta + terms.nu) - leverages


class _Elimination(NamedTuple):
    """The skip eliminated from W's equations."""

    P: Tensor  # (F, D)
    C: Tensor  # C_x
    factor: Tensor  # of K by Cholesky, (D, D)

    @classmethod
    def of(cls, P: Tensor, C: Tensor, A_xx: Tensor) -> "_Elimination":
        K = A_xx - C.T @ P
        K = (K + K.T) / 2
        ridge = RIDGE * max(A_xx.diagonal().mean().item(), torch.finfo(torch.float64).tiny)
        failed = True
        while failed:  # rounding, where codes explain some of x exactly
            factor, failed = torch.linalg.cholesky_ex(K + ridge * torch.eye(len(K)).to(K))
            ridge *= 10
        return cls(P, C, factor)

    def skip(self, W: Tensor, A_xy: Tensor | None = None) -> Tensor:
        """`K^-1 (A_xy - C_x' W)`, (D, E), for a solution without the skip, (F, E)."""
        right = -self.C.T @ W
        return torch.cholesky_solve(right if A_xy is None else right + A_xy, self.factor)

    def inverse(self, without: Inverse) -> Inverse:
        """M with the skip, `M + P K^-1 P'`."""
        root = torch.linalg.solve_triangular(self.factor, self.P.T, upper=False)  # (D, F)
        return Inverse(
            without.diagonal + root.square().sum(0),
            lambda latents: without.block(latents) + root[:, latents].T @ root[:, latents],
        )

    def __call__(self, W: Tensor, A_xy: Tensor | None = None) -> Tensor:
        """The solution with the skip, (F, E)."""
        return W - self.P @ self.skip(W, A_xy)
