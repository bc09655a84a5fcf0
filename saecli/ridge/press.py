"""Exact leave-one-out error, and the leverages that it rests on.

    PRESS(alpha) = mean_i ||r_i||^2 / (1 - h_i)^2,    h_i = 1/D + psi_i' (A + diag(decay) + r I)^-1 psi_i,
    psi_i = z_i - s z_bar,

with r_i the residual of row i: the squared error of row i under the decoder fitted to all other rows, c held.
Generalised cross-validation, which puts the mean leverage in place of h_i, chooses a ridge far too small where
rows differ much in norm, as activations do.
"""

from torch import Tensor

from ..distributed import latents_axis
from .solve import Terms, factor, rows_share, shrinkage, solve_parts, total
from .systems import Factor, System

LEAST_SLACK = 1e-12  # 1 - h_i from which on a row counts as fitted alone


def press(system: System, terms: Terms, z: Tensor, x: Tensor) -> float:
    """Mean squared leave-one-out error over a sample of the system's own rows.

    Args:
        system: normal equations of all N rows.
        terms: the other terms' weights, alpha among them; joint.
        z: codes of the sampled rows, (n, F); if N, then all in the system's order.
        x: their inputs, (n, D).

    Returns:
        The mean over the sampled rows of the squared error that each has when it is left out.

    Cost: a factorisation, a solve, and n F^2 operations for the leverages.
    """
    factored = factor(system, terms)
    W, b, _ = solve_parts(system, terms, factored)
    slack = slack_of(system, terms, factored, z).clamp(min=LEAST_SLACK)
    residual = x.double() - total(z.double() @ W) - b
    return (residual.square().sum(1) / slack.square()).mean().item()


def effective_dof(system: System, terms: Terms, z: Tensor) -> float:
    """The decoder's effective degrees of freedom: the trace of the matrix that maps inputs to reconstructions.

    `sum_i h_i` over all rows, c held: from 1, the bias alone, to min(N, F + 1), a fit without a ridge.

    Args:
        system: normal equations of all N rows.
        terms: the weights that the decoder was solved with.
        z: codes of all rows or of a sample of them, whose mean leverage then stands for that of all, (n, F).

    Returns:
        The degrees of freedom of each of the inputs' coordinates.

    Cost: a factorisation, and n F^2 operations for the leverages.
    """
    factored = factor(system, terms)
    most = min(system.rows, len(system.z_bar) * latents_axis().size + 1)
    if not terms.joint:
        fitted = factored.quadratic(z.double()).mean() * system.rows
        overlap = rows_share(system, terms) * (1 - system.rows * factored.quadratic(system.z_bar[None]))
        return min((fitted + overlap).item(), most)
    slack = slack_of(system, terms, factored, z)
    return min(system.rows * (1 - slack).mean().item(), most)


def slack_of(system: System, terms: Terms, factored: Factor, z: Tensor) -> Tensor:
    """1 - h_i of each row, (n,)."""
    constant = 1 / (system.rows + terms.beta + terms.nu)
    if factored.own_slack is not None and len(z) == system.rows:
        return factored.own_slack() - constant
    psi = z.double() - shrinkage(system, terms) * system.z_bar
    return 1 - constant - factored.quadratic(psi)
