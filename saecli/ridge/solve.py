"""The closed-form decoder, given its normal equations; symbols as in the package's docstring."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..distributed import latents_axis
from .systems import Factor, System

INFINITE_ALPHA = 1e9
FLAT = 1e-14  # share of ||T0||^2 from which down the objective's curvature in c is rounding


@dataclass(frozen=True)
class Terms:
    """The weights of the quadratic terms, each competing with a sum over all rows, and what they pull towards.

    Args:
        alpha: weight of `||W - T||_F^2`, at least 0.
        beta: weight of `||b||^2`, at least 0.
        mu: weight of `||W - W_t||_F^2`, at least 0.
        nu: weight of `||b - b_t||^2`, at least 0.
        direction: T0, (F, D), of which T = c T0 is the best multiple; None for T = 0.
        W_t: the decoder before this step, (F, D).
        b_t: its bias, (D,).
        decay: weights of each latent's own `||W_i||^2`, (F,), at least 0.
        joint: whether b is the minimum together with W; if not, W is solved without a bias, as if b were 0, and b is
            the best for that W.
    """

    alpha: float
    beta: float
    mu: float
    nu: float
    direction: Tensor | None
    W_t: Tensor
    b_t: Tensor
    decay: Tensor
    joint: bool = True


@dataclass(frozen=True)
class Decoder:
    """A solved decoder.

    Args:
        W: weights, (F, D), float64.
        b: bias, (D,), float64.
        c: the multiple of the direction, T = c T0; 0 where there is no direction.
        ridge: alpha + mu that the factorisation held for.
        raised: whether that is more than was asked for, which did not factorise.
        condition: estimate of the condition number of what was solved; see `Factor`.
        residual: of the worst column, over its right side; None where it was not solved by iteration.
    """

    W: Tensor
    b: Tensor
    c: float
    ridge: float
    raised: bool
    condition: float
    residual: float | None


def solve(system: System, terms: Terms, factored: Factor | None = None) -> Decoder:
    """The decoder that minimises the package's objective, jointly with c where there is a direction.

    Args:
        system: the normal equations.
        terms: the other terms.
        factored: what `factor` gave for nearly this alpha, and is still valid; the decoder is then for its alpha.

    Cost: one factorisation (see `System.factor`), and 2 F^2 D operations for each of W and T0.

    Raises:
        TrainingError: the codes are not finite, or so far from 0 that their spread is lost in rounding.
    """
    factored = factored or factor(system, terms)
    W, b, c = solve_parts(system, terms, factored)
    residual = factored.residual and factored.residual()
    return Decoder(W, b, c, factored.ridge, factored.raised, factored.condition(), residual)


def factor(system: System, terms: Terms) -> Factor:
    """Factorise `A + diag(decay) + (alpha + mu) I`.

    An alpha above `INFINITE_ALPHA` of A's mean diagonal is taken as that: W is T then to nine digits, and c would be
    lost in a difference of nearly equal numbers.
    """
    s = shrinkage(system, terms)
    alpha = min(terms.alpha, INFINITE_ALPHA * system.scale(s)) or terms.alpha
    factored = system.factor(alpha + terms.mu, s, terms.decay)
    return replace(factored, alpha=alpha + (factored.ridge - (alpha + terms.mu)))


def shrinkage(system: System, terms: Terms) -> float:
    """s, by which W is solved: 0 where that is without a bias, as with an endless beta."""
    return rows_share(system, terms) if terms.joint else 0.0


def rows_share(system: System, terms: Terms) -> float:
    """The share of the bias that the rows, and not beta and nu, decide."""
    return system.rows / (system.rows + terms.beta + terms.nu)


def centre_of(system: System, terms: Terms) -> Tensor:
    """What inputs are counted from where W is solved, (D,): the bias where no code tells anything, or 0."""
    return bare_bias(system, terms) if terms.joint else torch.zeros_like(system.x_bar)


def bare_bias(system: System, terms: Terms) -> Tensor:
    """`s x_bar + t b_t`, (D,), which is the bias where no code tells anything."""
    share = terms.nu / (system.rows + terms.beta + terms.nu)
    return rows_share(system, terms) * system.x_bar + share * terms.b_t.double()


def solve_parts(system: System, terms: Terms, factored: Factor) -> tuple[Tensor, Tensor, float]:
    """W (F, D), b (D,) and c, with the factorisation already at hand."""
    centre = centre_of(system, terms)
    W, c = factored.solve_cross(centre), 0.0
    if terms.mu:
        W += factored.solve(terms.mu * terms.W_t.double())
    if terms.direction is not None:
        T0 = terms.direction.double()
        along = factored.solve(T0)
        c, _ = best_multiple(T0, W, along, factored.alpha)
        W.add_(along, alpha=c * factored.alpha)
    return W, bare_bias(system, terms) - rows_share(system, terms) * total(system.z_bar @ W), c


def best_multiple(T0: Tensor, untargeted: Tensor, along: Tensor, alpha: float) -> tuple[float, float]:
    """The c that minimises the objective jointly with W, and its derivative in alpha.

    At W(c) = M (C + mu W_t) + c alpha M T0, with M the inverse, the objective's derivative in c is
    `-2 alpha <T0, W(c) - c T0>`. It vanishes at `<T0, M (C + mu W_t)> / <T0, T0 - alpha M T0>`, which for mu = 0
    and no decay is `<T0, M C> / <T0, M A T0>`. Where no code varies every c is as good; 1 keeps the encoder's
    gradient. Columns may be left out of all three, or mixed alike: then it is the c that is best for those.
    """
    curvature = total((T0 * (T0 - alpha * along)).sum()).item()
    if curvature <= FLAT * total(T0.square().sum()).item():
        return 1.0, 0.0
    c = total((T0 * untargeted).sum()).item() / curvature
    falling = total((along * (untargeted - c * T0 + c * alpha * along)).sum()).item()  # <M T0, W - c T0>; dM = -M M
    return c, -falling / curvature


def total(own: Tensor) -> Tensor:
    """The sum over all latents, given that over those which this process holds; it takes the place of what is given."""
    return latents_axis().add_up(own)
