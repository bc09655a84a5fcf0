"""The search for the alpha of least PRESS, the exact leave-one-out error, with one factorisation per alpha tried.

    PRESS(alpha) = mean_i ||r_i||^2 / (1 - h_i)^2

with r_i the residual of row i and h_i its leverage (`solve.slack_of`): the squared error of row i under the decoder
fitted to all other rows, with c fixed. Generalised cross-validation, with the mean leverage, chooses a ridge far too
small if rows differ much in norm, as activations do.

At an alpha that has been factorised, with M = (A + diag(decay) + (alpha + mu) I)^-1 and u_i = M psi_i, a row's
leverage and residual have, in alpha, the derivatives

    h_i' = -u_i' u_i      r_i' = (W - c T0)' u_i - c' alpha T0' u_i

and at alpha + d both are modelled as rational functions of d with one pole, given by the leverage:

    rho_i = u_i' u_i / psi_i' u_i      h_i(d) = h_i(0) - psi_i' u_i rho_i d / (1 + rho_i d)
                                       r_i(d) = r_i(0) + r_i' d / (1 + rho_i d)

The model is exact if psi_i lies in one eigenspace of A, and exact to first order always: if the modelled PRESS has its
minimum at d = 0, so has PRESS.

A row of a nested dictionary has a psi, a residual and an error in each of L prefixes, and is left out of all at once:

    PRESS(alpha) = mean_i ||(I - H_i)^-1 r_i||^2 / L      H_i = (psi_i M psi_i' + 1 1' / (N + beta + nu)) / L

with psi_i, u_i' and r_i of L rows. With axes Y and L poles rho such that `psi_i M psi_i' / L = Y Y'` and
`u_i' u_i / L = Y diag(rho) Y'`, the model is

    H_i(d) = H_i(0) - Y diag(rho d / (1 + rho d)) Y'      r_i(d) = r_i(0) + Y diag(d / (1 + rho d)) Y^+ r_i'

With L = 1 these are the formulas above.

An affine skip (see `solve.py`) is held while alpha is chosen: rows are left out of the decoder alone.

N rows, n sampled; F = d_sae, E targets, L prefixes, 1 without.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ...base.devices import moved
from .solve import best_multiple
from .system import Factorisation, System, Terms

LEAST_SLACK = 1e-12  # least 1 - h_i: with less, only the row itself determines its fit
LEAST, MOST = -7, 3  # range of alpha, log10 over A's mean diagonal
SPACING = 2  # decades between the alphas of a first search
REACH = 1.0  # decades over which a model is used, doubled while it falls all the way
STEPS = 41  # alphas at which a model is evaluated to find its minimum
GAIN = 1e-3  # relative gain in PRESS below which a search stops
WARM_GAIN = (
    1e-2  # the same at the previous alpha, since the next outer iteration continues the search
)
LOOKS = 12  # factorisations per search at most
LEAST_ROWS, FRACTION, MOST_ROWS = (
    128,
    8,
    256,
)  # sampled rows: one in 8, between these numbers; nested, the least
NULL = 1e-12  # fraction of a row's largest leverage below which an axis is rounding
MIXED = 64  # random sums of columns that determine c
UNIFORM = 0.5  # fraction of the sampling probability that is uniform; the rest is by squared norm


@dataclass(frozen=True)
class Model:
    """PRESS around a factorised alpha."""

    decades: float  # log10 of alpha over A's mean diagonal
    alpha: float
    slack: Tensor  # I - H_i, (n, L, L)
    axes: Tensor  # Y_i, (n, L, L)
    poles: Tensor  # rho_i, (n, L)
    squares: Tensor  # products of r_i over Y_i^+ r_i' with themselves, times the row's weight, (n, 2 L, 2 L)

    def press(self, alphas: Tensor) -> Tensor:
        """At alphas, (k,), up to a factor common to all models of a sample."""
        d = (alphas - self.alpha)[:, None, None]
        step = d / (1 + self.poles * d)  # (k, n, L)
        slack = self.slack + (self.axes * (self.poles * step)[..., None, :]) @ self.axes.mT
        moved = self.axes * step[..., None, :]
        errors = inverse(slack) @ torch.cat(
            [torch.eye(step.shape[-1]).to(moved).expand_as(moved), moved], -1
        )
        return ((errors @ self.squares) * errors).sum((1, 2, 3))

    @property
    def value(self) -> float:
        return self.press(self.slack.new_tensor([self.alpha])).item()

    def minimum(self, reach: float) -> tuple[float, float]:
        low, high = max(self.decades - reach, LEAST), min(self.decades + reach, MOST)
        points = np.union1d(np.linspace(low, high, STEPS), self.decades)
        values = (
            self.press(self.slack.new_tensor(self.alpha * 10 ** (points - self.decades)))
            .cpu()
            .numpy()
        )
        best = int(values.argmin())
        return float(points[best]), float(values[best])


def choose_alpha(
    system: System, terms: Terms, z: Tensor, y: Tensor, last: float | None
) -> Factorisation:
    """The factorisation at the alpha of least PRESS over rows z, (n, F), and y, (n, E), if n = N in the system's order.

    The search starts at `last`, or covers all decades. alpha is between 1e-7 and 1e3 times A's mean diagonal: below,
    the ridge is lost in rounding; above, W - T vanishes. By its model, PRESS is at most a thousandth above the local
    minimum; a hundredth if `last` is chosen again.

    Cost per alpha tried, one or two from a good start, about seven from none: a factorisation, and 2 F^2 operations for
    each of some 650 columns. One more factorisation if the last was not the best.
    """
    scale = max(system.scale(terms.shrink(system.rows)), np.finfo(float).tiny)
    press = Press.of(system, terms, z, y)

    def factorised(decades: float) -> Factorisation:
        return system.factorise(replace(terms, alpha=scale * 10**decades))

    def look(decades: float) -> tuple[Model, Factorisation]:
        found = factorised(decades)
        return press.model(found, decades), found

    kept: Factorisation | None = (
        None  # of `here`, as long as no other was made: two would take twice the memory
    )
    if last is not None:
        start, gain = float(np.log10(max(last, np.finfo(float).tiny)) - np.log10(scale)), WARM_GAIN
        here, kept = look(min(max(start, LEAST), MOST))
    else:
        coarse, gain = (
            [look(float(decades))[0] for decades in range(LEAST, MOST + 1, SPACING)],
            GAIN,
        )
        here = min(coarse, key=lambda model: model.minimum(REACH)[1])
    reach = REACH
    for _ in range(LOOKS):
        target, expected = here.minimum(reach)
        away = abs(target - here.decades)
        falling = (
            away > 0.99 * reach
        )  # up to the end: PRESS may be flat here, with its minimum far away
        if expected > (1 - gain) * here.value and not falling:
            break
        kept, gain = None, GAIN
        there, found = look(target)
        if there.value < here.value:
            here, kept, reach = there, found, 2 * reach if falling else REACH
        else:
            reach = away / 2
        del found
    return kept or factorised(here.decades)


@dataclass(frozen=True)
class Press:
    """The inputs of PRESS that do not depend on alpha."""

    system: System
    terms: Terms
    z: Tensor  # of the sampled rows, (n, F), float64
    y: Tensor  # (n, E)
    index: Tensor | None  # their numbers in the system; None if unknown
    weight: Tensor  # of each row's error, (n,)
    centre: Tensor  # subtracted from the system's targets, (E,); with a skip (E + D,)
    right: Tensor  # `cross` plus mu W_t, (F, E)
    mixed: tuple[Tensor, ...]  # T0 and `right`, columns mixed into p, (F, p) each; empty without T0

    @classmethod
    def of(cls, system: System, terms: Terms, z: Tensor, y: Tensor) -> Self:
        rows, y_bar, targets = system.rows, system.y_bar, slice(0, terms.d_out)
        y = y[:, targets]
        most = LEAST_ROWS if system.prefixes else MOST_ROWS
        index, weight = sample_rows(
            y, y_bar[targets], int(min(max(LEAST_ROWS, rows // FRACTION), most))
        )
        centre = terms.centre(rows, y_bar)
        right = system.cross(centre)[:, targets].add_(terms.W_t.double(), alpha=terms.mu)
        mixed: tuple[Tensor, ...] = ()
        if terms.direction is not None:
            signs = _mixing(right.shape[1]).to(right)
            mixed = terms.direction.double() @ signs, right @ signs
        return cls(
            system,
            terms,
            z[index].double(),
            y[index].double(),
            index if len(z) == rows else None,
            weight,
            centre,
            right,
            mixed,
        )

    def model(self, factorisation: Factorisation, decades: float) -> Model:
        """Only products of `W = M (right + c alpha T0)` with u and psi are needed, by `psi' M = u'`."""
        terms, targets, alpha = self.terms, slice(0, self.terms.d_out), factorisation.alpha
        psi = self.system.centred(self.z, terms.shrink(self.system.rows))
        rows, prefixes, _ = psi.shape
        psi = psi.flatten(0, 1)
        own = None if self.index is None else factorisation.own(self.index)
        if own is not None:
            u, slack = own.u(), own.slack[:, None, None]
            residual = own.residual(self.centre)[:, targets] - terms.mu * (u.T @ terms.W_t.double())
        else:
            u = factorisation.solve(psi.T)
            bias = 1 / (self.system.rows + terms.beta + terms.nu)
            slack = torch.eye(prefixes).to(psi) - (products(psi, u.T, rows) + bias / prefixes)
            about = self.y - self.centre[targets]
            residual = about.repeat_interleave(prefixes, 0) - u.T @ self.right  # y - b - psi' W
        v = factorisation.solve(u)
        falling = v.T @ self.right  # its derivative
        if terms.direction is not None:
            T0 = terms.direction.double()
            along, untargeted = factorisation.solve(torch.cat(self.mixed, 1)).chunk(2, 1)
            c, slope = best_multiple(self.mixed[0], untargeted, along, alpha)
            towards = u.T @ T0
            residual -= c * alpha * towards
            falling += c * alpha * (v.T @ T0) - (c + slope * alpha) * towards
        axes, inverse_axes, poles = axes_and_poles(
            products(psi, u.T, rows), products(u.T, u.T, rows)
        )
        both = torch.cat(
            [residual.view(rows, prefixes, -1), inverse_axes @ falling.view(rows, prefixes, -1)], 1
        )
        return Model(
            decades, alpha, slack, axes, poles, self.weight[:, None, None] * (both @ both.mT)
        )


def products(left: Tensor, right: Tensor, rows: int) -> Tensor:
    """Each row's L vectors, (n L, F), times its L others, over L: (n, L, L)."""
    left, right = left.reshape(rows, -1, left.shape[-1]), right.reshape(rows, -1, right.shape[-1])
    return left @ right.mT / left.shape[1]


def axes_and_poles(K: Tensor, falling: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Y, Y^+, (n, L, L), and rho, (n, L), with `K = Y Y'` and `falling = Y diag(rho) Y'`, both semidefinite."""
    values, vectors = torch.linalg.eigh(K)
    root = values.clamp(min=0).sqrt()[:, None]
    kept = values > NULL * values.amax(1, keepdim=True)
    inverse_root = torch.where(kept[:, None], 1 / root, 0.0)
    back = vectors * inverse_root
    rho, turn = torch.linalg.eigh(back.mT @ falling @ back)
    return (vectors * root) @ turn, turn.mT @ back.mT, rho.clamp(min=0)


def inverse(slack: Tensor) -> Tensor:
    """Of symmetric matrices, (..., L, L), with eigenvalues of at least `LEAST_SLACK`."""
    if slack.shape[-1] == 1:
        return 1 / slack.clamp(min=LEAST_SLACK)
    values, vectors = torch.linalg.eigh(slack)
    return (vectors / values.clamp(min=LEAST_SLACK)[..., None, :]) @ vectors.mT


def _mixing(columns: int) -> Tensor:
    if columns <= MIXED:
        return torch.eye(columns)
    return 2.0 * torch.randint(2, (columns, MIXED), generator=torch.Generator().manual_seed(0)) - 1


def sample_rows(y: Tensor, centre: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """A systematic sample of about `size` rows, and the weights that make its sums unbiased, (m,) each.

    Row i of the targets, (n, E), is in it with probability `min(1, size (p / n + (1 - p) ||y_i - centre||^2 / sum))`:
    large norms dominate PRESS.
    """
    if len(y) <= size:
        return torch.arange(len(y), device=y.device), torch.ones(
            len(y), dtype=torch.float64, device=y.device
        )
    norms = (y.double() - centre).square().sum(1)
    fraction = UNIFORM / len(y) + (1 - UNIFORM) * norms / norms.sum().clamp(
        min=torch.finfo(torch.float64).tiny
    )
    chance = (size * fraction).clamp(max=1)
    chances = (
        chance.cpu()
    )  # where the running sum has one order, so that the sample is the same on every call
    ticks = (chances.cumsum(0) - 0.5).ceil()
    index = moved(torch.diff(ticks, prepend=ticks.new_zeros(1)).nonzero().squeeze(1), y.device)
    return index, 1 / chance[index]
