"""Planes in the space of the rows, and the cells in a window of one, pixel by pixel.

On a plane `o + u B`, with B orthonormal, an encoder is an encoder of two dimensions:

    (o + u B) W_enc + b_enc = u (B W_enc) + (o W_enc + b_enc)

so the cells that the plane meets are exactly the cells of that small SAE. Source: the paper on power diagrams as
sections of diagrams in more dimensions. Shapes: D = d_in, F = d_sae, P pixels per side, C cells.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
BLOCK = 2**22  # pre-activations at a time, 32 MiB
PIXELS = (240, 640)  # P at least and at most
Window = tuple[float, float, float, float]  # left, right, bottom and top


@dataclass(frozen=True)
class Plane:
    origin: Tensor  # the point with coordinates (0, 0), (D,), float64
    basis: Tensor  # two orthonormal directions, (2, D), float64; where D = 1 the second is zero

    @classmethod
    def through(cls, rows: Tensor) -> Self:
        """The plane through three rows, (3, D), its origin the first and its first axis towards the second; ConfigError
        where they lie on one line."""
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
        """The plane through the mean of rows, (M, D), along their first two principal components; for D <= 2 the space
        itself. At most 2048 rows are used."""
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
        """Orthogonal projections of rows, (B, D), on the plane, (B, 2)."""
        return (x.double() - self.origin) @ self.basis.T

    def distances(self, x: Tensor) -> Tensor:
        """Distances of rows, (B, D), from the plane, (B,)."""
        return (x.double() - self.origin - self.coordinates(x) @ self.basis).norm(dim=1)

    def section(self, sae: SAE) -> SAE:
        """The SAE of two dimensions that acts on the plane's coordinates; its reconstructions are projected on it."""
        sae = sae.copy_to(torch.float64)
        return sae.changed(
            W_enc=self.basis @ sae.W_enc,
            b_enc=self.origin @ sae.W_enc + sae.b_enc,
            W_dec=sae.W_dec @ self.basis.T,
            b_dec=(sae.b_dec - self.origin) @ self.basis.T,
        )


def rows_of_slice(rows: Rows, chosen: str | Sequence[int]) -> dict[int, Tensor]:
    """The rows that a picture's plane goes through, (D,) each, by their numbers in stored order, given `pca` for none,
    three numbers, or a text such as `0,5,9`; ConfigError also where they lie on one line."""
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
    by_number: dict[int, Tensor] = {}
    begin = 0
    for batch in rows.sequential(1024):
        for number in numbers:
            if begin <= number < begin + len(batch):
                by_number[number] = torch.from_numpy(batch[number - begin])
        begin += len(batch)
        if len(by_number) == len({*numbers}):
            break
    Plane.through(torch.stack([by_number[number] for number in numbers]))  # refused before the work
    return {number: by_number[number] for number in numbers}


def window_of(points: Tensor, held: Tensor) -> Window:
    """A square around points on a plane, (M, 2), M > 0, less a hundredth of them on each side, and around all of
    `held`, (any number, 2)."""
    low, high = (torch.quantile(points, q, dim=0) for q in (0.01, 0.99))
    low, high = torch.cat([low[None], held]).amin(0), torch.cat([high[None], held]).amax(0)
    half = float((high - low).max()) * 0.6 or 1.0
    x, y = ((low + high) / 2).tolist()
    return x - half, x + half, y - half, y + half


@dataclass(frozen=True)
class PlaneCells:
    window: Window  # in the plane's coordinates
    keys: Sequence[bytes]  # the key of each cell's support, as of `support_keys`, C of them
    kept: NDArray[np.int64]  # number of latents that each cell keeps, (C,)
    labels: NDArray[np.int64]  # the cell of each pixel's centre, (P, P), the lowest row first

    def occupancy(self, keys: Iterable[bytes]) -> NDArray[np.int64]:
        """Points of the plane in each cell, (C,), in the window or not, given their keys from `keys_at`."""
        counts = Counter(keys)
        return np.array([counts[key] for key in self.keys])


@torch.no_grad()
def keys_at(cells: Cells, points: Tensor) -> list[bytes]:
    """The keys of the cells that points lie in, (M, D), or (M, 2) in a plane's coordinates and its partition."""
    keys: list[bytes] = []
    for part in points.split(max(1, BLOCK // cells.sae.d_sae)):
        keys += support_keys(cells.supports(cells.pre_activations(part)))
    return keys


@torch.no_grad()
def plane_cells(cells: Cells, window: Window, pixels: int | None = None) -> PlaneCells:
    """Find the cells in a window of a plane, given its partition, `cells_of(plane.section(sae))`.

    P is 240 to 640, within `LATENT_PIXELS`, unless given; cells smaller than a pixel may be missed. Cost: O(F P^2).
    """
    P = pixels or int(np.clip((LATENT_PIXELS / cells.sae.d_sae) ** 0.5, *PIXELS))
    left, right, bottom, top = window
    steps = (torch.arange(P, dtype=torch.float64) + 0.5) / P
    x, y = left + steps * (right - left), bottom + steps * (top - bottom)
    grid = torch.cartesian_prod(y, x).flip(1)  # (P P, 2), x fastest
    numbers: dict[bytes, int] = {}
    kept: list[int] = []
    labels: list[int] = []
    for points in grid.split(max(1, BLOCK // cells.sae.d_sae)):
        supports = cells.supports(cells.pre_activations(points))
        for key, size in zip(support_keys(supports), supports.sum(1).tolist(), strict=True):
            if key not in numbers:
                numbers[key] = len(numbers)
                kept.append(size)
            labels.append(numbers[key])
    return PlaneCells(window, list(numbers), np.array(kept), np.array(labels).reshape(P, P))
