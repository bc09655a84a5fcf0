"""The normal equations of one decoder step, the other quadratic terms, and their factorisation.

Shapes: B rows in a block, N rows in all, F = d_sae, D skipped dimensions, E targets, C columns of a right side,
L prefixes; 1 without. Sums and solutions are float64. Symbols as in the package's docstring; `shrink` is s.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ...sae.codes import Codes, Prefixes

AllReduce = Callable[[Tensor], Tensor]  # the sum of all processes' tensors, the same bits in each process

NOT_FINITE = "the decoder step cannot be solved: the codes, or their products, are not finite; lower --lr"
INFINITE_ALPHA = 1e9  # over A's mean diagonal: W equals T to nine digits, and c would be lost in a difference
PIECE = 256  # rows of a matrix all-reduced at a time


class SkipSums:
    """Sums of the rows' own blocks, for an affine skip from rows x, (D,), to targets y, (E,)."""

    def __init__(self, d_skip: int, d_out: int, device: torch.device) -> None:
        self.d_out = d_out
        self._sums = torch.zeros(d_skip, d_skip + d_out, dtype=torch.float64, device=device)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add a block of rows, (B, D), and their targets, (B, E)."""
        self._sums += x.double().T @ torch.cat([x, y], 1).double()

    def reduce(self, all_reduce: AllReduce) -> None:
        """All-reduce the sums in place."""
        self._sums.copy_(all_reduce(self._sums))

    def blocks(self, rows: float, x_bar: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
        """A_xx, (D, D), and A_xy, (D, E), for N rows of mean `x_bar`, (D,), and a centre of (y, x), (E + D,)."""
        E = self.d_out
        centred = self._sums - rows * torch.outer(x_bar, torch.cat([centre[E:], centre[:E]]))
        return centred[:, :len(x_bar)], centred[:, len(x_bar):]


@dataclass(frozen=True)
class Place:
    """Terms of some of the targets, the columns of a place.

    Args:
        columns: of the targets.
        decay: weights of each latent's own `||W_i||^2` there, (F,), at least 0.
        ratio: of alpha there to `Terms.alpha`, positive.
    """

    columns: slice
    decay: Tensor
    ratio: float = 1.0


@dataclass(frozen=True)
class Terms:
    """Weights of the quadratic terms, all at least 0 and relative to a sum over all rows, and their targets.

    Args:
        alpha: weight of `||W - T||_F^2`.
        beta: weight of `||b||^2`.
        mu: weight of `||W - W_t||_F^2`.
        nu: weight of `||b - b_t||^2`.
        direction: T0, (F, E), whose best multiple is T = c T0; None for T = 0.
        W_t: the decoder before this step, (F, E).
        b_t: its bias, (E,); with a skip (E + D,), zero for its dimensions.
        decay: weights of each latent's own `||W_i||^2`, (F,).
        joint: whether b is optimal jointly with W; if not, W is solved with b = 0, and b is then optimal for that W.
        skip: sums for an affine skip, whose D dimensions are the system's last targets; None for none.
        places: of the targets, if they differ in decay or alpha, all of them; `decay` and `alpha` are then unused.
        columns: the targets for which an alpha is chosen; None for all.
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
    skip: SkipSums | None = None
    places: Sequence[Place] = ()
    columns: slice | None = None

    @property
    def d_out(self) -> int:
        """E, without the dimensions of a skip."""
        return self.skip.d_out if self.skip else len(self.b_t)

    @property
    def targets(self) -> slice:
        """The targets for which an alpha is chosen."""
        return self.columns or slice(0, self.d_out)

    def rows_fraction(self, rows: float) -> float:
        """`N / (N + beta + nu)`, the weight of N rows in the bias."""
        return rows / (rows + self.beta + self.nu)

    def shrink(self, rows: float) -> float:
        """The s of W's equations: 0 without a joint bias, as with an infinite beta."""
        return self.rows_fraction(rows) if self.joint else 0.0

    def bare_bias(self, rows: float, y_bar: Tensor) -> Tensor:
        """`s y_bar + t b_t`, (E,), the bias if codes predict nothing."""
        return self.rows_fraction(rows) * y_bar + self.nu / (rows + self.beta + self.nu) * self.b_t.double()

    def centre(self, rows: float, y_bar: Tensor) -> Tensor:
        """The bias subtracted from targets before solving for W, (E,): `bare_bias`, or 0 without a joint bias."""
        return self.bare_bias(rows, y_bar) if self.joint else torch.zeros_like(y_bar)


class System(ABC):
    """Normal equations, collected block by block: `Sums`, `HeldRows` or `StreamedCodes`. Once they are factorised no
    more rows may be added.

    Args:
        prefixes: of a nested dictionary; none otherwise.
    """

    prefixes: Prefixes = ()

    @abstractmethod
    def add(self, codes: Codes, y: Tensor) -> None:
        """Add a block of rows: codes, (B, F), detached, which may be kept and must not be modified, and targets,
        (B, E), in the codes' precision."""

    @abstractmethod
    def reduce(self, all_reduce: AllReduce) -> None:
        """All-reduce the sums in place; no more rows may be added."""

    @property
    @abstractmethod
    def rows(self) -> float:
        """N."""

    @property
    @abstractmethod
    def y_bar(self) -> Tensor:
        """Mean target, (E,)."""

    @property
    @abstractmethod
    def _z_bar(self) -> Tensor:
        """Mean code, (F,)."""

    @property
    def u(self) -> Tensor:
        """The mean over rows and prefixes of the codes that a prefix has, (F,); the mean code without prefixes."""
        return self._membership * self._z_bar

    @property
    def _membership(self) -> Tensor:
        """The fraction of the prefixes that each latent is in, (F,), not increasing; a scalar 1 without prefixes."""
        return self._masks.mean(0) if self.prefixes else self._z_bar.new_ones(())

    @property
    def _masks(self) -> Tensor:
        """Whether each latent is in each prefix, 1 or 0, (L, F)."""
        z_bar = self._z_bar
        ends = z_bar.new_tensor(self.prefixes or (len(z_bar),))
        return (torch.arange(len(z_bar), device=z_bar.device) < ends[:, None]).to(z_bar)

    def centred(self, z: Tensor, shrink: float) -> Tensor:
        """psi, the centred codes that each prefix has of rows z, (n, F): (n, L, F), float64."""
        parts = z.double()[:, None]
        return (parts * self._masks if self.prefixes else parts) - shrink * self.u

    @abstractmethod
    def cross(self, centre: Tensor) -> Tensor:
        """C, (F, E), for a centre of the targets, (E,)."""

    @abstractmethod
    def scale(self, shrink: float) -> float:
        """Mean of A's diagonal, at least 0: the scale of ridges."""

    def factorise(self, terms: Terms) -> "Factorisation":
        """Prepare solving with `A + diag(decay) + (alpha + mu) I`.

        Alpha is at most `INFINITE_ALPHA` times A's mean diagonal. If the matrix does not factorise, its ridge is
        raised.

        Raises:
            TrainingError: the matrix is not finite, or after rounding no ridge makes it positive definite.
        """
        shrink = terms.shrink(self.rows)
        scale = self.scale(shrink)
        alpha = min(terms.alpha, INFINITE_ALPHA * scale) or terms.alpha
        found = self._factorise(alpha + terms.mu, shrink, terms.decay)
        found.alpha = alpha + (found.ridge - (alpha + terms.mu))  # ridge - mu would lose alpha to a large mu
        found.relative_alpha = found.alpha / max(scale, sys.float_info.min)
        return found

    @abstractmethod
    def _factorise(self, ridge: float, shrink: float, decay: Tensor) -> "Factorisation":
        """Factorise `A + diag(decay) + ridge I` for a decay, (F,)."""


class OwnRows(Protocol):
    """Leverages and residuals of m of the system's own rows, to full precision: with a small ridge the differences
    from 1 and from the target would cancel. psi_i = z_i - s z_bar, M the inverse."""

    @property
    def slack(self) -> Tensor:
        """`1 - 1/(N + beta + nu) - psi_i' M psi_i`, (m,), 1 less the leverage."""

    def u(self) -> Tensor:
        """`M psi_i`, (F, m)."""

    def residual(self, centre: Tensor) -> Tensor:
        """`y_i - centre - psi_i' M sum z (y - centre)'`, (m, E), for a centre of shape (E,)."""


class Factorisation(ABC):
    """`A + diag(decay) + ridge I`, prepared for solving: `Direct`, `Dual` or `Iterative`.

    Args:
        system: the normal equations of A.
        ridge: of this factorisation.
        raised: whether a smaller ridge was asked for and did not factorise.

    Attributes:
        alpha: the part of the ridge that is not mu.
        relative_alpha: alpha over A's mean diagonal.
    """

    alpha: float
    relative_alpha: float

    def __init__(self, system: System, ridge: float, raised: bool) -> None:
        self.system, self.ridge, self.raised = system, ridge, raised

    @abstractmethod
    def solve(self, right: Tensor) -> Tensor:
        """`(A + diag(decay) + ridge I)^-1 G`, (F, C), for a right side G of that shape."""

    def solve_cross(self, centre: Tensor) -> Tensor:
        """The solution for the system's `cross`, (F, E), given a centre, (E,)."""
        return self.solve(self.system.cross(centre))

    def quadratic(self, psi: Tensor) -> Tensor:
        """`psi_i' (A + diag(decay) + ridge I)^-1 psi_i`, (n,), of rows psi, (n, F)."""
        return (psi.T * self.solve(psi.T)).sum(0)

    def inverse_diagonal(self) -> Tensor:
        """The diagonal of `(A + diag(decay) + ridge I)^-1`, (F,); F times the cost of `quadratic`."""
        u = self.system.u
        units = (one_hot(some, len(u)).to(u) for some in torch.arange(len(u), device=u.device).split(PIECE))
        return torch.cat([self.quadratic(unit) for unit in units])

    @abstractmethod
    def condition(self) -> float:
        """Estimate of the condition number: of the matrix, in the 1-norm; for an iteration, of the preconditioned
        matrix."""

    def residual(self) -> float:
        """The largest residual so far over its right side; nan if solutions are exact to float64's rounding."""
        return math.nan

    def own(self, index: Tensor) -> OwnRows | None:
        """The system's own rows with the given numbers, (m,); None if it does not hold its rows."""
        return None


def reduced(tensors: Iterable[Tensor], all_reduce: AllReduce) -> None:
    """All-reduce each tensor in place, a matrix `PIECE` rows at a time."""
    for tensor in tensors:
        for piece in tensor.split(PIECE) if tensor.dim() > 1 else [tensor]:
            piece.copy_(all_reduce(piece.contiguous()))
