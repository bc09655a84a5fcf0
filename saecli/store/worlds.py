"""A world: features with directions, firing probabilities, magnitudes, and what makes them fire together.

Shapes: B rows of a block, n entries, G features, D = d_in, R rank of the correlations.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from scipy.sparse import csr_array
from scipy.special import ndtri

from ..base.errors import StoreError
from ..base.files import appearing_whole
from .checks import damaged_world
from .reader import ActivationStore
from .schema import WORLD_FILE
from .sparse_rows import SparseRows, offsets_of

BLOCK_NUMBERS = 1 << 21  # Gaussians of a block: 8 MiB in float32
MOST_BLOCK_ROWS = 4096


@dataclass(frozen=True, eq=False)
class World:
    """Rows x made of features f with unit directions d_f:

        x = bias + sum over f of a_f d_f,   a_f = max(0, mean_f + std_f N(0, 1)) where f fires, else 0

    f fires where a standard Gaussian of its own is above the quantile of its `own_probabilities`, its parent fires, and
    it is the one that a lot chose among siblings that exclude each other. The Gaussians of a row are correlated:
    `factor e + sqrt(1 - |factor|^2) N(0, 1)` with e of R shared ones.

    Args:
        directions: d, (G, D), float32.
        bias: (D,), float32.
        firing_probabilities: how often each feature fires, (G,), float32; of a world that SAELens saved, as it says.
        own_probabilities: how often each would fire if its parent always did and no sibling excluded it, (G,), float32.
        mean, std: of each feature's magnitude before it is cut at 0, (G,), float32.
        factor: loadings of the shared Gaussians, (G, R), float32; R may be 0.
        parents: the feature that each fires with only, (G,), int32; -1 for none. A parent is no descendant of its own.
        groups: a number for the siblings among which each excludes and is excluded, (G,), int32; -1 for none.
        scaled: whether a feature's magnitude is multiplied by that of its parent over its parent's mean, (G,), bool.

    Source: D. Chanin and A. Garriga-Alonso, "SynthSAEBench: Evaluating Sparse Autoencoders on Scalable Realistic
    Synthetic Data", 2026, arXiv:2602.14687; details as in SAELens 6.54, `sae_lens.synthetic`.
    """

    directions: np.ndarray
    bias: np.ndarray
    firing_probabilities: np.ndarray
    own_probabilities: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    factor: np.ndarray
    parents: np.ndarray
    groups: np.ndarray
    scaled: np.ndarray

    @property
    def features(self) -> int:
        """G."""
        return len(self.directions)

    @property
    def d_in(self) -> int:
        """D."""
        return self.directions.shape[1]

    @property
    def block_rows(self) -> int:
        """B, the same for every block."""
        return max(1, min(MOST_BLOCK_ROWS, BLOCK_NUMBERS // self.features))

    @cached_property
    def levels(self) -> list[np.ndarray]:
        """Masks, (G,) each, of features without a parent, of their children, and so on; the first only where some of
        them exclude each other."""
        depth, above = np.zeros(self.features, int), self.parents
        while (above >= 0).any():
            depth += above >= 0
            above = np.where(above >= 0, self.parents[above], -1)
        first = 0 if (self.groups[depth == 0] >= 0).any() else 1
        return [depth == level for level in range(first, int(depth.max(initial=0)) + 1)]

    def codes(self, seed: int, block: int) -> SparseRows:
        """The true codes of a block of rows, a pure function of the world, seed and block.

        Args:
            seed: at least 0.
            block: the number of the block, from 0.

        Returns:
            Those of `block_rows` rows; equal on one machine however many blocks were sampled before.

        Cost: B G Gaussians.
        """
        random = np.random.default_rng((seed, block))
        gaussians = random.standard_normal((self.block_rows, self.features), np.float32)
        if self.factor.shape[1]:
            shared = random.standard_normal((self.block_rows, self.factor.shape[1]), np.float32)
            gaussians *= self._own_part
            gaussians += shared @ self.factor.T
        fires = gaussians > self._thresholds
        for level in self.levels:  # before magnitudes are drawn: of most children the parent does not fire
            below = np.flatnonzero(level & (self.parents >= 0))
            fires[:, below] &= fires[:, self.parents[below]]
        rows, features = fires.nonzero()
        magnitudes = self.mean[features] + self.std[features] * random.standard_normal(len(features), np.float32)
        values = gaussians  # its memory, for magnitudes by row and feature
        values.fill(0)
        values[rows, features] = magnitudes.clip(0)
        for level in self.levels:
            at = level[features]
            self._gate(values, rows[at], features[at], random)
        values = values[rows, features]
        kept = values > 0
        counts = np.bincount(rows[kept], minlength=self.block_rows)
        return SparseRows(offsets_of(counts), features[kept].astype(np.int32), values[kept])

    def rows(self, codes: SparseRows) -> np.ndarray:
        """`codes directions + bias`, (R, D) float32; a row's terms are added in order, whatever the threads."""
        matrix = csr_array((codes.values, codes.indices, codes.offsets), shape=(len(codes), self.features))
        return matrix @ self.directions + self.bias

    def _gate(self, values: np.ndarray, rows: np.ndarray, features: np.ndarray, random: np.random.Generator) -> None:
        """Silence features of one level whose parent is silent, (n,) entries of values, (B, G), then those that lost to
        a sibling."""
        above = self.parents[features]
        parents = np.where(above >= 0, values[rows, above], 1)
        scale = np.where(self.scaled[features] & (above >= 0), parents / self.mean[above], 1)
        values[rows, features] *= np.where(parents > 0, scale, 0)
        lots = random.random(len(rows))
        at = (self.groups[features] >= 0) & (values[rows, features] > 0)
        rows, features, lots = rows[at], features[at], lots[at]
        order = np.lexsort((lots, self.groups[features], rows))
        rows, features = rows[order], features[order]
        groups = self.groups[features]
        lost = (rows[1:] == rows[:-1]) & (groups[1:] == groups[:-1])  # all but the last, which drew the largest lot
        values[rows[:-1][lost], features[:-1][lost]] = 0

    @cached_property
    def _thresholds(self) -> np.ndarray:
        return -ndtri(self.own_probabilities.astype(np.float64)).astype(np.float32)

    @cached_property
    def _own_part(self) -> np.ndarray:
        """What of each feature's Gaussian is its own, (G,), float32."""
        return np.sqrt(1 - np.square(self.factor, dtype=np.float64).sum(1)).astype(np.float32)

    def to_bytes(self) -> bytes:
        """The contents of `world.safetensors`, equal for equal worlds."""
        return save({one.name: np.ascontiguousarray(getattr(self, one.name)) for one in dataclasses.fields(self)})

    @staticmethod
    def save(folder: Path, content: bytes) -> None:
        """Write `to_bytes` into a store's folder, whole or not at all, where it is not there already. Raises OSError
        where the disk refuses it."""
        path = folder / WORLD_FILE
        if path.is_file() and path.read_bytes() == content:
            return
        with appearing_whole(path) as temporary:
            temporary.write_bytes(content)

    @classmethod
    def of_store(cls, store: ActivationStore) -> Self:
        """The world that a store's rows are made of, where it has one; StoreError where its file is missing or damaged.
        """
        if problems := damaged_world(store.path, store.meta):
            raise StoreError(problems[0])
        path = store.path / WORLD_FILE
        try:
            return cls(**_expected(load_file(path)))
        except (OSError, SafetensorError, ValueError) as error:
            raise StoreError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}; remove the store and "
                             "make it again") from error


KINDS = {"parents": "int32", "groups": "int32", "scaled": "bool"}


def _expected(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of a world, by name; ValueError where some are missing, or of other types and shapes."""
    names = [one.name for one in dataclasses.fields(World)]
    if missing := [name for name in names if name not in arrays]:
        raise ValueError(f"expected an array {missing[0]}, got none")
    found = {name: arrays[name] for name in names}
    features, d_in = np.atleast_2d(found["directions"]).shape
    for name, array in found.items():
        kind = KINDS.get(name, "float32")
        shape = {"directions": (features, d_in), "bias": (d_in,),
                 "factor": (features, array.shape[-1] if array.ndim else 0)}.get(name, (features,))
        if array.shape != shape or array.dtype != kind:
            raise ValueError(f"expected {name} of shape {shape} and type {kind}, got {array.shape} and {array.dtype}")
    return found
