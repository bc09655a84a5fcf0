"""Leverages of rows, and the degrees of freedom that they sum to.

    h_i = 1/D + psi_i' (A + diag(decay) + r I)^-1 psi_i,    psi_i = z_i - s z_bar
"""

import torch
from torch import Tensor

from ..distributed import latents_axis
from .cholesky import PANEL
from .solve import Terms, factor, rows_share, shrinkage
from .systems import Factor, System


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
    if factored.own is not None and len(z) == system.rows:
        return torch.cat([factored.own(some).slack for some in torch.arange(len(z), device=z.device).split(PANEL)])
    psi = z.double() - shrinkage(system, terms) * system.z_bar
    return 1 - 1 / (system.rows + terms.beta + terms.nu) - factored.quadratic(psi)
