"""The search for the alpha of least PRESS, the exact leave-one-out error, one factorisation a step.

    PRESS(alpha) = mean_i ||r_i||^2 / (1 - h_i)^2

with r_i the residual of row i and h_i its leverage (`leverage.py`): the squared error of row i under the decoder
fitted to all other rows, c held. Generalised cross-validation, which puts the mean leverage in place of h_i, chooses a
ridge far too small where rows differ much in norm, as activations do.

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
from typing import Self

import numpy as np
import torch
from torch import Tensor

from .solve import Terms, best_multiple, centre_of, factor, shrinkage, total
from .systems import Factor, System

LEAST_SLACK = 1e-12  # 1 - h_i from which on a row counts as fitted alone
LEAST, MOST = -7, 3  # powers of ten of A's mean diagonal between which alpha is sought
SPACING = 2  # decades between the alphas that a first search looks at
REACH = 1.0  # decades over which a model is used, doubled while it falls all the way
CLOSE = 0.3  # decades over which it is taken at its word
STEPS = 41  # alphas at which a model is evaluated, to find its minimum
GAIN = 1e-3  # share of PRESS for which another factorisation is not worth it
WARM_GAIN = 1e-2  # the same at the last choice, where the next outer iteration goes on with the search
LOOKS = 12  # factorisations after which a search ends with the best of them
LEAST_ROWS, SHARE, MOST_ROWS = 128, 8, 256  # rows that are looked at: one in 8, between these numbers
MIXED = 64  # sums of columns that c is taken from
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


@dataclass(frozen=True)
class Choice:
    """What a search ended with.

    Args:
        alpha: the alpha of least PRESS.
        factored: for an alpha so near that PRESS is a hundredth above at most, still valid; None where the search's
            last step led it away from there.
    """

    alpha: float
    factored: Factor | None


def choose_alpha(system: System, terms: Terms, z: Tensor, x: Tensor, last: float | None) -> Choice:
    """The alpha with the least PRESS over a sample of rows.

    Args:
        system: normal equations of all rows.
        terms: the other terms' weights; their alpha is not looked at.
        z: codes of the sampled rows, (n, F); if N, then all in the system's order.
        x: their inputs, (n, D).
        last: the choice of the outer iteration before, from which the search goes downhill; None for a search over
            all decades.

    Returns:
        The alpha, between 1e-7 and 1e3 of A's mean diagonal: below, the ridge is lost in rounding; above, it leaves
        nothing of W - T. With it, mostly, a factorisation.

    Cost: a factorisation, and 2 F^2 operations for each of some 650 columns, for every alpha looked at: one or two
    alphas from a good start, about seven from none.
    """
    scale = max(system.scale(shrinkage(system, terms)), np.finfo(float).tiny)
    index, weight = sample_rows(x, system.x_bar, min(max(LEAST_ROWS, system.rows // SHARE), MOST_ROWS))
    rows = Rows(z[index].double(), x[index].double(), index if len(z) == system.rows else None, weight)

    equations, latest = Equations.of(system, terms), None

    def look(decades: float) -> Model:
        nonlocal latest
        latest = factor(system, replace(terms, alpha=scale * 10**decades))
        return model(equations, rows, latest, decades)

    if last is not None:
        start = float(np.clip(np.log10(max(last, np.finfo(float).tiny)) - np.log10(scale), LEAST, MOST))
        here, best = _descend(look, look(start), WARM_GAIN)
    else:
        coarse = [look(float(decades)) for decades in range(LEAST, MOST + 1, SPACING)]
        here, best = _descend(look, min(coarse, key=lambda one: one.minimum(REACH)[1]), GAIN)
    return Choice(scale * 10**best, latest if latest.alpha == here.alpha else None)


def _descend(look: Callable[[float], Model], here: Model, gain: float) -> tuple[Model, float]:
    """The best model that is come to from the first of them, and the minimum, in decades, that it leads to; it goes on
    while there is more than `gain` left to win."""
    reach = REACH
    for _ in range(LOOKS):
        target, expected = here.minimum(reach)
        away = abs(target - here.decades)
        falling = away > 0.99 * reach  # to the last: PRESS may be flat here and have its minimum far off
        if expected > (1 - gain) * here.value and not falling:
            return here, here.minimum(CLOSE)[0]
        there, gain = look(target), GAIN
        if there.value < here.value:
            here, reach = there, 2 * reach if falling else REACH
        else:
            reach = away / 2
    return here, here.decades


@dataclass(frozen=True)
class Equations:
    """What the right side of the normal equations is, whatever alpha.

    Args:
        system: the equations' left side.
        terms: the other terms.
        centre: what inputs are counted from, (D,).
        right: `C + mu W_t`, (F, D).
        direction: T0, (F, D); None where there is none.
        mixed: T0 and `right` with few columns that stand for all, each (F, p); none where there is no T0.
    """

    system: System
    terms: Terms
    centre: Tensor
    right: Tensor
    direction: Tensor | None
    mixed: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, system: System, terms: Terms) -> Self:
        """Those of a system."""
        centre = centre_of(system, terms)
        right = system.cross(centre).add_(terms.W_t.double(), alpha=terms.mu)
        if terms.direction is None:
            return cls(system, terms, centre, right, None)
        direction = terms.direction.double()
        signs = _mixing(right.shape[1]).to(right)
        return cls(system, terms, centre, right, direction, (direction @ signs, right @ signs))


def _mixing(d_in: int) -> Tensor:
    """What takes D columns to `MIXED` sums of all of them with random signs, the same on every call."""
    if d_in <= MIXED:
        return torch.eye(d_in)
    return 2.0 * torch.randint(2, (d_in, MIXED), generator=torch.Generator().manual_seed(0)) - 1


def model(equations: Equations, rows: Rows, factored: Factor, decades: float) -> Model:
    """The model of PRESS around the alpha of a factorisation, which is `decades` powers of ten of A's mean diagonal.

    No decoder is solved for: with `W = M (right + c alpha T0)` all that is wanted of W are its products with u and psi,
    which `psi' M = u'` gives. c is that of the mixed columns, of whose choice it hardly depends.
    """
    system, terms, alpha, T0 = equations.system, equations.terms, factored.alpha, equations.direction
    psi = rows.z - shrinkage(system, terms) * system.z_bar
    if factored.own is not None and rows.index is not None:
        own = factored.own(rows.index)
        u, slack = own.solve(), own.slack
        residual = own.residual(equations.centre) - terms.mu * (u.T @ terms.W_t.double())
    else:
        u = factored.solve(psi.T)
        slack = 1 - 1 / (system.rows + terms.beta + terms.nu) - total((psi * u.T).sum(1))
        residual = rows.x - equations.centre - total(u.T @ equations.right)  # x - b - psi' W
    v = factored.solve(u)
    falling = total(v.T @ equations.right)  # its derivative
    if T0 is not None:
        along, untargeted = factored.solve(torch.cat(equations.mixed, 1)).chunk(2, 1)
        c, slope = best_multiple(equations.mixed[0], untargeted, along, alpha)
        towards = total(u.T @ T0)
        residual -= c * alpha * towards
        falling += c * alpha * total(v.T @ T0) - (c + slope * alpha) * towards
    leverage = total((psi * u.T).sum(1))
    pole = torch.where(leverage > 0, total(u.square().sum(0)) / leverage, 0.0)
    squares = torch.stack([residual.square().sum(1), (residual * falling).sum(1), falling.square().sum(1)])
    return Model(decades, alpha, slack, leverage, pole, rows.weight * squares)


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
