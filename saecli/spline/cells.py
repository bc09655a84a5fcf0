"""Cells: the pieces on which an SAE is affine, how far rows are from their walls, and how many walls are near.

The cell of a row is its support S, the latents it keeps. Every cell is cut out by half-spaces, so the distance
from a row to the boundary of its cell is the smallest distance to one of their hyperplanes:

    thresholded:  latent i switches at       v_i = t_i,   at distance  |v_i - t_i| / ||w_i||
    largest K:    i in S and j not in S swap, at distance  (v_i - v_j) / ||mu_i - mu_j||
    relu-topk:    as the largest K and v_i = 0 for i in S where K latents are positive, else as relu

with v = x @ W_enc + b_enc and mu the sites of the activation's power diagram (for abs-topk the 2F sites
+-w_i). Source: the paper on SAEs as piecewise affine splines and on their half-space inequalities. All float64.
Here is what all partitions share, and the thresholded ones; the largest K are in `largest_cells.py`.
Shapes: B rows, D = d_in, F = d_sae, K = k, n sites.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..dictionary import SAE
from .half_spaces import Cell
from .screening import Switches


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
        """What a piece of boundary is, in one word for tables."""

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
        """The exact distance of each row to the boundary of its cell.

        Args:
            pre: pre-activations, (B, F).

        Returns:
            Distances in units of the rows, (B,); infinite where the cell is the whole space.
        """

    @abstractmethod
    def crossings(self, pre: Tensor, radius: float) -> Tensor:
        """Local complexity: the boundary hyperplanes that pass within a distance of each row.

        Args:
            pre: pre-activations, (B, F).
            radius: the distance, in units of the rows.

        Returns:
            Counts, (B,).
        """


@dataclass(frozen=True)
class ThresholdedCells(Cells):
    """Cells of latents that switch each on its own: every latent is one hyperplane.

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
