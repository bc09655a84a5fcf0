"""The ridge that exact leave-one-out chooses.

    PRESS(alpha) = mean_i ||r_i||^2 / (1 - h_i)^2,    h_i = 1/D + psi_i' (A + diag(decay) + r I)^-1 psi_i,
    psi_i = z_i - s z_bar,

with r_i the residual of row i: the squared error of row i under the decoder fitted to all other rows, c held.
Generalised cross-validation, which puts the mean leverage in place of h_i, chooses a ridge far too small where
rows differ much in norm, as activations do.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scipy.optimize import minimize_scalar
from torch import Tensor

from .solve import Terms, factor, shrinkage, solve_factored
from .systems import System

LEAST, MOST = -7, 3  # powers of ten of A's mean diagonal between which alpha is sought
WARM_STEP = 0.5  # decades between the three values that a later search compares
LEAST_SLACK = 1e-9  # 1 - h_i from which on a row counts as fitted alone


def press(system: System, terms: Terms, z: Tensor, x: Tensor) -> float:
    """Mean squared leave-one-out error over a sample of the system's own rows.

    Args:
        system: normal equations of all N rows.
        terms: the other terms' weights, alpha among them.
        z: codes of the sampled rows, (n, F).
        x: their inputs, (n, D).

    Returns:
        The mean over the sampled rows of the squared error that each has when it is left out.

    Cost: a factorisation, a solve, and n F^2 operations for the leverages.
    """
    factored = factor(system, terms)
    decoder = solve_factored(system, terms, factored)
    z, x = z.double(), x.double()
    psi = z - shrinkage(system, terms) * system.z_bar
    leverage = 1 / (system.rows + terms.beta + terms.nu) + factored.quadratic(psi)
    slack = (1 - leverage).clamp(min=LEAST_SLACK)
    residual = x - z @ decoder.W - decoder.b
    return (residual.square().sum(1) / slack.square()).mean().item()


def choose_alpha(system: System, terms: Terms, z: Tensor, x: Tensor, last: float | None) -> float:
    """The alpha with the least PRESS over a sample of rows.

    Args:
        system: normal equations of all rows.
        terms: the other terms' weights; their alpha is not looked at.
        z: codes of the sampled rows, (n, F).
        x: their inputs, (n, D).
        last: the choice of the outer iteration before, from which to take one step of at most a decade; None for
            a search over all decades.

    Returns:
        The alpha chosen, between 1e-7 and 1e3 of A's mean diagonal: below, the ridge is lost in rounding; above,
        it leaves nothing of W - T.
    """
    def criterion(decades: float) -> float:
        return press(system, replace(terms, alpha=scale * 10**decades), z, x)

    scale = max(system.scale(shrinkage(system, terms)), np.finfo(float).tiny)
    if last is not None:
        return scale * 10 ** _parabola_step(criterion, float(np.clip(np.log10(last / scale), LEAST, MOST)))
    grid = range(LEAST, MOST + 1)
    best = grid[int(np.argmin([criterion(decades) for decades in grid]))]
    found = minimize_scalar(criterion, bounds=(max(best - 1, LEAST), min(best + 1, MOST)), method="bounded",
                            options={"xatol": 0.05, "maxiter": 10})
    return scale * 10 ** float(found.x)


def _parabola_step(criterion: Callable[[float], float], middle: float) -> float:
    """The minimum of the parabola through three values around `middle`, or the best of them where it opens down."""
    points = np.clip([middle - WARM_STEP, middle, middle + WARM_STEP], LEAST, MOST)
    values = np.array([criterion(point) for point in points])
    second = values[0] - 2 * values[1] + values[2]
    if np.ptp(points) < 2 * WARM_STEP or second <= 0:
        return float(points[values.argmin()])
    step = WARM_STEP * (values[0] - values[2]) / (2 * second)
    return float(np.clip(middle + np.clip(step, -2 * WARM_STEP, 2 * WARM_STEP), LEAST, MOST))
