"""One cell as the set `H x > c`: its inequalities, exact or implicit, and who belongs to it.

    switching:  s_i (w_i . x + b_i) > 0                     h = s_i w_i,       c = -s_i b_i
    swapping:   (w_i . x + b_i) - (w_j . x + b_j) > 0       h = w_i - w_j,     c = b_j - b_i

An intersection of half-spaces is convex, and so is every cell. Source: the paper's half-space form of the regions R_S.
All float64. Shapes: P points, D dimensions, n affine functions, a of them inside and m outside, s that switch,
q = s + a m inequalities.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from ..errors import ConfigError

EXACT = 2**24  # numbers that H may hold, 128 MiB


@dataclass(frozen=True)
class Cell:
    """A convex cell, its inequalities implicit in affine functions `v = x W + b`.

    Points on the boundary count as inside: of two equal sites one is kept and one is not, and `v_i > v_j` never holds.

    Args:
        W: linear parts, (D, n).
        b: constant parts, (n,).
        inside: functions each of which is above every one of `outside`, (a,).
        outside: those, (m,).
        switches: functions with a sign of their own, (s,).
        above: whether each of `switches` is above zero, (s,), bool; else it is below.
    """

    W: Tensor
    b: Tensor
    inside: Tensor
    outside: Tensor
    switches: Tensor
    above: Tensor

    @classmethod
    def switching(cls, W: Tensor, b: Tensor, switches: Tensor, above: Tensor) -> Self:
        """The cell where each function of `switches` has its own sign; arguments as of the class."""
        none = torch.empty(0, dtype=torch.long)
        return cls(W, b, none, none, switches, above)

    @classmethod
    def swapping(cls, W: Tensor, b: Tensor, inside: Tensor, outside: Tensor) -> Self:
        """The cell where every function inside is above every one outside; arguments as of the class."""
        none = torch.empty(0, dtype=torch.long)
        return cls(W, b, inside, outside, none, none.bool())

    def switched(self, switches: Tensor, above: Tensor) -> Self:
        """This cell cut by functions that have their own signs as well."""
        return replace(self, switches=switches, above=above)

    @property
    def count(self) -> int:
        """Inequalities, q; some of them may be implied by the others."""
        return len(self.switches) + len(self.inside) * len(self.outside)

    @property
    def key(self) -> bytes:
        """What tells this cell from the others of its partition."""
        switches = self.switches[self.above].numpy().tobytes()
        # A cell without pairs and one without switches above zero must not look alike.
        return bytes([len(self.inside) > 0]) + self.inside.sort().values.numpy().tobytes() + b"/" + switches

    def inequalities(self) -> tuple[Tensor, Tensor]:
        """H and c of `H x > c`, one inequality a row.

        Returns:
            H (q, D) and c (q,); inequalities between equal linear parts, whose row of H is zero, hold everywhere or
            tie everywhere and are left out.

        Raises:
            ConfigError: H would hold more than 16.8 million numbers; `tightest` needs no H.
        """
        if self.count * len(self.W) > EXACT:
            raise ConfigError(None, "the cell has {count:,} inequalities in {width:,} dimensions; expected at most "
                                    "{most:,} numbers in all", "ask for the tightest of them at some points instead",
                              count=self.count, width=len(self.W), most=EXACT)
        signs = self._signs()
        i, j = torch.cartesian_prod(self.inside, self.outside).reshape(-1, 2).T
        H = torch.cat([signs[:, None] * self.W[:, self.switches].T, (self.W[:, i] - self.W[:, j]).T])
        c = torch.cat([-signs * self.b[self.switches], self.b[j] - self.b[i]])
        bounds = H.abs().amax(1) > 0
        return H[bounds], c[bounds]

    def tightest(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of all inequalities the one with the smallest `h . x - c`, for each of some points.

        Args:
            x: points, (P, D).

        Returns:
            `h . x - c` (P,), below zero outside of the cell and infinite where nothing bounds it; h (P, D), zero where
            two functions of equal linear parts come nearest; c (P,).

        Cost: O(n D) a point; H is not built.
        """
        v = torch.addmm(self.b, x, self.W)
        slack, h, c = v.new_full((len(x),), torch.inf), torch.zeros_like(x), torch.zeros(len(x), dtype=v.dtype)
        if len(self.switches):
            slack, which = (self._signs() * v[:, self.switches]).min(1)
            s, i = self._signs()[which], self.switches[which]
            h, c = s[:, None] * self.W[:, i].T, -s * self.b[i]
        if len(self.inside) and len(self.outside):
            (low, i), (high, j) = v[:, self.inside].min(1), v[:, self.outside].max(1)
            i, j = self.inside[i], self.outside[j]
            nearer = low - high < slack
            slack = torch.where(nearer, low - high, slack)
            h = torch.where(nearer[:, None], (self.W[:, i] - self.W[:, j]).T, h)
            c = torch.where(nearer, self.b[j] - self.b[i], c)
        return slack, h, c

    def contains(self, x: Tensor) -> Tensor:
        """Whether each of some points, (P, D), lies in the cell or on its boundary, (P,)."""
        return self.tightest(x)[0] >= 0

    def _signs(self) -> Tensor:
        return torch.where(self.above, 1.0, -1.0).double()
