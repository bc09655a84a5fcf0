"""The normal equations of one decoder step, the other quadratic terms, and their factorisation.

Shapes: B rows in a block, N rows in all, F = d_sae, E targets, C columns of a right side, L prefixes; 1 without. Sums
and solutions are float64. Symbols as in the package's docstring; `shrink` is s.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ...sae.codes import Codes, Prefixes
from .skip import SkipSums


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
    """Weights of the quadratic terms, each relative to a sum over all rows, and their targets.

    Args:
        alpha: weight of `||W - T||_F^2`, at least 0.
        beta: weight of `||b||^2`, at least 0.
        mu: weight of `||W - W_t||_F^2`, at least 0.
        nu: weight of `||b - b_t||^2`, at least 0.
        direction: T0, (F, E), whose best multiple is T = c T0; None for T = 0.
        W_t: the decoder before this step, (F, E).
        b_t: its bias, (E,); with a skip (E + D,), zero for its dimensions.
        decay: weights of each latent's own `||W_i||^2`, (F,), at least 0.
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


AllReduce = Callable[[Tensor], Tensor]  # the sum of all processes' tensors, the same bits in each process

NOT_FINITE = ("the decoder step cannot be solved: the codes, or their products, are not finite; lower --lr")
INFINITE_ALPHA = 1e9  # over A's mean diagonal: W equals T to nine digits, and c would be lost in a difference
PIECE = 256  # rows of a matrix all-reduced at a time


class System(ABC):
    """Normal equations, collected block by block: `Sums`, `HeldRows` or `StreamedCodes`.

    A system has storage for one factorisation: the next one, and every change to the system, supersede it.

    Args:
        prefixes: of a nested dictionary; none otherwise.
    """

    prefixes: Prefixes = ()
    version = 0  # incremented whenever a factorisation is superseded

    @abstractmethod
    def add(self, codes: Codes, y: Tensor) -> None:
        """Add a block of rows: codes, (B, F), detached, which may be kept and must not be modified, and targets,
        (B, E), in the codes' precision."""

    @property
    @abstractmethod
    def rows(self) -> float:
        """N, or the sum of the rows' weights."""

    @property
    @abstractmethod
    def z_bar(self) -> Tensor:
        """Mean code, (F,)."""

    @property
    def u(self) -> Tensor:
        """The mean over rows and prefixes of the codes that a prefix has, (F,); `z_bar` without prefixes."""
        return self.membership * self.z_bar

    @property
    def membership(self) -> Tensor:
        """The fraction of the prefixes that each latent is in, (F,), not increasing; a scalar 1 without prefixes."""
        return self.masks.mean(0) if self.prefixes else self.z_bar.new_ones(())

    @property
    def masks(self) -> Tensor:
        """Whether each latent is in each prefix, 1 or 0, (L, F)."""
        z_bar = self.z_bar
        ends = z_bar.new_tensor(self.prefixes or (len(z_bar),))
        return (torch.arange(len(z_bar), device=z_bar.device) < ends[:, None]).to(z_bar)

    def design(self, z: Tensor, shrink: float) -> Tensor:
        """psi, the centred codes that each prefix has of rows z, (n, F): (n, L, F), float64."""
        parts = z.double()[:, None]
        return (parts * self.masks if self.prefixes else parts) - shrink * self.u

    @property
    @abstractmethod
    def y_bar(self) -> Tensor:
        """Mean target, (E,)."""

    @abstractmethod
    def cross(self, centre: Tensor) -> Tensor:
        """`sum z (y - centre)'`, (F, E), for a centre of shape (E,), each latent times its `membership`."""

    @abstractmethod
    def scale(self, shrink: float) -> float:
        """Mean of A's diagonal, at least 0: the scale of ridges."""

    def factorise(self, terms: Terms) -> "Factorisation[Any]":
        """Prepare solving with `A + diag(decay) + (alpha + mu) I`.

        Alpha is at most `INFINITE_ALPHA` times A's mean diagonal.

        Raises:
            TrainingError: the matrix is not finite, or after rounding no ridge makes it positive definite.
        """
        shrink = terms.shrink(self.rows)
        scale = self.scale(shrink)
        alpha = min(terms.alpha, INFINITE_ALPHA * scale) or terms.alpha
        self.changed()
        found = self._factorise(alpha + terms.mu, shrink, terms.decay)
        found.alpha = alpha + (found.ridge - (alpha + terms.mu))  # ridge - mu would lose alpha to a large mu
        found.relative_alpha = found.alpha / max(scale, sys.float_info.min)
        return found

    @abstractmethod
    def _factorise(self, ridge: float, shrink: float, decay: Tensor) -> "Factorisation[Any]":
        """Factorise `A + diag(decay) + ridge I` for a decay, (F,)."""

    def changed(self) -> None:
        """Supersede the last factorisation."""
        self.version += 1


class OwnRows(Protocol):
    """Leverages and residuals of the system's own rows, to full precision: with a small ridge the differences from 1
    and from the target would cancel. With psi_i = z_i - s z_bar and M the inverse:

    Args:
        slack: `1 - 1/(N + beta + nu) - psi_i' M psi_i`, (m,), 1 less the leverage.
    """

    slack: Tensor

    def u(self) -> Tensor:
        """`M psi_i`, (F, m)."""

    def residual(self, centre: Tensor) -> Tensor:
        """`y_i - centre - psi_i' M sum z (y - centre)'`, (m, E), for a centre of shape (E,)."""


S = TypeVar("S", bound=System)


class Factorisation(ABC, Generic[S]):
    """`A + diag(decay) + ridge I`, prepared for solving: `Direct`, `Dual` or `Iterative`.

    Args:
        system: the normal equations of A, which hold the storage.
        ridge: of this factorisation.
        raised: whether a smaller ridge was asked for and did not factorise.

    Attributes:
        alpha: the part of the ridge that is not mu.
        relative_alpha: alpha over A's mean diagonal.
    """

    relative_alpha: float

    def __init__(self, system: S, ridge: float, raised: bool) -> None:
        self.ridge = self.alpha = ridge
        self.raised = raised
        self._system = system
        self._version = system.version

    @property
    def system(self) -> S:
        """The normal equations, unchanged since they were factorised; all storage is accessed through them. Raises
        RuntimeError if they have been factorised again, or have changed, so that this factorisation is gone."""
        if self._system.version != self._version:
            raise RuntimeError(f"this factorisation, with a ridge of {self.ridge:.3g}, has been superseded: its normal "
                               "equations have been factorised again, or have changed; factorise them once more")
        return self._system

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
