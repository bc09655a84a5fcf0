"""The closed-form decoder from its normal equations, the way to solve for it within a budget of memory, and its alpha.

An affine skip is solved for exactly together with the decoder. Over (W, S, b) the squared error is
`||z W + x S + b - y||^2`. The system has the targets (y, x) side by side, so that one factorisation M gives both
`M C_y` and `P = M C_x`. With the rows' own blocks, centred like C,

    A_xx = sum x x' - N x_bar (s x_bar)'        A_xy = sum x y' - N x_bar (s y_bar + t b_t)'

W follows S, `W = M (C_y + alpha T) - P S`, and S solves what is left, K its Schur complement:

    K = A_xx - C_x' P        S = K^-1 (A_xy - C_x' M (C_y + alpha T))

Alpha has the least PRESS, the exact leave-one-out error:

    PRESS(alpha) = mean_i ||r_i||^2 / (1 - h_i)^2

with r_i the residual of row i and h_i its leverage, `psi_i' M psi_i + 1 / (N + beta + nu)`: the squared error of row i
under the decoder fitted to all other rows, with c fixed. Generalised cross-validation, with the mean leverage, chooses
a ridge far too small if rows differ much in norm, as activations do.

A row of a nested dictionary has a psi, a residual and an error in each of L prefixes, and is left out of all at once:

    PRESS(alpha) = mean_i ||(I - H_i)^-1 r_i||^2 / L      H_i = (psi_i M psi_i' + 1 1' / (N + beta + nu)) / L

A skip is held while alpha is chosen: rows are left out of the decoder alone.

N rows, n sampled; F = d_sae, D skipped dimensions, E targets proper, L prefixes, 1 without. All float64; symbols as in
the package.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...base.devices import moved
from ...sae.codes import Codes, Prefixes
from .iterative import COLUMNS, StreamedCodes
from .sums import HeldRows, Sums, cholesky
from .system import Factorisation, Inverse, System, Terms

# Effect over the median one, below which a latent may be needless. FVU of SmolLM2-135M-Instruct, topk: 0.169, without
# such a limit 0.172; F1 of the world with hierarchy: 0.695, 0.700.
LEAST_EFFECT = 0.3
LEAST, MOST = 1e-7, 1e3  # range of alpha over A's mean diagonal; W is lost in rounding, or is T
TURNS = 64  # between waits for the device
MIXED = 64  # random sums of columns that determine c


@dataclass(frozen=True)
class Method:
    kind: str  # "direct" by sums over the rows, "dual" by the rows themselves, "iterative" by products with codes
    bytes: int  # peak memory, without the codes that an iteration keeps
    budget: float = 0.0  # for those
    prefixes: Prefixes = ()

    def system(self, start: Tensor, reread: Callable[[], Iterator[Codes]]) -> System:
        """The system to add rows to; "dual" has none yet, and is replaced by one of all rows at the end of the pass."""
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
    """How to solve a decoder step: with `solve` "auto" by a factorisation if it fits in bytes of memory, else by
    iteration."""
    solution = 6 * d_sae * d_out  # numbers of float64
    if rows < d_sae and not prefixes:
        # Codes, their centred and weighted copies, targets, products of N x N and their factor.
        held = rows * (5 * d_sae + d_out) + 2 * rows * rows
        factorised = Method("dual", 8 * (held + solution))
    else:  # the Gram matrix and its factor
        factorised = Method("direct", 8 * (2 * d_sae * d_sae + solution), prefixes=prefixes)
    # Vectors of the iteration, for each column; of all columns at once if codes come again for each product.
    streaming = 8 * (solution + 6 * d_sae * d_out)
    keeping = 8 * (solution + 6 * d_sae * min(COLUMNS, d_out))
    if solve == "direct" or (solve == "auto" and factorised.bytes <= max(memory, streaming)):
        return factorised
    budget = 0.8 * max(memory - keeping, 0)  # the rest for what codes take while they are joined
    return Method("iterative", streaming, budget, prefixes)


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
    condition: float  # of a factorised matrix; else nan
    residual: float  # of an iteration's worst column, over its right side; else nan
    skip: Tensor | None = None  # (D, E)
    needless: Tensor | None = None  # 1 for the latents that are missed least, else 0, (F,)

    def W(self, direction: Tensor | None) -> Tensor:  # noqa: N802
        """(F, E), given T0."""
        if direction is None:
            return self.Delta
        return torch.add(self.Delta, direction.double(), alpha=self.c)


def solve(
    system: System, terms: Terms, factorisation: Factorisation | None = None, needless: int = 0
) -> DecoderState:
    """The decoder that minimises the package's objective, jointly with c if there is a direction. The alpha of a
    `factorisation` replaces the terms'. `needless` is the number of latents that are found as missed least, at most.

    Cost: one factorisation if none is given; 2 F^2 E operations for each of W and T0, F^3 / 3 for needless latents.
    """
    M = factorisation or system.factorise(terms)
    rows, E, alpha = system.rows, terms.d_out, M.alpha
    s, centre = terms.shrink(rows), terms.centre(rows, system.y_bar)

    W, P = M.solve_cross(centre).tensor_split([E], 1)  # M C_y and M C_x
    if terms.mu:
        W += M.solve(terms.mu * terms.W_t.double())
    elimination, S = None, None
    if terms.skip is not None:
        A_xx, A_xy = terms.skip.blocks(rows, system.y_bar[E:], centre)
        elimination = _Elimination(P, system.cross(centre)[:, E:], A_xx)
        W, S = elimination(W, A_xy)

    c = 0.0
    if terms.direction is not None:
        along = M.solve(terms.direction.double())
        S_along = None
        if elimination is not None:
            along, S_along = elimination(along)
        c = best_multiple(terms.direction.double(), W, along, alpha)
        W.add_(along, alpha=c * alpha)
        if S is not None and S_along is not None:
            S.add_(S_along, alpha=c * alpha)

    b = centre[:E] - s * (system.u @ W)
    if S is not None:
        b = b - s * (system.y_bar[E:] @ S)

    condition, residual = M.condition(), M.residual()
    missed_least = None
    if needless:  # last, since the inverse may overwrite the factor
        inverse = M.inverse()
        if elimination is not None:
            inverse = elimination.inverse(inverse)
        varies = system.diagonal(s) > 0
        missed_least = least_missed(W, inverse, varies, needless)
    if terms.direction is not None:
        W.sub_(terms.direction.double(), alpha=c)
    return DecoderState(
        c=c,
        Delta=W,
        b=b,
        alpha=alpha,
        relative_alpha=M.relative_alpha,
        ridge=M.ridge,
        raised=M.raised,
        condition=condition,
        residual=residual,
        skip=S,
        needless=missed_least,
    )


def least_missed(W: Tensor, inverse: Inverse, varies: Tensor, most: int) -> Tensor:
    """1 for at most `most` of the latents whose codes vary, a mask (F,), that are missed least, else 0, (F,), float64.

    Without latent i, and with the others refitted, the objective is larger by its effect, `||W_i||^2 / M_ii`, here far
    below the median one. They are found one after another, each without those before, so that one of several copies
    stays.

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
        least = effect.argmin(
            keepdim=True
        )  # as an index of one entry, for which a GPU is not waited for
        found = effect[least] < low
        if turn % TURNS == 0 and not found:
            break
        taken[least] = found
        along = torch.where(found, M[:, least] / M.diagonal()[least], 0.0)
        W.addmm_(along, W[least], alpha=-1)
        M.addmm_(along, M[least], alpha=-1)
    missed_least[latents] = taken.double()
    return missed_least


def best_multiple(T0: Tensor, untargeted: Tensor, along: Tensor, alpha: float) -> float:
    """The c that minimises the objective jointly with W.

    Of T0, `untargeted` M (C + mu W_t) and `along` M T0, (F, E) each, columns may be left out, or mixed alike. At
    W(c) = M (C + mu W_t) + c alpha M T0 the objective's derivative in c, `-2 alpha <T0, W(c) - c T0>`, vanishes at
    `<T0, M (C + mu W_t)> / <T0, T0 - alpha M T0>`. If no code varies every c is equally good; 1 keeps the encoder's
    gradient.
    """
    curvature = (T0 * (T0 - alpha * along)).sum().item()
    if curvature <= 1e-14 * T0.square().sum().item():  # rounding
        return 1.0
    return (T0 * untargeted).sum().item() / curvature


class _Elimination:
    """The skip eliminated from W's equations: S = K^-1 (A_xy - C_x' W) for a W without it, which loses P S."""

    def __init__(self, P: Tensor, C_x: Tensor, A_xx: Tensor) -> None:
        self._P, self._C_x = P, C_x  # (F, D)
        K = A_xx - C_x.T @ P
        K = (K + K.T) / 2
        # A ridge, raised against rounding: dimensions of x that codes explain, or that never vary, get no skip.
        ridge = 1e-9 * max(A_xx.diagonal().mean().item(), torch.finfo(torch.float64).tiny)
        self._R, _ = cholesky(lambda ridge: K + ridge * torch.eye(len(K)).to(K), ridge)

    def __call__(self, W: Tensor, A_xy: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
        """The solution with the skip, (F, E), and the skip, (D, E), for targets that have products A_xy with x."""
        S = torch.cholesky_solve(A_xy - self._C_x.T @ W, self._R, upper=True)
        return W - self._P @ S, S

    def inverse(self, without: Inverse) -> Inverse:
        """M with the skip, `M + P K^-1 P'`."""
        root = torch.linalg.solve_triangular(self._R.mT, self._P.T, upper=False)  # (D, F)
        return Inverse(
            without.diagonal + root.square().sum(0),
            lambda latents: without.block(latents) + root[:, latents].T @ root[:, latents],
        )


def choose_alpha(
    system: System, terms: Terms, z: Tensor, y: Tensor, last: float | None
) -> Factorisation:
    """The factorisation at the alpha of least PRESS over rows z, (n, F), and y, (n, E), if n = N in the system's order.

    From `last`, or without it from A's mean diagonal with longer strides at first, alpha walks by factors of three to
    where neither neighbour has less; it ends at the minimum of the parabola through these three.

    Cost per alpha tried, three if `last` is the best: a factorisation, and 2 F^2 operations for each of some 400
    columns. One more factorisation at the end: to keep the best one would take twice the memory.
    """
    scale = max(system.scale(terms.shrink(system.rows)), np.finfo(float).tiny)
    press = press_of(system, terms, z, y)
    start = float(np.clip(last or scale, LEAST * scale, MOST * scale))
    errors: dict[int, float] = {}

    def factorised(steps: float) -> Factorisation:
        alpha = float(np.clip(start * 3.0**steps, LEAST * scale, MOST * scale))
        return system.factorise(replace(terms, alpha=alpha))

    def error(steps: int) -> float:
        if steps not in errors:
            errors[steps] = press(factorised(steps))
        return errors[steps]

    best, stride = 0, 1 if last else 3
    while True:
        neighbour = min(best - stride, best + stride, key=error)
        if error(neighbour) < error(best):
            best = neighbour
        elif stride > 1:
            stride = 1
        else:
            break
    fall, rise = error(best - 1) - error(best), error(best + 1) - error(best)
    vertex = (fall - rise) / (2 * (fall + rise)) if fall + rise > 0 else 0.0
    return factorised(best + vertex)


def press_of(
    system: System, terms: Terms, z: Tensor, y: Tensor, size: int = 256
) -> Callable[[Factorisation], float]:
    """PRESS of sampled rows, up to a factor, at the alpha of a factorisation of the system.

    W itself is not solved for: with `u = M psi'`, `psi W = u' (right + c alpha T0)`.
    """
    N, E, T0, W_t = system.rows, terms.d_out, terms.direction, terms.W_t.double()
    index, weight = sample_rows(y[:, :E], system.y_bar[:E], size)
    psi = system.centred(z[index].double(), terms.shrink(N))
    rows, prefixes, F = psi.shape
    centre = terms.centre(N, system.y_bar)  # with a skip (E + D,)
    about = (y[index, :E].double() - centre[:E]).repeat_interleave(prefixes, 0)
    right = system.cross(centre)[:, :E].add_(W_t, alpha=terms.mu)  # (F, E)
    signs = _mixing(E).to(right)

    def press(factorisation: Factorisation) -> float:
        own = None
        if len(z) == N:  # the numbers of the rows in the system are known
            own = factorisation.own(index, centre)
        if own is None:
            u = factorisation.solve(psi.reshape(-1, F).T)  # (F, n L)
            bias = 1 / (N + terms.beta + terms.nu)
            leverage = (psi @ u.T.reshape(psi.shape).mT + bias) / prefixes
            slack = torch.eye(prefixes).to(leverage) - leverage  # I - H_i, (n, L, L)
            residual = about - u.T @ right
        else:
            u, slack = own.u, own.slack[:, None, None]
            residual = own.residual[:, :E] - terms.mu * (u.T @ W_t)
        if T0 is not None:
            mixed_T0 = T0.double() @ signs  # (F, p)
            both = factorisation.solve(torch.cat([right @ signs, mixed_T0], 1))
            untargeted, along = both.chunk(2, 1)
            c = best_multiple(mixed_T0, untargeted, along, factorisation.alpha)
            residual -= c * factorisation.alpha * (u.T @ T0.double())
        # An eigenvalue near 0 belongs to a row that alone determines its fit.
        values, vectors = torch.linalg.eigh(slack)
        inverse = (vectors / values.clamp(min=1e-12)[:, None]) @ vectors.mT
        errors = inverse @ residual.view(rows, prefixes, E)
        return (weight @ errors.square().sum((1, 2))).item()

    return press


def _mixing(columns: int) -> Tensor:
    if columns <= MIXED:
        return torch.eye(columns)
    return 2.0 * torch.randint(2, (columns, MIXED), generator=torch.Generator().manual_seed(0)) - 1


def sample_rows(y: Tensor, centre: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """A systematic sample of about `size` rows, and the weights that make its sums unbiased, (m,) each.

    Row i of the targets, (n, E), is in it with probability `min(1, size / 2 (1 / n + ||y_i - centre||^2 / sum))`:
    large norms dominate PRESS.
    """
    if len(y) <= size:
        return torch.arange(len(y), device=y.device), y.new_ones(len(y), dtype=torch.float64)
    norms = (y.double() - centre).square().sum(1)
    by_norm = norms / norms.sum().clamp(min=torch.finfo(torch.float64).tiny)
    chance = (size / 2 * (1 / len(y) + by_norm)).clamp(max=1)
    # On the CPU a running sum has one order, so that the sample is the same on every call.
    ticks = (chance.cpu().cumsum(0) - 0.5).ceil()
    index = moved(torch.diff(ticks, prepend=ticks.new_zeros(1)).nonzero().squeeze(1), y.device)
    return index, 1 / chance[index]
