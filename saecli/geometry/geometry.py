"""The geometry of one SAE as a document: one pass over rows, references, the theorem on the power diagram; on a plane.

    margin:             distance of x to the boundary of its cell, see `cells.py`
    local complexity:   boundary hyperplanes within a radius of x
    on a cell:          x_hat = x A_S + a_S        A_S = W_enc[:, S] W_dec[S, :]        rank A_S <= min(|S|, D)

On a plane `o + u B`, with B orthonormal, an encoder is an encoder of two dimensions:

    (o + u B) W_enc + b_enc = u (B W_enc) + (o W_enc + b_enc)

so the cells that the plane meets are exactly those of that small SAE.

Source: the paper on SAEs as piecewise affine splines; Humayun et al., "SplineCam" (2023), for local complexity; the
paper on power diagrams as sections of diagrams in more dimensions.
Shapes: N training rows, B rows measured, D = d_in, F = d_sae, P pixels per side, C cells.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, islice
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base.console import Listener
from ..base.errors import ConfigError
from ..measure.measured import Measured, held_out, spread_out
from ..sae.dictionary import SAE
from ..store.reader import Rows
from .cells import Cells, agreement, cells_of
from .references import measure_references, principal_directions

KEY_BYTES = 16  # two of a billion cells share a key with probability 1e-21
QUANTILES = {"min": 0, "p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1}
SAMPLE_ROWS = 50_000  # rows kept for the references
COMPLEXITY_ROWS = 1000  # rows whose local complexity is counted
CELL_CODES = 2**23  # codes at a time, 64 MiB in float64
SAMPLE_BYTES = 2**28  # of rows kept for the references, in float32, at most, 256 MiB
AGREEMENT_WORK = 4 * 10**9  # rows n D of true distances at most, a second on a core
RANK_ROWS = 100  # rows of whose cells the map's rank is computed
SAMPLE_SEED = 0
OTHER_ROWS = 10_000  # rows of the other split, held out or trained on, whose margins are compared
PRINCIPAL_ROWS = 2048  # rows that the principal components are taken of, evenly spaced
LATENT_PIXELS = 6 * 10**8  # F P^2 of one picture at most, some ten seconds on two cores
PIXEL_CODES = 2**22  # pre-activations at a time, 32 MiB
PIXELS = (240, 640)  # P at least and at most
Bounds = tuple[float, float, float, float]  # left, right, bottom and top


def support_keys(supports: Tensor) -> list[bytes]:
    """A key for each row's support, (B, F) bool."""
    packed = np.packbits(supports.numpy(), axis=1)
    return [blake2b(row, digest_size=KEY_BYTES).digest() for row in packed]


@dataclass
class Census:
    """Counts the rows in each cell; memory grows with the cells visited, not with the rows."""

    rows: int = 0
    active: int = 0
    counts: Counter[bytes] = field(default_factory=Counter)
    _growth: list[tuple[int, int]] = field(default_factory=list)

    def add(self, keys: list[bytes], active: int) -> None:
        """Count rows by `support_keys`; `active` is the sum of their L0."""
        self.active += active
        for key in keys:
            self.counts[key] += 1
            self.rows += 1
            if str(self.rows).rstrip("0") in ("1", "2", "5"):
                self._growth.append((self.rows, len(self.counts)))

    @property
    def l0(self) -> float:
        return self.active / self.rows

    @property
    def growth(self) -> list[tuple[int, int]]:
        """(rows, cells visited by them) at 1, 2, 5, 10, ... rows and at the last."""
        last = (self.rows, len(self.counts))
        return self._growth if self._growth[-1:] == [last] else [*self._growth, last]

    def sizes(self) -> NDArray[np.int64]:
        """Of visited cells, descending."""
        sizes = np.fromiter(self.counts.values(), np.int64, len(self.counts))
        return np.sort(sizes)[::-1]

    def occupancy(self) -> dict[str, Any]:
        """`mean` and `max` rows in a visited cell, `singletons` (cells with one row), `entropy` of rows over cells in
        nats, `effective` = exp(entropy), and `growth`."""
        sizes = self.sizes()
        entropy = float(np.log(self.rows) - sizes / self.rows @ np.log(sizes))
        return {
            "mean": self.rows / len(self.counts),
            "max": int(sizes[0]),
            "singletons": int((sizes == 1).sum()),
            "entropy": entropy,
            "effective": float(np.exp(entropy)),
            "growth": [{"rows": rows, "cells": cells} for rows, cells in self.growth],
        }


@dataclass(frozen=True)
class Visited:
    census: Census
    margins: NDArray[np.float64]  # (margin, margin / ||x||), (B, 2)
    sample: NDArray[np.float32]  # of the rows, uniform and in order, (at most `sample_capacity`, D)


class Limits(NamedTuple):
    """See the arguments of `functions.geometry`."""

    rows: int
    fit_rows: int
    radius: float


@dataclass(frozen=True)
class Geometry:
    run: Measured
    census: Census
    sample: NDArray[np.float32]  # of the rows measured, (any number, D)
    margins: dict[str, NDArray[np.float64]]  # (margin, margin / ||x||), (B, 2), by split
    complexity: dict[str, NDArray[np.int64]]  # (B,) by split
    document: dict[str, Any]  # the command's JSON


@torch.no_grad()
def measure_geometry(run: Measured, limits: Limits, listener: Listener) -> Geometry:
    """Measure an SAE on the CPU; ConfigError where its activation has no cells."""
    cells, split = cells_of(run.sae), run.split or "all"
    run.demand_reconstruction("the geometry")
    visited = _visit(run, cells, limits.rows, listener)
    census, sample = visited.census, visited.sample
    train = _training_rows(run, limits.fit_rows)
    distances = np.linalg.norm(sample - sample.mean(0, dtype=np.float64), axis=1)
    radius = limits.radius * float(np.median(distances))
    margins = {split: visited.margins}
    complexity = {split: local_complexity(cells, sample, radius)}
    other = {"test": "train", "train": "test"}.get(split)
    if other is not None:
        rows = _rows_of_other(run, other, train)
        margins[other] = _margins(cells, rows, f"margins of {other} rows", listener)
        complexity[other] = local_complexity(cells, rows, radius)
    references = measure_references(run.sae, sample, train, round(census.l0), listener)
    document = {
        **run.heading,
        "act": run.sae.activation.name,
        **_cell_measures(cells, census),
        "rank": rank_measures(cells, sample),
        "power_diagram": _agreement(cells, sample, listener),
        "margin": margin_measures(visited.margins),
        "complexity": {
            "radius": radius,
            "radius_fraction": limits.radius,
            "boundary": cells.boundary,
            "rows": len(complexity[split]),
            **describe(complexity[split]),
        },
        "other_split": _other_split(other, margins, complexity),
        "references": {**references, "held_out": split == "test"},
    }
    return Geometry(run, census, sample, margins, complexity, document)


def _visit(run: Measured, cells: Cells, most: int, listener: Listener) -> Visited:
    count = min(most, run.rows.rows)
    stored = map(torch.from_numpy, _rows_or_sample(run.of_store, count, batch_size(run.sae.d_sae)))
    shown = _with_progress(stored, f"measuring {run.subject.name}", count, listener)
    return visit_rows(cells, shown, count)


def _rows_of_other(run: Measured, other: str, train: NDArray[np.float32]) -> NDArray[np.float32]:
    if other == "test":
        return _in_memory(held_out(run).of_store, OTHER_ROWS)
    return spread_out(train, OTHER_ROWS)


def _agreement(
    cells: Cells, sample: NDArray[np.float32], listener: Listener
) -> dict[str, Any] | None:
    most = max(16, AGREEMENT_WORK // (2 * cells.sae.d_sae * cells.sae.d_in))
    rows = torch.from_numpy(spread_out(sample, most))
    return agreement(cells, _with_progress(rows.split(64), "power diagram", len(rows), listener))


def _other_split(
    other: str | None,
    margins: dict[str, NDArray[np.float64]],
    complexity: dict[str, NDArray[np.int64]],
) -> dict[str, Any] | None:
    if other is None:
        return None
    return {
        "split": other,
        "rows": len(margins[other]),
        "margin": margin_measures(margins[other]),
        "complexity": describe(complexity[other]),
    }


def _training_rows(run: Measured, most: int) -> NDArray[np.float32]:
    seed, fraction = run.subject.split_seed, run.subject.fraction
    # More rows than the default are held as asked for, whatever memory they take.
    if most <= SAMPLE_ROWS:
        most = min(most, sample_capacity(run.sae.d_in))
    return _in_memory(run.store.split("train", fraction=fraction, seed=seed), most)


def _margins(
    cells: Cells, rows: NDArray[np.float32], label: str, listener: Listener
) -> NDArray[np.float64]:
    batches = torch.from_numpy(rows).split(batch_size(cells.sae.d_sae))
    shown = _with_progress(batches, label, len(rows), listener)
    return np.concatenate([margins_of(cells, x, cells.pre_activations(x)) for x in shown])


def _cell_measures(cells: Cells, census: Census) -> dict[str, Any]:
    visited, possible = len(census.counts), cells.possible_log10
    return {
        "rows": census.rows,
        "l0": census.l0,
        "cells_visited": visited,
        "cells_possible_log10": possible,
        "cells_share_log10": math.log10(visited) - possible,
        "occupancy": census.occupancy(),
    }


def _with_progress(
    batches: Iterable[Tensor], label: str, count: int, listener: Listener
) -> Iterator[Tensor]:
    done = 0
    with listener.progress(label, count, "rows") as show:
        for batch in batches:
            yield batch
            done += len(batch)
            show(done)


def _in_memory(rows: Rows, most: int) -> NDArray[np.float32]:
    return np.concatenate(list(_rows_or_sample(rows, most, 1024)))


def _rows_or_sample(rows: Rows, most: int, size: int) -> Iterator[NDArray[np.float32]]:
    """All rows in batches of `size`, or of more than `most`, `most` of them in one random order."""
    if rows.rows <= most:
        yield from rows.sequential(size)
        return
    with closing(rows.batches(size, seed=SAMPLE_SEED, epoch=0)) as batches:
        for batch in islice(batches, -(-most // size)):
            yield batch[:most]
            most -= len(batch)


@torch.no_grad()
def visit_rows(cells: Cells, batches: Iterable[Tensor], rows: int) -> Visited:
    census = Census()
    margins, sample = [], []
    sampled = np.zeros(rows, bool)
    capacity = min(rows, sample_capacity(cells.sae.d_in))
    sampled[np.random.default_rng(0).permutation(rows)[:capacity]] = True
    for x in batches:
        pre = cells.pre_activations(x)
        supports = cells.supports(pre)
        sample.append(x.float().numpy()[sampled[census.rows : census.rows + len(x)]])
        margins.append(margins_of(cells, x, pre))
        census.add(support_keys(supports), int(supports.sum()))
    return Visited(census, np.concatenate(margins), np.concatenate(sample))


def margins_of(cells: Cells, x: Tensor, pre: Tensor) -> NDArray[np.float64]:
    """(margin, margin / ||x||), (B, 2), of rows, (B, D), with their pre-activations, (B, F)."""
    margins = cells.margins(pre)
    # A row at the origin is infinitely far from its boundary in units of its own norm.
    relative = (margins / x.double().norm(dim=1)).nan_to_num(0.0, torch.inf)
    return torch.stack([margins, relative], 1).numpy()


def margin_measures(margins: NDArray[np.float64]) -> dict[str, Any]:
    margin, relative = margins.T
    return {**describe(margin), "relative": describe(relative)}


@torch.no_grad()
def local_complexity(cells: Cells, rows: NDArray[np.floating], radius: float) -> NDArray[np.int64]:
    """Boundary hyperplanes within a radius of at most 1000 of the rows, (B, D)."""
    x = torch.from_numpy(spread_out(rows, COMPLEXITY_ROWS))
    return cells.crossings(cells.pre_activations(x), radius).numpy()


@torch.no_grad()
def rank_measures(cells: Cells, rows: NDArray[np.floating]) -> dict[str, Any]:
    """Ranks of the SAE's map on the cells of at most 100 rows; `full`: the fraction of rank min(|S|, D)."""
    x = torch.from_numpy(spread_out(rows, RANK_ROWS))
    supports = torch.unique(cells.supports(cells.pre_activations(x)), dim=0)
    ranks = np.array([map_rank(cells.sae, support.nonzero()[:, 0]) for support in supports])
    full = ranks == supports.sum(1).clamp(max=cells.sae.d_in).numpy()
    return {"cells": len(ranks), "full": float(full.mean()), **describe(ranks)}


def describe(values: NDArray) -> dict[str, float]:
    """Mean and quantiles of numbers, (B,), B > 0, which may be infinite."""
    # The nearest rank, since interpolating between infinities gives no number.
    at = np.quantile(values, [*QUANTILES.values()], method="nearest").astype(float).tolist()
    return {"mean": float(values.mean()), **dict(zip(QUANTILES, at, strict=True))}


def batch_size(d_sae: int) -> int:
    return max(16, min(1024, CELL_CODES // d_sae))


def sample_capacity(d_in: int) -> int:
    return max(1, min(SAMPLE_ROWS, SAMPLE_BYTES // (4 * d_in)))


def map_rank(sae: SAE, support: Tensor) -> int:
    """The rank of a float64 SAE's affine map on the cell that keeps the latents `support`, (|S|,). Cost: O(D |S|^2)."""
    if not len(support):
        return 0
    left, right = sae.W_enc[:, support], sae.W_dec[support]
    if len(support) >= sae.d_in:
        return int(torch.linalg.matrix_rank(left @ right))
    # The product of the triangles has the map's singular values.
    inner = torch.linalg.qr(left, mode="r").R @ torch.linalg.qr(right.T, mode="r").R.T
    return int(torch.linalg.matrix_rank(inner))


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
                "the rows of --slice span no plane: expected three that lie on no line; choose others"
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
            f"--slice names row {max(numbers)}, but the split has {rows.rows:,} rows, from 0; choose lower numbers"
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
