"""Planes, and the cells in a window of one: exact polygons where they can be counted, else pixel by pixel; and few
colours for them, so that neighbours differ.

On a plane `o + u B`, with B orthonormal, an encoder is an encoder of two dimensions:

    (o + u B) W_enc + b_enc = u (B W_enc) + (o W_enc + b_enc)

so that the cells that the plane meets are exactly the cells of that small SAE. Source: the paper on power
diagrams as sections of diagrams in more dimensions.

A convex cell is found by cutting the window with the inequality that some corner of what is left violates most, until
none does; its neighbours lie just behind the middles of its sides. Shapes: D = d_in, F = d_sae, P pixels per side,
C cells.
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
from ..store.rows import Rows
from .cells import Cell, Cells
from .census import support_keys
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
        """The plane through three rows, (3, D), its origin the first and its first axis towards the second; ConfigError
        where they lie on one line."""
        rows = rows.double()
        sides = rows[1:] - rows[0]
        axes, sizes = torch.linalg.qr(sides.T)
        if sides.shape[1] < 2 or sizes.diagonal().abs().min() <= 1e-9 * sides.norm(dim=1).max():
            raise ConfigError("the rows of --slice span no plane: expected three rows that lie on no line, got three "
                              "that do; choose others")
        return cls(rows[0], (axes * sizes.diagonal().sign()).T)

    @classmethod
    def principal(cls, rows: NDArray) -> Self:
        """The plane through the mean of rows, (M, D), along their first two principal components; for D <= 2 the space
        itself. At most 2048 rows are used."""
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


def rows_of_slice(rows: Rows, chosen: str | Sequence[int]) -> dict[int, Tensor]:
    """The rows that a picture's plane goes through, (D,) each, by their numbers in stored order.

    Args:
        rows: those of a store's split.
        chosen: `pca` for none, three numbers, or a text such as `0,5,9`.

    Raises:
        ConfigError: it is none of these, a row does not exist, or the three lie on one line.
    """
    if chosen == "pca":
        return {}
    words = chosen.split(",") if isinstance(chosen, str) else [str(number) for number in chosen]
    if len(words) != 3 or not all(word.strip().isdecimal() for word in words):
        raise ConfigError(f"--slice must be pca or three row numbers like 0,5,9, got {chosen!r}", option="slice")
    numbers = [int(word) for word in words]
    if max(numbers) >= rows.rows:
        raise ConfigError(f"--slice names row {max(numbers)}, but the split has {rows.rows:,} rows, counted from 0; "
                          "choose lower numbers", option="slice")
    found: dict[int, Tensor] = {}
    begin = 0
    for batch in rows.sequential(1024):
        found |= {n: torch.from_numpy(batch[n - begin].copy()) for n in numbers if begin <= n < begin + len(batch)}
        begin += len(batch)
        if len(found) == len({*numbers}):
            break
    Plane.through(torch.stack([found[n] for n in numbers]))  # refused before the work
    return {n: found[n] for n in numbers}


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


def touching(labels: NDArray[np.int64]) -> list[list[int]]:
    """The cells that each cell touches in a picture, (P, P) of each pixel's cell numbered from 0: a list of numbers for
    each."""
    pairs = np.concatenate([np.stack([a.ravel(), b.ravel()], 1)
                            for a, b in ((labels[1:], labels[:-1]), (labels[:, 1:], labels[:, :-1]))])
    pairs = np.unique(np.sort(pairs[pairs[:, 0] != pairs[:, 1]], axis=1), axis=0)
    neighbours: list[list[int]] = [[] for _ in range(int(labels.max()) + 1)]
    for a, b in pairs.tolist():
        neighbours[a].append(b)
        neighbours[b].append(a)
    return neighbours


def colouring(neighbours: Sequence[Sequence[int]], colours: int) -> NDArray[np.int64]:
    """Give each cell one of a few colours so that neighbours differ where it can be done.

    Greedy, cells of many neighbours first; a cell whose neighbours use every colour takes the rarest among them.

    Args:
        neighbours: numbers of the cells that each cell touches, C lists.
        colours: how many there are.

    Returns:
        A colour for each cell, (C,).
    """
    chosen = np.full(len(neighbours), -1)
    for cell in sorted(range(len(neighbours)), key=lambda cell: -len(neighbours[cell])):
        around = chosen[neighbours[cell]]
        used = np.bincount(around[around >= 0], minlength=colours)
        # Ties cycle through the colours, or most cells would get the first.
        chosen[cell] = min(range(colours), key=lambda c: (used[c], (c - cell) % colours))
    return chosen


COARSE = 96  # pixels per side of the map that shows whether there are too many cells for polygons
POLYGONS = 4000  # cells drawn as polygons at most; each takes some milliseconds
LATENT_PIXELS = 6 * 10**8  # F P^2 of one picture at most, some ten seconds on two cores
BLOCK = 2**22  # pre-activations at a time, 32 MiB
PIXELS = (240, 640)  # P at least and at most
OUTSIDE = 1e-9  # fraction of the window's side by which a corner may lie outside of its cell
BEHIND = 1e-6  # fraction of the window's side at which the cell behind a side is looked for
THIN = 1e-14  # least area of a polygon, as a fraction of the window
SEEDS = 12  # points per side of the window from which cells are searched
MISSING = 1e-3  # fraction of the window that polygons may leave uncovered

Polygon = NDArray[np.float64]  # corners in order, (any, 2)


@dataclass(frozen=True)
class PlaneCells:
    """The cells in a window of a plane.

    Args:
        window: left, right, bottom and top of the window, in the plane's coordinates.
        keys: the key of each cell's support, as of `support_keys`, C of them; cells of abs-topk that differ only in
            signs have the same.
        kept: number of latents that each cell keeps, (C,).
        neighbours: the cells that each touches.
        polygons: corners of each cell within the window; None if there are too many.
        labels: the cell of each pixel's centre, (P, P), the lowest row of pixels first; None where there are polygons.
    """

    window: Window
    keys: Sequence[bytes]
    kept: NDArray[np.int64]
    neighbours: Sequence[Sequence[int]]
    polygons: Sequence[Polygon] | None
    labels: NDArray[np.int64] | None

    @property
    def count(self) -> int:
        """Supports in view."""
        return len(set(self.keys))

    def occupancy(self, keys: Iterable[bytes]) -> NDArray[np.int64]:
        """How many points of the plane lie in each cell, (C,), given the keys of theirs, as `keys_at` has them; those
        outside of the window count too."""
        counts = Counter(keys)
        return np.array([counts[key] for key in self.keys])


@torch.no_grad()
def keys_at(cells: Cells, points: Tensor) -> list[bytes]:
    """The keys of the cells of a plane's partition that points lie in, (M, 2) in the plane's coordinates."""
    return [key for some in points.split(max(1, BLOCK // cells.sae.d_sae))
            for key in support_keys(cells.supports(cells.pre_activations(some)))]


@torch.no_grad()
def plane_cells(cells: Cells, window: Window) -> PlaneCells:
    """Find the cells in a window of a plane.

    Args:
        cells: the partition of the plane, `cells_of(plane.section(sae))`.
        window: left, right, bottom and top.

    Returns:
        Polygons where they are few enough, and rounding leaves no hole of a thousandth; else a map of pixels.

    Cost: O(F) per cell and corner, or O(F P^2).
    """
    if pixel_cells(cells, window, COARSE).count <= POLYGONS:
        exact = polygon_cells(cells, window)
        if exact is not None:
            return exact
    return pixel_cells(cells, window, pixels_for(cells.sae.d_sae))


def pixels_for(d_sae: int) -> int:
    """Pixels per side of a map, within `LATENT_PIXELS`."""
    return int(np.clip((LATENT_PIXELS / d_sae) ** 0.5, *PIXELS))


def pixel_cells(cells: Cells, window: Window, pixels: int) -> PlaneCells:
    """Find the cell of each pixel; arguments as of `plane_cells`, and P.

    Cost: O(F P^2).
    """
    left, right, bottom, top = window
    steps = (torch.arange(pixels, dtype=torch.float64) + 0.5) / pixels
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
    image = np.array(labels).reshape(pixels, pixels)
    return PlaneCells(window, list(numbers), np.array(kept), touching(image), None, image)


def polygon_cells(cells: Cells, window: Window, most: int = POLYGONS) -> PlaneCells | None:
    """Find each cell as a polygon, from one to its neighbours; arguments as of `plane_cells`.

    Returns:
        None where there are more than `most`, or where they leave more than a thousandth of the window uncovered, as
        slivers may that are thinner than rounding.
    """
    left, right, bottom, top = window
    frame = np.array([[left, bottom], [right, bottom], [right, top], [left, top]])
    side = right - left
    numbers: dict[bytes, int] = {}
    keys, kept, polygons, neighbours = [], [], [], []
    steps = (np.arange(SEEDS) + 0.5) / SEEDS * side
    # From many points, since one may lie where cells are thinner than rounding, as the origin without biases does.
    waiting = [(np.array([left + x, bottom + y]), -1) for x in steps for y in steps]
    while waiting:
        point, origin = waiting.pop()
        cell = cells.cell(torch.from_numpy(point))
        number = numbers.get(cell.key)
        if number is None:
            polygon = _polygon(cell, frame, side)
            if len(polygon) < 3 or _area(polygon) < THIN * side**2:
                continue
            number = numbers[cell.key] = len(polygons)
            if number == most:
                return None
            supports = cells.supports(cells.pre_activations(torch.from_numpy(polygon.mean(0))[None]))
            keys += support_keys(supports)
            kept.append(int(supports.sum()))
            polygons.append(polygon)
            neighbours.append(set())
            waiting += [(behind, number) for behind in _behind(polygon, side)
                        if left < behind[0] < right and bottom < behind[1] < top]
        if origin >= 0 and origin != number:
            neighbours[number].add(origin)
            neighbours[origin].add(number)
    if sum(map(_area, polygons)) < (1 - MISSING) * side * (top - bottom):
        return None
    return PlaneCells(window, keys, np.array(kept), [sorted(some) for some in neighbours], polygons, None)


def _polygon(cell: Cell, frame: Polygon, side: float) -> Polygon:
    """The part of the window in the cell."""
    polygon = frame
    while len(polygon) >= 3:
        slack, h, c = (some.numpy() for some in cell.tightest(torch.from_numpy(polygon)))
        norms = np.linalg.norm(h, axis=1)
        violated = (norms > 0) & (slack < -OUTSIDE * side * norms)
        if not violated.any():
            break
        # Each corner's own cut at once: asking for the tightest is what takes the time.
        for cut in np.unique(np.column_stack([h, c])[violated] / norms[violated][:, None], axis=0):
            polygon = _cut(polygon, cut[:2], cut[2])
    return polygon


def _cut(polygon: Polygon, h: NDArray, c: float) -> Polygon:
    """The part of a convex polygon where `h . x >= c`, by Sutherland and Hodgman's rule."""
    heights = polygon @ h - c
    if (heights >= 0).all():
        return polygon
    corners = []
    for index, height in enumerate(heights):
        before = heights[index - 1]
        if (height >= 0) != (before >= 0):
            along = before / (before - height)
            corners.append(polygon[index - 1] + along * (polygon[index] - polygon[index - 1]))
        if height >= 0:
            corners.append(polygon[index])
    return np.array(corners).reshape(-1, 2)


def _behind(polygon: Polygon, side: float) -> list[NDArray]:
    """A point just outside of each side of a convex polygon, whose corners go counter-clockwise."""
    along = np.roll(polygon, -1, axis=0) - polygon
    lengths = np.linalg.norm(along, axis=1)
    middles = polygon + along / 2
    outward = np.stack([along[:, 1], -along[:, 0]], 1)
    return [middle + BEHIND * side * out / length
            for middle, out, length in zip(middles, outward, lengths, strict=True) if length > OUTSIDE * side]


def _area(polygon: Polygon) -> float:
    x, y = polygon.T
    return float(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2
