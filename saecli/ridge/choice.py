"""The search for the alpha of least PRESS, one factorisation a step.

At an alpha that has been factorised, with M = (A + diag(decay) + (alpha + mu) I)^-1 and u_i = M psi_i, a row's
leverage and residual have, in alpha, the derivatives

    h_i' = -u_i' u_i      r_i' = (W - c T0)' u_i - c' alpha T0' u_i

and at alpha + d both are taken as rational functions of d with one pole, the one that the leverage shows:

    rho_i = u_i' u_i / psi_i' u_i      h_i(d) = h_i(0) - psi_i' u_i rho_i d / (1 + rho_i d)
                                       r_i(d) = r_i(0) + r_i' d / (1 + rho_i d)

That is exact where psi_i lies in one eigenspace of A, and exact to first order everywhere: where the PRESS so
modelled has its minimum at d = 0, so has PRESS.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .press import LEAST_SLACK
from .solve import Terms, factor, shrinkage, solve_parts
from .systems import System

LEAST, MOST = -7, 3  # powers of ten of A's mean diagonal between which alpha is sought
SPACING = 2  # decades between the alphas that a first search looks at
REACH = 1.0  # decades over which a model is used, doubled while it falls all the way
CLOSE = 0.3  # decades over which it is taken at its word
STEPS = 41  # alphas at which a model is evaluated, to find its minimum
GAIN = 1e-3  # share of PRESS for which another factorisation is not worth it
WARM_GAIN = 1e-2  # the same at the last choice, where the next outer iteration goes on with the search
LOOKS = 12  # factorisations after which a search ends with the best of them
LEAST_ROWS, SHARE, MOST_ROWS = 128, 8, 256  # rows that are looked at: one in 8, between these numbers
UNIFORM = 0.5  # share of them drawn evenly, the others by squared norm


@dataclass(frozen=True)
class Rows:
    """Rows on which PRESS is evaluated.

    Args:
        z: codes, (n, F), float64.
        x: inputs, (n, D), float64.
        index: which of the system's rows they are, (n,); None where that is not known.
        weight: what each one's error counts, (n,).
    """

    z: Tensor
    x: Tensor
    index: Tensor | None
    weight: Tensor


@dataclass(frozen=True)
class Model:
    """PRESS around an alpha that was factorised; a vector has an entry a row, (n,).

    Args:
        decades: log10 of alpha over A's mean diagonal.
        alpha: the alpha.
        slack: 1 - h_i.
        leverage: psi_i' u_i.
        pole: rho_i.
        squares: r_i' r_i, r_i' (derivative) r_i and the derivative's square, with each row's weight, (3, n).
    """

    decades: float
    alpha: float
    slack: Tensor
    leverage: Tensor
    pole: Tensor
    squares: Tensor

    def press(self, alphas: Tensor) -> Tensor:
        """PRESS at each of (k,) alphas, up to a factor common to all models of a sample."""
        d = (alphas - self.alpha)[:, None]
        step = d / (1 + self.pole * d)
        slack = (self.slack + self.leverage * self.pole * step).clamp(min=LEAST_SLACK)
        squares = self.squares[0] + 2 * step * self.squares[1] + step.square() * self.squares[2]
        return (squares / slack.square()).sum(1)

    @property
    def value(self) -> float:
        """PRESS at the model's own alpha."""
        return self.press(self.slack.new_tensor([self.alpha])).item()

    def minimum(self, reach: float) -> tuple[float, float]:
        """Where in `decades` the model is least, at most `reach` away, and its value there."""
        low, high = max(self.decades - reach, LEAST), min(self.decades + reach, MOST)
        points = np.union1d(np.linspace(low, high, STEPS), self.decades)
        values = self.press(self.slack.new_tensor(self.alpha * 10 ** (points - self.decades))).cpu().numpy()
        best = int(values.argmin())
        return float(points[best]), float(values[best])


def choose_alpha(system: System, terms: Terms, z: Tensor, x: Tensor, last: float | None) -> float:
    """The alpha with the least PRESS over a sample of rows.

    Args:
        system: normal equations of all rows.
        terms: the other terms' weights; their alpha is not looked at.
        z: codes of the sampled rows, (n, F); if N, then all in the system's order.
        x: their inputs, (n, D).
        last: the choice of the outer iteration before, from which the search goes downhill; None for a search over
            all decades.

    Returns:
        The alpha chosen, between 1e-7 and 1e3 of A's mean diagonal: below, the ridge is lost in rounding; above,
        it leaves nothing of W - T.

    Cost: a solve and the leverages of m rows, m <= 256, 2 m F^2 operations, for every alpha looked at: one or two
    alphas from a good start, about seven from none.
    """
    scale = max(system.scale(shrinkage(system, terms)), np.finfo(float).tiny)
    index, weight = sample_rows(x, system.x_bar, min(max(LEAST_ROWS, system.rows // SHARE), MOST_ROWS))
    rows = Rows(z[index].double(), x[index].double(), index if len(z) == system.rows else None, weight)

    def look(decades: float) -> Model:
        return model(system, replace(terms, alpha=scale * 10**decades), rows, decades)

    if last is not None:
        start = float(np.clip(np.log10(max(last, np.finfo(float).tiny)) - np.log10(scale), LEAST, MOST))
        return scale * 10 ** _descend(look, look(start), WARM_GAIN)
    coarse = [look(float(decades)) for decades in range(LEAST, MOST + 1, SPACING)]
    return scale * 10 ** _descend(look, min(coarse, key=lambda one: one.minimum(REACH)[1]), GAIN)


def _descend(look: Callable[[float], Model], here: Model, gain: float) -> float:
    """The minimum, in decades, that the models lead to from the first of them, unless that has less than `gain` left
    to win."""
    reach = REACH
    for _ in range(LOOKS):
        target, expected = here.minimum(reach)
        away = abs(target - here.decades)
        falling = away > 0.99 * reach  # to the last: PRESS may be flat here and have its minimum far off
        if expected > (1 - gain) * here.value and not falling:
            return here.minimum(CLOSE)[0]
        there, gain = look(target), GAIN
        if there.value < here.value:
            here, reach = there, 2 * reach if falling else REACH
        else:
            reach = away / 2
    return here.decades


def model(system: System, terms: Terms, rows: Rows, decades: float) -> Model:
    """The model of PRESS around the terms' alpha, which is `decades` powers of ten of A's mean diagonal."""
    factored = factor(system, terms)
    W, b, c, slope = solve_parts(system, terms, factored)
    psi = rows.z - shrinkage(system, terms) * system.z_bar
    if factored.own_solve is not None and rows.index is not None:
        u, slack = factored.own_solve(rows.index)
    else:
        u = factored.solve(psi.T)
        slack = 1 - (psi * u.T).sum(1)
    residual = rows.x - rows.z @ W - b
    if terms.direction is not None:
        W -= (c + slope * factored.alpha) * terms.direction.double()
    falling = u.T @ W
    leverage = (psi * u.T).sum(1)
    pole = torch.where(leverage > 0, u.square().sum(0) / leverage, 0.0)
    squares = torch.stack([residual.square().sum(1), (residual * falling).sum(1), falling.square().sum(1)])
    slack = slack - 1 / (system.rows + terms.beta + terms.nu)
    return Model(decades, factored.alpha, slack, leverage, pole, rows.weight * squares)


def sample_rows(x: Tensor, centre: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Rows that stand for all, large ones more surely, and the weights that make their sums unbiased.

    A systematic sample, the same on every call: row i is in it with probability
    `min(1, size (p / n + (1 - p) ||x_i - centre||^2 / sum))`. A few large rows decide PRESS where norms differ.

    Args:
        x: inputs, (n, D).
        centre: their mean, (D,).
        size: rows wanted.

    Returns:
        The indices and weights, each (m,): at most about `size` rows, and all where there are no more.
    """
    if len(x) <= size:
        return torch.arange(len(x), device=x.device), torch.ones(len(x), dtype=torch.float64, device=x.device)
    norms = (x.double() - centre).square().sum(1)
    share = UNIFORM / len(x) + (1 - UNIFORM) * norms / norms.sum().clamp(min=torch.finfo(torch.float64).tiny)
    chance = (size * share).clamp(max=1)
    ticks = (chance.cumsum(0) - 0.5).ceil()
    index = torch.diff(ticks, prepend=ticks.new_zeros(1)).nonzero().squeeze(1)
    return index, 1 / chance[index]
