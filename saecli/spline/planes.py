"""The partition on a plane: what a picture of an SAE's cells shows.

On a plane `o + u B`, with B orthonormal, an encoder is an encoder of two dimensions:

    (o + u B) W_enc + b_enc = u (B W_enc) + (o W_enc + b_enc)

so that the cells that the plane meets are exactly the cells of that small SAE. Source: the paper on power
diagrams as sections of diagrams in more dimensions. Shapes: D = d_in, F = d_sae.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..dictionary import SAE
from ..errors import ConfigError
from .piecewise_affine import principal_directions

PRINCIPAL_ROWS = 2048  # rows that the principal components are taken of, evenly spaced
Window = tuple[float, float, float, float]  # left, right, bottom and top


@dataclass(frozen=True)
class Plane:
    """A plane in the space of the rows.

    Args:
        origin: the point with coordinates (0, 0), (D,), float64.
        basis: two orthonormal directions, (2, D), float64; where D = 1 the second is zero.
    """

    origin: Tensor
    basis: Tensor

    @classmethod
    def through(cls, rows: Tensor) -> Self:
        """The plane through three rows, (3, D), its origin the first and its first axis towards the second.

        Raises:
            ConfigError: they lie on one line.
        """
        rows = rows.double()
        sides = rows[1:] - rows[0]
        axes, sizes = torch.linalg.qr(sides.T)
        if sides.shape[1] < 2 or sizes.diagonal().abs().min() <= 1e-9 * sides.norm(dim=1).max():
            raise ConfigError(None, "the rows of {slice} span no plane: expected three rows that lie on no line, got "
                                    "three that do", "choose others")
        return cls(rows[0], (axes * sizes.diagonal().sign()).T)

    @classmethod
    def principal(cls, rows: NDArray) -> Self:
        """The plane through the rows' mean along their first two principal components; for D <= 2 the space itself.

        Args:
            rows: rows, (M, D); at most 2048 of them are used.
        """
        D = rows.shape[1]
        if D <= 2:
            return cls(torch.zeros(D, dtype=torch.float64), torch.eye(2, D, dtype=torch.float64))
        some = rows[::-(-len(rows) // PRINCIPAL_ROWS)].astype(np.float64)
        mean = some.mean(0)
        basis = np.eye(2, D)  # stands in where the rows span fewer directions
        directions = principal_directions(some - mean, 2).T
        if len(directions) == 2:
            basis = directions
        return cls(torch.from_numpy(mean), torch.from_numpy(basis.copy()))

    def coordinates(self, x: Tensor) -> Tensor:
        """Where rows, (B, D), fall on the plane, (B, 2), projected orthogonally."""
        return (x.double() - self.origin) @ self.basis.T

    def distances(self, x: Tensor) -> Tensor:
        """How far rows, (B, D), are from the plane, (B,)."""
        return (x.double() - self.origin - self.coordinates(x) @ self.basis).norm(dim=1)

    def section(self, sae: SAE) -> SAE:
        """The SAE of two dimensions that does on the plane's coordinates what this one does on its points; its
        reconstructions are projected on the plane."""
        sae = sae.copy_to(torch.float64)
        return sae.changed(W_enc=self.basis @ sae.W_enc, b_enc=self.origin @ sae.W_enc + sae.b_enc,
                           W_dec=sae.W_dec @ self.basis.T, b_dec=(sae.b_dec - self.origin) @ self.basis.T)


def window_of(points: Tensor, held: Tensor) -> Window:
    """A square around points on a plane: left, right, bottom and top.

    Both axes have one scale, since distances on the plane are distances between rows.

    Args:
        points: (M, 2), M > 0; a hundredth of them on each side is left out.
        held: points that are not left out, (any number, 2).
    """
    low, high = (torch.quantile(points, q, dim=0) for q in (0.01, 0.99))
    low, high = torch.cat([low[None], held]).amin(0), torch.cat([high[None], held]).amax(0)
    half = float((high - low).max()) * 0.6 or 1.0
    x, y = ((low + high) / 2).tolist()
    return x - half, x + half, y - half, y + half
