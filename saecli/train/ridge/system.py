"""The normal equations of one decoder step, the other quadratic terms, and their factorisation; all float64.

N rows; F = d_sae, D skipped dimensions, E targets, C columns of a right side, L prefixes; `shrink` is s.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ...sae.codes import Prefixes

# The sum of all processes' tensors, the same bits in each process.
AllReduce = Callable[[Tensor], Tensor]

NOT_FINITE = (
    "the decoder step cannot be solved: the codes, or their products, are not finite; lower --lr"
)
PROBES = 64  # vectors of random signs where all columns would cost too much
PIECE = 256  # rows of a matrix at a time, where all would take as much memory again


class SkipSums:
    """`sum x x'` and `sum x y'`, for an affine skip from rows x, (D,), to y, (E,)."""

    def __init__(self, d_skip: int, d_out: int, device: torch.device) -> None:
        self.d_out = d_out
        self._sums = torch.zeros(d_skip, d_skip + d_out, dtype=torch.float64, device=device)

    def add(self, x: Tensor, y: Tensor) -> None:
        self._sums += x.double().T @ torch.cat([x, y], 1).double()

    def reduce(self, all_reduce: AllReduce) -> None:
        self._sums.copy_(all_reduce(self._sums))

    def blocks(self, rows: float, x_bar: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
        """A_xx, (D, D), and A_xy, (D, E), about a centre of (y, x), (E + D,)."""
        E = self.d_out
        centred = self._sums - rows * torch.outer(x_bar, torch.cat([centre[E:], centre[:E]]))
        return centred[:, : len(x_bar)], centred[:, len(x_bar) :]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Weights of the quadratic terms, relative to a sum over all rows, and their targets."""

    W_t: Tensor  # before this step, (F, E)
    b_t: Tensor  # (E,); with a skip (E + D,), zeros at the end
    alpha: float
    beta: float = 0.0
    mu: float = 0.0
    nu: float = 0.0
    direction: Tensor | None = None  # T0, (F, E), for T = c T0 with the best c; None for T = 0
    decay: Tensor | None = None  # (F,)
    skip: SkipSums | None = None  # its D dimensions are the system's last targets

    @property
    def d_out(self) -> int:
        return self.skip.d_out if self.skip else len(self.b_t)

    def shrink(self, rows: float) -> float:
        return rows / (rows + self.beta + self.nu)

    def centre(self, rows: float, y_bar: Tensor) -> Tensor:
        """`s y_bar + t b_t`, (E,), subtracted from targets."""
        t = self.nu / (rows + self.beta + self.nu)
        return self.shrink(rows) * y_bar + t * self.b_t.double()


@dataclass(frozen=True)
class Ridge:
    alpha: float
    mu: float

    @property
    def total(self) -> float:
        return self.alpha + self.mu

    def raised_to(self, total: float) -> "Ridge":
        """Not `total - mu`, since a large mu would swallow alpha."""
        return replace(self, alpha=self.alpha + (total - self.total))


class System(ABC):
    prefixes: Prefixes = ()

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
    def _z_bar(self) -> Tensor: ...

    @property
    def u(self) -> Tensor:
        """(F,)."""
        return self._membership * self._z_bar

    @property
    def _membership(self) -> Tensor:
        """q, (F,), not increasing; a scalar 1 without prefixes."""
        return self._masks.mean(0) if self.prefixes else self._z_bar.new_ones(())

    @property
    def _masks(self) -> Tensor:
        """(L, F): 1 where the latent is in the prefix."""
        z_bar = self._z_bar
        ends = z_bar.new_tensor(self.prefixes or (len(z_bar),))
        return (torch.arange(len(z_bar), device=z_bar.device) < ends[:, None]).to(z_bar)

    def centred(self, z: Tensor, shrink: float) -> Tensor:
        """psi, (n, L, F), of codes z, (n, F)."""
        codes = z.double()[:, None]
        if self.prefixes:
            codes = codes * self._masks
        return codes - shrink * self.u

    @abstractmethod
    def cross(self, centre: Tensor) -> Tensor:
        """C, (F, E), about a centre, (E,)."""

    @abstractmethod
    def diagonal(self, shrink: float) -> Tensor:
        """A's, (F,); rounding may leave it below 0."""

    def scale(self, shrink: float) -> float:
        """A's mean diagonal, at least 0."""
        return max(self.diagonal(shrink).mean().item(), 0.0)

    def factorise(self, terms: Terms) -> "Factorisation":
        """`A + diag(decay) + (alpha + mu) I`, alpha raised until it factorises; TrainingError if none does."""
        shrink = terms.shrink(self.rows)
        scale = self.scale(shrink)
        # With more W equals T to nine digits, and c would be lost in a difference.
        alpha = min(terms.alpha, 1e9 * scale) if scale else terms.alpha
        decay = torch.zeros_like(self._z_bar) if terms.decay is None else terms.decay
        return self._factorise(Ridge(alpha, terms.mu), shrink, decay)

    @abstractmethod
    def _factorise(self, ridge: Ridge, shrink: float, decay: Tensor) -> "Factorisation": ...


class Sample(NamedTuple):
    """n rows, to be left out one after another."""

    psi: Tensor  # centred codes in each prefix, (n, L, F)
    y: Tensor  # targets about the centre, (n, E)
    C: Tensor  # the right side, (F, E)
    centre: Tensor  # of all of the system's targets
    bias: float  # 1 / (N + beta + nu), the leverage of the intercept
    numbers: Tensor | None  # of the rows in the system, (n,), if they are known


class Fits(NamedTuple):
    """How `M C` fits sampled rows in each of L prefixes."""

    u: Tensor  # M psi', (F, n L)
    slack: Tensor  # I - H_i, H_i being the leverages, (n, L, L)
    residual: Tensor  # y - psi M C, (n L, E)


class Inverse(NamedTuple):
    """M, not all of it known."""

    diagonal: Tensor  # (F,)
    block: Callable[[Tensor], Tensor]  # gives the rows and columns, (m, m), of latents, (m,)


class Factorisation(ABC):
    """`A + diag(decay) + ridge I`, prepared for solving; M is its inverse."""

    def __init__(self, system: System, ridge: Ridge, raised: bool) -> None:
        self.system, self.ridge = system, ridge
        self.raised = raised  # a smaller ridge did not factorise

    @property
    def alpha(self) -> float:
        return self.ridge.alpha

    @abstractmethod
    def solve(self, right: Tensor) -> Tensor:
        """M times a right side, (F, C)."""

    def solve_cross(self, centre: Tensor) -> Tensor:
        return self.solve(self.system.cross(centre))

    def quadratic(self, psi: Tensor) -> Tensor:
        """`psi_i' M psi_i`, (n,), of rows psi, (n, F)."""
        return (psi.T * self.solve(psi.T)).sum(0)

    def fits(self, sample: Sample) -> Fits:
        """2 F^2 operations for each row and prefix."""
        _, prefixes, F = sample.psi.shape
        u = self.solve(sample.psi.reshape(-1, F).T)
        leverage = (sample.psi @ u.T.reshape(sample.psi.shape).mT + sample.bias) / prefixes
        slack = torch.eye(prefixes).to(leverage) - leverage
        return Fits(u, slack, sample.y.repeat_interleave(prefixes, 0) - u.T @ sample.C)

    def skip_for(self, W: Tensor) -> Tensor:
        """(D, E); without a skip D is 0."""
        return W.new_empty(0, W.shape[1])

    def inverse(self) -> Inverse:
        """M, at most at F times the cost of `quadratic`; it may overwrite the factor."""
        u = self.system.u
        numbers = torch.arange(len(u), device=u.device)
        units = (one_hot(latents, len(u)).to(u) for latents in numbers.split(PIECE))
        return Inverse(torch.cat([self.quadratic(unit) for unit in units]), self._block)

    def _block(self, latents: Tensor) -> Tensor:
        u = self.system.u
        return self.solve(one_hot(latents, len(u)).to(u).T)[latents]

    def condition(self) -> float:
        """Of the matrix, estimated; nan for an iteration."""
        return math.nan

    def residual(self) -> float:
        """The largest so far, over its right side; nan without an iteration."""
        return math.nan


def random_signs(length: int) -> Tensor:
    """(length, `PROBES`), the same on every call."""
    return 2.0 * torch.randint(2, (length, PROBES), generator=torch.Generator().manual_seed(0)) - 1


def reduced(tensors: Iterable[Tensor], all_reduce: AllReduce) -> None:
    for tensor in tensors:
        for piece in tensor.split(PIECE) if tensor.dim() > 1 else [tensor]:
            piece.copy_(all_reduce(piece.contiguous()))
