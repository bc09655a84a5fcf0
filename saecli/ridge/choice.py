"""The search for the alpha of least PRESS, the exact leave-one-out error, with one factorisation per alpha looked at.

    PRESS(alpha) = mean_i ||r_i||^2 / (1 - h_i)^2

with r_i the residual of row i and h_i its leverage (`solve.slack_of`): the squared error of row i under the decoder
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

Shapes: N rows in all, n sampled, F = d_sae, E targets.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from .solve import best_multiple
from .system import Factorisation, System, Terms

LEAST_SLACK = 1e-12  # 1 - h_i from which on a row counts as fitted alone
LEAST, MOST = -7, 3  # powers of ten of A's mean diagonal between which alpha is sought
SPACING = 2  # decades between the alphas that a first search looks at
REACH = 1.0  # decades over which a model is used, doubled while it falls all the way
STEPS = 41  # alphas at which a model is evaluated, to find its minimum
GAIN = 1e-3  # fraction of PRESS for which another factorisation is not worth it
WARM_GAIN = 1e-2  # the same at the last choice, where the next outer iteration goes on with the search
LOOKS = 12  # factorisations after which a search ends with the best of them
LEAST_ROWS, FRACTION, MOST_ROWS = 128, 8, 256  # sampled rows: one in 8, between these numbers
MIXED = 64  # sums of columns that c is taken from
UNIFORM = 0.5  # fraction of the sampled rows drawn evenly, the others by squared norm


@dataclass(frozen=True)
class Model:
    """PRESS around an alpha that was factorised; a vector has an entry for each row, (n,).

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


def choose_alpha(system: System, terms: Terms, z: Tensor, y: Tensor, last: float | None) -> Factorisation[Any]:
    """The factorisation at the alpha of least PRESS over a sample of rows.

    Args:
        system: normal equations of all rows.
        terms: the other terms' weights; their alpha is not looked at.
        z: codes of the sampled rows, (n, F); if N, then all in the system's order.
        y: their targets, (n, E).
        last: the choice of the outer iteration before, from which the search goes downhill; None for a search over
            all decades.

    Returns:
        The factorisation, with its `alpha` between 1e-7 and 1e3 of A's mean diagonal: below, the ridge is lost in
        rounding; above, it leaves nothing of W - T. PRESS there is by its model at most a thousandth above the least
        nearby; a hundredth where `last` itself is chosen again.

    Cost: a factorisation, and 2 F^2 operations for each of some 650 columns, for every alpha looked at: one or two
    alphas from a good start, about seven from none. One more factorisation where the last alpha looked at was worse.
    """
    scale = max(system.scale(terms.shrink(system.rows)), np.finfo(float).tiny)
    press, latest = Press.of(system, terms, z, y), None

    def factorised(decades: float) -> Factorisation[Any]:
        return system.factorise(replace(terms, alpha=scale * 10**decades))

    def look(decades: float) -> Model:
        nonlocal latest
        latest = factorised(decades)
        return press.model(latest, decades)

    if last is not None:
        start = float(np.clip(np.log10(max(last, np.finfo(float).tiny)) - np.log10(scale), LEAST, MOST))
        best = _descend(look, look(start), WARM_GAIN)
    else:
        coarse = [look(float(decades)) for decades in range(LEAST, MOST + 1, SPACING)]
        best = _descend(look, min(coarse, key=lambda model: model.minimum(REACH)[1]), GAIN)
    return latest if latest.alpha == best.alpha else factorised(best.decades)


def _descend(look: Callable[[float], Model], here: Model, gain: float) -> Model:
    """The best of the models that are come to from the first, going on while there is more than `gain` left to win."""
    reach = REACH
    for _ in range(LOOKS):
        target, expected = here.minimum(reach)
        away = abs(target - here.decades)
        falling = away > 0.99 * reach  # to the last: PRESS may be flat here and have its minimum far off
        if expected > (1 - gain) * here.value and not falling:
            return here
        there, gain = look(target), GAIN
        if there.value < here.value:
            here, reach = there, 2 * reach if falling else REACH
        else:
            reach = away / 2
    return here


@dataclass(frozen=True)
class Press:
    """What PRESS is computed from whatever alpha is.

    Args:
        system: the normal equations' left side.
        terms: the other terms.
        z: codes of the rows that it is evaluated on, (n, F), float64.
        y: their targets, (n, E), float64.
        index: their numbers among the system's rows, (n,); None where they are not known.
        weight: of each one's error, (n,).
        centre: what is subtracted from targets, (E,).
        right: `C + mu W_t`, (F, E).
        mixed: T0 and `right` with few columns that stand for all, each (F, p); none where there is no T0.
    """

    system: System
    terms: Terms
    z: Tensor
    y: Tensor
    index: Tensor | None
    weight: Tensor
    centre: Tensor
    right: Tensor
    mixed: tuple[Tensor, ...]

    @classmethod
    def of(cls, system: System, terms: Terms, z: Tensor, y: Tensor) -> Self:
        """On a sample of the given rows, (n, F) and (n, E); if N, then all in the system's order."""
        rows, y_bar = system.rows, system.y_bar
        index, weight = sample_rows(y, y_bar, int(min(max(LEAST_ROWS, rows // FRACTION), MOST_ROWS)))
        centre = terms.centre(rows, y_bar)
        right = system.cross(centre).add_(terms.W_t.double(), alpha=terms.mu)
        mixed: tuple[Tensor, ...] = ()
        if terms.direction is not None:
            signs = _mixing(right.shape[1]).to(right)
            mixed = terms.direction.double() @ signs, right @ signs
        return cls(system, terms, z[index].double(), y[index].double(), index if len(z) == rows else None, weight,
                   centre, right, mixed)

    def model(self, factorisation: Factorisation[Any], decades: float) -> Model:
        """The model around the alpha of a factorisation, which is `decades` powers of ten of A's mean diagonal.

        No decoder is solved for: with `W = M (right + c alpha T0)` all that is needed of W are its products with u and
        psi, which `psi' M = u'` gives. c is that of the mixed columns, on whose choice it hardly depends.
        """
        terms, alpha = self.terms, factorisation.alpha
        psi = self.z - terms.shrink(self.system.rows) * self.system.z_bar
        own = None if self.index is None else factorisation.own(self.index)
        if own is not None:
            u, slack = own.u(), own.slack
            residual = own.residual(self.centre) - terms.mu * (u.T @ terms.W_t.double())
        else:
            u = factorisation.solve(psi.T)
            slack = 1 - 1 / (self.system.rows + terms.beta + terms.nu) - (psi * u.T).sum(1)
            residual = self.y - self.centre - u.T @ self.right  # y - b - psi' W
        v = factorisation.solve(u)
        falling = v.T @ self.right  # its derivative
        if terms.direction is not None:
            T0 = terms.direction.double()
            along, untargeted = factorisation.solve(torch.cat(self.mixed, 1)).chunk(2, 1)
            c, slope = best_multiple(self.mixed[0], untargeted, along, alpha)
            towards = u.T @ T0
            residual -= c * alpha * towards
            falling += c * alpha * (v.T @ T0) - (c + slope * alpha) * towards
        leverage = (psi * u.T).sum(1)
        pole = torch.where(leverage > 0, u.square().sum(0) / leverage, 0.0)
        squares = torch.stack([residual.square().sum(1), (residual * falling).sum(1), falling.square().sum(1)])
        return Model(decades, alpha, slack, leverage, pole, self.weight * squares)


def _mixing(columns: int) -> Tensor:
    """What takes E columns to `MIXED` sums of all of them with random signs, (E, p), the same on every call."""
    if columns <= MIXED:
        return torch.eye(columns)
    return 2.0 * torch.randint(2, (columns, MIXED), generator=torch.Generator().manual_seed(0)) - 1


def sample_rows(y: Tensor, centre: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Rows that stand for all, large ones more surely, and the weights that make their sums unbiased.

    A systematic sample, the same on every call: row i is in it with probability
    `min(1, size (p / n + (1 - p) ||y_i - centre||^2 / sum))`. A few large rows decide PRESS where norms differ.

    Args:
        y: targets, (n, E).
        centre: their mean, (E,).
        size: rows wanted.

    Returns:
        The indices and weights, each (m,): at most about `size` rows, and all where there are no more.
    """
    if len(y) <= size:
        return torch.arange(len(y), device=y.device), torch.ones(len(y), dtype=torch.float64, device=y.device)
    norms = (y.double() - centre).square().sum(1)
    fraction = UNIFORM / len(y) + (1 - UNIFORM) * norms / norms.sum().clamp(min=torch.finfo(torch.float64).tiny)
    chance = (size * fraction).clamp(max=1)
    ticks = (chance.cumsum(0) - 0.5).ceil()
    index = torch.diff(ticks, prepend=ticks.new_zeros(1)).nonzero().squeeze(1)
    return index, 1 / chance[index]
