"""The cells of an SAE that a plane through its rows meets.

On a plane `o + u B`, with B orthonormal, an encoder is an encoder of two dimensions:

    (o + u B) W_enc + b_enc = u (B W_enc) + (o W_enc + b_enc)

so the cells that the plane meets are exactly those of that small SAE. Source: the paper on power diagrams as sections
of diagrams in more dimensions. Shapes: D = d_in, F = d_sae, P pixels per side, C cells.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base.errors import ConfigError
from ..sae.dictionary import SAE
from ..store.reader import Rows
from .cells import Cells
from .geometry import support_keys
from .references import principal_directions

PRINCIPAL_ROWS = 2048  # rows that the principal components are taken of, evenly spaced
LATENT_PIXELS = 6 * 10**8  # F P^2 of one picture at most, some ten seconds on two cores
PIXEL_CODES = 2**22  # pre-activations at a time, 32 MiB
PIXELS = (240, 640)  # P at least and at most
Bounds = tuple[float, float, float, float]  # left, right, bottom and top


@dataclass(frozen=True)
class Plane:
    origin: Tensor  # the point with coordinates (0, 0), (D,), float64
    basis: Tensor  # two orthonormal directions, (2, D), float64; where D = 1 the second is zero

    @classmethod
    def through(cls, rows: Tensor) -> Self:
        """The plane through three rows, (3, D), its first axis from the first, its origin, towards the second;
        ConfigError where they lie on one line."""
        rows = rows.double()
        sides = rows[1:] - rows[0]
        axes, sizes = torch.linalg.qr(sides.T)
        if sides.shape[1] < 2 or sizes.diagonal().abs().min() <= 1e-9 * sides.norm(dim=1).max():
            raise ConfigError(
                "the rows of --slice span no plane: expected three rows that lie on no line, got three "
                "that do; choose others"
            )
        return cls(rows[0], (axes * sizes.diagonal().sign()).T)

    @classmethod
    def principal(cls, rows: NDArray[np.floating]) -> Self:
        """The plane through the mean of rows, (M, D), along their first two principal components; for D <= 2 the
        space."""
        D = rows.shape[1]
        if D <= 2:
            return cls(torch.zeros(D, dtype=torch.float64), torch.eye(2, D, dtype=torch.float64))
        sample = rows[:: -(-len(rows) // PRINCIPAL_ROWS)].astype(np.float64)
        mean = sample.mean(0)
        directions = principal_directions(sample - mean)[:, :2].T
        # Axes of the space stand in where the rows span fewer directions.
        basis = directions if len(directions) == 2 else np.eye(2, D)
        return cls(torch.from_numpy(mean), torch.from_numpy(basis.copy()))

    def coordinates(self, x: Tensor) -> Tensor:
        """Orthogonal projections, (B, 2), of rows, (B, D)."""
        return (x.double() - self.origin) @ self.basis.T

    def section(self, sae: SAE) -> SAE:
        """The SAE that acts on the plane's coordinates, its reconstructions projected on it."""
        sae = sae.copy_to(torch.float64)
        return sae.changed(
            W_enc=self.basis @ sae.W_enc,
            b_enc=self.origin @ sae.W_enc + sae.b_enc,
            W_dec=sae.W_dec @ self.basis.T,
            b_dec=(sae.b_dec - self.origin) @ self.basis.T,
        )


def rows_of_slice(rows: Rows, chosen: str | Sequence[int]) -> dict[int, Tensor]:
    """The rows that a plane goes through, (D,) each, by number in stored order, given `pca` for none, three numbers, or
    a text such as `0,5,9`; ConfigError also where they lie on one line."""
    if chosen == "pca":
        return {}
    words = chosen.split(",") if isinstance(chosen, str) else [str(number) for number in chosen]
    if len(words) != 3 or not all(word.strip().isdecimal() for word in words):
        raise ConfigError(f"--slice must be pca or three row numbers like 0,5,9, got {chosen!r}")
    numbers = [int(word) for word in words]
    if max(numbers) >= rows.rows:
        raise ConfigError(
            f"--slice names row {max(numbers)}, but the split has {rows.rows:,} rows, counted from 0; "
            "choose lower numbers"
        )
    read = islice(chain.from_iterable(rows.sequential(1024)), max(numbers) + 1)
    found = {number: torch.tensor(row) for number, row in enumerate(read) if number in numbers}
    Plane.through(torch.stack([found[number] for number in numbers]))  # refused before the work
    return {number: found[number] for number in numbers}


def bounds_of(points: Tensor, corners: Tensor) -> Bounds:
    """A square around points, (M, 2), M > 0, less a hundredth on each side, and around `corners`, (any number, 2)."""
    low, high = (torch.quantile(points, q, dim=0) for q in (0.01, 0.99))
    low, high = torch.cat([low[None], corners]).amin(0), torch.cat([high[None], corners]).amax(0)
    half = float((high - low).max()) * 0.6 or 1.0
    x, y = ((low + high) / 2).tolist()
    return x - half, x + half, y - half, y + half


@dataclass(frozen=True)
class PlaneCells:
    bounds: Bounds  # in the plane's coordinates
    sizes: NDArray[np.int64]  # number of latents that each cell keeps, (C,)
    labels: NDArray[np.int64]  # the cell of each pixel's centre, (P, P), the lowest row first


@torch.no_grad()
def plane_cells(cells: Cells, bounds: Bounds, pixels: int | None = None) -> PlaneCells:
    """The cells within bounds on a plane, given `cells_of(plane.section(sae))`; those smaller than a pixel may be
    missed. P is by default 240 to 640, within `LATENT_PIXELS`. Cost: O(F P^2)."""
    P = pixels or int(np.clip((LATENT_PIXELS / cells.sae.d_sae) ** 0.5, *PIXELS))
    left, right, bottom, top = bounds
    steps = (torch.arange(P, dtype=torch.float64) + 0.5) / P
    x, y = left + steps * (right - left), bottom + steps * (top - bottom)
    grid = torch.cartesian_prod(y, x).flip(1)  # (P P, 2), x fastest
    numbers: dict[bytes, int] = {}
    sizes: list[int] = []
    labels: list[int] = []
    for points in grid.split(max(1, PIXEL_CODES // cells.sae.d_sae)):
        supports = cells.supports(cells.pre_activations(points))
        for key, size in zip(support_keys(supports), supports.sum(1).tolist(), strict=True):
            if key not in numbers:
                numbers[key] = len(numbers)
                sizes.append(size)
            labels.append(numbers[key])
    return PlaneCells(bounds, np.array(sizes), np.array(labels).reshape(P, P))
