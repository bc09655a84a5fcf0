"""What the normal equations of a decoder step offer, however they are held: `Moments`, `HeldRows`, `CodeProducts`.

Shapes: N rows in all, F = d_sae, D = d_in. Sums and factors are float64. Symbols as in the package's docstring;
`shrink` is s.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

NOT_FINITE = "the decoder step cannot be solved: the codes, or their products, are not finite; lower --lr"


@dataclass(frozen=True)
class OwnRows:
    """Rows of the system itself, m of them, as its factor has them: to full precision, where differences from 1 or from
    the input, which a small ridge makes nearly equal, would leave none. With psi_i = z_i - s z_bar and M the inverse:

    Args:
        slack: `1 - 1/(N + beta + nu) - psi_i' M psi_i`, (m,): one less the leverage.
        solve: gives `M psi_i`, (F, m).
        residual: maps a centre, (D,), to `x_i - centre - psi_i' M sum z (x - centre)'`, (m, D).
    """

    slack: Tensor
    solve: Callable[[], Tensor]
    residual: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Factor:
    """What `A + diag(decay) + ridge I` has been made ready to be solved by.

    Valid until the system is factorised again, or given further rows.

    Args:
        solve: maps G, (F, *), to `(A + diag(decay) + ridge I)^-1 G`.
        solve_cross: maps a centre, (D,), to the same of `sum z (x - centre)'`, (F, D).
        quadratic: maps rows psi, (n, F), to `psi_i' (A + diag(decay) + ridge I)^-1 psi_i`, (n,).
        ridge: the ridge it holds for.
        raised: whether that is more than was asked for, or than float64 resolves, since less did not factorise.
        condition: estimates the condition number: of the matrix, in the 1-norm; where it is never formed, of what
            is left of it by its diagonal.
        alpha: the part of the ridge that is not mu, filled in by `solve.factor`: a difference would lose it to a
            large mu.
        own: maps an index, (m,), to those of the system's own rows; None where it does not hold them.
        residual: gives the largest residual of what has been solved, over its right side; None where solutions are
            exact to float64's rounding.
    """

    solve: Callable[[Tensor], Tensor]
    solve_cross: Callable[[Tensor], Tensor]
    quadratic: Callable[[Tensor], Tensor]
    ridge: float
    raised: bool
    condition: Callable[[], float]
    alpha: float = 0.0
    own: Callable[[Tensor], OwnRows] | None = None
    residual: Callable[[], float] | None = None


class System(Protocol):
    """The normal equations of one decoder step, however they are held."""

    rows: float  # N, or the sum of their weights where some count for less

    @property
    def z_bar(self) -> Tensor:
        """Mean code, (F,)."""

    @property
    def x_bar(self) -> Tensor:
        """Mean input, (D,)."""

    def cross(self, centre: Tensor) -> Tensor:
        """`sum z (x - centre)'`, (F, D), for a centre of shape (D,)."""

    def scale(self, shrink: float) -> float:
        """Mean of A's diagonal, at least 0, which ridges are compared with."""

    def factor(self, ridge: float, shrink: float, decay: Tensor) -> Factor:
        """Make `A + diag(decay) + ridge I` ready to be solved by, for a decay of shape (F,), nowhere negative.

        Raises:
            TrainingError: it is not finite, or rounding has left it such that no ridge makes it positive definite.
        """
