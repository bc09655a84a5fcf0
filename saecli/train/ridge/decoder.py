"""The closed-form decoder from its normal equations, its ridge alpha, and the way to solve within a budget of memory.

alpha is the one of least PRESS, the exact leave-one-out error:

    PRESS(alpha) = mean_i ||r_i||^2 / (1 - h_i)^2

with r_i the residual of row i and h_i its leverage, `psi_i' M psi_i + 1 / (N + beta + nu)`; c and a skip are held.
Generalised cross-validation, with the mean leverage, chooses a ridge far too small if rows differ much in norm, as
activations do. A row of a nested dictionary has a psi and a residual in each of L prefixes, and is left out of all:

    PRESS(alpha) = mean_i ||(I - H_i)^-1 r_i||^2 / L      H_i = (psi_i M psi_i' + 1 1' / (N + beta + nu)) / L

N rows, n sampled; F = d_sae, D skipped dimensions, E targets proper, L prefixes, 1 without. All float64.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ...base.devices import moved
from ...sae.codes import Codes, Prefixes
from .iterative import SOLVED_COLUMNS, StreamedCodes
from .sums import HeldRows, Sums, cholesky
from .system import PROBES, Factorisation, Inverse, Sample, SkipSums, System, Terms, random_signs

# Effect over the median one, below which a latent may be needless; without such a limit FVU of SmolLM2 is 2% higher.
LEAST_EFFECT = 0.3
TURNS = 64  # between waits for the device
LEAST, MOST = 1e-7, 1e3  # alpha over A's mean diagonal; beyond, W is lost in rounding, or is T
FACTOR = 3  # of the walk's steps
STRIDE = 2  # steps at a time at first; on rows of real models the first alpha is 0.07 to 0.15 of A's mean diagonal


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


def choose_alpha(
    system: System, terms: Terms, z: Tensor, y: Tensor, last: float | None
) -> Factorisation:
    """The factorisation at the alpha of least PRESS over rows z, (n, F), and y, (n, E), if n = N in the system's order.

    From `last`, else from a ninth of A's mean diagonal with longer strides at first, alpha walks by factors of three to
    where neither neighbour has less, and ends at the minimum of the parabola through these three.

    Cost: a factorisation, and 2 F^2 operations for each of some 320 columns, per alpha tried, three or more; and one
    factorisation at the end.
    """
    scale = max(system.scale(terms.shrink(system.rows)), sys.float_info.min)
    press = press_of(system, terms, z, y)
    start = float(np.clip(last or scale / FACTOR**STRIDE, LEAST * scale, MOST * scale))

    def factorised(steps: float) -> Factorisation:
        alpha = float(np.clip(start * float(FACTOR) ** steps, LEAST * scale, MOST * scale))
        return system.factorise(replace(terms, alpha=alpha))

    @cache
    def error(steps: int) -> float:
        return press(factorised(steps))

    best, stride = 0, 1 if last else STRIDE
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
    """PRESS of sampled rows, up to a factor, at a factorisation's alpha: `psi W = u' (right + c alpha T0)`."""
    N, E, T0, W_t = system.rows, terms.d_out, terms.direction, terms.W_t.double()
    index, weight = sample_rows(y[:, :E], system.y_bar[:E], size)
    centre = terms.centre(N, system.y_bar)  # with a skip (E + D,)
    sample = Sample(
        psi=system.centred(z[index].double(), terms.shrink(N)),
        y=y[index, :E].double() - centre[:E],
        C=system.cross(centre)[:, :E],
        centre=centre,
        bias=1 / (N + terms.beta + terms.nu),
        numbers=index if len(z) == N else None,
    )
    rows, prefixes, _ = sample.psi.shape
    right = sample.C + terms.mu * W_t if terms.mu else sample.C  # (F, E)
    if T0 is not None:
        T0 = T0.double()
        # Random sums of the columns determine c.
        signs = (torch.eye(E) if E <= PROBES else random_signs(E)).to(right)
        mixed_T0, mixed_right = T0 @ signs, right @ signs  # (F, p)

    def press(M: Factorisation) -> float:
        u, slack, residual = M.fits(sample)
        if terms.mu:
            residual = residual - terms.mu * (u.T @ W_t)
        if T0 is not None:
            along = M.solve(mixed_T0)
            fitted = (along * mixed_right).sum().item()  # since M is symmetric
            c = best_multiple(mixed_T0, fitted, along, M.alpha)
            residual = residual - c * M.alpha * (u.T @ T0)
        # An eigenvalue near 0 belongs to a row that alone determines its fit.
        values, vectors = torch.linalg.eigh(slack)
        inverse = (vectors / values.clamp(min=1e-12)[:, None]) @ vectors.mT
        errors = inverse @ residual.view(rows, prefixes, E)
        return (weight @ errors.square().sum((1, 2))).item()

    return press


def sample_rows(y: Tensor, centre: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """A systematic sample of some `size` rows of targets, (n, E), and weights that make its sums unbiased, (m,) each.

    Row i is in it with probability `min(1, size / 2 (1 / n + ||y_i - centre||^2 / sum))`: large norms dominate PRESS.
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
