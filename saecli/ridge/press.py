"""The ridge that exact leave-one-out chooses.

    PRESS(alpha) = mean_i ||r_i||^2 / (1 - h_i)^2,    h_i = 1/D + psi_i' (A + r I)^-1 psi_i,    psi_i = z_i - s z_bar

with r_i the residual of row i: the squared error of row i under the decoder fitted to all other rows, c held.
Generalised cross-validation, which puts the mean leverage in place of h_i, chooses a ridge far too small where
rows differ much in norm, as activations do.
"""

from dataclasses import replace

import numpy as np
from scipy.optimize import minimize_scalar
from torch import Tensor

from .solve import Terms, factor, shrinkage, solve_factored
from .systems import System

DECADES = range(-7, 4)  # powers of ten of A's mean diagonal that the first search tries
WARM_SPAN = 1.5  # decades each way that later searches look from the last choice
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

    Cost: a factorisation, a solve, and 2 n F^2 operations for the leverages.
    """
    factored = factor(system, terms)
    decoder = solve_factored(system, terms, factored)
    z, x = z.double(), x.double()
    psi = z - shrinkage(system, terms) * system.z_bar
    leverage = 1 / (system.rows + terms.beta + terms.nu) + (psi * factored.solve(psi.T).T).sum(1)
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
        last: the choice of the outer iteration before, near which to search; None for a search over all decades
            from 1e-7 to 1e3 of A's mean diagonal.

    Returns:
        The alpha chosen, above 0.
    """
    def criterion(log_alpha: float) -> float:
        return press(system, replace(terms, alpha=10**log_alpha), z, x)

    if last is None:
        scale = np.log10(max(system.scale(shrinkage(system, terms)), np.finfo(float).tiny))
        grid = [scale + decade for decade in DECADES]
        middle, span = grid[int(np.argmin([criterion(value) for value in grid]))], 1.0
    else:
        middle, span = np.log10(last), WARM_SPAN
    found = minimize_scalar(criterion, bounds=(middle - span, middle + span), method="bounded",
                            options={"xatol": 0.05, "maxiter": 8})
    return float(10**found.x)
