"""Worlds: known features with directions, firing probabilities, magnitudes and correlations.

SAELens' `SyntheticModel.save` (`sae_lens.synthetic`, version 6) writes a folder with `synthetic_model_config.json`,
`synthetic_model.safetensors` (`feature_vectors` (G, D), `bias` (D,), `firing_probabilities` (G,), and with correlations
`correlation_factor` (G, R) and `correlation_diag` (G,)) and, with a hierarchy, `hierarchy.json`. Magnitudes are made
from the configuration and its seed.

Shapes: B rows of a block, n entries, G features, D = d_in, R rank of the correlations.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors.numpy import load_file, save
from scipy.sparse import csr_array
from scipy.special import ndtri

from ..base.documents import read_json
from ..base.errors import ConfigError, FormatError
from .options import SyntheticConfig
from .reader import ActivationStore
from .schema import WORLD_FILE

BLOCK_NUMBERS = 1 << 21  # Gaussians of a block: 8 MiB in float32
MOST_BLOCK_ROWS = 4096
MOST_OFTEN = 0.4  # no feature fires on more of the rows
RANK = 25
FEATURES_PER_ROOT, BRANCHES, DEPTH = 32, 4, 2  # so that 21 of 32 features are in a tree
MEAN, STD_MEAN, STD_STD = 1.0, 0.2, 0.1
BIAS_NORM = 1.0
TIGHT, STEPS = (
    1e-6,
    500,
)  # to a tight frame: largest change of an entry in the last step, and steps at most
DIRECTIONS, CORRELATIONS, MAGNITUDES = 1, 2, 3  # streams of random numbers


SYNTHETIC = "synthetic"  # what stands for a world made of options
CONFIG, WEIGHTS, HIERARCHY = (
    "synthetic_model_config.json",
    "synthetic_model.safetensors",
    "hierarchy.json",
)
STD_STREAM, MEAN_STREAM = 1, 2  # what SAELens adds to the seed


@dataclass(frozen=True, eq=False)
class World:
    """Rows x made of features f with unit directions d_f:

        x = bias + sum over f of a_f d_f,   a_f = max(0, mean_f + std_f N(0, 1)) where f fires, else 0

    f fires where a standard Gaussian of its own is above the quantile of its `own_probabilities`, its parent fires, and
    a lot chose it among siblings that exclude each other. The Gaussians of a row are correlated:
    `factor e + sqrt(1 - |factor|^2) N(0, 1)` with e of R shared ones.

    Source: D. Chanin and A. Garriga-Alonso, "SynthSAEBench: Evaluating Sparse Autoencoders on Scalable Realistic
    Synthetic Data", 2026, arXiv:2602.14687; details as in SAELens 6.54, `sae_lens.synthetic`.
    """

    directions: np.ndarray  # d, (G, D), float32, as all to `factor`
    bias: np.ndarray  # (D,)
    firing_probabilities: (
        np.ndarray
    )  # of each feature, (G,); in a world that SAELens saved, as recorded
    own_probabilities: (
        np.ndarray
    )  # the same if its parent always fired and no sibling excluded it, (G,)
    mean: np.ndarray  # of each feature's magnitude before it is cut at 0, (G,)
    std: np.ndarray
    factor: np.ndarray  # loadings of the shared Gaussians, (G, R)
    parents: np.ndarray  # the feature without which each does not fire, (G,), int32; -1 for none
    groups: (
        np.ndarray
    )  # number of the set of siblings that exclude each other, (G,), int32; -1 for none
    scaled: np.ndarray  # whether a feature's magnitude is multiplied by its parent's over its parent's mean, (G,), bool

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
        """Masks, (G,) each, of features by depth; roots only if some exclude each other."""
        depth, above = np.zeros(self.features, int), self.parents
        while (above >= 0).any():
            depth += above >= 0
            above = np.where(above >= 0, self.parents[above], -1)
        first = 0 if (self.groups[depth == 0] >= 0).any() else 1
        return [depth == level for level in range(first, int(depth.max(initial=0)) + 1)]

    def codes(self, seed: int, block: int) -> csr_array:
        """The true codes of a block, (B, G), a pure function of the world, seed and block number.

        Cost: B G Gaussians.
        """
        random = np.random.default_rng((seed, block))
        gaussians = random.standard_normal((self.block_rows, self.features), np.float32)
        if self.factor.shape[1]:
            shared = random.standard_normal((self.block_rows, self.factor.shape[1]), np.float32)
            gaussians *= np.sqrt(1 - np.square(self.factor, dtype=np.float64).sum(1)).astype(
                np.float32
            )
            gaussians += shared @ self.factor.T
        fires = gaussians > -ndtri(self.own_probabilities.astype(np.float64)).astype(np.float32)
        for (
            level
        ) in self.levels:  # before magnitudes are drawn: of most children the parent does not fire
            below = np.flatnonzero(level & (self.parents >= 0))
            fires[:, below] &= fires[:, self.parents[below]]
        rows, features = fires.nonzero()
        magnitudes = self.mean[features] + self.std[features] * random.standard_normal(
            len(features), np.float32
        )
        values = gaussians  # its memory, for magnitudes by row and feature
        values.fill(0)
        values[rows, features] = magnitudes.clip(0)
        for level in self.levels:
            at = level[features]
            self._gate(values, rows[at], features[at], random)
        values = values[rows, features]
        kept = values > 0
        return csr_array(
            (values[kept], (rows[kept], features[kept])), shape=(self.block_rows, self.features)
        )

    def rows(self, codes: csr_array) -> np.ndarray:
        """`codes directions + bias`, (R, D) float32."""
        return codes @ self.directions + self.bias

    def _gate(
        self,
        values: np.ndarray,
        rows: np.ndarray,
        features: np.ndarray,
        random: np.random.Generator,
    ) -> None:
        """Silence those of a level's entries, (n,), whose parent is silent or that lost to a sibling."""
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
        lost = (rows[1:] == rows[:-1]) & (
            groups[1:] == groups[:-1]
        )  # all but the last, which drew the largest lot
        values[rows[:-1][lost], features[:-1][lost]] = 0

    def to_bytes(self) -> bytes:
        """The contents of `world.safetensors`, equal for equal worlds."""
        return save(
            {
                one.name: np.ascontiguousarray(getattr(self, one.name))
                for one in dataclasses.fields(self)
            }
        )

    @classmethod
    def of_store(cls, store: ActivationStore) -> Self:
        """The world of a store's rows; StoreError if its file is missing or damaged."""
        store.demand_world()
        return cls(**load_file(store.path / WORLD_FILE))


def world_of(config: SyntheticConfig) -> World:
    """The world of some options; ConfigError if the requested L0 is infeasible."""
    firing = zipfian(config.features, config.zipf, config.l0)
    parents = forest(config.features) if config.hierarchy else np.full(config.features, -1)
    own = np.where(parents >= 0, firing / firing[parents], firing)
    random = np.random.default_rng((config.seed, DIRECTIONS))
    directions = tight_frame(random.standard_normal((config.features, config.d_in)))
    bias = random.standard_normal(config.d_in)
    bias *= BIAS_NORM / np.linalg.norm(bias)
    random = np.random.default_rng((config.seed, MAGNITUDES))
    std = np.abs(random.normal(STD_MEAN, STD_STD, config.features))
    columns = {
        "firing_probabilities": firing,
        "own_probabilities": own,
        "mean": np.full(config.features, MEAN),
        "std": std,
        "directions": directions,
        "bias": bias,
        "factor": _factor(config, parents),
    }
    return World(
        **{name: column.astype(np.float32) for name, column in columns.items()},
        parents=parents.astype(np.int32),
        groups=np.full(config.features, -1, np.int32),
        scaled=np.zeros(config.features, bool),
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
    depth = (parents >= 0).astype(int) + (parents[parents] >= 0) * (parents >= 0)
    for level in range(1, DEPTH + 1):
        at = np.flatnonzero(depth == level)
        above = parents[at]
        for _ in range(level):  # the ancestors of one feature are orthogonal to each other by now
            unit = factor[above] / np.linalg.norm(factor[above], axis=1, keepdims=True)
            factor[at] -= (factor[at] * unit).sum(1, keepdims=True) * unit
            above = parents[above]
    return factor * (np.sqrt(config.correlation) / np.linalg.norm(factor, axis=1, keepdims=True))


def zipfian(features: int, exponent: float, l0: float) -> np.ndarray:
    """Firing probabilities `min(0.4, c / i^s)`, i = 1 to G, with c such that they sum to l0."""
    most = MOST_OFTEN * features
    if l0 > most:
        raise ConfigError(
            f"--l0 must be at most {MOST_OFTEN:g} times --features, {most:g}, got {l0:g}; lower --l0 or "
            "raise --features"
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
    found = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for _ in range(STEPS):
        before = found
        gram = found.T @ found if features > d_in else found @ found.T
        values, axes = np.linalg.eigh(gram)
        root = axes * values.clip(np.finfo(float).tiny) ** -0.5 @ axes.T
        found = found @ root if features > d_in else root @ found
        found /= np.linalg.norm(found, axis=1, keepdims=True)
        if np.abs(found - before).max() < TIGHT:
            break
    return found


@dataclass(frozen=True)
class _Config:
    num_features: int
    hidden_dim: int
    mean_firing_magnitudes: float | dict[str, Any] = 1.0
    std_firing_magnitudes: float | dict[str, Any] = 0.0
    seed: int | None = None


@dataclass(frozen=True)
class _Node:
    feature_index: int | None = None
    mutually_exclusive_children: bool = False
    scale_children_by_parent: bool = False
    children: list["_Node"] = field(default_factory=list)


@dataclass(frozen=True)
class _Hierarchy:
    roots: list[_Node]


def is_saved_world(source: str | Path) -> bool:
    """Whether a path is a world's folder of SAELens, or one of its two required files."""
    path = Path(source)
    return (path / CONFIG).is_file() or (path.name in (CONFIG, WEIGHTS) and path.is_file())


def folder_of(source: str | Path) -> Path:
    """The folder of a saved world; `synthetic` as it is."""
    path = Path(source)
    return (
        path.resolve().parent if path.is_file() else path if source == SYNTHETIC else path.resolve()
    )


def world_files(source: str | Path) -> list[Path]:
    folder = folder_of(source)
    return [
        folder / name
        for name in (CONFIG, WEIGHTS, HIERARCHY)
        if name != HIERARCHY or (folder / name).exists()
    ]


def read_saelens(source: str | Path, seed: int) -> World:
    """A world that SAELens saved; FormatError if a file is missing, damaged or of an unknown kind.

    `seed` draws random magnitudes of a world saved without a seed, which SAELens draws anew at each loading.
    """
    folder = folder_of(source)
    try:
        config = read_json(folder / CONFIG, _Config)
        hierarchy = (
            read_json(folder / HIERARCHY, _Hierarchy)
            if (folder / HIERARCHY).exists()
            else _Hierarchy([])
        )
        arrays = _weights(folder / WEIGHTS, config)
        parents, groups, scaled = _structure(hierarchy, config.num_features)
        base = seed if config.seed is None else config.seed
        magnitudes = {
            name: _magnitudes(given, config.num_features, base + stream)
            for name, given, stream in (
                ("mean", config.mean_firing_magnitudes, MEAN_STREAM),
                ("std", config.std_firing_magnitudes, STD_STREAM),
            )
        }
    except FormatError:
        raise
    except (OSError, ValueError) as error:
        raise FormatError(
            f"cannot read the world in {folder}: {getattr(error, 'strerror', None) or error}; save it "
            "again with SAELens"
        ) from error
    probabilities = arrays["firing_probabilities"]
    return World(
        arrays["feature_vectors"],
        arrays["bias"],
        probabilities,
        probabilities,
        **magnitudes,
        factor=arrays["correlation_factor"],
        parents=parents,
        groups=groups,
        scaled=scaled,
    )


def _weights(path: Path, config: _Config) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # NumPy has no bfloat16

    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path.name} is damaged: {error}") from error
    features, d_in = config.num_features, config.hidden_dim
    shapes = {
        "feature_vectors": (features, d_in),
        "bias": (d_in,),
        "firing_probabilities": (features,),
    }
    if "correlation_factor" in tensors:
        shapes["correlation_factor"] = (features, tensors["correlation_factor"].shape[-1])
    found = {"correlation_factor": np.empty((features, 0), np.float32)}
    for name, shape in shapes.items():
        got = tuple(tensors[name].shape) if name in tensors else "none"
        if got != shape:
            raise ValueError(f"expected {name} of shape {shape} in {path.name}, got {got}")
        found[name] = tensors[name].float().numpy()
        if not np.isfinite(found[name]).all():
            raise ValueError(f"expected finite numbers in {name} of {path.name}, got others")
    if not ((found["firing_probabilities"] >= 0) & (found["firing_probabilities"] <= 1)).all():
        raise ValueError(f"expected firing_probabilities from 0 to 1 in {path.name}, got others")
    if (np.square(found["correlation_factor"]).sum(1) > 1).any():
        raise ValueError(
            f"expected rows of correlation_factor of norm 1 at most in {path.name}, got longer ones"
        )
    return found


def _structure(hierarchy: _Hierarchy, features: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parents, groups and scaled of `World`, (G,) each. A node without a feature passes its parent on."""
    parents, groups = np.full(features, -1, np.int32), np.full(features, -1, np.int32)
    scaled, seen = np.zeros(features, bool), np.zeros(features, bool)
    waiting = [(root, -1, -1, False) for root in hierarchy.roots]
    count = 0
    while waiting:
        node, parent, group, scale = waiting.pop()
        own = node.feature_index
        if own is not None:
            if not 0 <= own < features or seen[own]:
                raise ValueError(
                    f"expected each feature of {HIERARCHY} once, from 0 to {features - 1}, got {own}"
                )
            seen[own] = True
            parents[own], groups[own], scaled[own] = parent, group, scale
            parent = own
        exclusive = (
            node.mutually_exclusive_children
            and sum(c.feature_index is not None for c in node.children) > 1
        )
        waiting += [
            (child, parent, count if exclusive else -1, node.scale_children_by_parent)
            for child in node.children
        ]
        count += exclusive
    return parents, groups, scaled


def _magnitudes(given: float | dict[str, Any], features: int, seed: int) -> np.ndarray:
    """Means or standard deviations, (G,) float32, by SAELens' rules."""
    if not isinstance(given, dict):
        return np.full(features, given, np.float32)
    rule = dict(given)
    kind = rule.pop("generator_name", None)
    if kind == "constant":
        return np.full(features, rule.get("value", 1.0), np.float32)
    steps = np.linspace(0, 1, features) if features > 1 else np.zeros(1)
    if kind in ("linear", "exponential") and not {"start", "end"} - rule.keys():
        start, end = float(rule["start"]), float(rule["end"])
        found = (
            start + (end - start) * steps if kind == "linear" else start * (end / start) ** steps
        )
        return found.astype(np.float32)
    if kind == "folded_normal":
        import torch  # whose random numbers they are

        drawn = torch.randn(features, generator=torch.Generator().manual_seed(seed)).numpy()
        found = np.abs(rule.get("mean", 0.0) + drawn * rule.get("std", 0.1)).astype(np.float32)
        return found.clip(rule.get("min_value"), rule.get("max_value"))
    raise ValueError(
        f"expected magnitudes that are constant, linear, exponential or folded_normal, got {kind!r:.40}"
    )
