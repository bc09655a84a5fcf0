"""Worlds: known features with directions, firing probabilities, magnitudes and correlations.

Shapes: B rows of a block, n entries, G features, D = d_in, R rank of the correlations.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from scipy.sparse import csr_array
from scipy.special import ndtri

from ..base.errors import ConfigError, StoreError, one_line
from .options import SyntheticConfig
from .reader import ActivationStore
from .schema import WORLD_FILE
from .shard import make_anew

BLOCK_NUMBERS = 1 << 21  # Gaussians of a block: 8 MiB in float32
MOST_BLOCK_ROWS = 4096
MOST_OFTEN = 0.4  # no feature fires on more of the rows
RANK = 25
FEATURES_PER_ROOT, BRANCHES, DEPTH = 32, 4, 2  # so that 21 of 32 features are in a tree
MEAN, STD_MEAN, STD_STD = 1.0, 0.2, 0.1
BIAS_NORM = 1.0
TIGHT = 1e-6  # of a tight frame: largest change of an entry in the last step
STEPS = 500  # at most
DIRECTIONS, CORRELATIONS, MAGNITUDES = 1, 2, 3  # streams of random numbers


@dataclass(frozen=True, eq=False)
class World:
    """Rows x made of features f with unit directions d_f:

        x = bias + sum over f of a_f d_f,   a_f = max(0, mean_f + std_f N(0, 1)) where f fires, else 0

    f fires where a standard Gaussian of its own is above the quantile of its `own_probabilities` and its parent fires.
    The Gaussians of a row are correlated: `factor e + sqrt(1 - |factor|^2) N(0, 1)` with e of R shared ones.

    Source: see `SyntheticConfig`.
    """

    directions: np.ndarray  # d, (G, D), float32, as all to `factor`
    bias: np.ndarray  # (D,)
    firing_probabilities: np.ndarray  # of each feature, (G,)
    own_probabilities: np.ndarray  # the same if its parent always fired, (G,)
    mean: np.ndarray  # of each feature's magnitude before it is cut at 0, (G,)
    std: np.ndarray
    factor: np.ndarray  # loadings of the shared Gaussians, (G, R)
    parents: np.ndarray  # the feature without which each does not fire, (G,), int32; -1 for none

    @property
    def features(self) -> int:
        return len(self.directions)

    @property
    def d_in(self) -> int:
        return self.directions.shape[1]

    @property
    def block_rows(self) -> int:
        """B, the same for every block."""
        return max(1, min(MOST_BLOCK_ROWS, BLOCK_NUMBERS // self.features))

    @cached_property
    def levels(self) -> list[np.ndarray]:
        return levels_of(self.parents)

    def codes(self, seed: int, block: int) -> csr_array:
        """The true codes of a block, (B, G). Cost: B G Gaussians."""
        random = np.random.default_rng((seed, block))
        gaussians = random.standard_normal((self.block_rows, self.features), np.float32)
        if self.factor.shape[1]:
            shared = random.standard_normal((self.block_rows, self.factor.shape[1]), np.float32)
            gaussians *= np.sqrt(1 - np.square(self.factor, dtype=np.float64).sum(1)).astype(
                np.float32
            )
            gaussians += shared @ self.factor.T
        fires = gaussians > -ndtri(self.own_probabilities.astype(np.float64)).astype(np.float32)
        # Before magnitudes are drawn: of most children the parent does not fire.
        for level in self.levels:
            fires[:, level] &= fires[:, self.parents[level]]
        rows, features = fires.nonzero()
        magnitudes = self.mean[features] + self.std[features] * random.standard_normal(
            len(features), np.float32
        )
        values = gaussians  # its memory, for magnitudes by row and feature
        values.fill(0)
        values[rows, features] = magnitudes.clip(0)
        for level in self.levels:
            of_rows, children = rows[level[features]], features[level[features]]
            values[of_rows, children] *= values[of_rows, self.parents[children]] > 0
        values = values[rows, features]
        positive = values > 0
        at = rows[positive], features[positive]
        return csr_array((values[positive], at), shape=(self.block_rows, self.features))

    def rows(self, codes: csr_array) -> np.ndarray:
        """`codes directions + bias`, (R, D) float32."""
        return codes @ self.directions + self.bias

    def to_bytes(self) -> bytes:
        return save(
            {
                field.name: np.ascontiguousarray(getattr(self, field.name))
                for field in dataclasses.fields(self)
            }
        )


def directions_of(store: ActivationStore) -> np.ndarray:
    """(G, D); StoreError if their file is missing or damaged."""
    return stored_world(store.path).directions


def stored_world(store: Path) -> World:
    path = store / WORLD_FILE
    try:
        return World(**load_file(path))
    except (OSError, TypeError, SafetensorError) as error:
        raise StoreError(f"cannot read {path}: {one_line(error)}; {make_anew(store)}") from error


def world_of(config: SyntheticConfig) -> World:
    """ConfigError if the requested L0 is infeasible."""
    firing = zipfian(config.features, config.zipf, config.l0)
    parents = forest(config.features) if config.hierarchy else np.full(config.features, -1)
    own_probabilities = np.where(parents >= 0, firing / firing[parents], firing)
    random = np.random.default_rng((config.seed, DIRECTIONS))
    directions = tight_frame(random.standard_normal((config.features, config.d_in)))
    bias = random.standard_normal(config.d_in)
    bias *= BIAS_NORM / np.linalg.norm(bias)
    random = np.random.default_rng((config.seed, MAGNITUDES))
    std = np.abs(random.normal(STD_MEAN, STD_STD, config.features))
    columns = {
        "firing_probabilities": firing,
        "own_probabilities": own_probabilities,
        "mean": np.full(config.features, MEAN),
        "std": std,
        "directions": directions,
        "bias": bias,
        "factor": _factor(config, parents),
    }
    return World(
        **{name: column.astype(np.float32) for name, column in columns.items()},
        parents=parents.astype(np.int32),
    )


def _factor(config: SyntheticConfig, parents: np.ndarray) -> np.ndarray:
    """Loadings of the shared Gaussians, (G, R), each row of squared norm `correlation`; R is 0 without any.

    They are orthogonal to those of the feature's ancestors, so that probabilities of firing multiply.
    """
    if not config.correlation:
        return np.empty((config.features, 0))
    factor = np.random.default_rng((config.seed, CORRELATIONS)).standard_normal(
        (config.features, RANK)
    )
    for level, members in enumerate(levels_of(parents)):
        at = np.flatnonzero(members)
        above = parents[at]
        # The ancestors of one feature are orthogonal to each other by now.
        for _ in range(level + 1):
            unit = factor[above] / np.linalg.norm(factor[above], axis=1, keepdims=True)
            factor[at] -= (factor[at] * unit).sum(1, keepdims=True) * unit
            above = parents[above]
    return factor * (np.sqrt(config.correlation) / np.linalg.norm(factor, axis=1, keepdims=True))


def zipfian(features: int, exponent: float, l0: float) -> np.ndarray:
    """Firing probabilities `min(0.4, c / i^s)`, i = 1 to G, with c such that they sum to l0."""
    most = MOST_OFTEN * features
    if l0 > most:
        raise ConfigError(
            f"--l0 must be at most {MOST_OFTEN:g} times --features, {most:g}, got {l0:g}; lower it or raise --features"
        )
    shape = np.arange(1, features + 1, dtype=np.float64) ** -exponent
    # With the first m at their most, c is what is left over the others' sum; m is right where it cuts none of them.
    rest = shape[::-1].cumsum()[::-1]
    scales = np.maximum(l0 - MOST_OFTEN * np.arange(features), 0) / rest
    fits = scales * shape <= MOST_OFTEN * (1 + 1e-12)
    return np.minimum(MOST_OFTEN, scales[fits.argmax()] * shape)


def forest(features: int) -> np.ndarray:
    """Each feature's parent, (G,), -1 for none: the most frequent features are roots, the next their children."""
    parents = np.full(features, -1)
    begin, end = 0, max(1, features // FEATURES_PER_ROOT)
    for _ in range(DEPTH):
        children = np.arange(end, min(features, end + BRANCHES * (end - begin)))
        parents[children] = begin + (children - end) // BRANCHES
        begin, end = end, end + len(children)
    return parents


def levels_of(parents: np.ndarray) -> list[np.ndarray]:
    """Masks, (G,) each, of the features that have a parent, by depth."""
    depth, above = np.zeros(len(parents), int), parents
    while (above >= 0).any():
        depth += above >= 0
        above = np.where(above >= 0, parents[above], -1)
    return [depth == level for level in range(1, int(depth.max(initial=0)) + 1)]


def tight_frame(vectors: np.ndarray) -> np.ndarray:
    """Nearest tight frame of unit vectors, (G, D) float64, to given vectors of full rank.

        minimise sum over i != j of <d_i, d_j>^2

    over unit vectors: orthonormal ones if G <= D, else `d' d = G/D I` with the sum `G^2/D - G`. Alternates between
    tight and normalised vectors.

    Cost: `4 G D min(G, D)` operations a step, a few dozen steps.

    Source: J. J. Benedetto and M. Fickus, "Finite normalized tight frames", 2003; J. A. Tropp et al., "Designing
    structured tight frames via an alternating projection method", 2005.
    """
    features, d_in = vectors.shape
    frame = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for _ in range(STEPS):
        before = frame
        gram = frame.T @ frame if features > d_in else frame @ frame.T
        values, axes = np.linalg.eigh(gram)
        root = axes * values.clip(np.finfo(float).tiny) ** -0.5 @ axes.T
        frame = frame @ root if features > d_in else root @ frame
        frame /= np.linalg.norm(frame, axis=1, keepdims=True)
        if np.abs(frame - before).max() < TIGHT:
            break
    return frame
