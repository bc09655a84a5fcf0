"""Worlds made of options.

Shapes: G features, D = d_in, R rank of the correlations.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..base.errors import ConfigError
from ..base.options import Config, option
from .worlds import World

MOST_OFTEN = 0.4  # no feature fires on more of the rows
RANK = 25
FEATURES_PER_ROOT, BRANCHES, DEPTH = 32, 4, 2  # so that 21 of 32 features are in a tree
MEAN, STD_MEAN, STD_STD = 1.0, 0.2, 0.1
BIAS_NORM = 1.0
TIGHT, STEPS = 1e-6, 500  # to a tight frame: largest change of an entry in the last step, and steps at most
DIRECTIONS, CORRELATIONS, MAGNITUDES = 1, 2, 3  # streams of random numbers


@dataclass(frozen=True)
class SyntheticConfig(Config):
    """What decides the rows of `sae import synthetic`.

    The structure is SynthSAEBench's: Zipfian firing probabilities (exponent 0.5, at most 0.4, both as there), trees of
    which a feature fires only with its parent (4 children each, two thirds of all features in trees, as there), a
    Gaussian copula of rank 25, unit directions made nearly orthogonal, noisy magnitudes (of mean 1 and of a standard
    deviation |N(0.2, 0.1)|, another for each feature), a bias of norm 1. Other than there, trees end two levels below
    their roots, siblings do not exclude each other, and a feature's Gaussian is uncorrelated with those of its
    ancestors: so each fires as often as Zipf's law says, and as many as are asked for are active in the mean.

    Source: D. Chanin and A. Garriga-Alonso, "SynthSAEBench: Evaluating Sparse Autoencoders on Scalable Realistic
    Synthetic Data", 2026, arXiv:2602.14687.
    """

    panel: ClassVar[str] = "Options of synthetic, --rows and --seed of a saved world too"

    features: int = option(1024, "Known features that rows are made of.", minimum=2, maximum=2**20)
    d_in: int = option(128, "Dimensions of a row.", minimum=1, maximum=2**20)
    rows: int = option(100_000, "Rows to store.", minimum=1, maximum=2**31 - 1)
    seed: int = option(0, "Another seed gives other rows and another world.", minimum=0)
    l0: float = option(10.0, "Features active on a row, in the mean.", above=0)
    zipf: float = option(0.5, "Exponent s: the i-th most frequent feature fires on c / i^s of the rows, at most on "
                              "0.4.", minimum=0, maximum=10)
    hierarchy: bool = option(True, "Let two thirds of the features stand in trees: one root in 32 features, two levels "
                                   "below it, 4 children to a parent; a child fires only with its parent.")
    correlation: float = option(0.25, "Fraction of the variance of each feature's Gaussian that comes from 25 shared "
                                      "ones; a feature fires where its Gaussian is high.", minimum=0, below=1)

    def world(self) -> World:
        """The world, a function of the options but for rows.

        Raises:
            ConfigError: so many features cannot be active in the mean.
        """
        firing = zipfian(self.features, self.zipf, self.l0)
        parents = forest(self.features) if self.hierarchy else np.full(self.features, -1)
        own = np.where(parents >= 0, firing / firing[parents], firing)
        directions, bias = self._directions()
        random = np.random.default_rng((self.seed, MAGNITUDES))
        std = np.abs(random.normal(STD_MEAN, STD_STD, self.features))
        columns = {"firing_probabilities": firing, "own_probabilities": own, "mean": np.full(self.features, MEAN),
                   "std": std, "directions": directions, "bias": bias, "factor": self._factor()}
        return World(**{name: column.astype(np.float32) for name, column in columns.items()},
                     parents=parents.astype(np.int32), groups=np.full(self.features, -1, np.int32),
                     scaled=np.zeros(self.features, bool))

    def _directions(self) -> tuple[np.ndarray, np.ndarray]:
        """Directions and bias, (G, D) and (D,), float64."""
        random = np.random.default_rng((self.seed, DIRECTIONS))
        directions = tight_frame(random.standard_normal((self.features, self.d_in)))
        bias = random.standard_normal(self.d_in)
        return directions, bias * (BIAS_NORM / np.linalg.norm(bias))

    def _factor(self) -> np.ndarray:
        """Loadings of the shared Gaussians, (G, R), each row of squared norm `correlation`; R is 0 without any."""
        if not self.correlation:
            return np.empty((self.features, 0))
        factor = np.random.default_rng((self.seed, CORRELATIONS)).standard_normal((self.features, RANK))
        if self.hierarchy:
            _part_from_ancestors(factor, forest(self.features))
        return factor * (np.sqrt(self.correlation) / np.linalg.norm(factor, axis=1, keepdims=True))


def zipfian(features: int, exponent: float, l0: float) -> np.ndarray:
    """Firing probabilities `min(0.4, c / i^s)`, i = 1 to G, with c such that they sum to l0.

    Args:
        features: G.
        exponent: s, at least 0.
        l0: their sum, above 0.

    Returns:
        (G,) float64, descending.

    Raises:
        ConfigError: the sum cannot be had.
    """
    most = MOST_OFTEN * features
    if l0 > most:
        raise ConfigError(f"--l0 must be at most {MOST_OFTEN:g} times --features, {most:g}, got {l0:g}; lower --l0 "
                          "or raise --features", option="l0")
    shape = np.arange(1, features + 1, dtype=np.float64) ** -exponent
    # With the first m at their most, c is what is left over the others' sum; m is right where it cuts none of them.
    rest = shape[::-1].cumsum()[::-1]
    scales = np.maximum(l0 - MOST_OFTEN * np.arange(features), 0) / rest
    fits = scales * shape <= MOST_OFTEN * (1 + 1e-12)
    return np.minimum(MOST_OFTEN, scales[fits.argmax()] * shape)


def forest(features: int) -> np.ndarray:
    """Each feature's parent, (G,), -1 for none: the most frequent features are roots, the next their children, and so
    on, level by level."""
    parents = np.full(features, -1)
    begin, end = 0, max(1, features // FEATURES_PER_ROOT)
    for _ in range(DEPTH):
        children = np.arange(end, min(features, end + BRANCHES * (end - begin)))
        parents[children] = begin + (children - end) // BRANCHES
        begin, end = end, end + len(children)
    return parents


def _part_from_ancestors(factor: np.ndarray, parents: np.ndarray) -> None:
    """Make the loadings of each feature, (G, R), orthogonal to those of its ancestors, in place: where Gaussians are
    independent, the probabilities of firing multiply."""
    depth = (parents >= 0).astype(int) + (parents[parents] >= 0) * (parents >= 0)
    for level in range(1, DEPTH + 1):
        at = np.flatnonzero(depth == level)
        above = parents[at]
        for _ in range(level):  # the ancestors of one feature are orthogonal to each other by now
            unit = factor[above] / np.linalg.norm(factor[above], axis=1, keepdims=True)
            factor[at] -= (factor[at] * unit).sum(1, keepdims=True) * unit
            above = parents[above]


def tight_frame(vectors: np.ndarray) -> np.ndarray:
    """Unit vectors near those given that are as orthogonal as so many can be in the mean square.

        minimise sum over i != j of <d_i, d_j>^2

    over unit vectors: orthonormal ones where G <= D, else a tight frame, `d' d = G/D I`, of which the sum is
    `G^2/D - G`. Tight and normalised vectors are taken in turns. SAELens descends on the same sum by Adam.

    Args:
        vectors: (G, D), of full rank.

    Returns:
        (G, D) float64.

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
