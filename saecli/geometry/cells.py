"""Cells: the convex pieces on which an SAE is affine, the distance of rows to their boundaries, and boundaries near.

A row's cell is its support S, the latents that it keeps. The distance of a row to the boundary of its cell is the
smallest distance to a hyperplane where

    thresholded:  latent i switches at       v_i = t_i,   at distance  |v_i - t_i| / ||w_i||
    largest K:    i in S and j not in S swap, at distance  (v_i - v_j) / ||mu_i - mu_j||
    relu-topk:    as the largest K and v_i = 0 for i in S where K latents are positive, else as relu

with v = x @ W_enc + b_enc and mu the sites of the activation's power diagram (for abs-topk the 2F sites +-w_i).
Source: the paper on SAEs as piecewise affine splines and on their half-space inequalities. All float64.
Largest K are in `largest_cells.py`. Shapes: B rows, D = d_in, F = d_sae.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..sae.dictionary import SAE


@dataclass(frozen=True)
class Cells(ABC):
    """The partition that an SAE, in float64, makes of its input space."""

    sae: SAE

    @property
    @abstractmethod
    def possible_log10(self) -> float:
        """log10 of the number of possible supports."""

    @property
    @abstractmethod
    def boundary(self) -> str:
        """The kind of its boundaries, in one word for tables."""

    def pre_activations(self, x: Tensor) -> Tensor:
        """Pre-activations, (B, F), float64, of rows, (B, D)."""
        return self.sae.pre_activations(x.double())

    @abstractmethod
    def supports(self, pre: Tensor) -> Tensor:
        """The latents that each row keeps, (B, F), bool; a kept latent whose pre-activation is 0 included."""

    @abstractmethod
    def margins(self, pre: Tensor) -> Tensor:
        """The exact distance of each row to the boundary of its cell, (B,), in units of the rows, given
        pre-activations, (B, F); infinite where the cell is the whole space."""

    @abstractmethod
    def crossings(self, pre: Tensor, radius: float) -> Tensor:
        """Local complexity, (B,): boundary hyperplanes within a distance, in units of the rows, given pre-activations,
        (B, F)."""


@dataclass(frozen=True)
class ThresholdedCells(Cells):
    """Cells of latents that switch independently at thresholds t, (F,), float64: every latent is one hyperplane."""

    thresholds: Tensor

    @property
    def possible_log10(self) -> float:
        """log10 of 2^F."""
        return self.sae.d_sae * math.log10(2)

    @property
    def boundary(self) -> str:
        return "hyperplanes"

    @cached_property
    def _norms(self) -> Tensor:
        """||w_i||, (F,)."""
        return self.sae.W_enc.norm(dim=0)

    def distances(self, pre: Tensor) -> Tensor:
        """`|v_i - t_i| / ||w_i||`, (B, F)."""
        # A latent with no weights switches nowhere.
        return ((pre - self.thresholds).abs() / self._norms).masked_fill(self._norms == 0, torch.inf)

    def supports(self, pre: Tensor) -> Tensor:
        return pre > self.thresholds

    def margins(self, pre: Tensor) -> Tensor:
        """`min_i |v_i - t_i| / ||w_i||`, (B,)."""
        return self.distances(pre).amin(1)

    def crossings(self, pre: Tensor, radius: float) -> Tensor:
        """The number of latents with `|v_i - t_i| / ||w_i|| < radius`, (B,)."""
        return (self.distances(pre) < radius).sum(1)
