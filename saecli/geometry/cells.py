"""Cells: the pieces on which an SAE is affine, how far rows are from their walls, and how many walls are near.

The cell of a row is its support S, the latents it keeps. Every cell is cut out by half-spaces `h . x > c`, and so is
convex:

    switching:  s_i (w_i . x + b_i) > 0                     h = s_i w_i,       c = -s_i b_i
    swapping:   (w_i . x + b_i) - (w_j . x + b_j) > 0       h = w_i - w_j,     c = b_j - b_i

The distance from a row to the boundary of its cell is the smallest distance to one of their hyperplanes:

    thresholded:  latent i switches at       v_i = t_i,   at distance  |v_i - t_i| / ||w_i||
    largest K:    i in S and j not in S swap, at distance  (v_i - v_j) / ||mu_i - mu_j||
    relu-topk:    as the largest K and v_i = 0 for i in S where K latents are positive, else as relu

with v = x @ W_enc + b_enc and mu the sites of the activation's power diagram (for abs-topk the 2F sites
+-w_i). Source: the paper on SAEs as piecewise affine splines and on their half-space inequalities. All float64.
This file has the base of all partitions, and the thresholded ones; the largest K are in `largest_cells.py`.
Shapes: B rows, P points, D = d_in, F = d_sae, K = k, n sites or affine functions, a of them inside and m outside, s
that switch, q = s + a m inequalities.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from ..base.errors import ConfigError
from ..sae.dictionary import SAE
from .screening import Switches

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
        """A key that is unique within the partition."""
        switches = self.switches[self.above].numpy().tobytes()
        # A cell without pairs and one without switches above zero must not look alike.
        return bytes([len(self.inside) > 0]) + self.inside.sort().values.numpy().tobytes() + b"/" + switches

    def inequalities(self) -> tuple[Tensor, Tensor]:
        """H and c of `H x > c`, one inequality per row.

        Returns:
            H (q, D) and c (q,); inequalities between equal linear parts, whose row of H is zero, hold everywhere or
            tie everywhere and are left out.

        Raises:
            ConfigError: H would hold more than 16.8 million numbers; `tightest` needs no H.
        """
        if self.count * len(self.W) > EXACT:
            raise ConfigError(f"the cell has {self.count:,} inequalities in {len(self.W):,} dimensions; expected at "
                              f"most {EXACT:,} numbers in all; ask for the tightest of them at some points instead")
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

        Cost: O(n D) per point; H is not built.
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


@dataclass(frozen=True)
class Cells(ABC):
    """The partition that an SAE makes of its input space.

    Args:
        sae: the autoencoder, float64.
    """

    sae: SAE

    @property
    @abstractmethod
    def possible_log10(self) -> float:
        """log10 of the number of supports there could be."""

    @property
    @abstractmethod
    def boundary(self) -> str:
        """The kind of its boundaries, in one word for tables."""

    def pre_activations(self, x: Tensor) -> Tensor:
        """Pre-activations, (B, F), float64, of rows x, (B, D)."""
        return self.sae.pre_activations(x.double())

    @abstractmethod
    def supports(self, pre: Tensor) -> Tensor:
        """The latents that each row keeps, (B, F), bool; a kept latent whose pre-activation is 0 included."""

    @abstractmethod
    def cell(self, row: Tensor) -> Cell:
        """The cell of one row, (D,), as its inequalities `H x > c`."""

    def look(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Supports, (B, F), and margins, (B,), of rows, (B, D), as `supports` and `margins` have them."""
        pre = self.pre_activations(x)
        return self.supports(pre), self.margins(pre)

    @abstractmethod
    def margins(self, pre: Tensor) -> Tensor:
        """The exact distance of each row to the boundary of its cell, (B,), in units of the rows, given
        pre-activations, (B, F); infinite where the cell is the whole space."""

    @abstractmethod
    def crossings(self, pre: Tensor, radius: float) -> Tensor:
        """Local complexity: how many boundary hyperplanes pass within a distance, in units of the rows, of each row,
        (B,), given pre-activations, (B, F)."""


@dataclass(frozen=True)
class ThresholdedCells(Cells):
    """Cells of latents that switch independently: every latent is one hyperplane.

    Args:
        thresholds: t, (F,), float64.
    """

    thresholds: Tensor

    @property
    def possible_log10(self) -> float:
        """log10 of 2^F."""
        return self.sae.d_sae * math.log10(2)

    @property
    def boundary(self) -> str:
        """A latent's own hyperplane."""
        return "hyperplanes"

    @cached_property
    def _switches(self) -> Switches:
        return Switches(self.sae.W_enc, self.sae.b_enc - self.thresholds)

    @cached_property
    def _norms(self) -> Tensor:
        """||w_i||, (F,)."""
        return self.sae.W_enc.norm(dim=0)

    def look(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Supports, (B, F), and margins, (B,), of rows, (B, D), screened in float32."""
        return self._switches.look(x)

    def distances(self, pre: Tensor) -> Tensor:
        """`|v_i - t_i| / ||w_i||`, (B, F)."""
        # A latent with no weights switches nowhere.
        return ((pre - self.thresholds).abs() / self._norms).masked_fill(self._norms == 0, torch.inf)

    def supports(self, pre: Tensor) -> Tensor:
        """Where pre-activations exceed their thresholds, (B, F)."""
        return pre > self.thresholds

    def cell(self, row: Tensor) -> Cell:
        """The half-spaces `s_i (w_i . x + b_i - t_i) > 0`, s_i = 1 for i in S and else -1."""
        above = self.supports(self.pre_activations(row[None]))[0]
        latents = self._norms.nonzero()[:, 0]
        return Cell.switching(self.sae.W_enc, self.sae.b_enc - self.thresholds, latents, above[latents])

    def margins(self, pre: Tensor) -> Tensor:
        """`min_i |v_i - t_i| / ||w_i||`, (B,)."""
        return self.distances(pre).amin(1)

    def crossings(self, pre: Tensor, radius: float) -> Tensor:
        """How many latents have `|v_i - t_i| / ||w_i|| < radius`, (B,)."""
        return (self.distances(pre) < radius).sum(1)
